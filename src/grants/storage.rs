//! The record of one volume at its storage, and the means to cut a client off. Each backend implements it whose
//! volumes several nodes can reach.

use std::fmt::Debug;
use std::time::Instant;

use cleat_core::error::Result;

use crate::object::Mode;
use crate::record::{Record, Target};

/// The record of one volume at its storage. The calls block, at most until `deadline`.
pub trait Fencing: Debug + Send + Sync {
    /// Checks whether the volume can be granted in this mode. Does no I/O.
    ///
    /// # Errors
    /// Returns `Unsupported` if the storage does not record, or cannot cut off, clients with this mode.
    fn check_mode(&self, _mode: Mode) -> Result<()> {
        Ok(())
    }

    /// Reads the record. A volume that was never claimed has the default record.
    ///
    /// # Errors
    /// Returns `NotFound` only if the storage has answered that the volume does not exist, and another error if it does
    /// not answer or cannot be reached.
    fn record(&self, deadline: Instant) -> Result<Record>;

    /// Carries out [`Record::plan_fence`]: cuts off the recorded client and seals the generation. Does nothing if
    /// the plan says so. The caller reads the record afterwards, which is the proof.
    ///
    /// # Errors
    /// Returns an error if the storage does not answer, or if the record has changed meanwhile.
    fn fence(&self, target: &Target, deadline: Instant) -> Result<()>;

    /// Ends the fencing of a client that has ended: afterwards no seal of the record names it. What it has sent before may
    /// still be refused.
    ///
    /// # Errors
    /// Returns an error if the storage does not answer, or if the record has changed meanwhile.
    fn unfence(&self, client: &str, deadline: Instant) -> Result<()>;

    /// Cuts off `client`, a client of the node `node` whose process has ended, and releases its claim. Does nothing
    /// if the record has no such claim any more. Called on that node.
    ///
    /// # Errors
    /// Returns `InUse` if it is not proved that the process has ended, or if another client has claimed the volume,
    /// and an error if the storage does not answer.
    fn release(&self, node: &str, client: &str, deadline: Instant) -> Result<()>;
}
