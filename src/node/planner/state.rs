//! The state of a mapping, as the planner decides it and users see it.

use cleat_core::error::{Error, ErrorKind};
use cleat_kernel::Holder;

/// The state of a mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The mapping is being created.
    Mapping,
    /// The device works.
    Mapped,
    /// The device exists, and its worker is being replaced.
    Recovering,
    /// The mapping failed, and the supervisor does nothing more until a user acts.
    Failed(Failure),
    /// The mapping is being removed.
    Unmapping,
    /// The mapping is to be removed, but its device has holders. The supervisor does nothing.
    Held(Vec<Holder>),
    /// Nothing of the mapping is left.
    Unmapped,
}

/// Why a mapping failed, and what its owner can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind of the failure, which tells callers how to react.
    pub kind: ErrorKind,
    /// What failed, and why.
    pub message: String,
    /// What the owner can do.
    pub repair: String,
}

impl Failure {
    pub(super) fn new(
        kind: ErrorKind,
        message: impl Into<String>,
        repair: impl Into<String>,
    ) -> Self {
        Self { kind, message: message.into(), repair: repair.into() }
    }

    /// Converts the failure into an error for a caller.
    pub fn into_error(self) -> Error {
        Error::new(self.kind, self.message).with_repair(self.repair)
    }
}
