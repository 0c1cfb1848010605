//! Formats an empty device.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::blkid::Found;
use crate::call::Call;
use crate::content::{BUSY_DELAY, BUSY_TIMEOUT, Content, content};
use crate::kind::Kind;
use crate::mkfs_options::arguments;
use crate::path::check_device;

/// What mkfs programs write if they cannot open the device exclusively.
const BUSY: [&str; 2] = ["apparently in use by the system", "Device or resource busy"];

/// How a device is formatted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// The UUID of the new file system. Without one, mkfs makes a random UUID.
    pub uuid: Option<String>,
    /// Further options of the mkfs program, one word each, such as `-m0` or `-O` and `^64bit`. Options that
    /// could force a format or name another device or file are refused.
    pub extra: Vec<String>,
}

/// Formats `device` if [`content()`] finds it empty, and returns the new file system. Reads the device
/// first, in this call. mkfs is never told to overwrite existing content.
///
/// A mkfs that has been started is never killed by this process, because a device that is formatted in part
/// is neither empty nor usable. At the deadline, and when the returned future is dropped, it continues:
/// until it has ended, calls for the device fail with `Aborted`, and afterwards [`content()`] finds the new
/// file system. If the machine fails meanwhile, [`content()`] may find [`Content::Unknown`], and this
/// function refuses the device.
///
/// # Errors
/// Returns `InUse` if the device contains anything, or another program has it open exclusively;
/// `InvalidArgument` for options that are not permitted; `Unsupported` if mkfs is not installed;
/// `TimedOut`; `Aborted` while mkfs of an earlier call runs; otherwise the errors of [`content()`], and
/// `Internal` with the output of mkfs.
pub async fn format(
    device: &Path,
    kind: Kind,
    options: &FormatOptions,
    deadline: Instant,
) -> Result<Found> {
    let arguments = arguments(kind, options.uuid.as_deref(), &options.extra)?;
    // A missing program is reported before the device is read.
    kind.mkfs().find(device)?;
    let last_attempt = deadline.min(Instant::now() + BUSY_TIMEOUT);
    loop {
        let found = content(device, deadline).await?;
        if found != Content::Empty {
            return Err(not_empty(device, kind, &found));
        }
        let number = check_device(device)?;
        let call = Call::new(kind.mkfs(), device).args(&arguments).arg(device).writes(number);
        let ended = call.run(deadline).await?;
        let is_busy = BUSY.iter().any(|text| ended.reports(text));
        if is_busy && !ended.status.success() {
            if Instant::now() < last_attempt {
                // It has written nothing.
                tokio::time::sleep(BUSY_DELAY).await;
                continue;
            }
            let repair = format!("lsblk {0}; fuser --verbose {0}", device.display());
            return Err(ended.failure(ErrorKind::InUse).with_repair(repair));
        }
        ended.success().map_err(|error| {
            error.with_repair(format!("check the size of {} and the options", device.display()))
        })?;
        break;
    }
    match content(device, deadline).await? {
        Content::Filesystem(made) if is_as_requested(&made, kind, options) => Ok(made),
        other => {
            let (name, device) = (kind.mkfs().name, device.display());
            let message = format!("{name} succeeded, but {device} contains {other} afterwards");
            Err(Error::new(ErrorKind::Internal, message))
        }
    }
}

fn is_as_requested(made: &Found, kind: Kind, options: &FormatOptions) -> bool {
    let has_uuid =
        |wanted: &String| made.uuid.as_ref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(wanted));
    made.kind == kind.name() && options.uuid.as_ref().is_none_or(has_uuid)
}

fn not_empty(device: &Path, kind: Kind, found: &Content) -> Error {
    let device = device.display();
    let message = format!("cannot format {device} as {kind}: it contains {found}");
    Error::new(ErrorKind::InUse, message).with_repair(format!(
        "examine it: blkid -p {device}; wipefs --no-act {device}; and only if nothing on it is needed: \
         blkdiscard --force --zeroout {device}"
    ))
}
