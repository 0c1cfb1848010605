//! The table at the beginning of a file of the cache.
//!
//! An entry is valid if its checksum is right and it has the round of the first entry. So entries of an earlier round
//! end the table, as a missing one does.

use std::fs::File;
use std::os::unix::fs::FileExt;

use cleat_object::cache::Key;
use cleat_object::name::{Position, VolumeId};

/// The unit of places in a file, in bytes.
pub(super) const BLOCK_BYTES: u64 = 512;

/// The length of an entry in bytes.
pub(super) const ENTRY_BYTES: usize = 64;

/// The entries of a table: extents of 4 KiB fill the file.
pub(super) const ENTRIES: usize = 8064;

/// The first byte behind the table.
pub(super) const DATA_AT: u64 = (ENTRIES * ENTRY_BYTES) as u64;

const MAGIC: [u8; 8] = *b"cleatex1";

/// An extent in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) round: u64,
    pub(super) key: Key,
    /// The first block in the file.
    pub(super) block: u32,
}

impl Entry {
    /// The block behind the extent.
    pub(super) fn end(&self) -> u32 {
        self.block + blocks(self.key.length)
    }

    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let Self { round, key, block } = self;
        let mut bytes = Vec::with_capacity(ENTRY_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(round.to_le_bytes());
        bytes.extend(key.volume.0);
        bytes.extend(key.object.epoch.to_le_bytes());
        bytes.extend(key.object.slot.to_le_bytes());
        bytes.extend(key.at.to_le_bytes());
        bytes.extend(key.length.to_le_bytes());
        bytes.extend(block.to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let mut entry = [0; ENTRY_BYTES];
        entry.copy_from_slice(&bytes);
        entry
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, checksum) = bytes.split_at_checked(ENTRY_BYTES - 4)?;
        let is_whole = checksum == crc32c::crc32c(content).to_le_bytes() && content[..8] == MAGIC;
        let long = |at: usize| u64::from_le_bytes(content[at..at + 8].try_into().unwrap_or([0; 8]));
        let short =
            |at: usize| u32::from_le_bytes(content[at..at + 4].try_into().unwrap_or([0; 4]));
        let volume = VolumeId(content[16..32].try_into().ok()?);
        let object = Position { epoch: long(32), slot: long(40) };
        let key = Key { volume, object, at: short(48), length: short(52) };
        let entry = Self { round: long(8), key, block: short(56) };
        let fits = u64::from(entry.block) * BLOCK_BYTES >= DATA_AT
            && u64::from(entry.block) * BLOCK_BYTES + u64::from(key.length)
                <= cleat_backend::CACHE_FILE_BYTES;
        (is_whole && fits).then_some(entry)
    }
}

/// The blocks that `length` bytes take.
pub(super) fn blocks(length: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "it is 512")]
    let block = BLOCK_BYTES as u32;
    length.div_ceil(block)
}

/// Reads the valid entries of a file, in their order.
pub(super) fn read(file: &File) -> Vec<Entry> {
    let mut bytes = vec![0; ENTRIES * ENTRY_BYTES];
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) | Err(_) => break,
            Ok(count) => length += count,
        }
    }
    let entries = bytes[..length].chunks_exact(ENTRY_BYTES).map_while(Entry::decode);
    let mut entries: Vec<Entry> = entries.collect();
    if let Some(first) = entries.first().copied() {
        let end = entries.iter().position(|entry| entry.round != first.round);
        entries.truncate(end.unwrap_or(entries.len()));
    }
    entries
}
