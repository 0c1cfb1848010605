//! Unix sockets that the daemon listens on.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::directory::{check_shared, create_private};
use cleat_core::error::{Error, ErrorKind, Result};

/// A socket for root and our own user. One that a dead daemon left is replaced.
pub(crate) async fn listen(path: &Path) -> Result<UnixListener> {
    let failed = |error| Error::from_io(format!("cannot listen on {}", path.display()), error);
    match path.parent() {
        Some(parent) if parent.exists() => check_shared(parent)?,
        Some(parent) => create_private(parent)?,
        None => {}
    }
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            let message = format!("{} exists and is no socket", path.display());
            return Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("remove it, or choose another socket"));
        }
        // Anything but a refusal: somebody is there, busy or not.
        Ok(_) if !is_abandoned(path).await => {
            let message = format!("another daemon serves {}", path.display());
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("stop it first: systemctl stop cleat"));
        }
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(_) => {}
    }
    // Bound under another name and renamed when its mode is right: nobody finds it too open.
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(failed)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    std::fs::rename(&temporary, path).map_err(failed)?;
    Ok(listener)
}

/// Whether nobody listens on a socket.
async fn is_abandoned(path: &Path) -> bool {
    let connected = UnixStream::connect(path).await;
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}
