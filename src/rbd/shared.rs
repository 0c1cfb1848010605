//! The state that an open image shares with its queues and threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cleat_backend::Waker;

use crate::claim::record::Claim;
use crate::encryption::ENCRYPTED_BLOCK;
use crate::hold::Wanted;
use crate::pause::Pause;
use crate::permissions::MissingCaps;
use crate::pool_space::PoolSpace;

/// The state that the control half, the queues and the background thread of an image share.
pub(crate) struct Shared {
    /// The size of the volume in bytes, in whole blocks.
    pub(crate) size: AtomicU64,
    /// Wakes the owner of the volume after a change that the owner did not cause.
    pub(crate) watcher: OnceLock<Waker>,
    /// The size of the encryption header in bytes, if the library encrypts the content.
    pub(crate) luks_header: Option<u64>,
    /// Whether another client owns the image or may own it. Never reset.
    pub(crate) fenced: AtomicBool,
    /// The claim that this process wrote and has not released.
    pub(crate) claim: Mutex<Option<Claim>>,
    /// The hold that another client wants.
    pub(crate) hold: Wanted,
    /// Stops the background thread.
    pub(crate) pause: Pause,
    pub(crate) missing_caps: MissingCaps,
    pub(crate) pool_space: PoolSpace,
    /// Whether the image is open read-only. If it is not, EROFS means that the lock is lost.
    pub(crate) read_only: bool,
    /// The maximum length of one operation for a discard or zeroes, in bytes.
    pub(crate) piece: u64,
}

impl Shared {
    /// Stores the size that librbd reports.
    pub(crate) fn set_size(&self, bytes: u64) {
        let size = whole_blocks(bytes, self.luks_header.is_some());
        self.size.store(size, Ordering::Release);
    }

    /// Makes every later request fail with `Fenced`.
    pub(crate) fn set_fenced(&self) {
        self.fenced.store(true, Ordering::Release);
    }

    /// Returns whether the volume is fenced.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// Wakes the owner of the volume, if it watches for changes.
    pub(crate) fn wake(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }

    /// Returns the claim that this process wrote and has not released.
    pub(crate) fn claim(&self) -> MutexGuard<'_, Option<Claim>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a size in bytes without an incomplete block at its end.
pub(crate) fn whole_blocks(size: u64, encrypted: bool) -> u64 {
    if encrypted { size - size % u64::from(ENCRYPTED_BLOCK) } else { size }
}
