//! Mirrored images. The primary image behaves like any other. Only the mirroring daemon writes to its
//! copies in other clusters.

use librbd::{Image, RBD_FEATURE_JOURNALING, RBD_FEATURE_NON_PRIMARY};

use crate::errors::image_error;
use cleat_core::error::{Error, ErrorKind, Result};

/// Rejects a copy. Without this check librbd reports EINVAL, EPERM or EROFS, depending on the operation.
///
/// # Errors
/// Returns `PermissionDenied` for a copy, and otherwise the cluster's error.
pub(crate) fn check_primary(image: &Image, name: &str) -> Result<()> {
    let failed = |error| image_error(error, name);
    let features = image.features().map_err(failed)?;
    // Snapshot-based mirroring marks a copy by a feature bit. Journal-based mirroring needs a query.
    let is_copy = features & RBD_FEATURE_NON_PRIMARY != 0
        || features & RBD_FEATURE_JOURNALING != 0 && image.is_mirror_copy().map_err(failed)?;
    if !is_copy {
        return Ok(());
    }
    let message = format!("{name} is a mirror's copy, which only rbd-mirror may write to");
    Err(Error::new(ErrorKind::PermissionDenied, message).with_repair(format!(
        "map it read-only; or make it the primary image after the other one was demoted: rbd mirror \
         image promote {name}"
    )))
}
