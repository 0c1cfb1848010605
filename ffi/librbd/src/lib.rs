//! librbd for cleat: clusters, pools, images and asynchronous I/O, safely.
//!
//! Comes in: names, sizes, owned buffers. Goes out: owned values, and errors with an action and an
//! errno. The libraries are found at run time by `librbd-sys`; without them [`Cluster::connect`]
//! fails and says what to install.
//!
//! - Every call that talks to the cluster may block as long as the cluster does not answer, except
//!   connecting, which has a limit. Only [`Submitter`] never blocks.
//! - A buffer belongs to an operation from its start to its completion, whatever happens to whoever
//!   started it.
//! - Callbacks of the library do nothing but pass a completion or a wake-up on. A panic in a closure that is called
//!   through C never unwinds into it: where there is a caller to go back to it goes on there, else
//!   the process ends.
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
mod text;
mod watch;

pub use cluster::{Cluster, Config};
pub use describe::{LinkedImage, Objects, Parent};
pub use encryption::{Key, Luks};
pub use error::{Error, Result};
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
pub use watch::Watch;

/// Loads the libraries now, while their files can still be read: a process may want to give that
/// up. Without it the first [`Cluster::connect`] does. Starts no thread. Returns librbd's version: major,
/// minor, extra.
///
/// # Errors
/// When a library is missing or too old.
pub fn load() -> Result<(i32, i32, i32), LoadError> {
    let api = librbd_sys::api()?;
    let (mut major, mut minor, mut extra) = (0, 0, 0);
    // SAFETY: each takes a number.
    unsafe { (api.rbd.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
    Ok((major, minor, extra))
}

/// Version of the librbd that was loaded, as [`load`] has it.
///
/// # Errors
/// As [`load`].
pub fn version() -> Result<(i32, i32, i32)> {
    load().map_err(Error::no_library)
}
