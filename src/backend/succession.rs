//! A planned hand-over of a volume from one process to another, without a moment in which nobody has
//! it and without one in which both write:
//!
//! 1. [`super::Image::bequeath`] in the old process, which serves on: what the new one opens it with.
//! 2. [`super::inherit`] in the new one.
//! 3. The old one finishes every request, then [`super::Image::let_go`].
//! 4. [`super::Image::succeed`] in the new one, which serves from here on; or [`super::Image::take_back`] in the
//!    old one, as if nothing had happened.
//!
//! Two kinds of claim fit. One that belongs to an open file (a lock, O_EXCL, or memory itself) is in
//! both hands from 2 on, and never broken. One that belongs to a client of a storage system
//! (an exclusive lock) is released at 3 and acquired at 4 or taken back.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use cleat_core::error::{Error, ErrorKind};

/// What a successor opens the volume with.
#[derive(Debug)]
pub struct Inheritance {
    /// Open descriptions that carry the claim. None: the successor opens the volume by itself, and
    /// claims it when it succeeds.
    pub descriptors: Vec<OwnedFd>,
}

/// What the old process has learnt and the new one must not forget. Fields are only added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Legacy {
    /// Making written data durable has failed once: no later success can be believed.
    pub sync_failed: bool,
    /// Somebody else owns the volume.
    pub fenced: bool,
    /// The faults that are injected now.
    pub faults: Option<String>,
}

pub(super) fn impossible() -> Error {
    let message = "this kind of volume cannot be handed over to another process";
    Error::new(ErrorKind::Unsupported, message)
}
