//! The work of the leader: watches the objects, queues what has changed, and has it worked on.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::WatchStreamExt;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::attach_detach::state::Wanted;
use crate::attach_detach::{self, pods};
use crate::attachments;
use crate::calls::OfLeader;
use crate::cluster::{BY_VOLUME, Cluster, Key, grant_of};
use crate::grant::{DRIVER_LABEL, VolumeGrant};
use crate::guard::Guarded;
use crate::heartbeat;
use crate::kind::Kind;
use crate::marks;
use crate::mirror::Change;
use crate::nodes;
use crate::objects::{Node, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment};
use crate::persistent_volumes;
use crate::queue::{CONFLICT, FAILED, Next};
use crate::remediation;
use crate::server::Role;
use crate::sweep;
use crate::volumes;

/// The time between two updates of the gauges.
const GAUGE_PERIOD: Duration = Duration::from_secs(1);

/// Works as the leader until the future is dropped, or until one of its tasks ends: returns the reason then.
pub(crate) async fn lead(cluster: Arc<Cluster>, role: &watch::Sender<Role>) -> Error {
    let mut tasks = JoinSet::new();
    watch_others(&mut tasks, &cluster);
    tokio::select! {
        () = until(|| has_listed(&cluster)) => {}
        error = end_of_one(&mut tasks) => return error,
    }
    // The requests are listed last: a grant whose request is not in the list yet would be revoked.
    let ours =
        |cluster: &Cluster, known: &VolumeAttachment| known.spec.attacher == cluster.config.driver;
    feed(&mut tasks, &cluster, |cluster| &cluster.attachments, ours, attachment_changed);
    tokio::select! {
        () = until(|| cluster.attachments.mirror.is_complete()) => {}
        error = end_of_one(&mut tasks) => return error,
    }
    tracing::info!(
        attachments = cluster.attachments.mirror.len(),
        grants = cluster.grants.mirror.len(),
        "leading"
    );
    if cluster.wanted.is_some() {
        for volume in cluster.volumes.mirror.all() {
            cluster.queue.add(Key::Wanted(volume.name_any()));
        }
    }
    cluster.metrics.leader.set(1);
    role.send_replace(Role::Leader);
    start_work(&mut tasks, &cluster);
    tokio::select! {
        never = update_gauges(&cluster) => match never {},
        error = end_of_one(&mut tasks) => error,
    }
}

/// Waits until one of the tasks ends. None of them does so by itself: it has panicked. The controller must not go on with
/// the others, which would look healthy while an object is never worked on again, or a mirror becomes old.
async fn end_of_one(tasks: &mut JoinSet<()>) -> Error {
    let how = match tasks.join_next().await {
        Some(Err(error)) => error.to_string(),
        Some(Ok(())) | None => "it has returned".to_owned(),
    };
    Error::new(ErrorKind::Internal, format!("a task of the leader has ended: {how}"))
}

/// Watches everything but the attachments.
fn watch_others(tasks: &mut JoinSet<()>, cluster: &Arc<Cluster>) {
    let of_driver = |cluster: &Cluster, grant: &VolumeGrant| {
        grant.labels().get(DRIVER_LABEL) == Some(&cluster.config.driver)
    };
    feed(tasks, cluster, |cluster| &cluster.grants, of_driver, grant_changed);
    feed(tasks, cluster, |cluster| &cluster.nodes, |_, _| true, node_changed);
    feed(
        tasks,
        cluster,
        |cluster| &cluster.csi_nodes,
        |_, _| true,
        |cluster, change| {
            change.after.iter().for_each(|node| cluster.look_at_node(&node.name_any()));
        },
    );
    feed(tasks, cluster, |cluster| &cluster.volumes, is_ours, volume_changed);
    if needs_leases(cluster) {
        feed(tasks, cluster, |cluster| &cluster.leases, |_, _| true, lease_changed);
    }
    if cluster.config.remediation.is_some() {
        feed(tasks, cluster, |cluster| &cluster.heartbeats, is_heartbeat, |_, _| {});
    }
    if cluster.wanted.is_some() {
        feed(tasks, cluster, |cluster| &wanted(cluster).pods, needs_claims, pod_changed);
        feed(tasks, cluster, |cluster| &wanted(cluster).claims, |_, _| true, claim_changed);
    }
}

/// Starts the tasks that change something.
fn start_work(tasks: &mut JoinSet<()>, cluster: &Arc<Cluster>) {
    tasks.spawn(sweep::run(Arc::clone(cluster)));
    match cluster.config.remediation {
        Some(settings) => tasks.spawn(remediation::run(Arc::clone(cluster), settings)),
        None => tasks.spawn(marks::run(Arc::clone(cluster))),
    };
    if let Some(server) = &cluster.config.calls {
        tasks.spawn(server.serve(Arc::new(OfLeader::new(cluster))));
    }
    for _ in 0..cluster.config.workers {
        let cluster = Arc::clone(cluster);
        tasks.spawn(async move {
            loop {
                work(&cluster).await;
            }
        });
    }
}

/// Updates the gauges for ever.
async fn update_gauges(cluster: &Cluster) -> Infallible {
    loop {
        let metrics = &cluster.metrics;
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        metrics.grants.set(size(cluster.grants.mirror.len()));
        metrics.attachments.set(size(cluster.attachments.mirror.len()));
        metrics.queue.set(size(cluster.queue.len()));
        for (kind, number) in cluster.unreadable() {
            metrics.unreadable(kind, size(number));
        }
        metrics.oldest_wait.set(volumes::oldest_wait_s(cluster, crate::api::now()));
        metrics.nodes("lost", marks::marked(cluster).len());
        tokio::time::sleep(GAUGE_PERIOD).await;
    }
}

/// Starts the watches of the Leases of kubelets and agents, for a candidate.
pub(crate) fn feed_beats(tasks: &mut JoinSet<()>, cluster: &Arc<Cluster>) {
    feed(tasks, cluster, |cluster| &cluster.leases, |_, _| true, |_, _| {});
    feed(tasks, cluster, |cluster| &cluster.heartbeats, is_heartbeat, |_, _| {});
}

/// Returns whether everything but the attachments was listed.
fn has_listed(cluster: &Cluster) -> bool {
    let wanted = cluster.wanted.as_ref().is_none_or(|wanted| {
        wanted.pods.mirror.is_complete() && wanted.claims.mirror.is_complete()
    });
    let leases = !needs_leases(cluster) || cluster.leases.mirror.is_complete();
    let heartbeats =
        cluster.config.remediation.is_none() || cluster.heartbeats.mirror.is_complete();
    cluster.grants.mirror.is_complete()
        && cluster.nodes.mirror.is_complete()
        && cluster.csi_nodes.mirror.is_complete()
        && cluster.volumes.mirror.is_complete()
        && wanted
        && leases
        && heartbeats
}

/// Returns whether the Leases of kubelets are watched.
fn needs_leases(cluster: &Cluster) -> bool {
    cluster.config.policy.lease_timeout_s.is_some() || cluster.config.remediation.is_some()
}

fn is_heartbeat(_: &Cluster, lease: &Lease) -> bool {
    heartbeat::node_of(&lease.name_any()).is_some()
}

/// Returns what the attach/detach loop knows. Only called where there is one.
fn wanted(cluster: &Cluster) -> &Wanted {
    cluster.wanted.as_ref().expect("the controller has the loop")
}

/// Returns whether a pod can need a volume.
fn needs_claims(_: &Cluster, pod: &Pod) -> bool {
    pods::node(pod).is_some() && !pods::claims(pod).is_empty()
}

fn pod_changed(cluster: &Cluster, change: &Change<Pod>) {
    for pod in change.before.iter().chain(&change.after) {
        attach_detach::look_at_claims(cluster, wanted(cluster), &pods::claims(pod));
    }
}

fn claim_changed(cluster: &Cluster, change: &Change<PersistentVolumeClaim>) {
    let volume = |claim: &Arc<PersistentVolumeClaim>| claim.spec.as_ref()?.volume_name.clone();
    let before = change.before.as_ref().and_then(volume);
    let after = change.after.as_ref().and_then(volume);
    if before != after || change.after.is_none() {
        before.into_iter().chain(after).for_each(|name| cluster.queue.add(Key::Wanted(name)));
    }
}

/// Waits until a list was read.
async fn until(is_complete: impl Fn() -> bool) {
    while !is_complete() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Starts a watch of all objects of one kind that `keep` accepts.
fn feed<K>(
    tasks: &mut JoinSet<()>,
    cluster: &Arc<Cluster>,
    kind: fn(&Cluster) -> &Kind<K>,
    keep: fn(&Cluster, &K) -> bool,
    changed: fn(&Cluster, &Change<K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + Sync,
    K: 'static,
{
    let cluster = Arc::clone(cluster);
    tasks.spawn(async move {
        let mut events = kind(&cluster).watch("").default_backoff().boxed();
        while let Some(event) = events.next().await {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    tracing::warn!("cannot watch {}: {error}", K::plural(&()));
                    continue;
                }
            };
            let label = (DRIVER_LABEL, &*cluster.config.driver);
            let is_wanted =
                |object: &Guarded<K>| object.is_wanted(|known| keep(&cluster, known), label);
            for change in kind(&cluster).mirror.apply_raw(event, is_wanted) {
                changed(&cluster, &change);
                cluster.changes.send_replace(());
            }
        }
    });
}

fn is_ours(cluster: &Cluster, volume: &PersistentVolume) -> bool {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.is_some_and(|csi| csi.driver == cluster.config.driver)
}

fn grant_changed(cluster: &Cluster, change: &Change<VolumeGrant>) {
    let attachments = cluster.attachments_of(&change.name);
    cluster.look_at_attachments(&attachments);
    attachments.iter().for_each(|known| cluster.look_at_wanted(known));
    cluster.queue.add(Key::Grant(change.name.clone()));
}

fn attachment_changed(cluster: &Cluster, change: &Change<VolumeAttachment>) {
    let Some(known) = change.after.as_ref().or(change.before.as_ref()) else { return };
    if let (Some(before), Some(after)) = (&change.before, &change.after)
        && !is_news(before, after)
    {
        return;
    }
    cluster.queue.add(Key::Attachment(known.name_any()));
    cluster.look_at_wanted(known);
    if let Some(grant) = grant_of(known) {
        cluster.queue.add(Key::Grant(grant));
    }
    let volume = known.spec.source.persistent_volume_name.as_ref();
    if let Some(volume) = volume.filter(|_| change.after.is_none()) {
        cluster.queue.add(Key::Volume(volume.clone()));
    }
}

/// Returns whether two states of an attachment differ in more than what the controller itself writes about
/// errors: such a write must not have the attachment looked at again before its backoff ends.
fn is_news(before: &VolumeAttachment, after: &VolumeAttachment) -> bool {
    let plain = |known: &VolumeAttachment| {
        let mut known = known.clone();
        known.metadata.resource_version = None;
        let status = known.status.get_or_insert_default();
        (status.attach_error, status.detach_error) = (None, None);
        known
    };
    plain(before) != plain(after)
}

fn volume_changed(cluster: &Cluster, change: &Change<PersistentVolume>) {
    let Some(known) = change.after.as_ref().or(change.before.as_ref()) else { return };
    let name = known.name_any();
    if cluster.wanted.is_some() {
        cluster.queue.add(Key::Wanted(name.clone()));
    }
    if known.metadata.deletion_timestamp.is_some() {
        cluster.queue.add(Key::Volume(name));
    } else if change.before.is_none() {
        cluster.look_at_attachments(&cluster.attachments.mirror.find(BY_VOLUME, &name));
    }
}

/// Has the volumes of a node looked at when the node appears, disappears, or changes in what counts here. A
/// heartbeat changes nothing.
fn node_changed(cluster: &Cluster, change: &Change<Node>) {
    let state = |node: &Arc<Node>| nodes::state(node, None);
    let name = &change.name;
    let (before, after) = (change.before.as_ref().map(state), change.after.as_ref().map(state));
    // A Node that could not be read is neither before nor after.
    let is_other = before != after || after.is_none();
    if let Some(wanted) = &cluster.wanted {
        let both = change.before.as_ref().zip(change.after.as_ref());
        if is_other || both.is_some_and(|(before, after)| pods::differ(before, after)) {
            attach_detach::look_at_node(cluster, wanted, name);
        }
    }
    if !is_other {
        return;
    }
    cluster.look_at_node(name);
}

fn lease_changed(cluster: &Cluster, change: &Change<Lease>) {
    let Some(known) = change.after.as_ref().or(change.before.as_ref()) else { return };
    cluster.renewals.observe(&known.name_any(), change.after.as_deref(), Instant::now());
}

/// Works on the next object of the queue.
async fn work(cluster: &Cluster) {
    let key = cluster.queue.next().await;
    // An object that is answered from the mirrors waits for nothing: other tasks must get their turn.
    tokio::task::yield_now().await;
    let (kind, result) = match &key {
        // external-attacher handles it.
        Key::Attachment(_) if cluster.config.calls.is_some() => ("attachment", Ok(Next::Done)),
        Key::Attachment(name) => ("attachment", attachments::sync(cluster, name).await),
        Key::Volume(name) => ("volume", persistent_volumes::sync(cluster, name).await),
        Key::Wanted(name) => ("wanted", attach_detach::sync(cluster, wanted(cluster), name).await),
        Key::Grant(name) => {
            let decided = volumes::decide(cluster, name).await;
            match &decided {
                Err(error) if !attachments::is_conflict(error) => {
                    volumes::report(cluster, name, error).await;
                }
                Err(_) => {}
                Ok(_) => cluster.failures.remove(name),
            }
            ("grant", decided)
        }
    };
    let next = ended(cluster, &key, kind, result);
    cluster.queue.done(key, next);
}

fn ended(cluster: &Cluster, key: &Key, kind: &'static str, result: Result<Next>) -> Next {
    let failed = |error: &Error| {
        tracing::warn!(?key, "{}", crate::api::message(error));
    };
    match result {
        Ok(next) => {
            cluster.metrics.sync(kind, "ok");
            next
        }
        Err(error) if attachments::is_conflict(&error) => {
            cluster.metrics.sync(kind, "conflict");
            tracing::debug!(?key, "{}", error.report());
            Next::Failed(CONFLICT)
        }
        Err(error) => {
            cluster.metrics.sync(kind, "failed");
            failed(&error);
            Next::Failed(FAILED)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    /// Leads for a while with an API server that never answers requests for `held`. Returns the gauge.
    async fn leader(held: &'static str) -> i64 {
        let (client, _) = fake::silent(held);
        let cluster = Arc::new(fake::cluster_at(&client, Arc::new(fake::OneRecord::default())));
        let (role, watched) = watch::channel(Role::Syncing);
        let leading = lead(Arc::clone(&cluster), &role);
        assert!(tokio::time::timeout(Duration::from_secs(20), leading).await.is_err());
        let leader = cluster.metrics.leader.get();
        assert_eq!(leader == 1, *watched.borrow() == Role::Leader);
        leader
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_reads_the_objects_does_not_count_as_one_yet() {
        assert_eq!(leader("/volumeattachments").await, 0);
        assert_eq!(leader("").await, 1);
    }

    #[tokio::test]
    async fn a_panic_of_one_task_is_the_end_of_all() {
        let mut tasks = JoinSet::new();
        tasks.spawn(std::future::pending());
        tasks.spawn(async { panic!("as the test wants it") });
        let error = end_of_one(&mut tasks).await;
        assert!(error.message().contains("as the test wants it"), "{error}");
    }
}
