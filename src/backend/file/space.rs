//! The reason why requests on a file fail for lack of space, for the outage policy, status and logs.
//!
//! A file may be longer than its file system has room for. A request that finds none has changed nothing that
//! a repetition does not change again, so it may wait until there is room.
//!
//! Two errors look like a lack of space and are none. EFBIG: the file system has no files of that length, or the
//! process may not write them. And ENOSPC of a cached write on NFS: the client reports with it that pages of
//! earlier writes are lost, and reports that only once (`nfs_file_write`, fs/nfs/file.c).

use std::sync::atomic::{AtomicI32, Ordering};

use cleat_core::request::IoError;

use super::file_system::NFS;

/// Why the last request that failed for lack of space did.
#[derive(Debug, Default)]
pub(super) struct FreeSpace {
    /// ENOSPC or EDQUOT; 0: no request has failed for lack of space.
    errno: AtomicI32,
    /// With ENOSPC, EDQUOT and EFBIG, a write reports that pages of earlier writes are lost.
    reports_lost_pages: bool,
}

impl FreeSpace {
    /// Creates the state of a file. `file_system` is the magic number of its file system.
    pub(super) fn new(file_system: i64, direct: bool) -> Self {
        Self { errno: AtomicI32::new(0), reports_lost_pages: file_system == NFS && !direct }
    }

    /// Returns whether `errno` of a write means that acknowledged writes are lost.
    pub(super) fn is_loss(&self, errno: i32) -> bool {
        self.reports_lost_pages && matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    }

    /// Records that a request has failed with `errno`, which stands for `error`. Returns the error with which
    /// the request ends. Later successes do not clear the reason: writes of allocated ranges succeed although
    /// the file system is full.
    pub(super) fn record(&self, errno: i32, error: IoError) -> IoError {
        match errno {
            libc::EFBIG => return IoError::Broken,
            libc::ENOSPC | libc::EDQUOT => self.errno.store(errno, Ordering::Relaxed),
            // The request waits for another reason.
            _ if error == IoError::Retry => self.errno.store(0, Ordering::Relaxed),
            _ => {}
        }
        error
    }

    /// Returns why there is no space for the file at `path`, with a hint. `None` if there is.
    pub(super) fn failure_reason(&self, path: &str) -> Option<String> {
        match self.errno.load(Ordering::Relaxed) {
            0 => None,
            libc::EDQUOT => Some(format!(
                "no space is left for {path}: a quota of its file system is used up (quota, repquota); \
                 remove data or raise the quota"
            )),
            _ => Some(format!(
                "no space is left for {path}: its file system is full (df {path}); remove data or enlarge \
                 the file system"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXT4: i64 = 0xef53;

    #[test]
    fn a_quota_and_a_full_file_system_have_different_reasons() {
        let space = FreeSpace::new(EXT4, false);
        assert_eq!(space.failure_reason("/v"), None);
        for (errno, part) in [(libc::EDQUOT, "raise the quota"), (libc::ENOSPC, "df /v")] {
            assert_eq!(space.record(errno, IoError::NoSpace), IoError::NoSpace);
            let reason = space.failure_reason("/v").unwrap();
            assert!(
                reason.contains("no space is left for /v") && reason.contains(part),
                "{reason}"
            );
            assert_eq!(space.record(libc::EIO, IoError::Broken), IoError::Broken);
            assert_eq!(space.failure_reason("/v"), Some(reason));
        }
        assert_eq!(space.record(libc::ENOLINK, IoError::Retry), IoError::Retry);
        assert_eq!(space.failure_reason("/v"), None);
    }

    #[test]
    fn a_file_that_is_too_long_does_not_wait_for_space() {
        let space = FreeSpace::new(EXT4, false);
        assert_eq!(space.record(libc::EFBIG, IoError::NoSpace), IoError::Broken);
        assert_eq!(space.failure_reason("/v"), None);
    }

    #[test]
    fn only_a_cached_write_on_nfs_reports_the_loss_of_others() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
            assert!(FreeSpace::new(NFS, false).is_loss(errno));
            assert!(!FreeSpace::new(NFS, true).is_loss(errno));
            assert!(!FreeSpace::new(EXT4, false).is_loss(errno));
        }
        assert!(!FreeSpace::new(NFS, false).is_loss(libc::ETIMEDOUT));
    }
}
