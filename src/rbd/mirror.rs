//! Mirrored images: the primary one is as any other; its copies in other clusters only mirroring changes.

use librbd::{Image, RBD_FEATURE_JOURNALING, RBD_FEATURE_NON_PRIMARY};

use crate::errors::later;
use cleat_core::error::{Error, ErrorKind, Result};

/// Refuses a copy, which librbd calls an invalid argument, a lack of rights or a lost lock, as it comes.
pub(crate) fn check_primary(image: &Image, name: &str) -> Result<()> {
    let failed = |error| later(error, name);
    let features = image.features().map_err(failed)?;
    // Mirroring by snapshots leaves its mark; by the journal one has to ask.
    let is_copy = features & RBD_FEATURE_NON_PRIMARY != 0
        || features & RBD_FEATURE_JOURNALING != 0 && image.is_mirror_copy().map_err(failed)?;
    if !is_copy {
        return Ok(());
    }
    let message = format!("{name} is a mirror's copy, to which mirroring alone writes");
    Err(Error::new(ErrorKind::PermissionDenied, message).with_repair(format!(
        "map it read-only; or make it the primary one, once the other is not that any more: rbd \
         mirror image promote {name}"
    )))
}
