//! The mounts of this process's mount namespace, as the kernel lists them.

use std::fs;
use std::path::{Path, PathBuf};

use cleat_core::error::{Error, Result};
use cleat_kernel::{MountEntry, parse_mount_table, topmost};
use tokio::time::Instant;

use crate::blocking::bounded;
use crate::path::check_path;

/// The list of the mounts. This namespace is that of the process; no thread of this crate leaves it.
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Returns all mounts of this process's mount namespace.
///
/// # Errors
/// Returns an error if /proc cannot be read, and `TimedOut` at the deadline.
pub async fn mounts(deadline: Instant) -> Result<Vec<MountEntry>> {
    bounded("read", Path::new(MOUNTINFO), deadline, table).await
}

/// Returns the mount that is visible at `target`; `None` if `target` is no mount point or does not exist.
/// Does not access the mounted file system itself, so it answers also if that file system has failed.
///
/// # Errors
/// Returns `InvalidArgument` if `target` is not absolute; an error if a directory above `target` or /proc
/// cannot be read; `TimedOut` at the deadline.
pub async fn find(target: &Path, deadline: Instant) -> Result<Option<MountEntry>> {
    check_path("the mount point", target)?;
    let path = target.to_owned();
    let look = move || Ok(topmost(&table()?, &resolve(&path)?).cloned());
    bounded("look for a mount at", target, deadline, look).await
}

fn table() -> Result<Vec<MountEntry>> {
    let text = fs::read(MOUNTINFO);
    let text = text.map_err(|error| Error::from_io(format!("cannot read {MOUNTINFO}"), error))?;
    Ok(parse_mount_table(&text).collect())
}

/// Resolves the symlinks of `target`, since the kernel lists mount points without them. `target` itself is
/// resolved only if it is a symlink: a mounted file system that has failed cannot be examined.
fn resolve(target: &Path) -> Result<PathBuf> {
    let failed =
        |error| Error::from_io(format!("cannot resolve the path {}", target.display()), error);
    if fs::symlink_metadata(target).is_ok_and(|found| found.is_symlink()) {
        return fs::canonicalize(target).map_err(failed);
    }
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        // The root, or a path that ends in `..`.
        return fs::canonicalize(target).map_err(failed);
    };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(parent.join(name)),
        // Nothing is mounted at a path that does not exist.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(target.to_owned()),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn mounts_are_found_also_through_symlinks() {
        let root = find(Path::new("/"), later()).await.unwrap().unwrap();
        assert_eq!(root.mount.path, Path::new("/"));
        assert!(mounts(later()).await.unwrap().contains(&root));
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", directory.path().join("root")).unwrap();
        let through = find(&directory.path().join("root/proc"), later()).await.unwrap().unwrap();
        assert_eq!(through.mount.filesystem, "proc");
        let link = find(&directory.path().join("root"), later()).await.unwrap().unwrap();
        assert_eq!(link.mount.path, Path::new("/"));
        assert_eq!(find(directory.path(), later()).await.unwrap(), None);
        let missing = directory.path().join("missing/below");
        assert_eq!(find(&missing, later()).await.unwrap(), None);
        assert!(find(Path::new("relative"), later()).await.is_err());
    }
}
