//! The check and the repair of volumes.

use serde::Serialize;

use super::progress::Progress;
use cleat_core::error::Result;

/// Checks whether the content of volumes is intact.
pub trait CheckStore {
    /// Checks the volume `name` and its snapshots, or only `snapshot`. Changes nothing. Clients that have the volume
    /// open continue. With `data`, everything is read and compared with its checksums.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no such volume or snapshot, `Aborted` if `progress` stopped the operation, and
    /// the backend's error otherwise. What cannot be read because it is lost or damaged is no error.
    fn check(
        &self,
        name: &str,
        snapshot: Option<&str>,
        data: bool,
        progress: Progress<'_>,
    ) -> Result<Checked>;

    /// Repairs what is proved to be safe in the volume `name`, as a client that has it open: other clients are kept
    /// away. Never makes up data. An interrupted call has changed nothing or a part, and another one continues. With
    /// `dry_run`, returns what would be done, and changes nothing.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no such volume, `InUse` if a client has it open, `Aborted` if `progress` stopped
    /// the operation, and the backend's error otherwise. What cannot be repaired is no error.
    fn repair(&self, name: &str, dry_run: bool, progress: Progress<'_>) -> Result<Repaired>;
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// The number of snapshots that were checked.
    pub snapshots: usize,
    /// The number of objects with data that were read.
    pub objects: usize,
    /// What was found, in the order of the snapshots and ranges. A check ends when it has found
    /// [`Checked::MAX_DEFECTS`].
    pub defects: Vec<Defect>,
    /// The objects that nothing refers to; null if they were not looked for: only a snapshot was checked, there is a
    /// defect, a client has the volume open, or the key file is missing.
    pub unreferenced: Option<Unreferenced>,
}

/// Objects of a volume that nothing refers to. They take space and do no other harm.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Unreferenced {
    /// Their number.
    pub objects: u64,
    /// Their names; at most [`Checked::MAX_DEFECTS`].
    pub names: Vec<String>,
}

impl Checked {
    /// The maximum number of defects that a check returns.
    pub const MAX_DEFECTS: usize = 1000;
}

/// The result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Whether nothing was changed, and the result says what would be.
    pub dry_run: bool,
    /// What was put right.
    pub repairs: Vec<Repair>,
    /// The objects that were deleted because nothing refers to them; at most [`Checked::MAX_DEFECTS`].
    pub deleted: Vec<String>,
    /// Their number.
    pub deleted_objects: u64,
    /// What was not touched.
    pub refused: Vec<Refused>,
    /// The state of the volume now. With `dry_run`, the defects are those that would stay.
    #[serde(flatten)]
    pub checked: Checked,
}

/// A defect that was repaired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Repair {
    /// The range that could not be read; null if all data could be read, or none.
    pub range: Option<DamagedRange>,
    /// What was wrong, with the name of the object.
    pub problem: String,
    /// From what the right state follows.
    pub source: String,
}

/// A defect that was not touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// What is wrong, with the name of the object.
    pub problem: String,
    /// Why it is not repaired.
    pub reason: String,
}

/// Something that is lost or damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Defect {
    /// The snapshot; null for the volume itself.
    pub snapshot: Option<String>,
    /// The range that cannot be read; null if all data can be read.
    pub range: Option<DamagedRange>,
    /// What was found, with the name of the object.
    pub problem: String,
}

/// A range of a volume, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DamagedRange {
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}
