//! When the controller has seen kubelets renew their Leases. The times in the Leases are only compared with each other:
//! the clock of a node can be wrong, so that the controller's own clock says how long a node is silent.
//!
//! A new leader begins with nothing, so that no node seems to be silent because nothing led, or because the API server did
//! not answer: a leader that does not reach it ends after seconds.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// The last renewals, by node: one entry for each Lease.
#[derive(Debug, Default)]
pub(crate) struct Renewals(Mutex<BTreeMap<String, Renewal>>);

#[derive(Debug, Clone, Copy)]
struct Renewal {
    /// The time that the node has written.
    written: Timestamp,
    seen: Instant,
}

impl Renewals {
    /// Takes the Lease of a node as it is now; `None` if there is none. Returns whether it has changed.
    pub(crate) fn observe(&self, node: &str, lease: Option<&Lease>, now: Instant) -> bool {
        let written = lease.and_then(|lease| lease.spec.as_ref()?.renew_time.as_ref());
        let mut all = self.lock();
        let known = all.get(node).map(|known| known.written);
        match written.map(|written| written.0) {
            written if written == known => return false,
            Some(written) => {
                all.insert(node.to_owned(), Renewal { written, seen: now });
            }
            None => {
                all.remove(node);
            }
        }
        true
    }

    /// Returns for how many seconds the controller has not seen a node renew its Lease; `None` if it has no Lease.
    pub(crate) fn silent_s(&self, node: &str, now: Instant) -> Option<u64> {
        let known = self.lock().get(node).copied()?;
        Some(now.saturating_duration_since(known.seen).as_secs())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Renewal>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn lease(second: u64) -> Lease {
        let time = format!("2001-01-01T00:00:{second:02}.000000Z");
        serde_json::from_value(json!({ "metadata": {}, "spec": { "renewTime": time } })).unwrap()
    }

    #[test]
    fn a_node_is_silent_since_the_controller_has_seen_a_renewal_whatever_the_lease_says() {
        let (renewals, start) = (Renewals::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let silent_s = |seconds| renewals.silent_s("a", at(seconds));
        assert_eq!(silent_s(0), None);
        assert!(renewals.observe("a", Some(&lease(1)), start));
        assert_eq!(silent_s(9), Some(9), "the first sight counts as a renewal");
        assert!(!renewals.observe("a", Some(&lease(1)), at(9)));
        assert_eq!(silent_s(10), Some(10));
        // A clock that goes back renews, too.
        assert!(renewals.observe("a", Some(&lease(0)), at(10)));
        assert_eq!(silent_s(12), Some(2));
        assert!(renewals.observe("a", None, at(12)));
        assert_eq!(silent_s(13), None);
        assert!(!renewals.observe("a", Some(&Lease::default()), at(13)));
    }
}
