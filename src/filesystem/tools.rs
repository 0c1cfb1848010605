//! The programs that this crate starts, and the packages that contain them.

use std::path::{Path, PathBuf};

use cleat_core::error::{Error, ErrorKind, Result};
use nix::unistd::{AccessFlags, access};

/// A program, and the packages that contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// The package of Debian and Ubuntu.
    debian: &'static str,
    /// The package of Fedora, RHEL and SUSE.
    fedora: &'static str,
}

pub(crate) const BLKID: Tool = Tool::new("blkid", "util-linux", "util-linux");
pub(crate) const MOUNT: Tool = Tool::new("mount", "mount", "util-linux");
pub(crate) const UMOUNT: Tool = Tool::new("umount", "mount", "util-linux");
pub(crate) const FSTRIM: Tool = Tool::new("fstrim", "util-linux", "util-linux");
pub(crate) const MKFS_EXT4: Tool = Tool::new("mkfs.ext4", "e2fsprogs", "e2fsprogs");
pub(crate) const E2FSCK: Tool = Tool::new("e2fsck", "e2fsprogs", "e2fsprogs");
pub(crate) const RESIZE2FS: Tool = Tool::new("resize2fs", "e2fsprogs", "e2fsprogs");
pub(crate) const MKFS_XFS: Tool = Tool::new("mkfs.xfs", "xfsprogs", "xfsprogs");
pub(crate) const XFS_REPAIR: Tool = Tool::new("xfs_repair", "xfsprogs", "xfsprogs");
pub(crate) const XFS_GROWFS: Tool = Tool::new("xfs_growfs", "xfsprogs", "xfsprogs");
pub(crate) const MKFS_BTRFS: Tool = Tool::new("mkfs.btrfs", "btrfs-progs", "btrfs-progs");
pub(crate) const CRYPTSETUP: Tool = Tool::new("cryptsetup", "cryptsetup-bin", "cryptsetup");
pub(crate) const BTRFS: Tool = Tool::new("btrfs", "btrfs-progs", "btrfs-progs");

/// The directories that are searched for programs, and the `PATH` of each program. It does not depend on the
/// environment of the daemon.
const DIRECTORIES: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

impl Tool {
    pub(crate) const fn new(
        name: &'static str,
        debian: &'static str,
        fedora: &'static str,
    ) -> Self {
        Self { name, debian, fedora }
    }

    /// Returns the path of the program.
    ///
    /// # Errors
    /// Returns `Unsupported` if the program is not installed. `subject` is what it was needed for.
    pub(crate) fn find(self, subject: &Path) -> Result<PathBuf> {
        let candidates = DIRECTORIES.iter().map(|directory| Path::new(directory).join(self.name));
        let mut installed = candidates.filter(|path| access(path, AccessFlags::X_OK).is_ok());
        installed.next().ok_or_else(|| {
            let (name, subject) = (self.name, subject.display());
            let message = format!("cannot run {name} for {subject}: it is not installed");
            let (debian, fedora) = (self.debian, self.fedora);
            Error::new(ErrorKind::Unsupported, message)
                .with_repair(format!("apt install {debian} (Debian) or dnf install {fedora}"))
        })
    }
}

/// Returns the value of the variable `PATH` for programs.
pub(crate) fn search_path() -> String {
    DIRECTORIES.join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_reported_with_its_package() {
        let missing = Tool::new("mkfs.nothing", "nothing-progs", "nothing");
        let error = missing.find(Path::new("/dev/nbd0")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.message(), "cannot run mkfs.nothing for /dev/nbd0: it is not installed");
        let expected = "apt install nothing-progs (Debian) or dnf install nothing";
        assert_eq!(error.repair(), Some(expected));
    }

    #[test]
    fn all_programs_are_installed_here() {
        let all = [
            BLKID, MOUNT, UMOUNT, FSTRIM, MKFS_EXT4, E2FSCK, RESIZE2FS, MKFS_XFS, XFS_REPAIR,
            XFS_GROWFS, MKFS_BTRFS, BTRFS, CRYPTSETUP,
        ];
        for tool in all {
            tool.find(Path::new("/")).unwrap();
        }
    }
}
