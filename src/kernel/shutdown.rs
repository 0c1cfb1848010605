//! The last step of a shutdown: the file systems that are still mounted from devices of cleat become clean.
//!
//! systemd stops services and unmounts file systems in order, while the workers serve. What is still mounted
//! after that is in use by a process that no unit has ended. systemd would then kill all processes at once, the
//! workers among them, and unmount only afterwards. So the users of each device end first, then its file systems
//! are unmounted, and one that cannot be unmounted is frozen: its journal is then complete and empty.
//!
//! Works without a daemon, which has ended by then. Every wait has a deadline.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::bounded_call::BoundedCalls;
use super::exclusive;
use super::freeze::Freezes;
use super::mountinfo::{is_at_its_path, uncovered};
use super::namespaces::{in_namespaces, mountinfo};
use super::netlink::Netlink;
use super::sysfs::{Disk, Sysfs};
use super::usage::{MOUNTINFO_MAX, Proc, read_bounded};
use super::{DeviceIndex, Identity, UnmountScope};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;

/// The maximum number of calls that may be stuck, one for each device and mount namespace.
const STUCK_MAX: usize = 64;

/// How long processes have to end after SIGTERM, and after SIGKILL.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// How often the processes that have to end are looked up.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The beginning of the name of a worker process. A worker may use the device of another one, and ends with its own
/// device.
const WORKER: &str = "cleat:";

/// The maximum number of mounts on one device in one namespace.
const ROUNDS_MAX: u32 = 256;

/// What became of a device that was still mounted.
#[derive(Debug)]
pub struct Released {
    /// The path of the device.
    pub device: String,
    /// The processes that were ended, with their commands.
    pub ended: Vec<String>,
    /// The state of its file systems.
    pub state: State,
}

/// The state of the file systems of a device.
#[derive(Debug)]
pub enum State {
    /// They were unmounted.
    Unmounted,
    /// At least one could not be unmounted; each of these is frozen.
    Frozen,
    /// At least one is neither unmounted nor frozen.
    Dirty(cleat_core::error::Error),
}

/// Ends the users of each device of cleat that is mounted, and unmounts or freezes its file systems. Blocks until
/// `deadline` at most.
///
/// # Errors
/// Returns an error if sysfs or /proc cannot be read.
pub fn release_devices(deadline: Instant) -> Result<Vec<Released>> {
    let calls = BoundedCalls::new(STUCK_MAX);
    let all = All {
        sysfs: Sysfs("/sys".into()),
        proc: Proc("/proc".into()),
        netlink: Netlink::new(calls.clone()),
        calls,
        freezes: Freezes::default(),
        deadline,
    };
    let mut mounted = all.mounted()?;
    // The users of all devices end at the same time, so that many devices take no longer than one.
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        all.end_users(&mut mounted, signal)?;
    }
    // All are unmounted before the first one is frozen: a file system that is stored in a file of another one
    // cannot be unmounted after that one is frozen. Its worker still has the file open, so that the other one
    // must be frozen.
    for device in &mut mounted {
        device.unmounted = all.unmount(device);
    }
    // A device that is stored on another one has mostly been mapped after it, and must be frozen before it.
    let (unmounted, in_use): (Vec<_>, Vec<_>) = mounted.into_iter().partition(|d| d.unmounted);
    let released = unmounted.into_iter().map(|device| device.released(State::Unmounted));
    let frozen = in_use.into_iter().rev().map(|device| {
        let state = all.freeze(&device);
        device.released(state)
    });
    let released = released.chain(frozen).collect();
    for (index, identity) in all.connected()? {
        // A failure makes the shutdown longer, and no file system less clean.
        let _ = all.end(index, &identity);
    }
    Ok(released)
}

/// A device that is still mounted.
struct Mounted {
    index: DeviceIndex,
    disk: Disk,
    /// The processes that were ended, with their commands.
    ended: BTreeSet<(u32, String)>,
    unmounted: bool,
}

impl Mounted {
    fn released(self, state: State) -> Released {
        let ended = self.ended.into_iter().map(|(pid, command)| format!("{pid} ({command})"));
        Released { device: format!("/dev/nbd{}", self.index), ended: ended.collect(), state }
    }
}

/// The parts of the kernel's interface, and the deadline of the whole.
struct All {
    sysfs: Sysfs,
    proc: Proc,
    calls: BoundedCalls,
    netlink: Netlink,
    freezes: Freezes,
    deadline: Instant,
}

impl All {
    fn connected(&self) -> Result<Vec<(DeviceIndex, Identity)>> {
        let devices = self.sysfs.devices()?.into_iter().filter(|device| device.connected);
        Ok(devices.filter_map(|device| Some((device.index, device.identity()?))).collect())
    }

    fn mounted(&self) -> Result<Vec<Mounted>> {
        let usage = self.proc.usage()?;
        let mut mounted = Vec::new();
        for (index, _) in self.connected()? {
            let disk = self.sysfs.disk(index)?;
            if usage.mounts_on(&disk).next().is_some() {
                mounted.push(Mounted { index, disk, ended: BTreeSet::new(), unmounted: false });
            }
        }
        Ok(mounted)
    }

    /// Sends a signal to the processes that use the devices, and waits until there are none, for
    /// [`END_TIMEOUT`] at most.
    #[allow(clippy::disallowed_methods, reason = "no event reports the end of all users")]
    fn end_users(&self, mounted: &mut [Mounted], signal: Signal) -> Result<()> {
        for (number, user) in self.users(mounted)? {
            // It may have ended since.
            let _ = i32::try_from(user.0).map(|pid| kill(Pid::from_raw(pid), signal));
            mounted[number].ended.insert(user);
        }
        let end = self.deadline.min(SystemClock.now() + END_TIMEOUT);
        while !self.users(mounted)?.is_empty() && SystemClock.now() < end {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the processes that have a device or a file of a file system on it open or mapped, except this
    /// process, init and workers, with the number of the device in the list.
    fn users(&self, mounted: &[Mounted]) -> Result<Vec<(usize, (u32, String))>> {
        let (mut users, mut descriptors) = (Vec::new(), 0);
        for pid in self.proc.processes()? {
            let command = self.proc.command(pid);
            if pid <= 1 || pid == std::process::id() || command.starts_with(WORKER) {
                continue;
            }
            let process = pid.to_string();
            let (devices, filesystems) = self.proc.opens(&process, &mut descriptors)?;
            let maps = read_bounded(&self.proc.0.join(&process).join("maps"), MOUNTINFO_MAX);
            let maps = maps.unwrap_or_default();
            for (number, Mounted { disk, .. }) in mounted.iter().enumerate() {
                let opens = devices.iter().chain(&filesystems).any(|n| disk.numbers.contains(n));
                if opens || names_device(&maps, disk) {
                    users.push((number, (pid, command.clone())));
                }
            }
        }
        Ok(users)
    }

    /// Unmounts the file systems of a device, and returns whether none is left.
    fn unmount(&self, device: &Mounted) -> bool {
        let Mounted { index, disk, .. } = device;
        let what = format!("unmount /dev/nbd{index}");
        let (proc, calls, scope) = (&self.proc, &self.calls, UnmountScope::All);
        let unmounted = in_namespaces(proc, calls, disk, scope, &what, self.deadline, unmount_here);
        let usage = self.proc.usage();
        unmounted.is_ok() && usage.is_ok_and(|usage| usage.mounts_on(disk).next().is_none())
    }

    /// Disconnects a device that nothing uses, so that its worker ends: systemd before 255 waits for workers.
    /// Requests of another device fail as soon as its worker has ended, because no other worker serves it.
    fn end(&self, index: DeviceIndex, identity: &Identity) -> Result<()> {
        let (netlink, deadline) = (&self.netlink, self.deadline);
        netlink.set_dead_connection_timeout(index, identity, Duration::ZERO, deadline)?;
        let disk = self.sysfs.disk(index)?;
        if !self.proc.usage()?.holders(&disk)?.is_empty() {
            return Ok(());
        }
        // Fails if device mapper, md or another part of the kernel uses the device.
        let open = move || exclusive::open(Path::new("/dev"), &disk);
        let opened = self.calls.run(&format!("open /dev/nbd{index}"), deadline, open, drop)??;
        let Ok(_open) = opened else { return Ok(()) };
        let (sysfs, identity) = (self.sysfs.clone(), identity.clone());
        let is_meant = move || Ok(sysfs.connected_device(index, &identity)?.is_some());
        netlink.disconnect(index, deadline, is_meant)
    }

    fn freeze(&self, device: &Mounted) -> State {
        match self.freezes.freeze(&self.proc, device.index, &device.disk, self.deadline) {
            Ok(_) => State::Frozen,
            Err(error) => State::Dirty(error),
        }
    }
}

/// Returns whether /proc/PID/maps (proc_pid_maps(5)) has a file that is stored on the disk.
fn names_device(maps: &[u8], disk: &Disk) -> bool {
    let numbers: Vec<String> =
        disk.numbers.iter().map(|n| format!("{:02x}:{:02x}", n.major, n.minor)).collect();
    let mut lines = maps.split(|byte| *byte == b'\n');
    lines.any(|line| {
        let device = line.split(|byte| *byte == b' ').nth(3).unwrap_or_default();
        numbers.iter().any(|number| number.as_bytes() == device)
    })
}

/// Unmounts every mount of the device that the calling thread sees, from the top down. A file system that is in use
/// stays.
fn unmount_here(proc: &File, disk: &Disk) -> io::Result<()> {
    for _ in 0..ROUNDS_MAX {
        let text = mountinfo(proc)?;
        let unmount = |path: &Path| umount2(path, MntFlags::UMOUNT_NOFOLLOW).is_ok();
        let found = uncovered(&text).filter(|(_, mount)| mount.is_on(disk));
        let mut mounts = found.filter(is_at_its_path);
        if !mounts.any(|(_, mount)| unmount(&mount.path)) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_sys::descriptor::DeviceNumber;

    #[test]
    fn a_mapped_file_names_its_device() {
        let number = |minor| DeviceNumber { major: 43, minor };
        let disk = |minor| Disk { names: vec!["nbd1".into()], numbers: vec![number(minor)] };
        let maps =
            b"7f00-7f01 r--p 00000000 2b:20 12  /mnt/a file\n7f02-7f03 rw-p 00000000 00:00 0\n";
        assert!(names_device(maps, &disk(32)));
        assert!(!names_device(maps, &disk(33)));
        assert!(!names_device(b"", &disk(32)));
    }
}
