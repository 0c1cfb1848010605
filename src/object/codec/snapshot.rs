//! Snapshots: in the record that creates one, and in the table of each checkpoint that covers the record.

use super::Damage;
use super::history::{History, decode_position, decode_snapshot, encode_position, encode_snapshot};
use super::reader::{Reader, Writer};
use crate::name::{Position, SnapshotId};

/// The maximum number of snapshots of a volume.
pub const MAX_SNAPSHOTS: usize = 1024;

/// The length of the shortest encoded snapshot in bytes.
pub(super) const SNAPSHOT_BYTES: usize = 66;

/// A snapshot: the content of the volume before a record of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The identity.
    pub id: SnapshotId,
    /// The slot of the record that has created it, and the number of the record in the slot.
    pub at: (Position, u32),
    /// The name, at most [`super::MAX_NAME_BYTES`] bytes.
    pub name: String,
    /// The time in seconds since 1970, as the embedder has stated it. Nothing is decided by it.
    pub created_at_s: u64,
    /// The size of the volume in bytes.
    pub size: u64,
    /// The number of the first page that the writer of the history's checkpoint had not used when the checkpoint was
    /// written. The snapshot needs no later page; 0 without a checkpoint.
    pub next_page: u64,
    /// What its content is computed from; the last cut is limited by `at`. The checkpoint is the newest one that an
    /// `Open` or `Base` before the record names.
    pub history: History,
}

impl Snapshot {
    pub(super) fn encode(&self, to: &mut Writer) {
        encode_snapshot(to, self.id);
        encode_position(to, self.at.0);
        to.u32(self.at.1);
        to.text(&self.name);
        to.u64(self.created_at_s);
        to.u64(self.size);
        to.u64(self.next_page);
        self.history.encode(to);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, Damage> {
        let snapshot = Self {
            id: decode_snapshot(from)?,
            at: (decode_position(from)?, from.u32()?),
            name: from.text()?,
            created_at_s: from.u64()?,
            size: from.u64()?,
            next_page: from.u64()?,
            history: History::decode(from)?,
        };
        match snapshot.history.base.is_none_or(|base| base < snapshot.at.0) {
            true => Ok(snapshot),
            false => Err(Damage::Field("history of a snapshot")),
        }
    }
}
