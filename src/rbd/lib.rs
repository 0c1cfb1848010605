//! Images of Ceph's RBD, through librbd, which is loaded only when one is opened.
//!
//! - One RADOS client per volume: when a client is blocklisted, no other volume is affected.
//! - A writable image is claimed by its exclusive lock, which is kept until the image is closed
//!   (`claim`). A client that takes the image over has the cluster blocklist this one first: every
//!   request then fails with ESHUTDOWN, which is `Fenced`, for good.
//! - librbd's cache is off, or writes through (`cache`): a write that is answered is replicated, so FUA
//!   costs nothing.
//! - Requests wait inside the library while the cluster is away, as long as it takes: its own time
//!   limit (`rados_osd_op_timeout`) would report writes as failed that land later. For the same
//!   reason a write that ran into it is `Broken` and never `Retry`.
//! - Payloads are read and filled where they are. librbd makes one copy of a write:
//!   `rbd_disable_zero_copy_writes=false` would avoid it, but in 16.2 a write that is then refused
//!   (after a take-over, for example) never completes.
//! - WRITE_ZEROES is librbd's own, which keeps the promise for every byte; a discard leaves the edges
//!   of objects as they were (`rbd_skip_partial_discard`). Long ranges go piece by piece. For an
//!   encrypted image either writes encrypted zeroes, a few pieces at a time.
//! - Closing waits for what is in flight, on a thread that is abandoned when the cluster is away.

mod background;
mod cache;
mod claim;
mod connection;
mod encryption;
mod errors;
mod extents;
mod fence;
mod image;
mod mirror;
mod permissions;
mod pool_space;
mod queue;
mod quiesce;
mod registration;
mod shared;
mod spec;
mod store;
mod timeouts;

pub use registration::BACKEND;

/// For the fuzz target: parses the claim of the image with the id `image`, and prints it as it is written
/// to the image. `None` for the claim of another image.
///
/// # Errors
/// When `text` is not a claim.
#[cfg(feature = "fuzz")]
pub fn reprint_claim(text: &str, image: &str) -> cleat_core::error::Result<Option<String>> {
    claim::record::Claim::read(Some(text), image, "pool/image")?
        .map(|claim| claim.text())
        .transpose()
}
