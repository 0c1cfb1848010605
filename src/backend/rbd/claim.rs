//! Who may write: the holder of the image's exclusive lock.
//!
//! The lock is taken and kept, not left to librbd's way of taking it with the first write and handing
//! it over when another client asks, under which two writers alternate. A holder that still watches
//! the image is never pushed aside here; one that does not is dead, and librbd has it blocklisted
//! before it breaks its lock. (Taking over from a holder that must be gone, by the address that it
//! recorded, is a decision of the control side, and would stand before [`acquire`].)

use librbd::RBD_FEATURE_EXCLUSIVE_LOCK;

use super::problem::later;
use crate::error::{Error, ErrorKind, Result};

/// Where a mapping that may write says who it is, in the image's metadata.
pub(super) const KEY: &str = "cleat.claim";

/// Makes `image` ours until it is closed.
pub(super) fn acquire(image: &librbd::Image, name: &str) -> Result<()> {
    let failed = |error| later(error, name);
    if image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
        let message =
            format!("{name} has no exclusive lock, so a second writer could not be kept out");
        return Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair(format!("rbd feature enable {name} exclusive-lock")));
    }
    if let Some(holder) = holder(image).map_err(failed)? {
        return Err(in_use(name, &holder));
    }
    match image.lock_acquire() {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.errno(), Some(libc::EROFS | libc::EBUSY | libc::EAGAIN)) => {
            let holder = image.lock_owners().ok().and_then(|owners| owners.into_iter().next());
            Err(in_use(name, holder.as_deref().unwrap_or("another client")).with_source(error))
        }
        Err(error) => Err(failed(error)),
    }
}

/// The address of the client that holds the lock, if it is alive as far as the OSDs know.
fn holder(image: &librbd::Image) -> librbd::Result<Option<String>> {
    let Some(owner) = image.lock_owners()?.into_iter().next() else { return Ok(None) };
    let alive = image.watchers()?.iter().any(|watcher| watcher.address == owner);
    Ok(alive.then_some(owner))
}

fn in_use(name: &str, holder: &str) -> Error {
    Error::new(ErrorKind::InUse, format!("{name} is being written by the client at {holder}"))
        .with_repair(
            "unmap it there first, or map it read-only here; the cluster gives a client up that \
             died about 30 s later",
        )
}
