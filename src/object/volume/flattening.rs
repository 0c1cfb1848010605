//! The state of a flattening.

use super::access::Failure;
use crate::name::Position;

/// How far a flattening is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flattening {
    /// None was started, or it was stopped.
    Idle,
    /// It is in progress.
    Running {
        /// The bytes of the volume that were looked at.
        done: u64,
        /// The size of the volume in bytes.
        total: u64,
    },
    /// Every later opener finds a volume that refers to no object of its ancestors, and so do its snapshots.
    Done,
    /// It has ended with this error.
    Failed(Failure),
}

/// What a flattening does next.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Idle,
    /// It looks whether the snapshots permit it.
    Begin,
    /// It copies what the map has from this page on. The pages below refer to no ancestor.
    Copy(u64),
    /// It appends a record that the next checkpoint must cover.
    Settle,
    /// It waits until a checkpoint covers this slot and is the base of every later opener.
    Cover(u64),
    /// It looks at the snapshots that start from a checkpoint before this one.
    Prove(Position),
    Done,
    Failed(Failure),
}
