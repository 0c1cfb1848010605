//! Checkpoints: the volume after a slot, as the names of its map pages, and what else a replay of the history
//! up to there would give.

use super::history::{History, decode_position, decode_snapshot, encode_position, encode_snapshot};
use super::page::{PageId, decode_pages, encode_pages};
use super::reader::Writer;
use super::{Damage, Identity, Kind, exact, open, seal};
use crate::name::{Nonce, Position, SnapshotId};

/// The maximum number of snapshots of a volume.
pub const MAX_SNAPSHOTS: usize = 1024;

/// The maximum number of pages of the index or of the usage.
pub(super) const MAX_PAGES: usize = 64 << 10;

/// The length of the shortest encoded snapshot in bytes.
const SNAPSHOT_BYTES: usize = 42;

/// A snapshot that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The identity.
    pub id: SnapshotId,
    /// The slot of the record that has created it, and the number of the record in the slot.
    pub at: (Position, u32),
    /// The name, at most [`super::MAX_NAME_BYTES`] bytes.
    pub name: String,
    /// What its content is computed from; the last cut is limited by `at`.
    pub history: History,
}

/// A checkpoint: the volume after all records up to and including the slot in its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The size of the volume in bytes.
    pub size: u64,
    /// The number of the next page of the epoch that a writer may use.
    pub next_page: u64,
    /// The pages of the index, in the order of the ranges.
    pub index: Vec<Option<PageId>>,
    /// The pages of the usage.
    pub usage: Vec<Option<PageId>>,
    /// The snapshots, in the order of their creation.
    pub snapshots: Vec<Snapshot>,
}

impl Checkpoint {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.snapshots.len() <= MAX_SNAPSHOTS);
        let mut body = Writer::default();
        body.u64(self.size);
        body.u64(self.next_page);
        encode_pages(&mut body, &self.index);
        encode_pages(&mut body, &self.usage);
        body.length(self.snapshots.len());
        for snapshot in &self.snapshots {
            encode_snapshot(&mut body, snapshot.id);
            encode_position(&mut body, snapshot.at.0);
            body.u32(snapshot.at.1);
            body.text(&snapshot.name);
            snapshot.history.encode(&mut body);
        }
        seal(Kind::Checkpoint, self.identity, self.nonce, body)
    }

    /// Decodes the checkpoint that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a checkpoint with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let (nonce, mut body) = open(Kind::Checkpoint, identity, bytes)?;
        let (size, next_page) = (body.u64()?, body.u64()?);
        let index = decode_pages(&mut body, MAX_PAGES)?;
        let usage = decode_pages(&mut body, MAX_PAGES)?;
        let count = body.count(SNAPSHOT_BYTES, MAX_SNAPSHOTS)?;
        let mut snapshots: Vec<Snapshot> = Vec::with_capacity(count);
        for _ in 0..count {
            let snapshot = Snapshot {
                id: decode_snapshot(&mut body)?,
                at: (decode_position(&mut body)?, body.u32()?),
                name: body.text()?,
                history: History::decode(&mut body)?,
            };
            if snapshots.last().is_some_and(|before| before.at >= snapshot.at) {
                return Err(Damage::Field("order of snapshots"));
            }
            snapshots.push(snapshot);
        }
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, size, next_page, index, usage, snapshots })
    }
}
