//! The names of a device: the properties for the udev rule, the device node, the symlink.
//!
//! `systemd/60-cleat.rules` imports the file `<run directory>/udev/<identity>` for a device with that
//! identity, and udevd makes the symlink. If no udevd runs, or the rule is not installed, this module makes
//! the symlink instead.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{DeviceIndex, DevicePaths, Identity};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::{DeviceNumber, block_device};

/// The run directory that the udev rule names.
pub const RUN_DIRECTORY: &str = "/run/cleat";

/// The file name of the udev rule.
pub const RULE: &str = "60-cleat.rules";

/// The directories that udevd reads rules from (udev(7)).
const RULE_DIRECTORIES: [&str; 5] = [
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
];

/// The control socket of udevd. It exists while udevd runs.
const UDEV_CONTROL: &str = "/run/udev/control";

/// A file that exists while udevd has events to process.
const UDEV_QUEUE: &str = "/run/udev/queue";

/// The directories for names; parameters, so that tests give their own.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) dev: PathBuf,
    pub(super) run: PathBuf,
}

/// The reason why a device does not have its names yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Missing {
    /// The device node does not exist.
    Node,
    /// The device node exists, but belongs to another device.
    WrongNode,
    /// The symlink does not exist.
    Symlink,
    /// The symlink leads to this path instead.
    WrongSymlink(PathBuf),
}

/// Returns whether udevd runs on this machine and this process sees it.
pub fn udevd_runs() -> bool {
    Path::new(UDEV_CONTROL).exists()
}

/// Returns whether udevd has processed all its events (`udevadm settle` waits for the same).
pub(super) fn udevd_idle() -> bool {
    !Path::new(UDEV_QUEUE).exists()
}

/// Returns whether the rule is installed in a directory that udevd of this mount namespace reads.
pub fn rule_installed() -> bool {
    RULE_DIRECTORIES.iter().any(|directory| Path::new(directory).join(RULE).exists())
}

impl Names {
    /// Returns the paths that the device should have.
    pub(super) fn paths(&self, index: DeviceIndex, identity: &Identity) -> DevicePaths {
        let symlink = self.dev.join(format!("disk/by-id/cleat-{}", identity.name()));
        DevicePaths { node: self.node(index), symlink }
    }

    /// Returns the path of the device node.
    pub(super) fn node(&self, index: DeviceIndex) -> PathBuf {
        self.dev.join(format!("nbd{index}"))
    }

    /// Returns whether this process makes the symlinks, rather than udevd.
    pub(super) fn makes_symlinks(&self) -> bool {
        !udevd_runs() || !rule_installed() || self.run != Path::new(RUN_DIRECTORY)
    }

    /// Writes the properties of the identity. Must be called before the device appears.
    pub(super) fn publish(&self, identity: &Identity) -> Result<()> {
        let path = self.properties(identity)?;
        let text =
            format!("CLEAT_NAME={}\nCLEAT_MAPPING_ID={}\n", identity.name(), identity.mapping_id());
        let directory = self.run.join("udev");
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(&path, text))
            .map_err(|error| Error::from_io(format!("cannot write {}", path.display()), error))
    }

    /// Removes the properties of the identity. Must be called after the device is gone.
    pub(super) fn withdraw(&self, identity: &Identity) {
        let Ok(path) = self.properties(identity) else { return };
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove udev properties");
        }
    }

    /// Returns the identities that have properties.
    pub(super) fn published(&self) -> Vec<Identity> {
        let Ok(entries) = fs::read_dir(self.run.join("udev")) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| Identity::parse(&name)).collect()
    }

    /// Returns what is missing for the device to be usable by its names; `None`: nothing.
    pub(super) fn missing(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        number: DeviceNumber,
    ) -> Option<Missing> {
        let paths = self.paths(index, identity);
        match block_device(&paths.node) {
            Ok(Some(found)) if found == number => {}
            Ok(_) => return Some(Missing::WrongNode),
            Err(_) => return Some(Missing::Node),
        }
        match block_device(&paths.symlink) {
            Ok(Some(found)) if found == number => None,
            Ok(_) => {
                let target = fs::canonicalize(&paths.symlink).unwrap_or_default();
                Some(Missing::WrongSymlink(target))
            }
            Err(_) => Some(Missing::Symlink),
        }
    }

    /// Returns whether the symlink of a partition leads to it. The rule makes it.
    pub(super) fn partition_has_symlink(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        partition: u32,
        number: DeviceNumber,
    ) -> bool {
        let mut symlink = self.paths(index, identity).symlink.into_os_string();
        symlink.push(format!("-part{partition}"));
        block_device(Path::new(&symlink)).is_ok_and(|found| found == Some(number))
    }

    /// Makes the symlink. It replaces an existing file atomically.
    pub(super) fn make_symlink(&self, index: DeviceIndex, identity: &Identity) -> Result<()> {
        let symlink = self.paths(index, identity).symlink;
        let failed =
            |error| Error::from_io(format!("cannot make the symlink {}", symlink.display()), error);
        if let Some(directory) = symlink.parent() {
            fs::create_dir_all(directory).map_err(failed)?;
        }
        // No name of a mapping has a tilde.
        let mut temporary = symlink.clone().into_os_string();
        temporary.push(format!("~{index}"));
        let temporary = PathBuf::from(temporary);
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(format!("../../nbd{index}"), &temporary).map_err(failed)?;
        fs::rename(&temporary, &symlink).map_err(failed)
    }

    /// Returns whether the symlink leads to this device.
    pub(super) fn symlink_leads_to(&self, index: DeviceIndex, identity: &Identity) -> bool {
        let target = fs::read_link(self.paths(index, identity).symlink);
        let name = format!("nbd{index}");
        target.is_ok_and(|target| target.file_name().is_some_and(|file| *file == *name))
    }

    /// Removes the symlink if it leads to this device.
    pub(super) fn remove_symlink(&self, index: DeviceIndex, identity: &Identity) {
        if self.symlink_leads_to(index, identity) {
            // Another process may have removed it in the meantime.
            let _ = fs::remove_file(self.paths(index, identity).symlink);
        }
    }

    fn properties(&self, identity: &Identity) -> Result<PathBuf> {
        // The identity becomes a file name, so only one that parses is accepted.
        if Identity::parse(identity.as_str()).is_none() {
            let message = format!("invalid device identity {:?}", identity.as_str());
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        Ok(self.run.join("udev").join(identity.as_str()))
    }
}

impl Missing {
    /// Describes what is missing, and gives a hint at its cause.
    pub(super) fn explain(&self, paths: &DevicePaths) -> (String, &'static str) {
        let node = paths.node.display();
        let symlink = paths.symlink.display();
        match self {
            Self::Node => (
                format!("{node} does not exist"),
                "/dev must be a devtmpfs; in a container, mount the host's /dev",
            ),
            Self::WrongNode => (
                format!("{node} is not the device node of the kernel's device of that name"),
                "/dev must be a devtmpfs; in a container, mount the host's /dev",
            ),
            Self::Symlink => (
                format!("{symlink} does not exist"),
                "udevd may hang or lack the rule: see `udevadm settle` and \
                 `udevadm test /sys/block/nbdN`; `cleat doctor` checks both",
            ),
            Self::WrongSymlink(target) => (
                format!("{symlink} leads to {}", target.display()),
                "another device has a symlink of that name: unmap it, or choose another name",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(root: &Path) -> Names {
        Names { dev: root.join("dev"), run: root.join("run") }
    }

    #[test]
    fn properties_are_written_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let names = names(root.path());
        let identity = Identity::new("00ab", "data");
        names.publish(&identity).unwrap();
        let text = fs::read_to_string(root.path().join("run/udev/cleat.00ab.data")).unwrap();
        assert_eq!(text, "CLEAT_NAME=data\nCLEAT_MAPPING_ID=00ab\n");
        fs::write(root.path().join("run/udev/README"), "").unwrap();
        assert_eq!(names.published(), std::slice::from_ref(&identity));
        fs::remove_file(root.path().join("run/udev/README")).unwrap();
        names.withdraw(&identity);
        assert_eq!(fs::read_dir(root.path().join("run/udev")).unwrap().count(), 0);
        names.withdraw(&identity);
    }

    #[test]
    fn an_identity_is_never_a_path() {
        let root = tempfile::tempdir().unwrap();
        let refused = names(root.path()).publish(&Identity::new("00", "../../x")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_symlink_is_replaced_and_only_that_of_the_device_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let names = names(root.path());
        let identity = Identity::new("00", "data");
        names.make_symlink(3, &identity).unwrap();
        names.make_symlink(4, &identity).unwrap();
        assert!(names.symlink_leads_to(4, &identity));
        names.remove_symlink(3, &identity);
        assert!(names.symlink_leads_to(4, &identity), "it led to another device");
        names.remove_symlink(4, &identity);
        assert!(!names.symlink_leads_to(4, &identity));
        assert_eq!(fs::read_dir(root.path().join("dev/disk/by-id")).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_name_is_reported_with_a_hint() {
        let root = tempfile::tempdir().unwrap();
        let names = names(root.path());
        let identity = Identity::new("00", "data");
        let number = DeviceNumber { major: 43, minor: 0 };
        assert_eq!(names.missing(0, &identity, number), Some(Missing::Node));
        fs::create_dir_all(root.path().join("dev")).unwrap();
        fs::write(root.path().join("dev/nbd0"), "").unwrap();
        assert_eq!(names.missing(0, &identity, number), Some(Missing::WrongNode));
        let paths = names.paths(0, &identity);
        let (what, hint) = Missing::Symlink.explain(&paths);
        assert!(what.ends_with("cleat-data does not exist") && hint.contains("udevadm"));
    }
}
