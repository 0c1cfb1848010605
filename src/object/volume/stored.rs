//! The place of an extent in the store.

use crate::cache::Key;
use crate::codec::Entry;
use crate::name::{Name, Position, VolumeId};

/// The bytes between two extents that are read in vain to save a read.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// The bytes of an extent in its object. Entries with the same one are parts of the same extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stored {
    /// The volume of the object: 0 is this one, 1 its parent, and so on.
    ancestor: u8,
    object: Position,
    at: u32,
    length: u32,
    /// The length of its data in bytes.
    pub(super) data_length: u32,
}

impl Stored {
    /// The extent of an entry, which has `length` bytes in the object.
    pub(super) fn of(entry: &Entry, length: u32) -> Self {
        let Entry { ancestor, object, stored_at: at, extent_length: data_length, .. } = *entry;
        Self { ancestor, object, at, length, data_length }
    }

    /// The object, and its volume as [`Stored::ancestor`] returns it.
    pub(super) fn object(&self) -> (u8, Position) {
        (self.ancestor, self.object)
    }

    /// The volume of the object.
    pub(super) fn ancestor(&self) -> u8 {
        self.ancestor
    }

    /// The name of the object.
    pub(super) fn name(&self) -> Name {
        Name::Slot(self.object)
    }

    /// The key of its bytes in a cache, in an object of `volume`.
    pub(super) fn key(&self, volume: VolumeId) -> Key {
        Key { volume, object: self.object, at: self.at, length: self.length }
    }

    /// The first byte in the object.
    pub(super) fn begin(&self) -> u64 {
        self.at.into()
    }

    /// The byte behind the last one.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.at) + u64::from(self.length)
    }

    /// Whether one read of at most `max_bytes` can have this extent, and those from `first` to `last`, which precede it.
    pub(super) fn continues(&self, first: &Self, last: &Self, max_bytes: u64) -> bool {
        self.object() == first.object()
            && self.begin() <= last.end() + MAX_GAP_BYTES
            && self.end().max(last.end()) - first.begin() <= max_bytes
    }
}
