//! What the last request that there was no room for was told, and what is said of it.
//!
//! The OSDs refuse with ENOSPC when the cluster is full and with EDQUOT when the pool has reached its
//! quota; both only since we ask them to (`rados_set_pool_full_try`), and by the map of the cluster, which
//! the monitors change some seconds after the bytes did.

use std::sync::atomic::{AtomicU8, Ordering};

const ENOUGH: u8 = 0;
const FULL: u8 = 1;
const QUOTA: u8 = 2;

/// The room for an image's data.
#[derive(Debug)]
pub(crate) struct Room {
    missing: AtomicU8,
    /// Where the data lie.
    pool: String,
}

impl Room {
    pub(crate) fn of(pool: String) -> Self {
        Self { missing: AtomicU8::new(ENOUGH), pool }
    }

    /// A request waits for something else.
    pub(crate) fn is_not_the_matter(&self) {
        self.missing.store(ENOUGH, Ordering::Relaxed);
    }

    /// There was none. Others that succeed meanwhile, since what they write to has its room, change
    /// nothing in that.
    pub(crate) fn is_missing(&self, errno: i32) {
        let why = if errno == libc::EDQUOT { QUOTA } else { FULL };
        self.missing.store(why, Ordering::Relaxed);
    }

    /// For people: why there is none for the image `name`, and what to do.
    pub(crate) fn failure_reason(&self, name: &str) -> Option<String> {
        let Self { missing, pool } = self;
        match missing.load(Ordering::Relaxed) {
            ENOUGH => None,
            QUOTA => Some(format!(
                "there is no room for {name}: the quota of the pool {pool} is used up (ceph osd pool \
                 get-quota {pool}); remove data, or raise it: ceph osd pool set-quota {pool} \
                 max_bytes|max_objects N, 0 for none"
            )),
            _ => Some(format!(
                "there is no room for {name}: the cluster is full, or the pool {pool} (ceph df, ceph \
                 health detail); remove data, or add OSDs"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_told_from_a_full_cluster_and_from_anything_else() {
        let room = Room::of("p".to_owned());
        assert_eq!(room.failure_reason("p/i"), None);
        for (errno, part) in [(libc::EDQUOT, "set-quota p "), (libc::ENOSPC, "ceph df")] {
            room.is_missing(errno);
            let told = room.failure_reason("p/i").unwrap();
            assert!(told.contains("no room for p/i") && told.contains(part), "{told}");
        }
        room.is_not_the_matter();
        assert_eq!(room.failure_reason("p/i"), None);
    }
}
