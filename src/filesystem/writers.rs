//! The programs that write to devices and were left running when their caller's deadline expired.
//!
//! A format or a repair that is killed in the middle leaves a device that is neither empty nor usable, so
//! such a program is never killed. Until it has ended, no other call may examine or use its device.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::DeviceNumber;

/// A device number as a key.
type Key = (u32, u32);

/// The name of each program that writes, and its process number once it has one.
static WRITERS: Mutex<BTreeMap<Key, (&'static str, Option<u32>)>> = Mutex::new(BTreeMap::new());

/// The only program of this process that writes to a device. Dropped when the program has ended.
#[derive(Debug)]
pub(crate) struct Writer(Key);

impl Writer {
    /// Registers the program `name` as the one that writes to the device.
    ///
    /// # Errors
    /// Returns `Aborted` while another one is registered.
    pub(crate) fn register(
        number: DeviceNumber,
        device: &Path,
        name: &'static str,
    ) -> Result<Self> {
        let key = (number.major, number.minor);
        let mut writers = lock();
        refuse(&writers, key, device)?;
        writers.insert(key, (name, None));
        Ok(Self(key))
    }

    /// Records the number of the process for error messages.
    pub(crate) fn started(&self, pid: u32) {
        if let Some((_, recorded)) = lock().get_mut(&self.0) {
            *recorded = Some(pid);
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        lock().remove(&self.0);
    }
}

/// Checks that no program that this process has started writes to the device.
///
/// # Errors
/// Returns `Aborted` while a format or a repair still runs. The message names the program and its process.
pub(crate) fn refuse_if_written(number: DeviceNumber, device: &Path) -> Result<()> {
    refuse(&lock(), (number.major, number.minor), device)
}

fn refuse(
    writers: &BTreeMap<Key, (&'static str, Option<u32>)>,
    key: Key,
    device: &Path,
) -> Result<()> {
    let Some((name, pid)) = writers.get(&key) else { return Ok(()) };
    let device = device.display();
    let process = pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
    let message = format!("{name}{process} of an earlier call still writes to {device}");
    let error = Error::new(ErrorKind::Aborted, message);
    Err(match pid {
        Some(pid) => error.with_repair(format!(
            "retry when it has ended; ps -o stat,wchan:20,args {pid} shows what it waits for"
        )),
        None => error,
    })
}

fn lock() -> MutexGuard<'static, BTreeMap<Key, (&'static str, Option<u32>)>> {
    // No code panics while it holds the lock.
    WRITERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_one_writer() {
        let number = |minor| DeviceNumber { major: 4095, minor };
        let device = Path::new("/dev/nbd7");
        let writer = Writer::register(number(7), device, "mkfs.xfs").unwrap();
        writer.started(4321);
        let refused = Writer::register(number(7), device, "e2fsck").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Aborted);
        let expected = "mkfs.xfs (process 4321) of an earlier call still writes to /dev/nbd7";
        assert_eq!(refused.message(), expected);
        assert!(refuse_if_written(number(7), device).is_err());
        refuse_if_written(number(8), device).unwrap();
        drop(writer);
        refuse_if_written(number(7), device).unwrap();
    }
}
