//! Where this process has found extents: a memory of a fixed size, which may forget anything.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The extents that are remembered. Those of 4 KiB take 1 GiB of the cache.
const PLACES: usize = 256 << 10;

/// The places of a chunk, whose memory is allocated when it is used: 4 KiB.
const CHUNK: usize = 512;

/// The bits of a place: the block in the set, which is never 0.
const BLOCK_BITS: u32 = 16;

/// Places by the hashes of their keys. A place has most bits of the hash besides the block.
pub(super) struct Places(Vec<OnceLock<Box<[AtomicU64]>>>);

impl Places {
    pub(super) fn new() -> Self {
        Self((0..PLACES / CHUNK).map(|_| OnceLock::new()).collect())
    }

    /// Returns the block at which the extent was found last. It may be another extent, whose hash is similar.
    pub(super) fn get(&self, hash: u64) -> Option<u32> {
        let (chunk, at) = index(hash);
        let place = self.0[chunk].get()?[at].load(Ordering::Relaxed);
        let block = u32::try_from(place & ((1 << BLOCK_BITS) - 1)).unwrap_or(0);
        (place >> BLOCK_BITS == hash >> BLOCK_BITS && block > 0).then_some(block)
    }

    pub(super) fn set(&self, hash: u64, block: u32) {
        let (chunk, at) = index(hash);
        let new = || (0..CHUNK).map(|_| AtomicU64::new(0)).collect();
        let place = (hash >> BLOCK_BITS) << BLOCK_BITS | u64::from(block);
        self.0[chunk].get_or_init(new)[at].store(place, Ordering::Relaxed);
    }
}

/// The lower bits of a hash are those of the file and the set.
fn index(hash: u64) -> (usize, usize) {
    let at = usize::try_from(hash >> 40).unwrap_or(0) % PLACES;
    (at / CHUNK, at % CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_place_of_an_extent_is_returned_until_another_one_takes_its_room() {
        let places = Places::new();
        let hash = 0x1234_5678_9abc_def0;
        assert_eq!(places.get(hash), None);
        places.set(hash, 128);
        places.set(hash, 8191);
        assert_eq!(places.get(hash), Some(8191));
        let other = hash ^ 1 << 20;
        assert_eq!(places.get(other), None, "it has the same room");
        places.set(other, 200);
        assert_eq!((places.get(hash), places.get(other)), (None, Some(200)));
    }
}
