//! When the controller has seen the kubelet and the agent of a node renew their Leases. Only the controller's own clock
//! counts: the clock of a node can be wrong. A candidate observes them before it leads (`standby`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// How long a node has been silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The kubelet has no Lease, or the agent has never renewed its own.
    Unknown,
    /// The kubelet or the agent has renewed its Lease in time.
    No,
    /// The agent is late, and the kubelet has not renewed its Lease since, or is late itself. Where many nodes are, the network
    /// is the probable cause.
    Late,
    /// Neither has renewed its Lease within the timeout.
    Lost,
}

/// Within how many seconds nodes fall silent for the same reason.
const TOGETHER_S: u64 = 300;

/// The last renewals of all nodes.
#[derive(Debug, Default)]
pub(crate) struct Beats(Mutex<BTreeMap<String, [Option<Beat>; 2]>>);

#[derive(Debug, Clone, Copy)]
struct Beat {
    /// The time that the node has written.
    renewed: Timestamp,
    seen: Instant,
    /// Whether it was renewed since this controller knows it.
    has_changed: bool,
}

impl Beats {
    /// Takes the Leases of a node as they are now: that of its kubelet, and that of its agent.
    pub(crate) fn observe(&self, node: &str, leases: [Option<&Lease>; 2], now: Instant) {
        let mut all = self.lock();
        let known = all.entry(node.to_owned()).or_default();
        for (beat, lease) in known.iter_mut().zip(leases) {
            let renewed = lease.and_then(|lease| lease.spec.as_ref()?.renew_time.as_ref());
            *beat = renewed.map(|renewed| match *beat {
                Some(same) if same.renewed == renewed.0 => same,
                other => Beat { renewed: renewed.0, seen: now, has_changed: other.is_some() },
            });
        }
    }

    /// Forgets all nodes but these.
    pub(crate) fn keep(&self, nodes: &BTreeSet<String>) {
        self.lock().retain(|node, _| nodes.contains(node));
    }

    /// Begins again to measure all times, because no node could reach the API server.
    pub(crate) fn restart(&self, now: Instant) {
        self.lock().values_mut().flatten().flatten().for_each(|beat| beat.seen = now);
    }

    pub(crate) fn silence(&self, node: &str, timeout: Duration, now: Instant) -> Silence {
        let beats = self.lock().get(node).copied().unwrap_or_default();
        let [Some(kubelet), Some(agent)] = &beats else { return Silence::Unknown };
        let age = |beat: &Beat| now.saturating_duration_since(beat.seen);
        // A kubelet that renews its Lease proves that the node works: the agent alone is broken.
        let is_mute = || kubelet.seen <= agent.seen || age(kubelet) >= late(timeout);
        if age(kubelet).min(age(agent)) >= timeout {
            Silence::Lost
        } else if age(agent) >= timeout / 2 && is_mute() {
            Silence::Late
        } else {
            Silence::No
        }
    }

    /// Returns whether both have renewed their Leases, since this controller knows them and within the timeout.
    pub(crate) fn is_back(&self, node: &str, timeout: Duration, now: Instant) -> bool {
        let Some(beats) = self.lock().get(node).copied() else { return false };
        let is_fresh =
            |beat: &Beat| beat.has_changed && now.saturating_duration_since(beat.seen) < timeout;
        beats.iter().all(|beat| beat.as_ref().is_some_and(is_fresh))
    }

    /// Returns whether the kubelet of a node is late, of whose agent nothing is known: it needs none.
    pub(crate) fn is_stale(&self, node: &str, timeout: Duration, now: Instant) -> bool {
        let Some([Some(kubelet), None]) = self.lock().get(node).copied() else { return false };
        now.saturating_duration_since(kubelet.seen) >= late(timeout)
    }

    /// Returns whether two nodes have fallen silent at about the same time. Only here the times count that the nodes have
    /// written: a controller that has begun after both have ended knows nothing else.
    pub(crate) fn is_with(&self, node: &str, other: &str) -> bool {
        let all = self.lock();
        let written = |node| {
            let beats = all.get(node)?.iter().flatten();
            beats.map(|beat| beat.renewed.as_second()).max()
        };
        let both = written(node).zip(written(other));
        both.is_some_and(|(node, other)| node.abs_diff(other) <= TOGETHER_S)
    }

    /// Returns when a node has given the last sign of life.
    pub(crate) fn last(&self, node: &str) -> Option<Instant> {
        let beats = self.lock().get(node).copied()?;
        beats.iter().flatten().map(|beat| beat.seen).max()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, [Option<Beat>; 2]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns after which time a kubelet is late: it renews its Lease every 10 s.
fn late(timeout: Duration) -> Duration {
    timeout * 4 / 5
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TIMEOUT: Duration = Duration::from_secs(15);

    fn lease(second: u64) -> Lease {
        let time = format!("2030-01-01T00:00:{second:02}.000000Z");
        serde_json::from_value(json!({ "metadata": {}, "spec": { "renewTime": time } })).unwrap()
    }

    /// Observes a node whose clock is wrong by years.
    fn observe(beats: &Beats, kubelet: u64, agent: Option<u64>, now: Instant) {
        let agent = agent.map(lease);
        beats.observe("a", [Some(&lease(kubelet)), agent.as_ref()], now);
    }

    #[test]
    fn a_node_is_lost_when_both_leases_are_stale_by_the_clock_of_the_controller() {
        let (beats, start) = (Beats::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(beats.silence("a", TIMEOUT, start), Silence::Unknown);
        observe(&beats, 1, None, start);
        assert_eq!(beats.silence("a", TIMEOUT, at(20)), Silence::Unknown);
        observe(&beats, 1, Some(1), at(20));
        assert_eq!(beats.silence("a", TIMEOUT, at(20)), Silence::No);
        assert_eq!(beats.silence("a", TIMEOUT, at(28)), Silence::Late);
        // The agent works, and the kubelet does not.
        observe(&beats, 1, Some(2), at(28));
        assert_eq!(beats.silence("a", TIMEOUT, at(35)), Silence::No);
        assert_eq!(beats.silence("a", TIMEOUT, at(43)), Silence::Lost);
        observe(&beats, 3, Some(2), at(43));
        assert_eq!(beats.silence("a", TIMEOUT, at(57)), Silence::Late);
        assert_eq!(beats.silence("a", TIMEOUT, at(58)), Silence::Lost);
    }

    #[test]
    fn a_node_whose_agent_alone_is_broken_is_not_late() {
        let (beats, start) = (Beats::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        observe(&beats, 0, Some(1), start);
        assert_eq!(beats.silence("a", TIMEOUT, at(8)), Silence::Late);
        for second in (10..3600).step_by(10) {
            observe(&beats, second / 10 % 60, Some(1), at(second));
            assert_eq!(beats.silence("a", TIMEOUT, at(second)), Silence::No);
            assert_eq!(beats.silence("a", TIMEOUT, at(second + 10)), Silence::No);
        }
        // The kubelet stops as well.
        assert_eq!(beats.silence("a", TIMEOUT, at(3602)), Silence::Late);
        assert_eq!(beats.silence("a", TIMEOUT, at(3605)), Silence::Lost);
    }

    #[test]
    fn an_outage_of_the_api_server_makes_no_node_lost() {
        let (beats, start) = (Beats::default(), Instant::now());
        observe(&beats, 1, Some(1), start);
        beats.restart(start + TIMEOUT);
        assert_eq!(beats.silence("a", TIMEOUT, start + TIMEOUT), Silence::No);
        assert_eq!(beats.silence("a", TIMEOUT, start + 2 * TIMEOUT), Silence::Lost);
    }

    #[test]
    fn a_node_without_an_agent_is_stale_when_its_kubelet_is_late() {
        let (beats, start) = (Beats::default(), Instant::now());
        observe(&beats, 1, None, start);
        let at = |seconds| beats.is_stale("a", TIMEOUT, start + Duration::from_secs(seconds));
        assert!(!at(11) && at(12));
        observe(&beats, 1, Some(1), start);
        assert!(!at(12));
    }

    #[test]
    fn a_node_that_has_been_off_for_long_has_not_fallen_silent_with_another_one() {
        let (beats, now) = (Beats::default(), Instant::now());
        let lease = |minute: u64| {
            let time = format!("2030-01-01T00:{minute:02}:00.000000Z");
            let lease = json!({ "metadata": {}, "spec": { "renewTime": time } });
            serde_json::from_value::<Lease>(lease).unwrap()
        };
        for (name, minute) in [("off", 0), ("a", 7), ("b", 12), ("later", 59)] {
            beats.observe(name, [Some(&lease(minute)), None], now);
        }
        // The kubelet alone has failed before.
        beats.observe("agent", [Some(&lease(0)), Some(&lease(7))], now);
        assert!(beats.is_with("b", "a") && beats.is_with("a", "b") && beats.is_with("b", "agent"));
        assert!(!beats.is_with("off", "a") && !beats.is_with("later", "a"));
        assert!(!beats.is_with("unknown", "a"));
    }

    #[test]
    fn a_node_is_back_when_both_have_renewed() {
        let (beats, start) = (Beats::default(), Instant::now());
        observe(&beats, 1, Some(1), start);
        assert!(!beats.is_back("a", TIMEOUT, start), "the first sight proves nothing");
        observe(&beats, 1, Some(2), start);
        assert!(!beats.is_back("a", TIMEOUT, start));
        observe(&beats, 2, Some(2), start);
        assert!(beats.is_back("a", TIMEOUT, start));
        assert!(!beats.is_back("a", TIMEOUT, start + TIMEOUT));
    }
}
