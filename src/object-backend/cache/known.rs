//! What this process knows of the cache: where the blocks of extents are, and a hash of each block. The memory has a fixed
//! size, and may forget anything.
//!
//! Only extents that have been verified get here, so a block with the same hash is the same block. Without that, each read of a
//! part would have to read and verify the whole extent, which may be 16 times as long.

use std::sync::atomic::{AtomicU64, Ordering};

use cleat_core::error::{Error, Result};
use cleat_sys::words::Words;
use twox_hash::XxHash3_64;

/// The length of a block in bytes. The last one of an extent may be shorter.
pub(super) const BLOCK_BYTES: usize = 4096;

/// The blocks that are remembered: 2 GiB of the cache, in 8 MiB of memory.
const BLOCKS: usize = 512 << 10;

/// The blocks that have the same room: two lines of the processor's cache.
const ROOM: usize = 8;

/// The words of a block: most bits of the hash of its name, with the place of its extent in the set; and the hash of its bytes,
/// together with its name. They are written one after the other: a mixture of two blocks has a wrong hash.
const WORDS: usize = 2;

/// The bits of a place.
const PLACE_BITS: u32 = 16;

/// The bits of the block in a place.
const BLOCK_BITS: u32 = 15;

/// Where an extent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Which of the two sets of the extent.
    pub(super) set: usize,
    /// The first block in it, which is never 0.
    pub(super) block: u32,
}

impl Place {
    fn encode(self) -> u64 {
        u64::from(self.set != 0) << BLOCK_BITS | u64::from(self.block)
    }

    fn decode(place: u64) -> Option<Self> {
        let block = u32::try_from(place & ((1 << BLOCK_BITS) - 1)).ok()?;
        (block > 0).then_some(Self { set: usize::from(place >> BLOCK_BITS & 1 == 1), block })
    }
}

/// Blocks by the hashes of their names.
pub(super) struct Known {
    words: Words,
    /// No other process knows it, so none can make bytes with the hash of others.
    seed: u64,
}

impl Known {
    /// # Errors
    /// Returns an error if the process may not have the memory.
    pub(super) fn new(seed: u64) -> Result<Self> {
        let words = Words::new(BLOCKS * WORDS)
            .map_err(|error| Error::from_io("the table of the blocks in the cache", error))?;
        Ok(Self { words, seed })
    }

    /// Returns the place of an extent with this hash of its key, if its block with this number is known. It may be the place
    /// of another extent.
    pub(super) fn place(&self, extent: u64, number: usize) -> Option<Place> {
        self.find(name(extent, number)).map(|(place, _)| place)
    }

    /// Has the processor load what is known of a block.
    pub(super) fn prefetch(&self, extent: u64, number: usize) {
        self.words.prefetch(first_word(name(extent, number)));
    }

    /// Whether `bytes`, which were read from an extent at `place`, are those of its blocks from this number on.
    pub(super) fn has(&self, extent: u64, first: usize, place: Place, bytes: &[u8]) -> bool {
        bytes.chunks(BLOCK_BYTES).zip(first..).all(|(block, number)| {
            let name = name(extent, number);
            self.find(name).is_some_and(|found| found == (place, self.hash(name, block)))
        })
    }

    /// Remembers an extent that was verified.
    pub(super) fn add(&self, extent: u64, place: Place, bytes: &[u8]) {
        for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let name = name(extent, number);
            self.set(name, place, self.hash(name, block));
        }
    }

    fn find(&self, name: u64) -> Option<(Place, u64)> {
        self.room(name).find_map(|[place, hash]| {
            let found = place.load(Ordering::Relaxed);
            let is_found = found >> PLACE_BITS == name >> PLACE_BITS;
            let place = Place::decode(found).filter(|_| is_found)?;
            Some((place, hash.load(Ordering::Relaxed)))
        })
    }

    fn set(&self, name: u64, place: Place, hash: u64) {
        let holder = |[place, _]: &&[AtomicU64; WORDS]| place.load(Ordering::Relaxed) >> PLACE_BITS;
        let own = self.room(name).find(|block| holder(block) == name >> PLACE_BITS);
        let free = || self.room(name).find(|block| holder(block) == 0);
        // If the room is full, one of the blocks is forgotten, whichever it is.
        let any = || self.room(name).nth(usize::try_from(hash).unwrap_or(0) % ROOM);
        let Some(block) = own.or_else(free).or_else(any) else { return };
        let [at, bytes] = block;
        at.store((name >> PLACE_BITS) << PLACE_BITS | place.encode(), Ordering::Relaxed);
        bytes.store(hash, Ordering::Relaxed);
    }

    /// The blocks among which one with this name is.
    fn room(&self, name: u64) -> impl Iterator<Item = &[AtomicU64; WORDS]> {
        let words = &self.words.get()[first_word(name)..][..ROOM * WORDS];
        words.as_chunks().0.iter()
    }

    fn hash(&self, name: u64, block: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed ^ name, block)
    }
}

/// The name of a block. The multiplier is that of Fibonacci hashing.
fn name(extent: u64, number: usize) -> u64 {
    extent ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Where the room of a name begins. The lower bits of the hash of a key are those of the file and the set.
fn first_word(name: u64) -> usize {
    usize::try_from(name >> 40).unwrap_or(0) % (BLOCKS / ROOM) * ROOM * WORDS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(block: u32) -> Place {
        Place { set: 1, block }
    }

    #[test]
    fn a_block_is_known_with_its_bytes_at_its_place_and_for_its_extent_only() {
        let known = Known::new(7).unwrap();
        let extent = 0x1234_5678_9abc_def0;
        let bytes: Vec<u8> = (0..2500_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(known.place(extent, 0), None);
        known.add(extent, at(128), &bytes);
        assert_eq!(
            [0, 1, 2, 3].map(|number| known.place(extent, number)),
            [Some(at(128)), Some(at(128)), Some(at(128)), None]
        );
        assert!(known.has(extent, 0, at(128), &bytes));
        assert!(known.has(extent, 1, at(128), &bytes[4096..8192]));
        assert!(known.has(extent, 2, at(128), &bytes[8192..]));
        assert!(!known.has(extent, 0, at(128), &bytes[4096..8192]), "another block");
        assert!(!known.has(extent, 0, at(192), &bytes), "another place");
        assert!(!known.has(extent, 0, Place { set: 0, block: 128 }, &bytes), "the other set");
        assert!(!known.has(extent, 2, at(128), &bytes[8192..9000]), "a part of a block");
        let mut damaged = bytes.clone();
        damaged[5000] ^= 1;
        assert!(!known.has(extent, 0, at(128), &damaged));
        assert!(known.has(extent, 0, at(128), &damaged[..4096]));
        // The lowest bits of the hash are not in the memory, but they are in the hash of the block.
        assert_eq!(known.place(extent ^ 1, 0), Some(at(128)));
        assert!(!known.has(extent ^ 1, 0, at(128), &bytes));
        known.add(extent, at(8191), &bytes);
        assert_eq!(known.place(extent, 0), Some(at(8191)));
    }

    #[test]
    fn a_full_room_forgets_one_block() {
        let known = Known::new(7).unwrap();
        let extents: Vec<u64> = (1..=9).map(|number| number << 20).collect();
        for extent in &extents {
            known.add(*extent, at(200), b"data");
        }
        let count =
            extents.iter().filter(|extent| known.has(**extent, 0, at(200), b"data")).count();
        assert_eq!(count, 8);
        assert!(known.has(extents[8], 0, at(200), b"data"));
    }
}
