//! Positions in the log, and histories: what a view of the volume is computed from.

use super::Damage;
use super::reader::{Reader, Writer};
use crate::name::{Position, SnapshotId};

/// The maximum number of epochs in a history. An opener that would need more writes a checkpoint before it
/// commits its take-over to nothing but that.
pub const MAX_CUTS: usize = 256;

/// What a view of the volume is computed from: a checkpoint, and the slots of the log above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// The checkpoint; `None` is the empty volume, or the parent's snapshot for a clone.
    pub base: Option<Position>,
    /// The epochs above the checkpoint in their order, with the number of slots that count in each. Epochs
    /// without slots are left out.
    pub cuts: Vec<Position>,
}

impl History {
    pub(super) fn encode(&self, to: &mut Writer) {
        debug_assert!(self.cuts.len() <= MAX_CUTS);
        to.u8(self.base.is_some().into());
        if let Some(base) = self.base {
            encode_position(to, base);
        }
        to.length(self.cuts.len());
        self.cuts.iter().for_each(|cut| encode_position(to, *cut));
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, Damage> {
        let base = match from.u8()? {
            0 => None,
            1 => Some(decode_position(from)?),
            _ => return Err(Damage::Field("history")),
        };
        let count = from.count(16, MAX_CUTS)?;
        let mut cuts: Vec<Position> = Vec::with_capacity(count);
        for _ in 0..count {
            let cut = decode_position(from)?;
            let before = cuts.last().map(|cut| cut.epoch);
            let is_after = before.is_none_or(|epoch| epoch < cut.epoch);
            // A checkpoint is written only after its slot is confirmed, so no cut lies below it.
            let is_above = base.is_none_or(|base| base < cut);
            if !is_after || !is_above || cut.slot == 0 {
                return Err(Damage::Field("history"));
            }
            cuts.push(cut);
        }
        Ok(Self { base, cuts })
    }
}

pub(super) fn encode_position(to: &mut Writer, position: Position) {
    to.u64(position.epoch);
    to.u64(position.slot);
}

pub(super) fn decode_position(from: &mut Reader<'_>) -> Result<Position, Damage> {
    Ok(Position { epoch: from.u64()?, slot: from.u64()? })
}

pub(super) fn encode_snapshot(to: &mut Writer, id: SnapshotId) {
    to.u64(id.epoch);
    to.u64(id.number);
}

pub(super) fn decode_snapshot(from: &mut Reader<'_>) -> Result<SnapshotId, Damage> {
    Ok(SnapshotId { epoch: from.u64()?, number: from.u64()? })
}
