//! The users of block devices, from /proc: mounts in every mount namespace, open files, swap.
//!
//! One scan serves every device. Each quantity that is read has a bound. Beyond a bound, or when a file
//! cannot be read, the scan fails: a device that is in use must not be reported as free.
//!
//! File descriptors are read as links that `statx` resolves, without the crate `procfs`, which would resolve
//! and allocate each link's target and ask remote file servers about it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Holder;
use super::mountinfo::{Mount, parse_mountinfo, parse_swaps};
use super::sysfs::Disk;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::{BackingDevice, DeviceNumber, backing_device, block_device};

/// The maximum number of bytes that are read of one mountinfo. A mount takes about 150 bytes.
pub(super) const MOUNTINFO_MAX: u64 = 64 << 20;
const PROCESSES_MAX: usize = 1 << 17;
const DESCRIPTORS_MAX: usize = 1 << 21;
const MOUNTS_MAX: usize = 1 << 16;
const HOLDERS_MAX: usize = 4096;

/// The path of `/proc`; a test gives another directory.
#[derive(Debug, Clone)]
pub(super) struct Proc(pub(super) PathBuf);

/// The users of all block devices at the time of one scan.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// Every mount once, with a process of the first namespace that has it. `None`: the namespace of this
    /// process.
    mounts: Vec<(Mount, Option<u32>)>,
    /// The processes that have block devices open, with their commands and the devices.
    opens: Vec<(u32, String, Vec<DeviceNumber>)>,
    /// The processes that use a file system which is no longer mounted anywhere, with their commands and
    /// the devices: it was unmounted lazily, and exists until they close it.
    lingering: Vec<(u32, String, Vec<DeviceNumber>)>,
    swaps: Vec<PathBuf>,
}

impl Usage {
    /// Returns the mounts, openers and swap on the disk or its partitions.
    pub(super) fn holders(&self, disk: &Disk) -> Result<Vec<Holder>> {
        let mut holders: Vec<_> = self.mounts_on(disk).collect();
        let ours = |numbers: &[DeviceNumber]| numbers.iter().any(|n| disk.numbers.contains(n));
        let opens = self.opens.iter().chain(&self.lingering).filter(|(.., numbers)| ours(numbers));
        for (pid, command, _) in opens {
            let process = Holder::Process { pid: *pid, command: command.clone() };
            if !holders.contains(&process) {
                holders.push(process);
            }
        }
        let swap = self.swaps.iter().any(|path| is_ours(path, disk));
        holders.extend(swap.then(|| Holder::Device { name: "swap".into(), mapper: None }));
        if holders.len() > HOLDERS_MAX {
            return Err(too_much("holders"));
        }
        Ok(holders)
    }

    /// Returns the mounts on the disk or its partitions.
    pub(super) fn mounts_on<'a>(&'a self, disk: &'a Disk) -> impl Iterator<Item = Holder> + 'a {
        let mounts = self.mounts.iter().filter(|(mount, _)| mount.is_on(disk));
        mounts.map(|(mount, namespace_pid)| Holder::Mount {
            path: mount.path.clone(),
            filesystem: mount.filesystem.clone(),
            namespace_pid: *namespace_pid,
        })
    }
}

impl Proc {
    /// Scans every process.
    pub(super) fn usage(&self) -> Result<Usage> {
        let mut usage = Usage::default();
        // A mount that several namespaces share is listed once. This process's namespace comes first.
        let (mut mounts, mut views) = (HashSet::new(), HashSet::new());
        views.extend(self.view("self"));
        self.mounts("self", None, &mut mounts, &mut usage.mounts)?;
        let (mut descriptors, mut used) = (0, Vec::new());
        for pid in self.processes()? {
            let process = pid.to_string();
            // Processes that see the same mounts are read once.
            if let Some(view) = self.view(&process)
                && views.insert(view)
            {
                self.mounts(&process, Some(pid), &mut mounts, &mut usage.mounts)?;
            }
            let (devices, filesystems) = self.opens(&process, &mut descriptors)?;
            if !devices.is_empty() {
                usage.opens.push((pid, self.command(pid), devices));
            }
            used.push((pid, filesystems));
        }
        let mounted: HashSet<_> = usage.mounts.iter().map(|(mount, _)| mount.number).collect();
        for (pid, mut filesystems) in used {
            filesystems.retain(|number| !mounted.contains(number));
            if !filesystems.is_empty() {
                usage.lingering.push((pid, self.command(pid), filesystems));
            }
        }
        let path = self.0.join("swaps");
        let swaps = match fs::read(&path) {
            // The kernel has no support for swap.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|error| {
                Error::from_io(format!("cannot read {}", path.display()), error)
            })?,
        };
        usage.swaps = parse_swaps(&swaps).map(PathBuf::from).collect();
        Ok(usage)
    }

    pub(super) fn processes(&self) -> Result<Vec<u32>> {
        let unreadable = |error| Error::from_io(format!("cannot read {}", self.0.display()), error);
        let entries = fs::read_dir(&self.0).map_err(unreadable)?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut pids: Vec<u32> = names.filter_map(|name| name.parse().ok()).collect();
        if pids.len() > PROCESSES_MAX {
            return Err(too_much("processes"));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// Returns what determines the mounts that a process sees: its namespace and its root. `None` when the
    /// process has ended.
    fn view(&self, process: &str) -> Option<View> {
        let directory = self.0.join(process);
        let namespace = fs::read_link(directory.join("ns/mnt")).ok()?;
        let root = fs::metadata(directory.join("root")).ok();
        Some((namespace, root.map(|root| (root.dev(), root.ino()))))
    }

    fn mounts(
        &self,
        process: &str,
        namespace_pid: Option<u32>,
        seen: &mut HashSet<Mount>,
        mounts: &mut Vec<(Mount, Option<u32>)>,
    ) -> Result<()> {
        let path = self.0.join(process).join("mountinfo");
        let text = match read_bounded(&path, MOUNTINFO_MAX) {
            Ok(text) => text,
            // The process has ended, or (EINVAL) has no mount namespace any more.
            Err(_) if namespace_pid.is_some() => return Ok(()),
            Err(error) => {
                return Err(Error::from_io(format!("cannot read {}", path.display()), error));
            }
        };
        if text.len() as u64 > MOUNTINFO_MAX {
            return Err(too_much("mounts"));
        }
        for mount in parse_mountinfo(&text).filter(Mount::may_be_on_a_device) {
            if seen.insert(mount.clone()) {
                mounts.push((mount, namespace_pid));
            }
        }
        if mounts.len() > MOUNTS_MAX {
            return Err(too_much("mounts"));
        }
        Ok(())
    }

    /// Returns the block devices that a process has open, and the devices of the file systems that it
    /// uses.
    pub(super) fn opens(&self, process: &str, descriptors: &mut usize) -> Result<Opens> {
        let directory = self.0.join(process);
        let (mut devices, mut filesystems) = (Vec::new(), Vec::new());
        let mut note = |path: &Path| {
            // By number, because a device node may have any name in any namespace.
            let (list, number) = match backing_device(path) {
                Ok(BackingDevice::Device(number)) => (&mut devices, number),
                Ok(BackingDevice::Filesystem(number)) if number.major != 0 => {
                    (&mut filesystems, number)
                }
                _ => return,
            };
            if !list.contains(&number) {
                list.push(number);
            }
        };
        ["cwd", "root", "exe"].iter().for_each(|name| note(&directory.join(name)));
        // Fails for the processes of other users if this one is not root, and for ended processes.
        let entries = fs::read_dir(directory.join("fd"));
        for entry in entries.into_iter().flatten().filter_map(io::Result::ok) {
            *descriptors += 1;
            if *descriptors > DESCRIPTORS_MAX {
                return Err(too_much("open files"));
            }
            note(&entry.path());
        }
        Ok((devices, filesystems))
    }

    pub(super) fn command(&self, pid: u32) -> String {
        let command = fs::read_to_string(self.0.join(pid.to_string()).join("comm"));
        command.unwrap_or_default().trim_end().to_owned()
    }
}

pub(super) type Opens = (Vec<DeviceNumber>, Vec<DeviceNumber>);
type View = (PathBuf, Option<(u64, u64)>);

impl Mount {
    /// Returns whether the file system may be on a block device: not on memory or a network, and not the
    /// kernel's own.
    fn may_be_on_a_device(&self) -> bool {
        self.number.major != 0 || Path::new(&self.source).starts_with("/dev")
    }

    /// Returns whether the file system is on the disk or a partition of it. A file system with a device
    /// number of its own (btrfs: major 0) is recognised by its source.
    pub(super) fn is_on(&self, disk: &Disk) -> bool {
        disk.numbers.contains(&self.number)
            || self.number.major == 0 && is_ours(Path::new(&self.source), disk)
    }
}

/// Returns whether a path names the disk or a partition: by the kernel's name for it, or by its number.
fn is_ours(path: &Path, disk: &Disk) -> bool {
    let Ok(name) = path.strip_prefix("/dev") else { return false };
    let by_name = disk.names.iter().any(|ours| OsStr::new(ours) == name.as_os_str());
    by_name
        || block_device(path).ok().flatten().is_some_and(|number| disk.numbers.contains(&number))
}

pub(super) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    fs::File::open(path)?.take(limit + 1).read_to_end(&mut text)?;
    Ok(text)
}

pub(super) fn too_much(what: &str) -> Error {
    let message = format!("cannot find the users of the device: too many {what} on this machine");
    Error::new(ErrorKind::Unavailable, message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const MOUNTINFO: &[u8] = b"\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
36 22 43:32 / /mnt/my\\040data rw,noatime - ext4 /dev/nbd1 rw
37 22 43:33 /sub /mnt/part rw,noatime shared:2 master:1 - xfs /dev/nbd1p1 rw
38 22 0:45 / /mnt/btrfs rw - btrfs /dev/nbd1 rw
39 22 0:46 / /proc rw - proc proc rw
broken line
40 22 43:64 / /mnt/other rw - ext4 /dev/nbd2 rw
";

    fn disk() -> Disk {
        let number = |minor| DeviceNumber { major: 43, minor };
        let names = vec!["nbd1".to_owned(), "nbd1p1".to_owned()];
        Disk { names, numbers: vec![number(32), number(33)] }
    }

    #[test]
    fn mounts_on_a_device_are_found() {
        let ours: Vec<_> = parse_mountinfo(MOUNTINFO).filter(|m| m.is_on(&disk())).collect();
        let paths: Vec<_> = ours.iter().map(|mount| mount.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/mnt/my data", "/mnt/part", "/mnt/btrfs"]);
        assert_eq!(ours[1].filesystem, "xfs");
        assert_eq!(parse_mountinfo(MOUNTINFO).count(), 6);
    }

    #[test]
    fn swaps_are_read() {
        let text = b"Filename\t\tType\t\tSize\n/dev/nbd1p1                  partition\t1\n/swap\\040file file\t1\n";
        let found: Vec<_> = parse_swaps(text).collect();
        assert_eq!(found, ["/dev/nbd1p1", "/swap file"]);
        assert!(is_ours(Path::new("/dev/nbd1p1"), &disk()));
        assert!(!is_ours(Path::new("/dev/nbd10"), &disk()));
    }

    /// Two namespaces, three processes: each namespace is read once, each mount listed once.
    #[test]
    fn every_mount_is_listed_once_and_those_of_this_namespace_first() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = b"50 49 43:32 / /container rw - ext4 /dev/nbd1 rw\n";
        for (process, namespace) in [("self", 1), ("10", 1), ("20", 2), ("30", 2)] {
            let directory = root.path().join(process);
            fs::create_dir_all(directory.join("ns")).unwrap();
            symlink(format!("mnt:[{namespace}]"), directory.join("ns/mnt")).unwrap();
            let more = if namespace == 2 { &elsewhere[..] } else { b"" };
            fs::write(directory.join("mountinfo"), [MOUNTINFO, more].concat()).unwrap();
        }
        let swaps = "Filename Type\n/dev/nbd1 partition\n";
        fs::write(root.path().join("swaps"), swaps).unwrap();
        let usage = Proc(root.path().to_owned()).usage().unwrap();
        let holders = usage.holders(&disk()).unwrap();
        let mounts: Vec<_> = holders
            .iter()
            .filter_map(|holder| match holder {
                Holder::Mount { path, namespace_pid, .. } => {
                    Some((path.to_str().unwrap(), *namespace_pid))
                }
                _ => None,
            })
            .collect();
        let own = [("/mnt/my data", None), ("/mnt/part", None), ("/mnt/btrfs", None)];
        assert_eq!(mounts[..3], own);
        assert_eq!(mounts[3..], [("/container", Some(20))]);
        assert_eq!(holders.last(), Some(&Holder::Device { name: "swap".into(), mapper: None }));
        // Another device has its own mounts.
        let number = DeviceNumber { major: 43, minor: 64 };
        let other = Disk { names: vec!["nbd2".into()], numbers: vec![number] };
        assert_eq!(usage.holders(&other).unwrap().len(), 1);
        // A missing /proc/swaps means no swap; one that cannot be read is an error.
        fs::remove_file(root.path().join("swaps")).unwrap();
        Proc(root.path().to_owned()).usage().unwrap();
        fs::create_dir(root.path().join("swaps")).unwrap();
        assert!(Proc(root.path().to_owned()).usage().is_err());
    }

    #[test]
    fn this_machine_can_be_scanned() {
        Proc("/proc".into()).usage().unwrap();
    }
}
