//! The identity of an image: the ids that the cluster never gives twice, not the names.

use librbd::{Image, SnapshotKind};

use crate::errors::open_error;
use crate::spec::RbdSpec;
use cleat_backend::VolumeIdentity;
use cleat_core::error::{Error, ErrorKind, Result};

/// Returns the identity of the image that was opened as `spec`. It stays the same when the image is renamed,
/// or is restored from the trash. Blocks until the cluster has answered.
///
/// # Errors
/// Returns `NotFound` for a snapshot that was removed, and otherwise the library's error.
pub(super) fn identity(image: &Image, spec: &RbdSpec) -> Result<VolumeIdentity> {
    let name = spec.image_name();
    let failed = |error| open_error(error, &name, spec);
    let (pool, id) = (image.pool(), image.id().map_err(failed)?);
    let (cluster, pool_id) = (pool.cluster().fsid().map_err(failed)?, pool.id());
    let text = format!("image {id} in pool {pool_id} of cluster {cluster}");
    let Some(wanted) = &spec.snapshot else { return Ok(VolumeIdentity::new(text)) };
    let snapshots = image.snapshots().map_err(failed)?;
    let found = snapshots
        .iter()
        .find(|snapshot| snapshot.kind == SnapshotKind::User && snapshot.name == *wanted)
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{name} was removed")))?;
    Ok(VolumeIdentity::new(format!("snapshot {} of {text}", found.id)))
}
