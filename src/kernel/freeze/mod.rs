//! File systems on a device: frozen (FIFREEZE) for a moment, in whatever mount namespace they are
//! mounted, each once; and thawed again, whatever happened meanwhile.
//!
//! Freezing writes back everything that is dirty and thawing writes a superblock, both through the
//! device: with a backend that hangs neither returns. So both are done on threads that can be left
//! behind, and a freeze that nobody wants any more is undone by its own thread. What is frozen is kept
//! open: it cannot be unmounted then (which would leave it frozen, out of everybody's reach) and is
//! thawed without being looked for.

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

/// Threads that may be stuck: one or two a device, each waits for a backend of its own.
const STUCK_MAX: usize = 64;

/// What this process has frozen.
#[derive(Debug)]
pub(super) struct Freezes {
    pub(super) threads: BoundedCalls,
    devices: Arc<Devices>,
}

#[derive(Debug, Default)]
struct Devices(Mutex<BTreeMap<DeviceIndex, Freeze>>);

/// One of a device, from its beginning until everything is thawed.
#[derive(Debug, Default)]
struct Freeze {
    /// It is to be thawed, or was.
    over: bool,
    /// Threads that freeze or thaw.
    running: u32,
    /// What is frozen, to be thawed by us.
    held: Vec<File>,
}

/// A thread's part of a freeze, which ends with it, even where it was never begun.
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
    /// Freezes all file systems on `disk`; those that somebody else has frozen already are returned.
    /// Where it fails, nothing stays frozen.
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
            // Where it goes on behind the scenes, its own thread does the rest.
            let _ = self.thaw_held(index, deadline);
        }
        frozen
    }

    /// Thaws what was frozen by this process; or else by another one, which left `spared` as they were,
    /// everything that is mounted, where `disk` is given.
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
                _ => Err(still_under_way(&what)),
            };
        }
        let turn = Turn { devices: Arc::clone(&self.devices), index };
        let call = move || {
            let _turn = turn;
            // Each, whatever became of the others.
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

    /// Every file system on `disk`, once, in our own namespace where it is there.
    fn open_all(&self, proc: &Proc, disk: &Disk, deadline: Instant) -> Result<Vec<Opened>> {
        let found = in_namespaces(
            proc,
            &self.threads,
            disk,
            UnmountScope::All,
            "look at mounts",
            deadline,
            open_here,
        )?;
        let mut all: Vec<Opened> = Vec::new();
        for opened in found {
            let opened = opened.map_err(|error| {
                Error::from_io("cannot look at the mounts of a namespace", error)
            })?;
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
            return Err(still_under_way(what));
        }
        devices.insert(index, Freeze { running: 1, ..Freeze::default() });
        Ok(())
    }

    fn with<T>(&self, index: DeviceIndex, action: impl FnOnce(&mut Freeze) -> T) -> Option<T> {
        self.lock().get_mut(&index).map(action)
    }

    /// Freezes one after the other, on a thread of its own. Each that comes when it is over already is
    /// thawed at once.
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

    /// It is over: what is to be thawed, by a thread that says when it has ended, and how many others
    /// are still at it. `None`: there is nothing.
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

    /// A thread has done its part.
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
        // It is not frozen: somebody else has thawed it.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

fn still_under_way(what: &str) -> Error {
    let message = format!("cannot {what}: an earlier freeze or thaw of it is still under way");
    Error::new(ErrorKind::TimedOut, message)
        .with_repair("its backend does not answer: see `cleat stats` and the daemon's log")
}

fn text(number: DeviceNumber) -> String {
    format!("{}:{}", number.major, number.minor)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn directory() -> (tempfile::TempDir, File) {
        let directory = tempfile::tempdir().unwrap();
        let file = File::open(directory.path()).unwrap();
        (directory, file)
    }

    #[test]
    fn a_device_that_is_mounted_nowhere_is_frozen_and_thawed_as_it_is() {
        let (proc, freezes) = (Proc("/proc".into()), Freezes::default());
        let numbers = vec![DeviceNumber { major: 43, minor: 0xf_ffff }];
        let disk = Disk { names: vec!["nbd9".into()], numbers };
        assert!(freezes.freeze(&proc, 9, &disk, soon()).unwrap().is_empty());
        let again = freezes.freeze(&proc, 9, &disk, soon()).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::TimedOut);
        for disk in [Some(&disk), None] {
            freezes.thaw(&proc, 9, disk, &[], soon()).unwrap();
        }
        freezes.freeze(&proc, 9, &disk, soon()).unwrap();
    }

    /// The thread that freezes comes back after everybody has left: nothing stays behind.
    #[test]
    fn a_freeze_that_is_over_before_it_ends_keeps_nothing() {
        let freezes = Freezes::default();
        let (_kept, file) = directory();
        let turn = freezes.begin(3, "freeze").unwrap();
        assert_eq!(freezes.thaw_held(3, soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        // A file system that cannot be frozen from here, or is thawed at once.
        let number = DeviceNumber { major: 1, minor: 1 };
        let _ = freezes.devices.freeze(3, vec![(number, file)]);
        drop(turn);
        assert!(freezes.devices.lock().is_empty());
        freezes.thaw_held(3, soon()).unwrap();
    }

    #[test]
    fn a_thaw_that_hangs_is_not_piled_upon() {
        let freezes = Freezes::default();
        let (_kept, file) = directory();
        drop(freezes.begin(3, "freeze").unwrap());
        freezes.devices.with(3, |freeze| freeze.held.push(file));
        let (held, running) = freezes.devices.end(3).unwrap();
        assert_eq!((held.len(), running), (1, 0));
        assert_eq!(freezes.thaw_held(3, soon()).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(freezes.devices.begin(3, "freeze").is_err());
        freezes.devices.ended(3);
        assert!(freezes.devices.lock().is_empty());
    }
}
