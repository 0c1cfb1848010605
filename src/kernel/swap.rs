//! Swap areas that are stored on devices of cleat.
//!
//! Input: /proc/swaps, which lists the swap areas and reports a change to poll(2). Output: those areas whose
//! content ends up on a device of cleat, directly, on a partition, in a file of a file system, or below device
//! mapper, md, loop and zram devices.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Identity;
use super::mountinfo::{parse_mountinfo, parse_swaps};
use super::usage::MOUNTINFO_MAX;
use cleat_sys::descriptor::{BackingDevice, DeviceNumber, backing_device, block_device};
use cleat_sys::swap::swap_off;

/// The maximum number of bytes that are read of /proc/swaps. An area takes about 100 bytes, and the kernel allows
/// 32 areas.
const SWAPS_MAX: u64 = 1 << 20;

/// The swap areas of this machine.
#[derive(Debug)]
pub struct SwapAreas {
    swaps: File,
    sys: PathBuf,
    mountinfo: PathBuf,
}

/// A swap area on a device of cleat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapArea {
    /// The path of the device or file, as /proc/swaps shows it.
    pub path: PathBuf,
    /// The device of cleat, such as `nbd3`.
    pub device: String,
}

impl SwapAreas {
    /// Opens the list of swap areas.
    ///
    /// # Errors
    /// Returns `NotFound` if the kernel has no support for swap.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            swaps: File::open("/proc/swaps")?,
            sys: "/sys".into(),
            mountinfo: "/proc/self/mountinfo".into(),
        })
    }

    /// Waits until the list changes, for `timeout` at most. Returns at once if it has changed since the last
    /// call.
    pub fn wait(&self, timeout: Duration) {
        // The kernel reports a change as POLLERR and POLLPRI (swaps_poll in mm/swapfile.c).
        let mut set = [PollFd::new(self.swaps.as_fd(), PollFlags::POLLPRI)];
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        // After an error, such as EINTR, the list is read again.
        if poll(&mut set, timeout).is_err() {
            std::thread::yield_now();
        }
    }

    /// Returns the swap areas on devices of cleat. An area whose device cannot be determined is left out.
    pub fn on_devices(&self) -> Vec<SwapArea> {
        let (mut swaps, mut text) = (&self.swaps, Vec::new());
        let read = swaps.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| swaps.take(SWAPS_MAX).read_to_end(&mut text));
        if let Err(error) = read {
            tracing::warn!(%error, "cannot read /proc/swaps");
        }
        let areas = parse_swaps(&text).map(PathBuf::from);
        areas
            .filter_map(|path| {
                let device = self.device_below(&path)?;
                Some(SwapArea { path, device })
            })
            .collect()
    }

    /// Returns the device of cleat on which the content of `path` is stored.
    fn device_below(&self, path: &Path) -> Option<String> {
        self.device_at_or_below(self.number_below(path)?)
    }

    /// Returns the device of cleat that is the block device `number`, or is below it.
    fn device_at_or_below(&self, number: DeviceNumber) -> Option<String> {
        let (mut waiting, mut seen) = (vec![number], HashSet::new());
        // The number of devices of a machine bounds the loop.
        while let Some(number) = waiting.pop() {
            if !seen.insert(number) {
                continue;
            }
            let link = self.sys.join(format!("dev/block/{}:{}", number.major, number.minor));
            let Ok(mut directory) = link.canonicalize() else { continue };
            if directory.join("partition").exists() {
                directory.pop();
            }
            let name = directory.file_name()?.to_string_lossy().into_owned();
            let backend = fs::read_to_string(directory.join("backend")).unwrap_or_default();
            if name.starts_with("nbd") && Identity::parse(backend.trim_end()).is_some() {
                return Some(name);
            }
            // What is below a loop device, and where zram writes what does not fit.
            for name in ["loop/backing_file", "backing_dev"] {
                let below = fs::read_to_string(directory.join(name)).unwrap_or_default();
                let below = Path::new(below.trim_end_matches('\n'));
                waiting.extend(below.is_absolute().then(|| self.number_below(below)).flatten());
            }
            for lower in fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten() {
                let number = fs::read_to_string(lower.path().join("dev")).unwrap_or_default();
                waiting.extend(super::sysfs::parse_number(&number));
            }
        }
        None
    }

    /// Returns the number of a block device, or of the one on which a file is stored.
    fn number_below(&self, path: &Path) -> Option<DeviceNumber> {
        match backing_device(path).ok()? {
            BackingDevice::Device(number) => Some(number),
            BackingDevice::Filesystem(number) if number.major != 0 => Some(number),
            // A file system with a number of its own (btrfs) is recognised by the source of its mount.
            BackingDevice::Filesystem(_) => {
                let mut text = Vec::new();
                let file = File::open(&self.mountinfo).ok()?;
                file.take(MOUNTINFO_MAX).read_to_end(&mut text).ok()?;
                let on = parse_mountinfo(&text).filter(|mount| path.starts_with(&mount.path));
                let nearest = on.max_by_key(|mount| mount.path.as_os_str().len())?;
                block_device(Path::new(&nearest.source)).ok().flatten()
            }
        }
    }
}

/// Turns a swap area off. Blocks until its content is back in memory.
///
/// # Errors
/// Returns `ENOMEM` if the memory cannot hold the content; `EPERM` without CAP_SYS_ADMIN.
pub fn turn_off(area: &SwapArea) -> io::Result<()> {
    swap_off(&area.path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const VOLUME: DeviceNumber = DeviceNumber { major: 253, minor: 0 };

    fn areas(root: &Path, swaps: &str) -> SwapAreas {
        let path = root.join("swaps");
        fs::write(&path, format!("Filename Type Size\n{swaps}")).unwrap();
        let swaps = File::open(path).unwrap();
        SwapAreas { swaps, sys: root.join("sys"), mountinfo: root.join("mountinfo") }
    }

    /// Makes a sysfs with the logical volume [`VOLUME`] on a partition of an nbd device.
    fn make_sysfs(root: &Path) {
        let sys = root.join("sys");
        fs::create_dir_all(sys.join("dev/block")).unwrap();
        write(&sys, "block/nbd1/backend", "cleat.0123abcd.data\n");
        write(&sys, "block/nbd1/nbd1p2/partition", "2\n");
        write(&sys, "block/nbd1/nbd1p2/dev", "43:34\n");
        write(&sys, "block/dm-0/slaves/nbd1p2/dev", "43:34\n");
        symlink(sys.join("block/dm-0"), sys.join("dev/block/253:0")).unwrap();
        symlink(sys.join("block/nbd1/nbd1p2"), sys.join("dev/block/43:34")).unwrap();
    }

    fn write(sys: &Path, path: &str, text: &str) {
        let path = sys.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_device_is_followed_down_to_the_device_of_cleat() {
        let root = tempfile::tempdir().unwrap();
        make_sysfs(root.path());
        let areas = areas(root.path(), "");
        let below = |major, minor| areas.device_at_or_below(DeviceNumber { major, minor });
        assert_eq!(areas.device_at_or_below(VOLUME).as_deref(), Some("nbd1"));
        assert_eq!(below(43, 34).as_deref(), Some("nbd1"));
        assert_eq!(below(8, 0), None, "a device that is not in sysfs");
        // Another program's device.
        write(&root.path().join("sys"), "block/nbd1/backend", "other\n");
        assert_eq!(areas.device_at_or_below(VOLUME), None);
    }

    #[test]
    fn a_swap_file_is_followed_down_to_the_device() {
        let root = tempfile::tempdir().unwrap();
        make_sysfs(root.path());
        let file = root.path().join("swap file");
        fs::write(&file, "").unwrap();
        let sys = root.path().join("sys");
        // The file system of the file is on the logical volume. A file system without a block device, such as a
        // tmpfs, cannot be.
        let Ok(BackingDevice::Filesystem(number)) = backing_device(&file) else { panic!() };
        let link = sys.join(format!("dev/block/{}:{}", number.major, number.minor));
        let _ = symlink(sys.join("block/dm-0"), link);
        let escaped = file.display().to_string().replace(' ', "\\040");
        let areas = areas(root.path(), &format!("{escaped} file 1\n"));
        let device = "nbd1".to_owned();
        let expected = (number.major != 0).then_some(SwapArea { path: file, device });
        for time in ["first", "second"] {
            assert_eq!(areas.on_devices(), Vec::from_iter(expected.clone()), "{time} read");
        }
    }

    #[test]
    fn the_areas_of_this_machine_can_be_read() {
        if let Ok(areas) = SwapAreas::open() {
            areas.wait(Duration::ZERO);
            areas.on_devices();
        }
    }
}
