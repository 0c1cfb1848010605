//! Freezes the file systems on a device (FIFREEZE), each once, in whatever mount namespace they are mounted,
//! and thaws them again.
//!
//! Freezing writes the dirty data, and thawing writes a superblock, both through the device: neither returns
//! while the backend does not answer. So both run on threads that can be left behind, and a freeze that the
//! caller has timed out is undone by its own thread. A frozen file system is kept open. So it cannot be
//! unmounted, which would leave it frozen and out of reach, and it can be thawed without another search.

mod filesystems;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use self::filesystems::{Opened, open_here};
use super::bounded_call::BoundedCalls;
use super::namespaces::in_namespaces;
use super::sysfs::Disk;
use super::usage::Proc;
use super::{DeviceIndex, UnmountScope};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::block;
use cleat_sys::descriptor::DeviceNumber;

/// The maximum number of threads that may be stuck: one or two for each device, since each waits for its own
/// backend.
const STUCK_MAX: usize = 64;

/// The file systems that this process has frozen.
#[derive(Debug)]
pub(super) struct Freezes {
    pub(super) threads: BoundedCalls,
    devices: Arc<Devices>,
}

#[derive(Debug, Default)]
struct Devices(Mutex<BTreeMap<DeviceIndex, Freeze>>);

/// The freeze of one device, from its beginning until every file system is thawed.
#[derive(Debug, Default)]
struct Freeze {
    /// The file systems are to be thawed, or were thawed.
    over: bool,
    /// The number of threads that freeze or thaw.
    running: u32,
    /// The frozen file systems, which this process must thaw.
    held: Vec<File>,
}

/// Counts a thread that freezes or thaws. The count ends when this value is dropped, also if the thread
/// never started.
struct Turn {
    devices: Arc<Devices>,
    index: DeviceIndex,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.devices.ended(self.index);
    }
}

impl Default for Freezes {
    fn default() -> Self {
        Self { threads: BoundedCalls::new(STUCK_MAX), devices: Arc::default() }
    }
}

impl Freezes {
    /// Freezes all file systems on `disk`. Returns those that another program had frozen before. After an
    /// error none stays frozen.
    pub(super) fn freeze(
        &self,
        proc: &Proc,
        index: DeviceIndex,
        disk: &Disk,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        let what = format!("freeze what is mounted from /dev/nbd{index}");
        let found = self.open_all(proc, disk, deadline)?;
        let failed = |error| Error::from_io(format!("cannot {what}"), error);
        let files = found.into_iter().map(|(number, file)| Ok((number, file?)));
        let files = files.collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let turn = self.begin(index, &what)?;
        let call = move || {
            let turn = turn;
            turn.devices.freeze(index, files)
        };
        let frozen = self.threads.run(&what, deadline, call, drop);
        let frozen = frozen.and_then(|frozen| frozen.map_err(failed));
        if frozen.is_err() {
            // If the freeze still runs, its own thread thaws the rest.
            let _ = self.thaw_held(index, deadline);
        }
        frozen
    }

    /// Thaws the file systems that this process froze. If it froze none and `disk` is given, an earlier
    /// supervisor process may have: thaws everything that is mounted from `disk` except `spared`.
    pub(super) fn thaw(
        &self,
        proc: &Proc,
        index: DeviceIndex,
        disk: Option<&Disk>,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()> {
        if self.devices.lock().contains_key(&index) {
            return self.thaw_held(index, deadline);
        }
        let Some(disk) = disk else { return Ok(()) };
        let found = self.open_all(proc, disk, deadline)?;
        let mut unreachable = None;
        let wanted = found.into_iter().filter(|(number, _)| !spared.contains(&text(*number)));
        let files = wanted.filter_map(|(_, file)| file.map_err(|e| unreachable = Some(e)).ok());
        let files: Vec<File> = files.collect();
        let what = format!("thaw what is mounted from /dev/nbd{index}");
        let turn = self.begin(index, &what)?;
        self.devices.with(index, |freeze| freeze.held = files);
        drop(turn);
        self.thaw_held(index, deadline)?;
        unreachable.map_or(Ok(()), |error| Err(Error::from_io(format!("cannot {what}"), error)))
    }

    fn thaw_held(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        let what = format!("thaw what is mounted from /dev/nbd{index}");
        let Some((files, running)) = self.devices.end(index) else { return Ok(()) };
        if files.is_empty() {
            return match running {
                0 => Ok(()),
                _ => Err(still_running(&what)),
            };
        }
        let turn = Turn { devices: Arc::clone(&self.devices), index };
        let call = move || {
            let _turn = turn;
            // Each one is thawed even if another one failed.
            let thawed: Vec<_> = files.iter().map(thaw).collect();
            thawed.into_iter().collect::<io::Result<()>>()
        };
        let thawed = self.threads.run(&what, deadline, call, drop)?;
        thawed.map_err(|error| Error::from_io(format!("cannot {what}"), error))
    }

    fn begin(&self, index: DeviceIndex, what: &str) -> Result<Turn> {
        self.devices.begin(index, what)?;
        Ok(Turn { devices: Arc::clone(&self.devices), index })
    }

    /// Opens every file system on `disk` once, in this process's own namespace if it is mounted there.
    fn open_all(&self, proc: &Proc, disk: &Disk, deadline: Instant) -> Result<Vec<Opened>> {
        let found = in_namespaces(
            proc,
            &self.threads,
            disk,
            UnmountScope::All,
            "read the mounts of a device",
            deadline,
            open_here,
        )?;
        let mut all: Vec<Opened> = Vec::new();
        for opened in found {
            let opened = opened
                .map_err(|error| Error::from_io("cannot read the mounts of a namespace", error))?;
            for (number, file) in opened {
                match all.iter_mut().find(|(known, _)| *known == number) {
                    Some((_, known)) if known.is_err() => *known = file,
                    Some(_) => {}
                    None => all.push((number, file)),
                }
            }
        }
        Ok(all)
    }
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DeviceIndex, Freeze>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, index: DeviceIndex, what: &str) -> Result<()> {
        let mut devices = self.lock();
        if devices.contains_key(&index) {
            return Err(still_running(what));
        }
        devices.insert(index, Freeze { running: 1, ..Freeze::default() });
        Ok(())
    }

    fn with<T>(&self, index: DeviceIndex, action: impl FnOnce(&mut Freeze) -> T) -> Option<T> {
        self.lock().get_mut(&index).map(action)
    }

    /// Freezes the file systems one after the other, on a thread of its own. After the caller has timed
    /// out, it thaws a file system as soon as it is frozen, and stops.
    fn freeze(
        &self,
        index: DeviceIndex,
        files: Vec<(DeviceNumber, File)>,
    ) -> io::Result<Vec<String>> {
        let mut spared = Vec::new();
        let mut outcome = Ok(());
        for (number, file) in files {
            match block::freeze(&file) {
                Ok(()) => {
                    let mut file = Some(file);
                    let wanted = self.with(index, |freeze| {
                        if !freeze.over {
                            freeze.held.extend(file.take());
                        }
                        !freeze.over
                    });
                    if let Some(file) = file {
                        let _ = thaw(&file);
                    }
                    if wanted != Some(true) {
                        break;
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    spared.push(text(number))
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        outcome.map(|()| spared)
    }

    /// Ends the freeze of a device. Returns the file systems to be thawed, by a thread that calls
    /// [`Devices::ended`], and the number of other threads that still run. `None`: nothing is frozen.
    fn end(&self, index: DeviceIndex) -> Option<(Vec<File>, u32)> {
        let mut devices = self.lock();
        let freeze = devices.get_mut(&index)?;
        freeze.over = true;
        let (held, running) = (std::mem::take(&mut freeze.held), freeze.running);
        if !held.is_empty() {
            freeze.running += 1;
        } else if running == 0 {
            devices.remove(&index);
        }
        Some((held, running))
    }

    /// Notes that a thread has ended.
    fn ended(&self, index: DeviceIndex) {
        let mut devices = self.lock();
        let Some(freeze) = devices.get_mut(&index) else { return };
        freeze.running -= 1;
        if freeze.over && freeze.running == 0 {
            devices.remove(&index);
        }
    }
}

fn thaw(file: &File) -> io::Result<()> {
    match block::thaw(file) {
        // It is not frozen: another program has thawed it.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

fn still_running(what: &str) -> Error {
    let message = format!("cannot {what}: an earlier freeze or thaw is still running");
    Error::new(ErrorKind::TimedOut, message)
        .with_repair("its backend does not answer: see `cleat stats` and the log of the daemon")
}

fn text(number: DeviceNumber) -> String {
    format!("{}:{}", number.major, number.minor)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn directory() -> (tempfile::TempDir, File) {
        let directory = tempfile::tempdir().unwrap();
        let file = File::open(directory.path()).unwrap();
        (directory, file)
    }

    #[test]
    fn freezing_an_unmounted_device_has_no_effect() {
        let (proc, freezes) = (Proc("/proc".into()), Freezes::default());
        let numbers = vec![DeviceNumber { major: 43, minor: 0xf_ffff }];
        let disk = Disk { names: vec!["nbd9".into()], numbers };
        assert!(freezes.freeze(&proc, 9, &disk, deadline()).unwrap().is_empty());
        let again = freezes.freeze(&proc, 9, &disk, deadline()).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::TimedOut);
        for disk in [Some(&disk), None] {
            freezes.thaw(&proc, 9, disk, &[], deadline()).unwrap();
        }
        freezes.freeze(&proc, 9, &disk, deadline()).unwrap();
    }

    /// A freeze that continues after its caller has timed out leaves nothing frozen.
    #[test]
    fn a_freeze_that_timed_out_leaves_nothing_frozen() {
        let freezes = Freezes::default();
        let (_kept, file) = directory();
        let turn = freezes.begin(3, "freeze").unwrap();
        assert_eq!(freezes.thaw_held(3, deadline()).unwrap_err().kind(), ErrorKind::TimedOut);
        // The file system cannot be frozen without privileges, or is thawed at once.
        let number = DeviceNumber { major: 1, minor: 1 };
        let _ = freezes.devices.freeze(3, vec![(number, file)]);
        drop(turn);
        assert!(freezes.devices.lock().is_empty());
        freezes.thaw_held(3, deadline()).unwrap();
    }

    #[test]
    fn a_second_thaw_does_not_wait_behind_one_that_hangs() {
        let freezes = Freezes::default();
        let (_kept, file) = directory();
        drop(freezes.begin(3, "freeze").unwrap());
        freezes.devices.with(3, |freeze| freeze.held.push(file));
        let (held, running) = freezes.devices.end(3).unwrap();
        assert_eq!((held.len(), running), (1, 0));
        assert_eq!(freezes.thaw_held(3, deadline()).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(freezes.devices.begin(3, "freeze").is_err());
        freezes.devices.ended(3);
        assert!(freezes.devices.lock().is_empty());
    }
}
