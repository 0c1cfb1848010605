//! A safe interface to librbd for cleat: clusters, pools, images and asynchronous I/O.
//!
//! Input: names, sizes and owned buffers. Output: owned values, and errors with an action and an errno.
//! `librbd-sys` loads the libraries at run time. If they are missing, [`Cluster::connect`] fails with an
//! error that names the packages to install.
//!
//! - Every call to the cluster may block for as long as the cluster does not answer. Only
//!   [`Cluster::connect`] has a timeout, and only [`Submitter`] never blocks.
//! - A buffer belongs to an operation from its start to its completion, even if its submitter is
//!   dropped.
//! - Callbacks of the library only pass a completion or a wake-up on. A panic in a closure that is called
//!   from C never unwinds into C: it continues on the calling thread if there is one, and otherwise ends
//!   the process.
#![allow(unsafe_code, reason = "the only caller of librbd-sys; each block says why it may")]

mod cluster;
mod describe;
mod encryption;
mod error;
mod gate;
mod image;
mod list;
mod lock;
mod metadata;
mod pool;
mod progress;
mod quiesce;
mod snapshots;
mod submit;
mod swap;
mod text;
mod watch;

pub use cluster::{Cluster, Config};
pub use describe::{LinkedImage, Objects, Parent};
pub use encryption::{Key, Luks};
pub use error::{Error, Result, Subject};
pub use image::{Image, Open, Stat};
pub use librbd_sys::{
    LoadError, RBD_FEATURE_DATA_POOL, RBD_FEATURE_DEEP_FLATTEN, RBD_FEATURE_EXCLUSIVE_LOCK,
    RBD_FEATURE_FAST_DIFF, RBD_FEATURE_JOURNALING, RBD_FEATURE_LAYERING, RBD_FEATURE_NON_PRIMARY,
    RBD_FEATURE_OBJECT_MAP, RBD_FEATURE_STRIPINGV2, RBD_FLAG_FAST_DIFF_INVALID,
    RBD_FLAG_OBJECT_MAP_INVALID,
};
pub use lock::{Locker, Watcher};
pub use pool::{ImageSpec, NewImage, Pool, Trashed};
pub use progress::Progress;
pub use quiesce::{Quiesce, QuiesceWatch};
pub use snapshots::{Snapshot, SnapshotKind};
pub use submit::{Completion, Io, IoBuffer, Refused, Submitter};
pub use swap::LockState;
pub use watch::Watch;

/// Loads the libraries. A process that later gives up access to files calls this first; otherwise the
/// first [`Cluster::connect`] loads them. Starts no thread. Returns librbd's version: major, minor, extra.
///
/// # Errors
/// Returns an error if a library is missing or too old.
pub fn load() -> Result<(i32, i32, i32), LoadError> {
    let api = librbd_sys::api()?;
    let (mut major, mut minor, mut extra) = (0, 0, 0);
    // SAFETY: each takes a number.
    unsafe { (api.rbd.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
    Ok((major, minor, extra))
}

/// Returns the version of librbd, which is loaded if necessary: major, minor, extra.
///
/// # Errors
/// Returns an error if a library is missing or too old.
pub fn version() -> Result<(i32, i32, i32)> {
    load().map_err(Error::no_library)
}
