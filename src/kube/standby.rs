//! What a candidate does until it is the leader: with node remediation, it observes the Leases of kubelets and agents, so
//! that a new leader need not begin to measure how long a node is silent. The node that has failed may be that of the
//! previous leader. A candidate reads only, with the rights that it has as a leader.

use std::future::Future;
use std::sync::Arc;

use tokio::task::JoinSet;

use crate::cluster::Cluster;
use crate::leader::feed_beats;
use crate::remediation::{self, Beats};

/// Waits until `elected` completes, and returns what was observed meanwhile. `cluster` is one that nothing else uses.
pub(crate) async fn until(elected: impl Future<Output = ()>, cluster: Cluster) -> Arc<Beats> {
    let beats = Arc::clone(&cluster.beats);
    tokio::select! {
        () = elected => {}
        () = observe(Arc::new(cluster)) => {}
    }
    beats
}

/// Observes until the future is dropped.
async fn observe(cluster: Arc<Cluster>) {
    let Some(settings) = cluster.config.remediation else { return std::future::pending().await };
    let mut tasks = JoinSet::new();
    feed_beats(&mut tasks, &cluster);
    remediation::observe(&cluster, settings).await;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use serde_json::json;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::config::Remediation;
    use crate::fake;
    use crate::remediation::Silence;

    const TIMEOUT: Duration = Duration::from_secs(15);

    /// Returns how long a candidate has found the node `a` silent that becomes the leader after more than the timeout.
    /// `second` returns when the node has renewed its Leases.
    async fn silence(second: impl Fn() -> Option<u64> + Clone + Send + 'static) -> Silence {
        let beats = observed(2 * TIMEOUT, second, Arc::default()).await;
        beats.silence("a", TIMEOUT, Instant::now())
    }

    /// As [`silence`], after `time`. `reads` counts how often the Lease of the kubelet is read.
    async fn observed(
        time: Duration,
        second: impl Fn() -> Option<u64> + Clone + Send + 'static,
        reads: Arc<AtomicU64>,
    ) -> Arc<Beats> {
        let writes = Arc::new(AtomicBool::new(false));
        let has_written = Arc::clone(&writes);
        let mut cluster = fake::cluster_of(move |method, path| {
            has_written.fetch_or(method != "GET", Ordering::SeqCst);
            let Some(second) = second() else { return (503, json!({})) };
            let lease = |name: &str| {
                let time = format!("2030-01-01T00:{:02}:{:02}.000000Z", second / 60, second % 60);
                json!({
                    "metadata": { "name": name, "resourceVersion": (second + 1).to_string() },
                    "spec": { "renewTime": time },
                })
            };
            let path = path.split('?').next().unwrap();
            match path.rsplit('/').next().unwrap() {
                "leases" => {
                    let version = (second + 1).to_string();
                    let items = [lease("a"), lease("node-a")];
                    (200, json!({ "metadata": { "resourceVersion": version }, "items": items }))
                }
                name => {
                    reads.fetch_add(u64::from(name == "a"), Ordering::SeqCst);
                    (200, lease(name))
                }
            }
        });
        cluster.config.remediation =
            Some(Remediation { timeout: TIMEOUT, limit: 1, dry_run: false });
        let beats = until(sleep(time), cluster).await;
        assert!(!writes.load(Ordering::SeqCst));
        beats
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_leader_knows_how_long_a_node_has_been_silent() {
        assert_eq!(silence(|| Some(1)).await, Silence::Lost);
        let start = Instant::now();
        assert_eq!(silence(move || Some(start.elapsed().as_secs())).await, Silence::No);
    }

    #[tokio::test(start_paused = true)]
    async fn the_leases_of_a_node_that_stays_silent_are_not_read_for_ever() {
        let reads = Arc::new(AtomicU64::new(0));
        observed(10 * TIMEOUT, || Some(1), Arc::clone(&reads)).await;
        let known = reads.load(Ordering::SeqCst);
        assert!(known > 0);
        reads.store(0, Ordering::SeqCst);
        observed(100 * TIMEOUT, || Some(1), Arc::clone(&reads)).await;
        assert_eq!(reads.load(Ordering::SeqCst), known);
    }

    #[tokio::test(start_paused = true)]
    async fn no_node_is_silent_because_a_candidate_does_not_reach_the_api_server() {
        let start = Instant::now();
        // It answers at first, so that the candidate knows the node.
        let second = move || (start.elapsed() < Duration::from_secs(5)).then_some(1);
        assert_ne!(silence(second).await, Silence::Lost);
    }
}
