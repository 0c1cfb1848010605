//! Directories that only root and the daemon's user can change. Another user who could create a symlink
//! there would choose the files that a privileged daemon writes to.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};

/// Creates a directory of mode 0700, with its parents. An existing directory is accepted if no other user
/// can write to it or move it.
///
/// # Errors
/// Returns `PermissionDenied` if another user can change the directory, and an error if the file system
/// refuses to create it.
pub(crate) fn create_private(path: &Path) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| {
        let error = Error::from_io(format!("cannot create {}", path.display()), error);
        match error.kind() {
            ErrorKind::PermissionDenied => error.with_repair(
                "start the daemon as root, or set --state-dir and --runtime-dir to directories of its \
                 user",
            ),
            _ => error,
        }
    })?;
    check(path, 0o022)
}

/// Checks a directory that other users may write to if it is sticky, such as /tmp.
///
/// # Errors
/// Returns `PermissionDenied` if another user can move the directory or replace files in it.
pub(crate) fn check_shared(path: &Path) -> Result<()> {
    check(path, 0)
}

/// Checks a directory and its parents. `forbidden` are the permissions that the directory itself must not
/// give.
fn check(path: &Path, forbidden: u32) -> Result<()> {
    let unreadable = |error| Error::from_io(format!("cannot inspect {}", path.display()), error);
    let real = fs::canonicalize(path).map_err(unreadable)?;
    let mode = fs::metadata(&real).map_err(unreadable)?.mode();
    if mode & forbidden != 0 {
        return Err(unsafe_directory(&real, "other users may write to it", "chmod go-w"));
    }
    // Both paths are checked: the given one with its symlinks, and the real one.
    for part in path.ancestors().chain(real.ancestors()).filter(|p| !p.as_os_str().is_empty()) {
        let found = fs::symlink_metadata(part).map_err(unreadable)?;
        if found.uid() != 0 && found.uid() != nix::unistd::geteuid().as_raw() {
            let why = format!("it belongs to user {}", found.uid());
            return Err(unsafe_directory(part, &why, "chown root"));
        }
        const STICKY: u32 = 0o1000;
        let open = found.mode() & 0o002 != 0 && found.mode() & STICKY == 0;
        if open && !found.is_symlink() {
            return Err(unsafe_directory(part, "every user may write to it", "chmod o-w"));
        }
    }
    Ok(())
}

fn unsafe_directory(path: &Path, why: &str, command: &str) -> Error {
    let message = format!("{} is not safe to use: {why}", path.display());
    Error::new(ErrorKind::PermissionDenied, message)
        .with_repair(format!("{command} {}, or choose another directory", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_created_directory_has_mode_0700() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        create_private(&path).unwrap();
        create_private(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_can_change_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let (open, inner) = (root.path().join("open"), root.path().join("open/inner"));
        create_private(&inner).unwrap();
        for (path, mode) in [(&inner, 0o1777), (&inner, 0o720), (&open, 0o707)] {
            chmod(path, mode);
            let error = create_private(&inner).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{mode:o}");
            assert!(error.repair().unwrap().contains(path.to_str().unwrap()), "{error:?}");
            chmod(path, 0o700);
        }
        chmod(&open, 0o1777);
        create_private(&inner).unwrap();
        check_shared(&open).unwrap();
        // The real path is safe and the path of the symlink is not.
        chmod(&open, 0o777);
        symlink(root.path(), open.join("link")).unwrap();
        assert!(create_private(&open.join("link")).is_err());
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("other");
        create_private(&path).unwrap();
        // Only root can change the owner of a directory.
        if chown(&path, Some(4711), None).is_ok() {
            let error = create_private(&path).unwrap_err();
            assert!(error.message().contains("user 4711"), "{error}");
        }
    }
}
