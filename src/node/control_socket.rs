//! Unix sockets that the daemon listens on.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

pub use crate::api::service::PeerCheck;
use crate::directory::{check_shared, check_volume, create_private};
use cleat_core::error::{Error, ErrorKind, Result};

/// Listens on a unix socket of mode 0600. Replaces a socket of a daemon that has ended.
///
/// # Errors
/// Returns `InUse` if another process listens on `path`, `AlreadyExists` if `path` is not a socket,
/// `PermissionDenied` if other users can change its directory, and the errors of the file system.
pub async fn listen(path: &Path) -> Result<UnixListener> {
    listen_in(path, check_shared).await
}

/// Listens as [`listen`] does, also in a volume of a pod that every user may write to, such as an `emptyDir`.
///
/// # Errors
/// As [`listen`].
pub async fn listen_in_pod(path: &Path) -> Result<UnixListener> {
    listen_in(path, check_volume).await
}

/// Listens in a directory that `check` accepts, or that does not exist.
async fn listen_in(path: &Path, check: impl Fn(&Path) -> Result<()>) -> Result<UnixListener> {
    let failed = |error| Error::from_io(format!("cannot listen on {}", path.display()), error);
    match path.parent() {
        Some(parent) if parent.exists() => check(parent)?,
        Some(parent) => create_private(parent)?,
        None => {}
    }
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            let message = format!("{} exists and is not a socket", path.display());
            return Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("remove it, or choose another socket"));
        }
        // Any answer but a refusal comes from a process that listens, even if it is busy.
        Ok(_) if !is_abandoned(path).await => {
            let message = format!("another daemon serves {}", path.display());
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("stop it first: systemctl stop cleat"));
        }
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(_) => {}
    }
    // The socket gets its final name only after its mode is set, so its permissions are never too wide.
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(failed)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    std::fs::rename(&temporary, path).map_err(failed)?;
    Ok(listener)
}

/// Returns whether no process listens on a socket.
async fn is_abandoned(path: &Path) -> bool {
    let connected = UnixStream::connect(path).await;
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}
