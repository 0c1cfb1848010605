//! The file system that has a file, by its magic number (linux/magic.h, and the file systems' own headers).

use std::fs::File;

use cleat_core::error::{Error, Result};
use cleat_sys::block::is_on_disk;
use nix::sys::statfs::fstatfs;

pub(super) const BTRFS: i64 = 0x9123_683e;
/// ext2, ext3 and ext4.
pub(super) const EXT4: i64 = 0xef53;
pub(super) const NFS: i64 = 0x6969;
pub(super) const OVERLAYFS: i64 = 0x794c_7630;
pub(super) const TMPFS: i64 = 0x0102_1994;
pub(super) const XFS: i64 = 0x5846_5342;

/// Network file systems: their storage is reached by another protocol than a block device's.
const NETWORK: [i64; 11] = [
    NFS,         // nfs
    0xfe53_4d42, // smb2, also of the present cifs
    0xff53_4d42, // cifs
    0x00c3_6400, // ceph
    0x0102_1997, // 9p
    0x6b41_4653, // afs
    0x5346_414f, // openafs
    0x0bd0_0bd0, // lustre
    0x4750_4653, // gpfs
    0x6573_5546, // fuse: sshfs, glusterfs and others
    0x1983_0326, // fhgfs, beegfs
];

/// Returns the magic number of the file system that has the file.
pub(super) fn of(file: &File, path: &str) -> Result<i64> {
    let status = fstatfs(file)
        .map_err(|e| Error::from_io(format!("cannot read the file system of {path}"), e.into()))?;
    Ok(status.filesystem_type().0)
}

/// Returns whether the file is in memory or on a disk of this node, as far as that is known. overlayfs may have its files on a
/// FUSE file system, whose server can hang.
pub(super) fn is_local(file_system: i64, file: &File) -> bool {
    match file_system {
        BTRFS | EXT4 | TMPFS | XFS => true,
        OVERLAYFS => is_on_disk(file),
        _ => false,
    }
}

pub(super) fn is_network(file_system: i64) -> bool {
    NETWORK.contains(&file_system)
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn overlayfs_is_local_where_its_files_are_on_a_disk() {
        let executable = std::env::current_exe().unwrap();
        let on_disk = tempfile::tempfile_in(executable.parent().unwrap()).unwrap();
        if [BTRFS, EXT4, XFS].contains(&of(&on_disk, "file").unwrap()) {
            assert!(is_local(OVERLAYFS, &on_disk));
        }
        let in_memory = File::from(memfd_create("volume", MFdFlags::MFD_CLOEXEC).unwrap());
        assert!(!is_local(OVERLAYFS, &in_memory) && is_local(TMPFS, &in_memory));
        assert!(!is_local(NFS, &on_disk));
    }
}
