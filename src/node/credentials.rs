//! Opens the files with the secrets of a volume, whose descriptors a worker gets. The supervisor reads none
//! of them; where the URI names no file, a backend may find the secret in this process. Each new worker gets the files
//! as they are when it starts.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::blocking::with_own_limit;
use crate::context::Context;
use crate::worker_start::within;
use cleat_backend::{CredentialFile, CredentialVersion};
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of volumes whose files are opened at the same time. A file system that does not answer
/// then blocks only these threads.
pub(crate) const MAX_CONCURRENT: usize = 32;

/// The same for the checks whether files have changed. They never take a thread from the start of a worker.
pub(crate) const MAX_CHECKS: usize = 4;

/// The timeout for opening the files of a volume.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The open credential files of a volume.
#[derive(Debug, Default)]
pub(crate) struct OpenCredentials {
    /// The paths, in the order of the descriptors.
    pub(crate) paths: Vec<String>,
    /// The descriptors.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The versions of the contents, after a check.
    pub(crate) versions: Vec<CredentialVersion>,
}

/// Opens the credential files that the URI of a volume names. There are none for a URI that no backend
/// accepts; the worker reports such a URI.
///
/// # Errors
/// Fails as [`CredentialFile::open`] does. Returns `TimedOut` if the files are not open after 10 s, or at
/// `deadline`.
pub(crate) async fn open_credentials(
    cx: &Context,
    uri: &str,
    deadline: Instant,
) -> Result<OpenCredentials> {
    let files = cx.registry.volume(uri).map(|uri| uri.spec().credential_files());
    let files = files.unwrap_or_default();
    if files.is_empty() {
        return Ok(OpenCredentials::default());
    }
    let named = files[0].to_string();
    let permits = Arc::clone(&cx.credential_opens);
    let opening = async move {
        let permit = permits.acquire_owned().await;
        let opened = with_own_limit(move || {
            let _permit = permit;
            open(&files, |file| Ok((file.open()?, None)))
        });
        opened.await
    };
    timeout_at(within(deadline, OPEN_TIMEOUT), opening).await.map_err(|_| {
        Error::new(ErrorKind::TimedOut, format!("the {named} could not be opened in time"))
            .with_repair("check the file system that contains it")
    })?
}

/// Opens the credential files of a volume to compare them with what its worker has. Has no timeout, so that the caller
/// starts no second check of the same files while the first one hangs.
///
/// # Errors
/// As [`CredentialFile::open`].
pub(crate) async fn open_for_check(
    cx: &Context,
    files: Vec<CredentialFile>,
) -> Result<OpenCredentials> {
    // The semaphore is never closed.
    let permit = Arc::clone(&cx.credential_checks).acquire_owned().await;
    let opened = with_own_limit(move || {
        let _permit = permit;
        open(&files, |file| {
            file.open_with_version().map(|(opened, version)| (opened, Some(version)))
        })
    });
    opened.await
}

fn open(
    files: &[CredentialFile],
    open_one: impl Fn(&CredentialFile) -> Result<(File, Option<CredentialVersion>)>,
) -> Result<OpenCredentials> {
    let mut open = OpenCredentials::default();
    for file in files {
        let Some(path) = file.path.to_str() else {
            let message = format!("the path of the {file} is not UTF-8");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair(format!("write the {} to a file with another name", file.what)));
        };
        let (descriptor, version) = open_one(file)?;
        open.descriptors.push(descriptor.into());
        open.versions.extend(version);
        open.paths.push(path.to_owned());
    }
    Ok(open)
}
