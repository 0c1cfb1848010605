//! What an open image shares with its queues and threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};

use cleat_backend::Waker;

use crate::permissions::Rights;
use crate::pool_space::Room;

/// What the queues share.
pub(crate) struct Shared {
    pub(crate) size: AtomicU64,
    /// Told when the size has changed by itself.
    pub(crate) watcher: OnceLock<Waker>,
    /// The content is encrypted by the library, and so many bytes of the image are no plain text.
    pub(crate) luks_header: Option<u64>,
    /// Somebody else owns the image, or nobody knows who does.
    pub(crate) fenced: AtomicBool,
    pub(crate) rights: Rights,
    pub(crate) room: Room,
    /// For a mapping that may write, being refused as a reader means that the lock is lost.
    pub(crate) read_only: bool,
    /// Bytes of a piece of a long range.
    pub(crate) piece: u64,
}
