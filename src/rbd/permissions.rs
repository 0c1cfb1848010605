//! The client's capabilities for the pools with an image's data: a separate data pool, or the pools of its
//! parents. librbd opens an image without checking them, and later each request fails like on a broken
//! disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::errors::{client_name, image_error, missing_caps_repair};
use crate::spec::RbdSpec;
use crate::timeouts::with_timeout;
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout of the check. If it passes, the image is opened nevertheless.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Rejects an image whose separate data pool this client may not use.
///
/// # Errors
/// Returns `PermissionDenied` with a command that grants the capabilities, or the cluster's error.
pub(crate) fn check(
    image: &Arc<librbd::Image>,
    data_pool: &str,
    spec: &RbdSpec,
    read_only: bool,
) -> Result<()> {
    let name = spec.image_name();
    let failed = |error| image_error(error, &name);
    let prefix = image.objects().map_err(failed)?.prefix;
    let cluster = image.pool().cluster();
    let pool = cluster.pool(data_pool, spec.namespace.as_deref()).map_err(failed)?;
    let what = format!("say whether the pool {data_pool} may be used");
    let asked =
        with_timeout(CHECK_TIMEOUT, &what, move || Ok(pool.check_rights(&prefix, !read_only)));
    match asked {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if error.errno() == Some(libc::EPERM) => {
            let message = format!(
                "{} may not use the pool {data_pool}, which has the data of {name}",
                client_name(spec)
            );
            Err(Error::new(ErrorKind::PermissionDenied, message)
                .with_repair(missing_caps_repair(spec, Some(data_pool)))
                .with_source(error))
        }
        Ok(Err(error)) => ignore_timeout(&name, failed(error)),
        Err(error) => ignore_timeout(&name, error),
    }
}

/// Turns a timeout into a warning: a pool that is unreachable now may be reachable later.
fn ignore_timeout(name: &str, error: Error) -> Result<()> {
    if error.kind() != ErrorKind::TimedOut {
        return Err(error);
    }
    tracing::warn!(image = name, error = error.message(), "the data pool does not answer");
    Ok(())
}

/// Logs once per image why requests fail that the OSDs refuse after opening.
#[derive(Debug)]
pub(crate) struct MissingCaps {
    reported: AtomicBool,
    image: String,
    repair: String,
}

impl MissingCaps {
    pub(crate) fn new(spec: &RbdSpec, data_pool: &str) -> Self {
        let data_pool = Some(data_pool).filter(|pool| *pool != spec.pool);
        let (image, repair) = (spec.image_name(), missing_caps_repair(spec, data_pool));
        Self { reported: AtomicBool::new(false), image, repair }
    }

    pub(crate) fn report_once(&self) {
        if !self.reported.swap(true, Ordering::Relaxed) {
            let Self { image, repair, .. } = self;
            tracing::error!(
                image,
                repair,
                "a request failed because the key may not use a pool with data of the image or of its \
                 parent; further failures of this kind are not logged"
            );
        }
    }
}
