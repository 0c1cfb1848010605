//! The blocks of the tail memory as bytes.

use super::{Change, Entry};
use crate::name::VolumeId;

/// The length of a block in bytes.
pub(super) const BLOCK: usize = 64;

/// The position of the checksum in a block.
const CHECKSUM_AT: usize = BLOCK - 4;

const IDENTITY: u32 = u32::from_le_bytes(*b"cti1");
const STATE: u32 = u32::from_le_bytes(*b"cts1");
const RECORD: u32 = u32::from_le_bytes(*b"ctr1");

/// Aligned, so that one copy of the kernel writes all of it.
#[repr(align(64))]
pub(super) struct Block(pub(super) [u8; BLOCK]);

/// What changes when records are released, and when an opener prepares the memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct State {
    /// Rises with every change.
    pub(super) count: u64,
    /// The newest epoch that was opened when the memory was prepared.
    pub(super) opened: u64,
    /// The epoch that it was prepared for.
    pub(super) trying: u64,
    /// The position of the first record, and its sequence number.
    pub(super) head: u64,
    pub(super) sequence: u64,
}

impl Block {
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut block = [0; BLOCK];
        block.copy_from_slice(bytes);
        Self(block)
    }

    fn new(kind: u32, words: [u64; 6], checksum: u32) -> Self {
        let mut block = [0; BLOCK];
        block[..4].copy_from_slice(&kind.to_le_bytes());
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
        for (at, word) in words.into_iter().enumerate() {
            block[8 + at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let sum = crc32c::crc32c(&block[..CHECKSUM_AT]);
        block[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        Self(block)
    }

    /// Returns the fields of an intact block of this kind.
    fn read(&self, kind: u32) -> Option<([u64; 6], u32)> {
        let sum = crc32c::crc32c(&self.0[..CHECKSUM_AT]);
        if self.short(CHECKSUM_AT) != sum || self.short(0) != kind {
            return None;
        }
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&self.0[8 + at * 8..][..8]);
            u64::from_le_bytes(bytes)
        };
        Some(([0, 1, 2, 3, 4, 5].map(word), self.short(4)))
    }

    fn short(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..][..4]);
        u32::from_le_bytes(bytes)
    }
}

/// The block that says whose memory it is.
pub(super) fn identity(volume: VolumeId, owner: u64) -> Block {
    let [mut low, mut high] = [[0; 8]; 2];
    low.copy_from_slice(&volume.0[..8]);
    high.copy_from_slice(&volume.0[8..]);
    Block::new(IDENTITY, [u64::from_le_bytes(low), u64::from_le_bytes(high), owner, 0, 0, 0], 0)
}

impl State {
    pub(super) fn block(&self) -> Block {
        let Self { count, opened, trying, head, sequence } = *self;
        Block::new(STATE, [count, opened, trying, head, sequence, 0], 0)
    }

    pub(super) fn read(block: &Block) -> Option<Self> {
        let ([count, opened, trying, head, sequence, _], _) = block.read(STATE)?;
        // Positions and numbers rise by one record at a time, so they never come near the end of their range.
        let is_possible = [count, head, sequence].iter().all(|value| *value < 1 << 62);
        let is_aligned = head.is_multiple_of(BLOCK as u64);
        (is_possible && is_aligned).then_some(Self { count, opened, trying, head, sequence })
    }
}

/// Returns the block of a record.
pub(super) fn record(entry: &Entry, sequence: u64) -> Block {
    let Entry { change, epoch, slot, offset, length, checksum } = *entry;
    Block::new(RECORD, [change as u64, sequence, epoch, slot, offset, length], checksum)
}

/// Returns the record of a block, if it has this sequence number.
pub(super) fn read_record(block: &Block, expected: u64) -> Option<Entry> {
    let ([change, sequence, epoch, slot, offset, length], checksum) = block.read(RECORD)?;
    let change = match change {
        1 => Change::Write,
        2 => Change::Trim,
        3 => Change::WriteZeroes,
        4 => Change::Resize,
        5 => Change::Skip,
        _ => return None,
    };
    let entry = Entry { change, epoch, slot, offset, length, checksum };
    (sequence == expected && entry.is_valid()).then_some(entry)
}
