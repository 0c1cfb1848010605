//! A set: a part of a file of the cache, with a table of the extents in it.
//!
//! ```text
//! 0     table: 128 entries of 64 bytes
//! 8192  extents, each at a multiple of the largest power of two that divides its length: 64 at least, 65536 at most
//! ```
//!
//! Entries and extents are written one after the other, and then again from the first one on. So the oldest extents are
//! overwritten. Each entry has a number, which is greater than that of all entries before it. An extent whose length is a
//! multiple of 4 KiB consists of whole pages of the kernel, so the kernel looks up and copies no more of them than needed.

use cleat_object::cache::Key;
use cleat_object::name::{Position, VolumeId};

/// The length of a set in bytes.
pub(super) const SET_BYTES: u64 = 512 << 10;

/// The length of a table in bytes.
pub(super) const TABLE_BYTES: usize = ENTRIES * ENTRY_BYTES;

/// The unit of places in a set, in bytes.
const BLOCK_BYTES: u32 = 64;

/// The first block behind the table, and the end of the set.
const FIRST_BLOCK: u32 = 128;
const END_BLOCK: u32 = 8192;

/// The maximum alignment of an extent in bytes.
const MAX_ALIGNMENT: u32 = 64 << 10;

/// The length of an entry in bytes.
pub(super) const ENTRY_BYTES: usize = 64;

/// The entries of a table. Extents of 4 KiB fill the set with 126 of them.
const ENTRIES: usize = 128;

const MAGIC: [u8; 8] = *b"cleatex4";

/// An extent in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    number: u64,
    key: Key,
    /// The first block in the set.
    block: u32,
}

/// Where an extent goes in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) entry: Entry,
    /// The position of the entry in the set, in bytes.
    pub(super) entry_at: u64,
}

impl Entry {
    /// The position of the extent in the set, in bytes.
    pub(super) fn at(&self) -> u64 {
        position(self.block)
    }

    /// The first block of the extent.
    pub(super) fn block(&self) -> u32 {
        self.block
    }

    /// The number, which is greater than that of everything that was written to the set before.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The block behind the extent.
    fn end(&self) -> u32 {
        self.block.saturating_add(blocks(self.key.length))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.block < other.end() && other.block < self.end()
    }

    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let Self { number, key, block } = self;
        let mut bytes = Vec::with_capacity(ENTRY_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(number.to_le_bytes());
        bytes.extend(key_bytes(key));
        bytes.extend(block.to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let mut entry = [0; ENTRY_BYTES];
        entry.copy_from_slice(&bytes);
        entry
    }

    /// Returns a valid entry.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, checksum) = bytes.split_at_checked(ENTRY_BYTES - 4)?;
        Self::parse(bytes).filter(|_| checksum == crc32c::crc32c(content).to_le_bytes())
    }

    /// Returns an entry whose checksum may be wrong.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let content = bytes.get(..ENTRY_BYTES - 4).filter(|content| content[..8] == MAGIC)?;
        let long = |at: usize| u64::from_le_bytes(content[at..at + 8].try_into().unwrap_or([0; 8]));
        let short =
            |at: usize| u32::from_le_bytes(content[at..at + 4].try_into().unwrap_or([0; 4]));
        let volume = VolumeId(content[16..32].try_into().ok()?);
        let object = Position { epoch: long(32), slot: long(40) };
        let key = Key { volume, object, at: short(48), length: short(52) };
        let entry = Self { number: long(8), key, block: short(56) };
        (fits(key.length)
            && (FIRST_BLOCK..END_BLOCK).contains(&entry.block)
            && entry.end() <= END_BLOCK)
            .then_some(entry)
    }
}

/// The position of a block in the set, in bytes.
pub(super) fn position(block: u32) -> u64 {
    u64::from(block) * u64::from(BLOCK_BYTES)
}

/// The blocks of an extent of `length` bytes.
fn blocks(length: u32) -> u32 {
    length.div_ceil(BLOCK_BYTES)
}

/// Returns the first block from `block` on at which an extent of `length` bytes may begin.
fn aligned(block: u32, length: u32) -> u32 {
    let alignment = 1 << length.trailing_zeros().min(MAX_ALIGNMENT.trailing_zeros());
    block.next_multiple_of(alignment.max(BLOCK_BYTES) / BLOCK_BYTES)
}

/// Returns whether a set has room for an extent of `length` bytes.
fn fits(length: u32) -> bool {
    aligned(FIRST_BLOCK, length) + blocks(length) <= END_BLOCK
}

/// Returns the newest entry of an extent, if nothing was written over the extent since.
pub(super) fn find(table: &[u8], key: &Key) -> Option<Entry> {
    let of_key = table.chunks_exact(ENTRY_BYTES).filter(|bytes| bytes[KEY] == key_bytes(key));
    let found = of_key.filter_map(Entry::decode).max_by_key(|entry| entry.number)?;
    let is_over = |entry: &Entry| entry.number > found.number && entry.overlaps(&found);
    // The checksum is computed only of an entry that matters.
    let mut later = table.chunks_exact(ENTRY_BYTES);
    let is_lost = later.any(|bytes| {
        Entry::parse(bytes).is_some_and(|entry| is_over(&entry)) && Entry::decode(bytes).is_some()
    });
    (!is_lost).then_some(found)
}

/// The place of the key in an entry.
const KEY: std::ops::Range<usize> = 16..56;

fn key_bytes(key: &Key) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..16].copy_from_slice(&key.volume.0);
    bytes[16..24].copy_from_slice(&key.object.epoch.to_le_bytes());
    bytes[24..32].copy_from_slice(&key.object.slot.to_le_bytes());
    bytes[32..36].copy_from_slice(&key.at.to_le_bytes());
    bytes[36..].copy_from_slice(&key.length.to_le_bytes());
    bytes
}

/// Returns where the next extent goes; `None` if it is too long.
pub(super) fn next(table: &[u8], key: Key) -> Option<Slot> {
    if !fits(key.length) {
        return None;
    }
    let mut entry = Entry { number: 1, key, block: aligned(FIRST_BLOCK, key.length) };
    let mut index = 0;
    if let Some((last_index, last)) = entries(table).max_by_key(number) {
        entry.number = last.number.saturating_add(1);
        entry.block = aligned(last.end(), key.length);
        index = (last_index + 1) % ENTRIES;
    }
    if entry.end() > END_BLOCK {
        entry.block = aligned(FIRST_BLOCK, key.length);
    }
    Some(Slot { entry, entry_at: (index * ENTRY_BYTES) as u64 })
}

/// The valid entries, with their places in the table.
fn entries(table: &[u8]) -> impl Iterator<Item = (usize, Entry)> + Clone + '_ {
    let all = table.chunks_exact(ENTRY_BYTES).enumerate();
    all.filter_map(|(index, bytes)| Some((index, Entry::decode(bytes)?)))
}

fn number((_, entry): &(usize, Entry)) -> u64 {
    entry.number
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: u64, length: u32) -> Key {
        let object = Position { epoch: 1, slot: number };
        Key { volume: VolumeId([3; 16]), object, at: 100, length }
    }

    /// A set in memory. Each block has the number of the extent in it.
    struct Set {
        table: [u8; TABLE_BYTES],
        blocks: Vec<u64>,
    }

    impl Set {
        fn new() -> Self {
            Self { table: [0; TABLE_BYTES], blocks: vec![0; END_BLOCK as usize] }
        }

        fn put(&mut self, number: u64, length: u32) {
            let slot = next(&self.table, key(number, length)).unwrap();
            let at = usize::try_from(slot.entry_at).unwrap();
            self.table[at..at + ENTRY_BYTES].copy_from_slice(&slot.entry.encode());
            self.blocks[slot.entry.block as usize..slot.entry.end() as usize].fill(number);
        }

        fn has(&self, number: u64, length: u32) -> bool {
            let Some(entry) = find(&self.table, &key(number, length)) else { return false };
            let blocks = &self.blocks[entry.block as usize..entry.end() as usize];
            assert!(blocks.iter().all(|block| *block == number), "{number} was overwritten");
            true
        }
    }

    #[test]
    fn the_oldest_extents_are_overwritten() {
        let mut set = Set::new();
        for number in 0..8 {
            set.put(number, 64 << 10);
        }
        let kept: Vec<u64> = (0..8).filter(|number| set.has(*number, 64 << 10)).collect();
        assert_eq!(kept, [1, 2, 3, 4, 5, 6, 7], "seven fit");
        for number in 100..300 {
            set.put(number, 100);
        }
        let kept = (0..300).filter(|number| set.has(*number, 100)).count();
        assert_eq!(kept, ENTRIES, "short extents are limited by the table");
        let longest = 504 << 10;
        assert_eq!(next(&set.table, key(1, longest)).map(|slot| slot.entry.block), Some(128));
        assert_eq!(next(&set.table, key(1, longest + 1)), None);
    }

    #[test]
    fn extents_of_whole_pages_begin_with_a_page() {
        let mut set = Set::new();
        let lengths = [100, 4096, 512, 12 << 10, 100, 64 << 10, 8 << 10];
        let places = lengths.map(|length| {
            let place = next(&set.table, key(1, length)).unwrap().entry.block();
            set.put(1, length);
            position(place) - TABLE_BYTES as u64
        });
        let [kib, from_table] = [1 << 10, 56 << 10];
        let behind = from_table + (64 << 10);
        assert_eq!(places, [0, 4 * kib, 8 * kib, 12 * kib, 24 * kib, from_table, behind]);
    }

    proptest! {
        #[test]
        fn what_is_found_was_not_overwritten(
            puts in prop::collection::vec((0..40_u64, 1..100_000_u32), 1..300)
        ) {
            let mut set = Set::new();
            for (number, length) in &puts {
                set.put(*number, *length);
                prop_assert!(set.has(*number, *length));
            }
            for (number, length) in &puts {
                set.has(*number, *length);
            }
        }

        #[test]
        fn any_bytes_are_a_table(
            damages in prop::collection::vec((0..TABLE_BYTES, any::<u8>()), 1..50),
            puts in 1..200_u64,
        ) {
            let mut set = Set::new();
            for number in 0..puts {
                set.put(number, 4096);
            }
            for (at, byte) in damages {
                set.table[at] = byte;
            }
            for number in 0..puts {
                let found = find(&set.table, &key(number, 4096));
                prop_assert!(found.is_none_or(|entry| entry.at() + 4096 <= SET_BYTES));
            }
            prop_assert!(next(&set.table, key(0, 4096)).is_some());
        }
    }
}
