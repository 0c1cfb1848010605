//! Waits until a device is as it should be.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::RealKernel;
use crate::udev::Missing;
use crate::{DeviceIndex, DevicePaths, KernelEvent};
use cleat_core::error::{Error, ErrorKind, Result};

/// Events are hints; without one, things are looked at again after this, doubling.
const LOOK_AGAIN_MIN: Duration = Duration::from_millis(2);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(500);

/// Why a device is not ready yet.
pub(super) enum NotReady {
    Size(u64),
    Name(Missing),
}

impl RealKernel {
    /// Looks until there is something, an error, or the deadline (`None`): at every hint about the
    /// device, and again after a while, because hints may be lost.
    pub(super) fn wait<T>(
        &self,
        deadline: Instant,
        hints: Option<(&Receiver<KernelEvent>, DeviceIndex)>,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut pause = LOOK_AGAIN_MIN;
        loop {
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let until = deadline.min(now + pause);
            match hints {
                Some((hints, index)) => await_hint(hints, index, until),
                None => std::thread::sleep(until - now),
            }
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }
}

/// Waits for an event of the device, or until then.
fn await_hint(hints: &Receiver<KernelEvent>, index: DeviceIndex, until: Instant) {
    loop {
        match hints.recv_deadline(until) {
            Ok(KernelEvent::Changed(changed)) if changed == index => return,
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => {
                return std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
        }
    }
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
            (what, "the kernel has not taken the new size over; see `dmesg`")
        }
        Some(NotReady::Name(missing)) => missing.explain(paths),
        None => (format!("/dev/nbd{index} has no device number"), "see `dmesg`"),
    };
    Error::new(ErrorKind::TimedOut, format!("the device is not ready in time: {what}"))
        .with_repair(hint)
}

pub(super) fn still_configured(index: DeviceIndex) -> Error {
    let message =
        format!("/dev/nbd{index} is disconnected, but somebody keeps it open, so it is not free");
    Error::new(ErrorKind::TimedOut, message)
        .with_repair(format!("end what holds it: see `fuser -v /dev/nbd{index}`"))
}
