//! Gives the files of a volume to a group (fsGroup), as kubelet does for drivers that cannot
//! (pkg/volume/volume_linux.go): every file gets the group and its permissions, every directory also the
//! set-group-id bit.
//!
//! Pods may change the files meanwhile. So every step goes through descriptors of directories and follows no
//! symbolic link: a link that replaces a directory leads to an error and not out of the volume.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, SFlag, fchmod, fchmodat, fstat, fstatat};
use nix::unistd::{Gid, fchown, fchownat};
use tokio::time::Instant;

/// The maximum depth of directories. Each level keeps a descriptor open.
const MAX_DEPTH: usize = 200;

/// Gives everything below `root` to the group `group`. Does nothing if `root` itself has the group and the bits
/// already: it is changed last, so then everything below was changed.
///
/// # Errors
/// Returns `TimedOut` at the deadline; a repeated call continues. Otherwise returns the error of the first file
/// that cannot be changed.
pub(crate) async fn apply(root: &Path, group: u32, deadline: Instant) -> Result<()> {
    let path = root.to_owned();
    let work = tokio::task::spawn_blocking(move || {
        let failed = |errno: Errno| {
            Error::from_io(
                format!("cannot give the files of {} to a group", path.display()),
                errno.into(),
            )
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let root = openat(AT_FDCWD, &path, flags, Mode::empty()).map_err(failed)?;
        let found = fstat(&root).map_err(failed)?;
        if found.st_gid == group && has(&found, DIRECTORY) {
            return Ok(());
        }
        let walk = Walk { group: Gid::from_raw(group), device: found.st_dev, until: deadline };
        walk.directory(root, 0).map_err(|errno| match errno {
            Errno::ETIME => {
                let message = format!("{} has too many files to change in time", path.display());
                Error::new(ErrorKind::TimedOut, message)
                    .with_repair("repeat the call; it continues")
            }
            errno => failed(errno),
        })
    });
    let late = || Error::new(ErrorKind::TimedOut, "changing the group of the files takes too long");
    match tokio::time::timeout_at(deadline, work).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => {
            Err(Error::new(ErrorKind::Internal, "internal: the change panicked").with_source(error))
        }
        Err(_) => Err(late().with_repair("repeat the call; it continues")),
    }
}

/// The permissions that a directory gets, and a file.
const DIRECTORY: Mode = Mode::from_bits_truncate(0o2770);
const FILE: Mode = Mode::from_bits_truncate(0o660);

fn has(found: &FileStat, bits: Mode) -> bool {
    Mode::from_bits_truncate(found.st_mode).contains(bits)
}

struct Walk {
    group: Gid,
    /// The device of the volume's filesystem: other mounts below it are left alone.
    device: u64,
    until: Instant,
}

impl Walk {
    /// Changes a directory after everything in it.
    fn directory(&self, directory: OwnedFd, depth: usize) -> Result<(), Errno> {
        if depth > MAX_DEPTH {
            return Err(Errno::ELOOP);
        }
        let mut entries = Dir::from_fd(directory)?;
        let names: Vec<_> = entries
            .iter()
            .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
            .collect::<Result<_, _>>()?;
        for name in names {
            if ![&b"."[..], b".."].contains(&name.to_bytes()) {
                self.entry(&entries, &name, depth)?;
            }
        }
        let found = fstat(&entries)?;
        fchown(&entries, None, Some(self.group))?;
        fchmod(&entries, Mode::from_bits_truncate(found.st_mode) | DIRECTORY)
    }

    fn entry(&self, parent: &Dir, name: &CStr, depth: usize) -> Result<(), Errno> {
        if Instant::now() >= self.until {
            return Err(Errno::ETIME);
        }
        let found = match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            // A pod has removed it.
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        if found.st_dev != self.device {
            return Ok(());
        }
        let kind = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT;
        if kind == SFlag::S_IFDIR {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let inner = openat(parent.as_fd(), name, flags, Mode::empty())?;
            return self.directory(inner, depth + 1);
        }
        fchownat(parent, name, None, Some(self.group), AtFlags::AT_SYMLINK_NOFOLLOW)?;
        if kind == SFlag::S_IFREG && !has(&found, FILE) {
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let file = openat(parent.as_fd(), name, flags, Mode::empty())?;
            // A descriptor of O_PATH cannot be changed itself, but the file that it stands for can.
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            let mode = Mode::from_bits_truncate(found.st_mode) | FILE;
            fchmodat(AT_FDCWD, path.as_str(), mode, FchmodatFlags::FollowSymlink)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn files_get_the_group_and_links_lead_nowhere() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (root, outside) = (directory.path().join("v"), directory.path().join("outside"));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), "x").unwrap();
        std::fs::write(&outside, "x").unwrap();
        std::fs::set_permissions(&outside, PermissionsExt::from_mode(0o600)).unwrap();
        symlink(&outside, root.join("a/link")).unwrap();
        let deadline = || Instant::now() + Duration::from_secs(10);
        apply(&root, 4242, deadline()).await.unwrap();
        for path in ["", "a", "a/b", "a/b/file", "a/link"] {
            let found = std::fs::symlink_metadata(root.join(path)).unwrap();
            assert_eq!(found.gid(), 4242, "{path:?}");
            let wanted = if found.is_dir() { 0o2770 } else { 0o660 };
            assert!(
                found.is_symlink() || found.mode() & wanted == wanted,
                "{path:?}: {:o}",
                found.mode()
            );
        }
        let untouched = std::fs::metadata(&outside).unwrap();
        assert_eq!((untouched.gid(), untouched.mode() & 0o777), (0, 0o600));
        // The root has the group already, so nothing is read again.
        std::fs::write(root.join("new"), "x").unwrap();
        std::os::unix::fs::chown(root.join("new"), None, Some(0)).unwrap();
        apply(&root, 4242, deadline()).await.unwrap();
        assert_eq!(std::fs::metadata(root.join("new")).unwrap().gid(), 0);
        let late = apply(&root, 4243, Instant::now() - Duration::from_secs(1)).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
    }
}
