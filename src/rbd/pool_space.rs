//! The reason why requests fail for lack of space, for status and logs.
//!
//! The OSDs answer ENOSPC if the cluster is full and EDQUOT if the pool has reached its quota. Both only
//! happen because the client requests it (`rados_set_pool_full_try`); otherwise the library waits. The
//! OSDs decide by the cluster map, which the monitors update some seconds after the space was used.

use std::sync::atomic::{AtomicU8, Ordering};

const AVAILABLE: u8 = 0;
const FULL: u8 = 1;
const QUOTA: u8 = 2;

/// Why the last request with an image's data failed for lack of space.
#[derive(Debug)]
pub(crate) struct PoolSpace {
    state: AtomicU8,
    /// The pool with the image's data.
    pool: String,
}

impl PoolSpace {
    pub(crate) fn new(pool: String) -> Self {
        Self { state: AtomicU8::new(AVAILABLE), pool }
    }

    /// Records that a request waits for another reason.
    pub(crate) fn clear(&self) {
        self.state.store(AVAILABLE, Ordering::Relaxed);
    }

    /// Records that a request failed with `errno`, which is ENOSPC or EDQUOT. Later successes do not clear
    /// it: overwrites of existing data succeed although the pool is full.
    pub(crate) fn record_no_space(&self, errno: i32) {
        let why = if errno == libc::EDQUOT { QUOTA } else { FULL };
        self.state.store(why, Ordering::Relaxed);
    }

    /// Returns why there is no space for the image `name`, with a hint. `None` if there is.
    pub(crate) fn failure_reason(&self, name: &str) -> Option<String> {
        let Self { state, pool } = self;
        match state.load(Ordering::Relaxed) {
            AVAILABLE => None,
            QUOTA => Some(format!(
                "no space is left for {name}: the pool {pool} has reached its quota (ceph osd pool \
                 get-quota {pool}); remove data or raise the quota: ceph osd pool set-quota {pool} \
                 max_bytes|max_objects N (0: no quota)"
            )),
            _ => Some(format!(
                "no space is left for {name}: the cluster or the pool {pool} is full (ceph df, ceph \
                 health detail); remove data or add OSDs"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_and_a_full_cluster_have_different_reasons() {
        let space = PoolSpace::new("p".to_owned());
        assert_eq!(space.failure_reason("p/i"), None);
        for (errno, part) in [(libc::EDQUOT, "set-quota p "), (libc::ENOSPC, "ceph df")] {
            space.record_no_space(errno);
            let reason = space.failure_reason("p/i").unwrap();
            assert!(
                reason.contains("no space is left for p/i") && reason.contains(part),
                "{reason}"
            );
        }
        space.clear();
        assert_eq!(space.failure_reason("p/i"), None);
    }
}
