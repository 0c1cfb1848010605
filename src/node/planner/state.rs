//! The state of a mapping, as the planner decides it and users see it.

use cleat_core::error::{Error, ErrorKind};
use cleat_kernel::Holder;

/// How a mapping is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// On its way to `Mapped`.
    Mapping,
    /// Works.
    Mapped,
    /// The device exists, its worker is being replaced.
    Recovering,
    /// Nothing more will be done without a hand.
    Failed(Failure),
    /// On its way to `Unmapped`.
    Unmapping,
    /// To be taken down, and held; nothing is done.
    Held(Vec<Holder>),
    /// Nothing is left.
    Unmapped,
}

/// Why a mapping failed, and what its owner can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// For the caller's reaction.
    pub kind: ErrorKind,
    /// What is the matter.
    pub message: String,
    /// What to do.
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

    /// As an error, for who asked.
    pub fn into_error(self) -> Error {
        Error::new(self.kind, self.message).with_repair(self.repair)
    }
}
