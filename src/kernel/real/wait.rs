//! Waits until a device is in the state that was asked for, and describes what is missing.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::{ANNOUNCE_AFTER, RealKernel};
use crate::udev::{Missing, udevd_idle};
use crate::{DeviceIndex, DevicePaths, Identity, KernelEvent};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The first and the longest time between two checks without an event. The time doubles in between.
const POLL_MIN: Duration = Duration::from_millis(2);
const POLL_MAX: Duration = Duration::from_millis(500);

/// How long udevd may take to make the symlinks of partitions after that of their disk.
const PARTITIONS_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why a device is not ready yet.
pub(super) enum NotReady {
    /// The device has this size, in bytes, instead of the right one.
    Size(u64),
    /// A name is missing.
    Name(Missing),
}

impl RealKernel {
    /// Calls `check` until it returns a value or an error, or the deadline passes (`None`): at every event
    /// of the device, and after a time without one, because events may be lost.
    pub(super) fn wait<T>(
        &self,
        deadline: Instant,
        events: Option<(&Receiver<KernelEvent>, DeviceIndex)>,
        mut check: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut pause = POLL_MIN;
        loop {
            if let Some(found) = check()? {
                return Ok(Some(found));
            }
            let now = SystemClock.now();
            if now >= deadline {
                return Ok(None);
            }
            let until = deadline.min(now + pause);
            match events {
                Some((events, index)) => wait_for_event(events, index, until),
                None => sleep_until(until),
            }
            pause = (pause * 2).min(POLL_MAX);
        }
    }
}

impl RealKernel {
    /// Waits until the partitions that the device has already have their symlinks. udevd opens the device before
    /// it makes the symlink of the disk, and with the first open the kernel finds the partitions. Waits for at
    /// most [`PARTITIONS_TIMEOUT`]: a content of the volume that udevd cannot handle must not prevent a map.
    ///
    /// # Errors
    /// Returns an error if sysfs cannot be read.
    pub(super) fn wait_for_partitions(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        events: Option<&Receiver<KernelEvent>>,
        deadline: Instant,
    ) -> Result<()> {
        if self.names.makes_symlinks() {
            // Only udevd makes the symlinks of partitions.
            return Ok(());
        }
        let begun = SystemClock.now();
        let mut announced = begun;
        let deadline = deadline.min(begun + PARTITIONS_TIMEOUT);
        let complete = self.wait(deadline, events.map(|events| (events, index)), || {
            let partitions = self.sysfs.partitions(index)?;
            if partitions.iter().all(|(partition, number)| {
                self.names.partition_has_symlink(index, identity, *partition, *number)
            }) {
                return Ok(Some(()));
            }
            if SystemClock.elapsed_since(announced) >= ANNOUNCE_AFTER && udevd_idle() {
                self.sysfs.announce_partitions(index);
                announced = SystemClock.now();
            }
            Ok(None)
        })?;
        if complete.is_none() {
            tracing::warn!(device = index, "udevd has not made the symlinks of all partitions");
        }
        Ok(())
    }
}

/// Waits for an event of the device, until `until` at most.
fn wait_for_event(events: &Receiver<KernelEvent>, index: DeviceIndex, until: Instant) {
    loop {
        match events.recv_deadline(until) {
            Ok(KernelEvent::Changed(changed)) if changed == index => return,
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => return sleep_until(until),
        }
    }
}

/// Sleeps while the kernel sends no events.
#[allow(clippy::disallowed_methods, reason = "the state of the kernel is polled in real time")]
fn sleep_until(until: Instant) {
    std::thread::sleep(until.saturating_duration_since(SystemClock.now()));
}

pub(super) fn not_ready(
    index: DeviceIndex,
    size: u64,
    paths: &DevicePaths,
    missing: Option<NotReady>,
) -> Error {
    let (what, hint) = match missing {
        Some(NotReady::Size(found)) => {
            let what = format!("/dev/nbd{index} has {found} bytes instead of {size}");
            (what, "the kernel has not applied the size; see `dmesg`")
        }
        Some(NotReady::Name(missing)) => missing.explain(paths),
        None => (format!("/dev/nbd{index} has no device number"), "see `dmesg`"),
    };
    Error::new(ErrorKind::TimedOut, format!("the device was not ready in time: {what}"))
        .with_repair(hint)
}

pub(super) fn still_configured(index: DeviceIndex) -> Error {
    let message = format!("/dev/nbd{index} is disconnected, but not free: a process keeps it open");
    Error::new(ErrorKind::TimedOut, message)
        .with_repair(format!("close or end its holders: see `fuser -v /dev/nbd{index}`"))
}
