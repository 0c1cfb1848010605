//! nbd devices as sysfs shows them. The path of sysfs is a parameter, so that tests give their own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Device, DeviceIndex, Identity, Mapper};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::DeviceNumber;

/// The unit of the attribute `size`, in bytes (include/linux/types.h: always 512).
const SECTOR_BYTES: u64 = 512;

/// The smallest logical block size, in bytes.
const MIN_BLOCK: u32 = 512;

/// What an attribute of a queue must be.
#[derive(Clone, Copy)]
enum Wanted {
    Is(&'static str),
    AtLeast(u64),
}

/// What cleat wants from the queue of a device (Documentation/ABI/stable/sysfs-block). The kernel's defaults differ
/// between its versions, and a device that is used again keeps the values of its last owner. The figures behind the
/// values are in docs/measurements.md, section "The queue of a device".
const QUEUE: [(&str, Wanted); 4] = [
    ("rotational", Wanted::Is("0")),
    // The backend orders requests; a scheduler in front of it takes time and gains nothing.
    ("scheduler", Wanted::Is("none")),
    // The default of Linux 6.12. With 128, as before, a request of 1 MiB is split into eight.
    ("max_sectors_kb", Wanted::AtLeast(1280)),
    // Each buffered read of less than this waits for the backend once for each window.
    ("read_ahead_kb", Wanted::AtLeast(4096)),
];

/// The path of `/sys`; a test gives another directory.
#[derive(Debug, Clone)]
pub(super) struct Sysfs(pub(super) PathBuf);

/// A disk and its partitions: their names and numbers, the disk's first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) names: Vec<String>,
    pub(super) numbers: Vec<DeviceNumber>,
}

impl Sysfs {
    /// Returns every nbd device: none if the module is not loaded.
    pub(super) fn devices(&self) -> Result<Vec<Device>> {
        let directory = self.0.join("block");
        let names = match list(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            names => names.map_err(|error| unreadable(&directory, error))?,
        };
        let mut indices: Vec<_> = names.iter().filter_map(|name| index_of(name)).collect();
        indices.sort_unstable();
        // A device that vanished since the directory was read is left out.
        indices.into_iter().filter_map(|index| self.device(index).transpose()).collect()
    }

    /// Returns one device; `None` when no device has that number.
    pub(super) fn device(&self, index: DeviceIndex) -> Result<Option<Device>> {
        let directory = self.directory(index);
        let Some(sectors) = self.attribute(index, "size")? else { return Ok(None) };
        let pid = self.attribute(index, "pid")?;
        let backend = self.attribute(index, "backend")?.filter(|backend| !backend.is_empty());
        let block_size = self.attribute(index, "queue/logical_block_size")?;
        let in_flight = self.attribute(index, "inflight")?;
        let sectors: u64 = sectors
            .parse()
            .map_err(|_| unreadable(&directory.join("size"), io::ErrorKind::InvalidData.into()))?;
        Ok(Some(Device {
            index,
            connected: pid.is_some(),
            pid: pid.and_then(|pid| pid.parse().ok()),
            backend,
            size: sectors.saturating_mul(SECTOR_BYTES),
            // A device that is being removed has no queue any more.
            block_size: block_size.and_then(|size| size.parse().ok()).unwrap_or(MIN_BLOCK),
            in_flight: in_flight.map_or(0, |counts| sum(&counts)),
        }))
    }

    /// Returns one device if it is connected as `identity`.
    pub(super) fn connected_device(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Option<Device>> {
        let device = self.device(index)?.filter(|device| device.connected);
        Ok(device.filter(|device| device.backend.as_deref() == Some(identity.as_str())))
    }

    /// Returns the device with its partitions.
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

    /// Returns the partitions that the kernel has found on the device: their numbers on the disk, and their
    /// device numbers.
    pub(super) fn partitions(&self, index: DeviceIndex) -> Result<Vec<(u32, DeviceNumber)>> {
        let prefix = format!("nbd{index}p");
        let names = self.disk(index)?.names;
        // A partition that was removed since the directory was read is left out.
        let partitions = names.iter().filter_map(|name| {
            let number = name.strip_prefix(&prefix)?.parse().ok()?;
            Some((number, read_number(&self.directory(index).join(name))?))
        });
        Ok(partitions.collect())
    }

    /// Returns the block devices on top of the disk or a partition of it: device mapper, md and bcache
    /// from `holders/`, loop devices by their backing file.
    pub(super) fn stacked(&self, index: DeviceIndex, disk: &Disk) -> Result<Vec<String>> {
        let directory = self.directory(index);
        let mut found = Vec::new();
        for name in &disk.names {
            let disk = *name == format!("nbd{index}");
            let device = if disk { directory.clone() } else { directory.join(name) };
            let holders = device.join("holders");
            match list(&holders) {
                // The partition was removed since it was listed.
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

    /// Returns the disk `name` without its partitions.
    pub(super) fn whole_disk(&self, name: &str) -> Disk {
        let number = read_number(&self.0.join("block").join(name));
        Disk { names: vec![name.to_owned()], numbers: number.into_iter().collect() }
    }

    /// Returns what the device mapper calls the disk `name`; `None` if it is not one of its devices.
    pub(super) fn mapper(&self, name: &str) -> Option<Mapper> {
        let directory = self.0.join("block").join(name).join("dm");
        let read = |file| fs::read_to_string(directory.join(file)).ok();
        let (name, uuid) = (read("name")?, read("uuid").unwrap_or_default());
        Some(Mapper { name: name.trim_end().to_owned(), uuid: uuid.trim_end().to_owned() })
    }

    /// Sets the time after which the kernel checks an unanswered request (`queue/io_timeout`).
    pub(super) fn set_replay_delay(&self, index: DeviceIndex, delay: Duration) -> Result<()> {
        let path = self.directory(index).join("queue/io_timeout");
        let delay_ms = delay.as_millis().clamp(1, u128::from(u32::MAX));
        fs::write(&path, delay_ms.to_string())
            .map_err(|error| Error::from_io(format!("cannot write {}", path.display()), error))
    }

    /// Sets the attributes of the device's queue that differ from [`QUEUE`], while it is connected as `identity`.
    /// An attribute that does not exist is left out. For each write the kernel freezes the queue and waits for the
    /// requests in flight, and meanwhile reads of other attributes of the queue may wait, too
    /// (queue_attr_store in block/blk-sysfs.c). So nothing is written before requests have ended, or after `deadline`.
    ///
    /// # Errors
    /// Returns the first error, after all attributes were tried; `TimedOut` if requests are in flight at the deadline.
    pub(super) fn set_queue(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
        let set = |(name, wanted): (&str, Wanted)| {
            let name = format!("queue/{name}");
            let Some(value) = self.attribute(index, &name)?.and_then(|now| wanted.from(&now))
            else {
                return Ok(());
            };
            // The device may have a new owner after a write that had to wait.
            if !self.wait_until_idle(index, identity, deadline)? {
                return Ok(());
            }
            let path = self.directory(index).join(name);
            fs::write(&path, &value).map_err(|error| {
                Error::from_io(format!("cannot write {value} to {}", path.display()), error)
            })
        };
        QUEUE.into_iter().map(set).fold(Ok(()), Result::and)
    }

    /// Waits until the device has no request in flight. Returns whether it is still connected as `identity`.
    fn wait_until_idle(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<bool> {
        loop {
            match self.connected_device(index, identity)? {
                None => return Ok(false),
                Some(device) if device.in_flight == 0 => return Ok(true),
                Some(_) if SystemClock.now() >= deadline => {
                    let message = format!("nbd{index} has requests in flight");
                    return Err(Error::new(ErrorKind::TimedOut, message));
                }
                Some(_) => pause(),
            }
        }
    }

    /// Makes the kernel send a `change` uevent for the device, for a udevd that missed the first event or
    /// handled it too early.
    pub(super) fn announce(&self, index: DeviceIndex) {
        announce(&self.directory(index));
    }

    /// Makes the kernel send a `change` uevent for each partition of the device.
    pub(super) fn announce_partitions(&self, index: DeviceIndex) {
        let names = self.disk(index).map(|disk| disk.names).unwrap_or_default();
        names.iter().skip(1).for_each(|name| announce(&self.directory(index).join(name)));
    }

    fn directory(&self, index: DeviceIndex) -> PathBuf {
        self.0.join(format!("block/nbd{index}"))
    }

    /// Returns an attribute's text; `None` when it does not exist.
    fn attribute(&self, index: DeviceIndex, name: &str) -> Result<Option<String>> {
        let path = self.directory(index).join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim_end_matches('\n').to_owned())),
            // ENODEV: the attribute was removed while it was read.
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

/// Sleeps between two looks at a device that has requests in flight.
#[allow(clippy::disallowed_methods, reason = "the state of the kernel is polled in real time")]
fn pause() {
    std::thread::sleep(Duration::from_millis(5));
}

impl Wanted {
    /// Returns what to write where an attribute is `now`; `None` if that is right. An attribute with several choices
    /// has brackets around the current one.
    fn from(self, now: &str) -> Option<String> {
        match self {
            Self::Is(value) => {
                let is_chosen = now == value || now.contains(&format!("[{value}]"));
                (!is_chosen).then(|| value.to_owned())
            }
            Self::AtLeast(least) => {
                let is_less = now.parse().is_ok_and(|now: u64| now < least);
                is_less.then(|| least.to_string())
            }
        }
    }
}

fn announce(directory: &Path) {
    // Without the event, if sysfs is read-only, the caller's wait ends at its deadline.
    if let Err(error) = fs::write(directory.join("uevent"), "change") {
        tracing::debug!(path = %directory.display(), %error, "cannot request a uevent");
    }
}

/// Returns N for the name `nbdN`; `None` for other names, including those of partitions.
pub(super) fn index_of(name: &str) -> Option<DeviceIndex> {
    let digits = name.strip_prefix("nbd")?;
    let canonical =
        digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    canonical.then(|| digits.parse().ok()).flatten()
}

/// Parses `major:minor`.
pub(super) fn parse_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

fn read_number(directory: &Path) -> Option<DeviceNumber> {
    parse_number(&fs::read_to_string(directory.join("dev")).ok()?)
}

pub(super) fn list(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// Adds the numbers of an attribute that has several.
fn sum(counts: &str) -> u64 {
    counts.split_whitespace().filter_map(|count| count.parse::<u64>().ok()).sum()
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
            ("block/nbd2/inflight", "       2        3\n"),
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
        assert_eq!((devices[0].in_flight, devices[1].in_flight), (5, 0));
        assert_eq!((devices[1].connected, devices[1].backend.as_deref()), (false, None));
        assert_eq!(sysfs.device(3).unwrap(), None);
    }

    #[test]
    fn a_missing_module_means_no_devices_but_a_bad_size_is_an_error() {
        let (_root, sysfs) = tree(&[("block/nbd0/size", "many\n")]);
        assert!(sysfs.devices().is_err());
        assert_eq!(Sysfs("/nonexistent".into()).devices().unwrap(), []);
    }

    #[test]
    fn partitions_and_stacked_devices_belong_to_the_device() {
        let (_root, sysfs) = tree(&[
            ("block/nbd1/dev", "43:32\n"),
            ("block/nbd1/nbd1p1/dev", "43:33\n"),
            ("block/nbd1/nbd1p1/holders/dm-0/dev", "254:0\n"),
            ("block/nbd1/holders/md0/dev", "9:0\n"),
            ("block/loop3/loop/backing_file", "/dev/nbd1p1\n"),
            ("block/loop4/loop/backing_file", "/dev/nbd10\n"),
            ("block/nbd10/dev", "43:320\n"),
            ("block/dm-0/dev", "254:0\n"),
            ("block/dm-0/dm/name", "vg0-data\n"),
            ("block/dm-0/dm/uuid", "LVM-abc\n"),
        ]);
        let disk = sysfs.disk(1).unwrap();
        assert_eq!(disk.names, ["nbd1", "nbd1p1"]);
        assert_eq!(disk.numbers.iter().map(|n| n.minor).collect::<Vec<_>>(), [32, 33]);
        let partition = DeviceNumber { major: 43, minor: 33 };
        assert_eq!(sysfs.partitions(1).unwrap(), [(1, partition)]);
        assert_eq!(sysfs.stacked(1, &disk).unwrap(), ["dm-0", "loop3", "md0"]);
        let number = DeviceNumber { major: 254, minor: 0 };
        let upper = Disk { names: vec!["dm-0".into()], numbers: vec![number] };
        assert_eq!(sysfs.whole_disk("dm-0"), upper);
        let mapper = Mapper { name: "vg0-data".into(), uuid: "LVM-abc".into() };
        assert_eq!(sysfs.mapper("dm-0"), Some(mapper));
        assert_eq!(sysfs.mapper("loop3"), None);
    }

    #[test]
    fn a_replay_delay_is_written_in_milliseconds() {
        let (root, sysfs) = tree(&[("block/nbd0/queue/io_timeout", "30000\n")]);
        sysfs.set_replay_delay(0, Duration::from_millis(500)).unwrap();
        let path = root.path().join("block/nbd0/queue/io_timeout");
        assert_eq!(fs::read_to_string(path).unwrap(), "500");
    }

    /// Returns a tree with the queue of `nbd0`, which is connected as the identity.
    fn queue(attributes: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs, Identity, PathBuf) {
        let names = attributes.iter().map(|(name, _)| format!("block/nbd0/queue/{name}"));
        let names: Vec<_> = names.collect();
        let connected = [("size", "8\n"), ("pid", "77\n"), ("backend", "cleat.00.data\n")];
        let connected = connected.map(|(name, text)| (format!("block/nbd0/{name}"), text));
        let files = names.iter().map(String::as_str).zip(attributes.iter().map(|(_, text)| *text));
        let files = connected.iter().map(|(name, text)| (&**name, *text)).chain(files);
        let (root, sysfs) = tree(&files.collect::<Vec<_>>());
        let path = root.path().join("block/nbd0/queue");
        fs::create_dir_all(&path).unwrap();
        (root, sysfs, Identity::parse("cleat.00.data").unwrap(), path)
    }

    #[test]
    fn a_queue_gets_what_it_lacks_and_keeps_what_is_more() {
        let (_root, sysfs, identity, queue) = queue(&[
            ("rotational", "1\n"),
            ("scheduler", "none [mq-deadline] kyber\n"),
            ("max_sectors_kb", "128\n"),
            ("read_ahead_kb", "8192\n"),
        ]);
        let read = || {
            ["rotational", "scheduler", "max_sectors_kb", "read_ahead_kb"]
                .map(|name| fs::read_to_string(queue.join(name)).unwrap())
        };
        let before = read();
        let other = Identity::parse("cleat.01.data").unwrap();
        sysfs.set_queue(0, &other, SystemClock.now()).unwrap();
        assert_eq!(read(), before, "the device of another mapping");
        sysfs.set_queue(0, &identity, SystemClock.now()).unwrap();
        assert_eq!(read(), ["0", "none", "1280", "8192\n"]);
    }

    #[test]
    fn a_queue_that_is_right_is_not_written_nor_what_it_does_not_have() {
        let (_root, sysfs, identity, queue) =
            queue(&[("scheduler", "[none] mq-deadline\n"), ("rotational", "0\n")]);
        sysfs.set_queue(0, &identity, SystemClock.now()).unwrap();
        let read = |name| fs::read_to_string(queue.join(name)).unwrap();
        assert_eq!(read("scheduler"), "[none] mq-deadline\n");
        assert_eq!(read("rotational"), "0\n");
        assert!(!queue.join("read_ahead_kb").exists());
    }

    #[test]
    fn a_queue_with_requests_in_flight_is_not_written() {
        let (_root, sysfs, identity, queue) = queue(&[("read_ahead_kb", "128\n")]);
        fs::write(queue.join("../inflight"), "1 0\n").unwrap();
        let error = sysfs.set_queue(0, &identity, SystemClock.now()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(fs::read_to_string(queue.join("read_ahead_kb")).unwrap(), "128\n");
        std::thread::scope(|scope| {
            let soon = SystemClock.now() + Duration::from_secs(10);
            let setting = scope.spawn(move || sysfs.set_queue(0, &identity, soon));
            fs::write(queue.join("../inflight"), "0 0\n").unwrap();
            setting.join().unwrap().unwrap();
        });
        assert_eq!(fs::read_to_string(queue.join("read_ahead_kb")).unwrap(), "4096");
    }

    #[test]
    fn an_attribute_that_cannot_be_written_does_not_keep_the_others() {
        let (_root, sysfs, identity, queue) = queue(&[("read_ahead_kb", "128\n")]);
        fs::create_dir(queue.join("rotational")).unwrap();
        let error = sysfs.set_queue(0, &identity, SystemClock.now()).unwrap_err();
        assert!(error.to_string().contains("rotational"), "{error}");
        assert_eq!(fs::read_to_string(queue.join("read_ahead_kb")).unwrap(), "4096");
    }

    proptest! {
        #[test]
        fn an_index_is_parsed_from_its_name(index: DeviceIndex) {
            prop_assert_eq!(index_of(&format!("nbd{index}")), Some(index));
        }

        #[test]
        fn no_name_makes_the_parser_panic(name in ".{0,20}") {
            if let Some(index) = index_of(&name) {
                prop_assert_eq!(format!("nbd{index}"), name.clone());
            }
            let _ = parse_number(&name);
        }
    }
}
