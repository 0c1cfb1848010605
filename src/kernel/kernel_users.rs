//! Users of block devices inside the kernel that have neither a mount of their own nor an open file nor a device
//! on top, as far as sysfs and configfs name them: the members of a btrfs, and exported targets.
//!
//! The names only explain what an exclusive open finds. The exception are the namespaces of nvmet, which opens
//! its devices without a claim (nvmet_bdev_ns_enable): they are found only here, and only if configfs is
//! mounted.

use std::fs;
use std::path::{Path, PathBuf};

use super::sysfs::{Disk, Sysfs, list};
use cleat_sys::descriptor::block_device;

/// The maximum number of entries that are read of a directory.
const ENTRIES_MAX: usize = 4096;

impl Sysfs {
    /// Returns descriptions of the users of a disk and its partitions. A directory that does not exist or
    /// cannot be read has none.
    pub(super) fn kernel_users(&self, disk: &Disk) -> Vec<String> {
        let mut users = Vec::new();
        for filesystem in below(&self.0.join("fs/btrfs")) {
            for member in entries(&filesystem.join("devices")) {
                if disk.names.contains(&member) {
                    users.push(format!("{member} is a member of the btrfs {}", name(&filesystem)));
                }
            }
        }
        let config = self.0.join("kernel/config");
        for target in below(&config.join("target/core")).iter().flat_map(|hba| below(hba)) {
            if is_on(disk, &target.join("udev_path")) {
                users.push(format!("exported by the LIO target {}", name(&target)));
            }
        }
        for subsystem in below(&config.join("nvmet/subsystems")) {
            for namespace in below(&subsystem.join("namespaces")) {
                if is_on(disk, &namespace.join("device_path")) && is_enabled(&namespace) {
                    let (subsystem, number) = (name(&subsystem), name(&namespace));
                    users.push(format!("exported by nvmet: namespace {number} of {subsystem}"));
                }
            }
        }
        users
    }
}

/// Returns whether the path in the attribute `attribute` leads to the disk or a partition of it. Only paths
/// below /dev are followed: other file systems may not answer.
fn is_on(disk: &Disk, attribute: &Path) -> bool {
    let text = fs::read_to_string(attribute).unwrap_or_default();
    let path = Path::new(text.trim_end_matches('\n'));
    path.starts_with("/dev")
        && block_device(path).is_ok_and(|found| found.is_some_and(|n| disk.numbers.contains(&n)))
}

fn is_enabled(namespace: &Path) -> bool {
    fs::read_to_string(namespace.join("enable")).is_ok_and(|text| text.trim_end() == "1")
}

fn below(directory: &Path) -> Vec<PathBuf> {
    entries(directory).iter().map(|name| directory.join(name)).collect()
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names = list(directory).unwrap_or_default();
    names.sort_unstable();
    names.truncate(ENTRIES_MAX);
    names
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_sys::descriptor::DeviceNumber;

    #[test]
    fn members_of_a_btrfs_and_exports_are_named() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("fs/btrfs/features/devices", "");
        write("fs/btrfs/1234/devices/nbd1p1", "");
        write("fs/btrfs/5678/devices/nbd10", "");
        write("kernel/config/target/core/iblock_0/lun/udev_path", "/dev/null\n");
        let space = "kernel/config/nvmet/subsystems/nqn/namespaces/1";
        write(&format!("{space}/device_path"), "/dev/nonexistent\n");
        write(&format!("{space}/enable"), "1\n");
        let disk = Disk {
            names: vec!["nbd1".into(), "nbd1p1".into()],
            numbers: vec![DeviceNumber { major: 43, minor: 32 }],
        };
        let users = Sysfs(root.path().to_owned()).kernel_users(&disk);
        assert_eq!(users, ["nbd1p1 is a member of the btrfs 1234"]);
        let none = Sysfs("/nonexistent".into()).kernel_users(&disk);
        assert_eq!(none, Vec::<String>::new());
    }
}
