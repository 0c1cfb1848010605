//! A planned handover of a volume from one process to another. At no moment do both processes write,
//! and at no moment is the volume without a claim that another node respects:
//!
//! 1. [`Handover::prepare`] in the old process, which continues to serve: it returns what the new
//!    process opens the volume with.
//! 2. [`VolumeSpec::open_successor`](crate::VolumeSpec::open_successor) in the new process.
//! 3. The old process completes every request, then calls [`Handover::release`].
//! 4. [`Handover::take_over`] in the new process, which serves from here on; or [`Handover::resume`]
//!    in the old process, which continues to serve.
//!
//! Two kinds of claim fit this order. A claim that belongs to an open file description (a lock, O_EXCL,
//! or memory itself) is held by both processes from step 2 on and is never interrupted. A claim that
//! belongs to a client of a storage system (an exclusive lock) is released at step 3, and acquired
//! again at step 4.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use cleat_core::error::Result;

/// Passes an open volume to a successor process; see the module's documentation for the order of the
/// calls.
pub trait Handover {
    /// Returns what a successor in another process opens the volume with. The volume stays open here,
    /// and continues to be served.
    ///
    /// # Errors
    /// What the operating system returns when a descriptor cannot be duplicated.
    fn prepare(&self) -> Result<HandoverFiles>;

    /// Releases the claim once no request is in flight, and returns the state that the successor needs.
    /// Nothing is written until [`Handover::resume`].
    ///
    /// # Errors
    /// The backend's error; the volume is then still claimed here.
    fn release(&self) -> Result<HandoverState>;

    /// Undoes [`Handover::release`] when no successor has taken over: acquires the claim again.
    ///
    /// # Errors
    /// The backend's error; `Fenced` when another client has claimed the volume meanwhile.
    fn resume(&self) -> Result<()>;

    /// In the successor: acquires the claim after the predecessor has released it, and before the first
    /// request.
    ///
    /// # Errors
    /// The backend's error; the predecessor can then resume.
    fn take_over(&self, state: &HandoverState) -> Result<()>;
}

/// Open file descriptions that a successor opens the volume with.
#[derive(Debug)]
pub struct HandoverFiles {
    /// Descriptors that carry the claim. Empty where the successor opens the volume by itself and
    /// claims it in [`Handover::take_over`].
    pub descriptors: Vec<OwnedFd>,
}

/// What the old process knows and its successor must not forget.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HandoverState {
    /// A sync of written data has failed once, so no later success of a sync can be trusted.
    pub sync_failed: bool,
    /// Another client owns the volume.
    pub fenced: bool,
    /// The faults that are injected at present; only in test builds.
    pub faults: Option<String>,
}
