//! nbd devices as sysfs shows them. The root is a parameter, so that tests bring their own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Device, DeviceIndex, Identity};
use cleat_core::error::{Error, Result};
use cleat_sys::descriptor::DeviceNumber;

/// Units of `size` (include/linux/types.h: always 512).
const SECTOR_BYTES: u64 = 512;

/// `/sys`, or what stands for it.
#[derive(Debug, Clone)]
pub(super) struct Sysfs(pub(super) PathBuf);

/// A block device and its partitions: their names and numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) names: Vec<String>,
    pub(super) numbers: Vec<DeviceNumber>,
}

impl Sysfs {
    /// Every nbd device. Without the module there is none.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        let directory = self.0.join("block");
        let names = match list(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            names => names.map_err(|error| unreadable(&directory, error))?,
        };
        let mut indices: Vec<_> = names.iter().filter_map(|name| index_of(name)).collect();
        indices.sort_unstable();
        // A device that vanishes meanwhile is not one.
        indices.into_iter().filter_map(|index| self.device(index).transpose()).collect()
    }

    /// One device; `None` when there is none of that number.
    pub(super) fn device(&self, index: DeviceIndex) -> Result<Option<Device>> {
        let directory = self.directory(index);
        let Some(sectors) = self.attribute(index, "size")? else { return Ok(None) };
        let pid = self.attribute(index, "pid")?;
        let backend = self.attribute(index, "backend")?.filter(|backend| !backend.is_empty());
        let sectors: u64 = sectors
            .parse()
            .map_err(|_| unreadable(&directory.join("size"), io::ErrorKind::InvalidData.into()))?;
        Ok(Some(Device {
            index,
            connected: pid.is_some(),
            pid: pid.and_then(|pid| pid.parse().ok()),
            backend,
            size: sectors.saturating_mul(SECTOR_BYTES),
        }))
    }

    /// One device, if it is connected as that identity.
    pub(super) fn connected_device(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Option<Device>> {
        let device = self.device(index)?.filter(|device| device.connected);
        Ok(device.filter(|device| device.backend.as_deref() == Some(identity.as_str())))
    }

    /// The device with its partitions.
    pub(super) fn disk(&self, index: DeviceIndex) -> Result<Disk> {
        let directory = self.directory(index);
        let disk = format!("nbd{index}");
        let partition = format!("{disk}p");
        let mut disk = Disk { names: vec![disk], numbers: Vec::new() };
        disk.numbers.extend(read_number(&directory));
        for name in list(&directory).map_err(|error| unreadable(&directory, error))? {
            if name.starts_with(&partition) {
                disk.numbers.extend(read_number(&directory.join(&name)));
                disk.names.push(name);
            }
        }
        Ok(disk)
    }

    /// Block devices stacked on the device or a partition of it: device mapper, md, bcache by
    /// `holders/`, loop devices by the file they are made of.
    pub(super) fn stacked(&self, index: DeviceIndex, disk: &Disk) -> Result<Vec<String>> {
        let directory = self.directory(index);
        let mut found = Vec::new();
        for name in &disk.names {
            let disk = *name == format!("nbd{index}");
            let device = if disk { directory.clone() } else { directory.join(name) };
            let holders = device.join("holders");
            match list(&holders) {
                // A partition that has just gone.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                names => found.extend(names.map_err(|error| unreadable(&holders, error))?),
            }
        }
        let block = self.0.join("block");
        for name in list(&block).map_err(|error| unreadable(&block, error))? {
            if !name.starts_with("loop") {
                continue;
            }
            let Ok(file) = fs::read_to_string(block.join(&name).join("loop/backing_file")) else {
                continue;
            };
            let file = file.trim_end_matches('\n').trim_start_matches("/dev/");
            if disk.names.iter().any(|ours| ours == file) {
                found.push(name);
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Sets the time after which an unanswered request is looked at again.
    pub(super) fn set_replay_delay(&self, index: DeviceIndex, delay: Duration) -> Result<()> {
        let path = self.directory(index).join("queue/io_timeout");
        let delay_ms = delay.as_millis().clamp(1, u128::from(u32::MAX));
        fs::write(&path, delay_ms.to_string())
            .map_err(|error| Error::from_io(format!("cannot write {}", path.display()), error))
    }

    /// Has the kernel announce the device again, for a udev that missed it or came too early.
    pub(super) fn announce(&self, index: DeviceIndex) {
        announce(&self.directory(index));
    }

    /// As [`Sysfs::announce`], for the partitions.
    pub(super) fn announce_partitions(&self, index: DeviceIndex) {
        let names = self.disk(index).map(|disk| disk.names).unwrap_or_default();
        names.iter().skip(1).for_each(|name| announce(&self.directory(index).join(name)));
    }

    fn directory(&self, index: DeviceIndex) -> PathBuf {
        self.0.join(format!("block/nbd{index}"))
    }

    /// An attribute's text; `None` when it does not exist, now or any more.
    fn attribute(&self, index: DeviceIndex, name: &str) -> Result<Option<String>> {
        let path = self.directory(index).join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim_end_matches('\n').to_owned())),
            // ENODEV: the attribute went while it was being read.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ENODEV) =>
            {
                Ok(None)
            }
            Err(error) => Err(unreadable(&path, error)),
        }
    }
}

fn announce(directory: &Path) {
    // Only a hint: where sysfs is read-only, the caller's wait ends by its deadline.
    if let Err(error) = fs::write(directory.join("uevent"), "change") {
        tracing::debug!(path = %directory.display(), %error, "cannot announce a device again");
    }
}

/// N of `nbdN`; `None` for anything else, partitions too.
pub(super) fn index_of(name: &str) -> Option<DeviceIndex> {
    let digits = name.strip_prefix("nbd")?;
    let canonical =
        digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    canonical.then(|| digits.parse().ok()).flatten()
}

/// Reads `major:minor`.
pub(super) fn parse_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

fn read_number(directory: &Path) -> Option<DeviceNumber> {
    parse_number(&fs::read_to_string(directory.join("dev")).ok()?)
}

fn list(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::from_io(format!("cannot read {}", path.display()), error)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let sysfs = Sysfs(root.path().to_owned());
        (root, sysfs)
    }

    #[test]
    fn devices_are_read_in_order() {
        let (_root, sysfs) = tree(&[
            ("block/nbd10/size", "0\n"),
            ("block/nbd2/size", "8192\n"),
            ("block/nbd2/pid", "77\n"),
            ("block/nbd2/backend", "cleat.00.data\n"),
            ("block/nbdx/size", "1\n"),
            ("block/sda/size", "1\n"),
        ]);
        let devices = sysfs.devices().unwrap();
        assert_eq!(devices.iter().map(|d| d.index).collect::<Vec<_>>(), [2, 10]);
        assert_eq!(
            (devices[0].connected, devices[0].pid, devices[0].size),
            (true, Some(77), 4 << 20)
        );
        assert_eq!(devices[0].identity().unwrap().name(), "data");
        assert_eq!((devices[1].connected, devices[1].backend.as_deref()), (false, None));
        assert_eq!(sysfs.device(3).unwrap(), None);
    }

    #[test]
    fn no_module_is_no_device_but_nonsense_is_an_error() {
        let (_root, sysfs) = tree(&[("block/nbd0/size", "many\n")]);
        assert!(sysfs.devices().is_err());
        assert_eq!(Sysfs("/nonexistent".into()).devices().unwrap(), []);
    }

    #[test]
    fn partitions_and_what_is_stacked_belong_to_the_device() {
        let (_root, sysfs) = tree(&[
            ("block/nbd1/dev", "43:32\n"),
            ("block/nbd1/nbd1p1/dev", "43:33\n"),
            ("block/nbd1/nbd1p1/holders/dm-0/dev", "254:0\n"),
            ("block/nbd1/holders/md0/dev", "9:0\n"),
            ("block/loop3/loop/backing_file", "/dev/nbd1p1\n"),
            ("block/loop4/loop/backing_file", "/dev/nbd10\n"),
            ("block/nbd10/dev", "43:320\n"),
        ]);
        let disk = sysfs.disk(1).unwrap();
        assert_eq!(disk.names, ["nbd1", "nbd1p1"]);
        assert_eq!(disk.numbers.iter().map(|n| n.minor).collect::<Vec<_>>(), [32, 33]);
        assert_eq!(sysfs.stacked(1, &disk).unwrap(), ["dm-0", "loop3", "md0"]);
    }

    #[test]
    fn a_replay_delay_is_written_in_milliseconds() {
        let (root, sysfs) = tree(&[("block/nbd0/queue/io_timeout", "30000\n")]);
        sysfs.set_replay_delay(0, Duration::from_millis(500)).unwrap();
        let path = root.path().join("block/nbd0/queue/io_timeout");
        assert_eq!(fs::read_to_string(path).unwrap(), "500");
    }

    proptest! {
        #[test]
        fn an_index_is_read_back(index: DeviceIndex) {
            prop_assert_eq!(index_of(&format!("nbd{index}")), Some(index));
        }

        #[test]
        fn no_name_makes_the_reader_panic(name in ".{0,20}") {
            if let Some(index) = index_of(&name) {
                prop_assert_eq!(format!("nbd{index}"), name.clone());
            }
            let _ = parse_number(&name);
        }
    }
}
