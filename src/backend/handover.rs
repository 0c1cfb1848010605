//! A planned handover of a volume from one process to another. At no moment do both processes write,
//! and at no moment is the volume without a claim that another node respects:
//!
//! 1. [`Handover::prepare`] in the old process, which continues to serve, returns the files with which the
//!    new process opens the volume.
//! 2. [`VolumeSpec::open_successor`](crate::VolumeSpec::open_successor) in the new process.
//! 3. The old process completes every request, stops its background work
//!    ([`BackgroundWork::stop`](crate::BackgroundWork::stop)), and calls [`Handover::release`].
//! 4. [`Handover::take_over`] in the new process, which serves from then on; or [`Handover::resume`]
//!    and [`BackgroundWork::restart`](crate::BackgroundWork::restart) in the old process, which continues
//!    to serve.
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
    /// Returns the files with which a successor in another process opens the volume. The volume stays open in
    /// this process, which continues to serve it.
    ///
    /// # Errors
    /// Returns the operating system's error if a descriptor cannot be duplicated.
    fn prepare(&self) -> Result<HandoverFiles>;

    /// Releases the claim, and returns the state that the successor needs. No request may be in flight. The
    /// process writes nothing until [`Handover::resume`].
    ///
    /// # Errors
    /// Returns the backend's error; this process then still has the claim.
    fn release(&self) -> Result<HandoverState>;

    /// Acquires the claim again after [`Handover::release`], when no successor has taken over.
    ///
    /// # Errors
    /// Returns the backend's error, and `Fenced` if another client has claimed the volume since.
    fn resume(&self) -> Result<()>;

    /// Acquires the claim in the successor, after the predecessor has released it, and before the first
    /// request.
    ///
    /// # Errors
    /// Returns the backend's error; the predecessor can then resume.
    fn take_over(&self, state: &HandoverState) -> Result<()>;
}

/// The files with which a successor opens the volume.
#[derive(Debug)]
pub struct HandoverFiles {
    /// Descriptors that carry the claim. Empty where the successor opens the volume by itself and
    /// claims it in [`Handover::take_over`].
    pub descriptors: Vec<OwnedFd>,
}

/// The state of the old process that its successor must keep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HandoverState {
    /// A sync of written data has failed once, so that no later success of a sync proves anything.
    pub sync_failed: bool,
    /// Another client owns the volume.
    pub fenced: bool,
    /// The present fault plan; only in test builds.
    pub faults: Option<String>,
}
