//! The paths that a caller gives, and the files and directories at them.

use std::io::ErrorKind as Io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum length of a path in bytes (PATH_MAX).
const MAX_PATH: usize = 4095;

/// Checks a path of a request. `what` names it in errors.
///
/// # Errors
/// Returns `InvalidArgument` if it is missing, relative or too long, or contains `..`.
pub(crate) fn checked(what: &str, path: &str) -> Result<PathBuf> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
    if path.is_empty() {
        return invalid(format!("the request has no {what}"));
    }
    let parsed = Path::new(path);
    let climbs = parsed.components().any(|part| part == Component::ParentDir);
    if !parsed.is_absolute() || climbs || path.len() > MAX_PATH || path.contains('\0') {
        return invalid(format!("the {what} must be an absolute path without \"..\""));
    }
    // Without a final slash and without doubled ones, as the mount table shows it.
    Ok(parsed.components().collect())
}

/// Checks the path at which a volume should be. `what` names it in errors.
///
/// # Errors
/// Returns `InvalidArgument` if it is missing, and `NotFound` if no volume can be at such a path.
pub(crate) fn of_volume(what: &str, path: &str) -> Result<PathBuf> {
    checked(what, path).map_err(|error| {
        if path.is_empty() { error } else { Error::new(ErrorKind::NotFound, error.message()) }
    })
}

/// Makes a directory of mode 0750, with its parents, if it does not exist.
pub(crate) fn make_directory(path: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(path);
    made.map_err(|error| Error::from_io(format!("cannot make {}", path.display()), error))
}

/// Makes an empty file of mode 0600, with the directories above it, if it does not exist.
pub(crate) fn make_file(path: &Path) -> Result<()> {
    if let Some(parent) = path.parent() {
        make_directory(parent)?;
    }
    let mut options = std::fs::OpenOptions::new();
    let made = options.write(true).create_new(true).mode(0o600).open(path);
    match made {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == Io::AlreadyExists => Ok(()),
        Err(error) => Err(Error::from_io(format!("cannot make {}", path.display()), error)),
    }
}

/// Removes the empty directory or the empty file at `path`. A missing one is success.
///
/// # Errors
/// Returns `InUse` for a directory or a file that is not empty: something has been written below the mount.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| match error.kind() {
        Io::NotFound => Ok(()),
        Io::DirectoryNotEmpty => Err(not_empty(path)),
        _ => Err(Error::from_io(format!("cannot remove {}", path.display()), error)),
    };
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir(path).or_else(failed),
        Ok(found) if found.is_file() && found.len() > 0 => Err(not_empty(path)),
        Ok(_) => std::fs::remove_file(path).or_else(failed),
        Err(error) => failed(error),
    }
}

fn not_empty(path: &Path) -> Error {
    let message = format!("{} is not mounted and not empty", path.display());
    Error::new(ErrorKind::InUse, message).with_repair("look at it, and move its content away")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_requests() {
        assert_eq!(checked("target path", "/a//b/").unwrap(), Path::new("/a/b"));
        for bad in ["", "a", "/a/../b", &format!("/{}", "a".repeat(5000))] {
            assert_eq!(checked("target path", bad).unwrap_err().kind(), ErrorKind::InvalidArgument);
            let of_volume = of_volume("volume path", bad).unwrap_err().kind();
            let wanted =
                if bad.is_empty() { ErrorKind::InvalidArgument } else { ErrorKind::NotFound };
            assert_eq!(of_volume, wanted);
        }
    }

    #[test]
    fn only_empty_targets_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (file, inner) = (directory.path().join("x/file"), directory.path().join("dir"));
        make_file(&file).unwrap();
        make_file(&file).unwrap();
        make_directory(&inner).unwrap();
        std::fs::write(inner.join("data"), "x").unwrap();
        assert_eq!(remove(&inner).unwrap_err().kind(), ErrorKind::InUse);
        std::fs::remove_file(inner.join("data")).unwrap();
        remove(&inner).unwrap();
        remove(&inner).unwrap();
        remove(&file).unwrap();
        std::fs::write(&file, "data").unwrap();
        assert_eq!(remove(&file).unwrap_err().kind(), ErrorKind::InUse);
    }
}
