//! A cache of extents as they were read from the store, for example on a local disk.
//!
//! A cache may lose anything at any moment. What it returns is verified like bytes of the store, unless it says that it has
//! done so itself. So wrong bytes cost a read of the store and are never served.

use crate::name::{Position, VolumeId};
use crate::store::Pending;

/// The bytes of an extent in a log object. They never change, because no name of an object is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The volume of the object: the one that is open, or one from which it was cloned. Its place is a part of it.
    pub volume: VolumeId,
    /// The log object.
    pub object: Position,
    /// The first byte in the object, header included.
    pub at: u32,
    /// The length in bytes.
    pub length: u32,
}

/// What a copy needs next; see [`Cache::prepare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// What is known of the extent.
    Place,
    /// Its bytes.
    Bytes,
}

/// A cache. Calls are made on the thread of the volume or of a connection, so they must not block. A cache in files can have to
/// wait for a page that the kernel has taken since it was there.
pub trait Cache: Send + Sync {
    /// Returns the bytes of an extent, if the cache has them.
    fn get(&self, key: Key) -> Pending<'_, Option<Vec<u8>>>;

    /// Gives the bytes of an extent to `take`, if the cache has them and need not wait for that. Returns what `take`
    /// returns, which is whether they are the right ones; false if it was not called.
    fn get_at_once(&self, key: Key, take: &mut dyn FnMut(&[u8]) -> bool) -> bool;

    /// Copies the part of an extent from byte `skip` on to `target`, if the cache need not wait for it, and if it can prove
    /// that the bytes are those that it was offered, or that were taken. Returns false otherwise; `target` may have changed
    /// then.
    fn copy_verified(&self, key: Key, skip: u32, target: &mut [u8]) -> bool {
        let _ = (key, skip, target);
        false
    }

    /// Says that [`Cache::copy_verified`] will soon be called with these arguments, so that the processor can load what it
    /// needs. Several copies are prepared together: first `Step::Place` of all, then `Step::Bytes` of all.
    fn prepare(&self, key: Key, skip: u32, step: Step) {
        let _ = (key, skip, step);
    }

    /// Offers the bytes of an extent, which were verified. The cache may ignore them.
    fn put(&self, key: Key, bytes: &[u8]);
}
