//! Directories that only root and the daemon's user can change. Another user who could create a symlink
//! there would choose the files that a privileged daemon writes to.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

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
    check(path, 0o022, |_, _| false)
}

/// Checks a directory that other users may write to if it is sticky, such as /tmp.
///
/// # Errors
/// Returns `PermissionDenied` if another user can move the directory or replace files in it.
pub(crate) fn check_shared(path: &Path) -> Result<()> {
    check(path, 0, |_, _| false)
}

/// Checks a directory as [`check_shared`] does, but accepts the root of a file system that every user may write to. In a
/// pod this is an `emptyDir`, which Kubernetes gives the mode 0777, and which only the containers of the pod see.
///
/// # Errors
/// As [`check_shared`].
pub(crate) fn check_volume(path: &Path) -> Result<()> {
    check(path, 0, is_mounted)
}

/// Whether a directory is on another file system than its parent.
fn is_mounted(path: &Path, found: &Metadata) -> bool {
    let parent = path.parent().and_then(|parent| fs::metadata(parent).ok());
    parent.is_some_and(|parent| parent.dev() != found.dev())
}

/// Checks a directory and its parents. `forbidden` are the permissions that the directory itself must not
/// give. `accepts` returns whether every user may write to a directory.
fn check(path: &Path, forbidden: u32, accepts: impl Fn(&Path, &Metadata) -> bool) -> Result<()> {
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
        let open = found.mode() & 0o002 != 0 && found.mode() & STICKY == 0;
        if open && !found.is_symlink() && !accepts(part, &found) {
            return Err(unsafe_directory(part, "every user may write to it", "chmod o-w"));
        }
    }
    Ok(())
}

/// The permissions of the group and of other users to write.
const OTHERS_WRITE: u32 = 0o022;

/// In a directory with this bit, only the owner of a file may move or remove it.
const STICKY: u32 = 0o1000;

/// The number of symbolic links that a path may contain, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Checks that only root and the user of this process can change a program that is run with all privileges:
/// neither the file, nor any directory or symbolic link on the way to it. `path` must be absolute.
///
/// # Errors
/// Returns `PermissionDenied` if another user can change what the path leads to, or if it leads to no regular
/// file, and the error of the file system if the path cannot be read.
pub(crate) fn check_program(path: &Path) -> Result<()> {
    let unreadable = |error| Error::from_io(format!("cannot inspect {}", path.display()), error);
    let mut left: VecDeque<OsString> = names(path);
    let mut at = PathBuf::from("/");
    let mut found = fs::symlink_metadata(&at).map_err(unreadable)?;
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(name);
        found = fs::symlink_metadata(&next).map_err(unreadable)?;
        check_owner(&next, &found)?;
        if !found.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(unsafe_directory(&next, "it contains too many symbolic links", "rm"));
        }
        let target = fs::read_link(&next).map_err(unreadable)?;
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        for name in names(&target).into_iter().rev() {
            left.push_front(name);
        }
    }
    if found.is_file() {
        return Ok(());
    }
    let message = format!("{} is not a regular file", path.display());
    Err(Error::new(ErrorKind::PermissionDenied, message)
        .with_repair("set the path of a program that only root can write"))
}

/// Returns the names in a path, without the root and the current directory.
fn names(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.collect()
}

/// Checks that a part of a program's path belongs to root or to this user, and that no other user may write to
/// it. A directory that others may write to must be sticky.
fn check_owner(part: &Path, found: &Metadata) -> Result<()> {
    if found.uid() != 0 && found.uid() != nix::unistd::geteuid().as_raw() {
        let why = format!("it belongs to user {}", found.uid());
        return Err(unsafe_directory(part, &why, "chown root"));
    }
    let protected = found.is_dir() && found.mode() & STICKY != 0;
    // The mode of a symbolic link has no effect.
    if found.mode() & OTHERS_WRITE != 0 && !found.is_symlink() && !protected {
        return Err(unsafe_directory(part, "other users may write to it", "chmod go-w"));
    }
    Ok(())
}

fn unsafe_directory(path: &Path, why: &str, command: &str) -> Error {
    let message = format!("{} is not safe to use: {why}", path.display());
    Error::new(ErrorKind::PermissionDenied, message)
        .with_repair(format!("{command} {}, or choose another path", path.display()))
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
    fn a_volume_of_a_pod_may_be_open_to_all() {
        let root = tempfile::tempdir().unwrap();
        let volume = root.path().join("volume");
        create_private(&volume).unwrap();
        chmod(&volume, 0o777);
        let error = check_volume(&volume).unwrap_err();
        assert!(error.message().contains("every user may write to it"), "{error}");
        // Only root can mount.
        let none = None::<&Path>;
        let tmpfs = Some(Path::new("tmpfs"));
        let mode = Some(Path::new("mode=0777"));
        if nix::mount::mount(none, &volume, tmpfs, nix::mount::MsFlags::empty(), mode).is_ok() {
            check_volume(&volume).unwrap();
            assert!(check_shared(&volume).is_err());
            let inner = volume.join("inner");
            fs::create_dir(&inner).unwrap();
            chmod(&inner, 0o777);
            assert!(check_volume(&inner).is_err(), "it is no volume of its own");
            nix::mount::umount(&volume).unwrap();
        }
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

    #[test]
    fn a_program_is_safe_only_if_its_whole_path_is() {
        let root = tempfile::tempdir().unwrap();
        let (open, program) = (root.path().join("open"), root.path().join("open/program"));
        create_private(&open).unwrap();
        fs::write(&program, "").unwrap();
        chmod(&program, 0o755);
        check_program(&program).unwrap();
        for (path, mode, before) in
            [(&program, 0o775, 0o755), (&program, 0o757, 0o755), (&open, 0o770, 0o700)]
        {
            chmod(path, mode);
            let error = check_program(&program).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{mode:o}");
            assert!(error.repair().unwrap().contains(path.to_str().unwrap()), "{error:?}");
            chmod(path, before);
        }
        // A link is followed step by step: each directory that it leads through counts.
        let (safe, link) = (root.path().join("safe"), root.path().join("safe/link"));
        create_private(&safe).unwrap();
        symlink("../open/../open/program", &link).unwrap();
        check_program(&link).unwrap();
        let between = root.path().join("between");
        create_private(&between).unwrap();
        symlink(&program, between.join("program")).unwrap();
        fs::remove_file(&link).unwrap();
        symlink(between.join("program"), &link).unwrap();
        check_program(&link).unwrap();
        chmod(&between, 0o707);
        assert_eq!(check_program(&link).unwrap_err().kind(), ErrorKind::PermissionDenied);
        chmod(&between, 0o700);
        fs::remove_file(&link).unwrap();
        symlink(&link, &link).unwrap();
        assert!(check_program(&link).unwrap_err().message().contains("too many"));
        assert!(check_program(&safe).unwrap_err().message().contains("not a regular file"));
        assert_eq!(check_program(&open.join("none")).unwrap_err().kind(), ErrorKind::NotFound);
        if nix::unistd::geteuid().is_root() {
            chown(&open, Some(4711), None).unwrap();
            let error = check_program(&program).unwrap_err();
            assert!(error.message().contains("user 4711"), "{error}");
        }
    }
}
