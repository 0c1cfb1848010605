//! The backend for images of Ceph's RBD. It uses librbd, which is loaded when the first image is opened.
//!
//! - One RADOS client per volume: when a client is blocklisted, no other volume is affected. The record of a grant and
//!   the commands of fencing use other clients, which stay connected for a minute (`clients`).
//! - A writable image is claimed with its exclusive lock, which is kept until the image is closed
//!   (`claim`). A client that takes the image over has the cluster blocklist the previous client first.
//!   Every request of the previous client then fails with ESHUTDOWN, which is `Fenced` and permanent.
//! - librbd's cache is off or writes through (`cache`): an answered write is replicated, so FUA costs
//!   nothing.
//! - While the cluster is unreachable, requests wait inside the library without a limit. The library's
//!   own timeout (`rados_osd_op_timeout`) would report writes as failed that take effect later. For the
//!   same reason, a write that reached this timeout is `Broken` and never `Retry`.
//! - Payloads are read from and written to the request's buffer directly. librbd makes one copy of a
//!   write. `rbd_disable_zero_copy_writes=false` would avoid it, but in 16.2 a write that is then refused
//!   (after a takeover, for example) never completes.
//! - WRITE_ZEROES is librbd's own operation, which zeroes every byte. A discard leaves the edges of
//!   objects unchanged (`rbd_skip_partial_discard`). Long ranges are processed in pieces. On an encrypted
//!   image both write encrypted zeroes, a few pieces at a time.
//! - Closing waits for requests in flight, on a thread that is abandoned when the cluster is unreachable.

mod background;
mod cache;
mod claim;
mod clients;
mod connection;
mod encryption;
mod errors;
mod extents;
mod fence;
mod granted;
mod hold;
mod image;
mod keyring;
mod mirror;
mod pause;
mod permissions;
mod pool_space;
mod queue;
mod quiesce;
mod registration;
mod shared;
mod sharer;
mod spec;
mod store;
mod timeouts;

pub use registration::BACKEND;

/// For the fuzz target: parses the claim of the image with the id `image` and returns it as it is written
/// to the image. Returns `None` for the claim of another image.
///
/// # Errors
/// Returns an error if `text` is not a claim.
#[cfg(feature = "fuzz")]
pub fn reprint_claim(text: &str, image: &str) -> cleat_core::error::Result<Option<String>> {
    claim::record::Claim::read(Some(text), image, "pool/image")?
        .map(|claim| claim.text())
        .transpose()
}
