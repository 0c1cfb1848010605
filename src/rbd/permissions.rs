//! What a key may do where an image's data lie: in a pool of their own, or in its parents' pools. librbd
//! opens an image without asking, and each request fails later on, as it does on a broken disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::errors::{client, lacks_rights, later};
use crate::spec::RbdSpec;
use crate::timeouts::within;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long the answer may take. An image whose data cannot be reached just now is opened all the same.
const PATIENCE: Duration = Duration::from_secs(5);

/// Refuses an image whose data, in a pool of their own, this client may not use.
pub(crate) fn check(
    image: &Arc<librbd::Image>,
    data_pool: &str,
    spec: &RbdSpec,
    read_only: bool,
) -> Result<()> {
    let name = spec.image_name();
    let failed = |error| later(error, &name);
    let prefix = image.objects().map_err(failed)?.prefix;
    let cluster = image.pool().cluster();
    let pool = cluster.pool(data_pool, spec.namespace.as_deref()).map_err(failed)?;
    let what = format!("say whether the pool {data_pool} may be used");
    let asked = within(PATIENCE, &what, move || Ok(pool.check_rights(&prefix, !read_only)));
    match asked {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if error.errno() == Some(libc::EPERM) => {
            let message = format!(
                "{} may not use the pool {data_pool}, which has the data of {name}",
                client(spec)
            );
            Err(Error::new(ErrorKind::PermissionDenied, message)
                .with_repair(lacks_rights(spec, Some(data_pool)))
                .with_source(error))
        }
        Ok(Err(error)) => reached(&name, failed(error)),
        Err(error) => reached(&name, error),
    }
}

/// What cannot be reached just now is no reason.
fn reached(name: &str, error: Error) -> Result<()> {
    if error.kind() != ErrorKind::TimedOut {
        return Err(error);
    }
    tracing::warn!(image = name, error = error.message(), "the data cannot be reached");
    Ok(())
}

/// Says once what requests fail for that are refused later on.
#[derive(Debug)]
pub(crate) struct Rights {
    told: AtomicBool,
    image: String,
    repair: String,
}

impl Rights {
    pub(crate) fn of(spec: &RbdSpec, data_pool: &str) -> Self {
        let data_pool = Some(data_pool).filter(|pool| *pool != spec.pool);
        let (image, repair) = (spec.image_name(), lacks_rights(spec, data_pool));
        Self { told: AtomicBool::new(false), image, repair }
    }

    pub(crate) fn are_missing(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            let Self { image, repair, .. } = self;
            tracing::error!(
                image,
                repair,
                "a request fails since the key may not use a pool that has data of the image, or of what \
                 it was cloned from; others may, too, and are not told"
            );
        }
    }
}
