//! What identifies an open file or block device, independently of its path.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, StatxFlags, statx};

mod raw {
    use nix::ioctl_read;

    // From linux/fs.h.
    ioctl_read!(blkgetdiskseq, 0x12, 128, u64);
}

/// A file that `statx` describes: two open files are the same file if these values are equal. A removed
/// file's inode number may be used again; the new file then has another birth time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileId {
    /// The major and minor number of the file system's device.
    pub device: (u32, u32),
    /// The inode number.
    pub inode: u64,
    /// The time at which the file was created, in seconds and nanoseconds since the Unix epoch, in steps of
    /// the kernel's tick (1 to 10 ms). `None` where the file system does not report it, for example NFS and
    /// FUSE.
    pub birth: Option<(i64, u32)>,
}

/// A block device during the time in which the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceId {
    /// The major and minor number. The kernel gives the number of a removed device to a later one.
    pub number: (u32, u32),
    /// The kernel's sequence number of the disk (BLKGETDISKSEQ, Linux 5.15). The kernel gives a new one to
    /// each disk that appears and to each medium that is inserted, and never gives one twice in a boot.
    pub sequence: Option<u64>,
    /// For a partition, its first sector in units of 512 bytes.
    pub start: Option<u64>,
}

impl FileId {
    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// Returns the errors of `statx`.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let wanted = StatxFlags::INO | StatxFlags::BTIME;
        let found = statx(file, c"", AtFlags::EMPTY_PATH, wanted)?;
        let has_birth = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        Ok(Self {
            device: (found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            birth: has_birth.then_some((found.stx_btime.tv_sec, found.stx_btime.tv_nsec)),
        })
    }
}

impl DeviceId {
    /// Returns the identity of an open block device. Reads `/sys` for the start of a partition.
    ///
    /// # Errors
    /// Returns the errors of `statx`, those of BLKGETDISKSEQ except `ENOTTY`, which a kernel without the ioctl
    /// returns, and those of reading `/sys`.
    pub fn of(device: &File) -> io::Result<Self> {
        let found = statx(device, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
        let number = (found.stx_rdev_major, found.stx_rdev_minor);
        let mut sequence = 0_u64;
        // SAFETY: the kernel stores one u64 in `sequence` (block/ioctl.c, blkdev_common_ioctl).
        let read = unsafe { raw::blkgetdiskseq(device.as_raw_fd(), &raw mut sequence) };
        let sequence = match read {
            Ok(_) => Some(sequence),
            Err(nix::Error::ENOTTY) => None,
            Err(error) => return Err(error.into()),
        };
        let start = match std::fs::read_to_string(format!(
            "/sys/dev/block/{}:{}/start",
            number.0, number.1
        )) {
            Ok(text) => Some(text.trim().parse().map_err(io::Error::other)?),
            // Only partitions have this attribute.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Self { number, sequence, start })
    }
}

/// Prints the values on one line. Equal texts mean equal identities.
impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((major, minor), inode) = (self.device, self.inode);
        write!(f, "inode {inode} on device {major}:{minor}")?;
        match self.birth {
            Some((seconds, nanoseconds)) => write!(f, ", created at {seconds}.{nanoseconds:09}"),
            None => Ok(()),
        }
    }
}

/// Prints the values on one line. Equal texts mean equal identities.
impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.number;
        write!(f, "block device {major}:{minor}")?;
        if let Some(sequence) = self.sequence {
            write!(f, ", disk sequence number {sequence}")?;
        }
        match self.start {
            Some(start) => write!(f, ", partition from sector {start}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_file_stays_the_same_and_a_file_of_the_same_name_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let id = |name: &str| FileId::of(File::open(path(name)).unwrap()).unwrap();
        std::fs::write(path("a"), "1").unwrap();
        let before = id("a");
        std::fs::write(path("a"), "22").unwrap();
        assert_eq!(id("a"), before, "its content changed");
        std::fs::rename(path("a"), path("b")).unwrap();
        std::fs::hard_link(path("b"), path("c")).unwrap();
        assert_eq!([id("b"), id("c")], [before.clone(), before.clone()]);
        std::fs::write(path("a"), "1").unwrap();
        assert_ne!(id("a"), before);
        assert_ne!(id("a").to_string(), before.to_string());
    }

    /// Many file systems use the number of a removed inode for the next file.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "the birth time is taken from the kernel's clock")]
    fn a_new_file_with_the_inode_number_of_a_removed_one_is_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let create = || {
            std::fs::write(&path, "1").unwrap();
            FileId::of(File::open(&path).unwrap()).unwrap()
        };
        let mut before = create();
        for _ in 0..5 {
            std::fs::remove_file(&path).unwrap();
            // Longer than the kernel's tick.
            std::thread::sleep(std::time::Duration::from_millis(20));
            let now = create();
            assert!(now != before, "{now}");
            before = now;
        }
    }
}
