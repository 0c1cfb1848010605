//! The space of a mounted file system, and the size of a device.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use cleat_core::error::{Error, Result};
use cleat_sys::block;
use nix::fcntl::OFlag;
use nix::sys::statvfs::{Statvfs, statvfs};
use tokio::time::Instant;

use crate::blocking::bounded;
use crate::path::{check_device, check_path};

/// An amount of bytes or of inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// All of them. File systems without a limit of inodes, such as btrfs, report 0 inodes.
    pub total: u64,
    /// Those that are in use.
    pub used: u64,
    /// Those that users without privileges can use. `total` may exceed `used` plus `available`, because a
    /// part may be reserved.
    pub available: u64,
}

/// The space of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// The bytes for data.
    pub bytes: Amount,
    /// The inodes.
    pub inodes: Amount,
}

/// Returns the space of the file system that `path` belongs to.
///
/// # Errors
/// Returns `NotFound` if the path does not exist; `TimedOut` if the file system does not answer before the
/// deadline; otherwise the errors of `statvfs`, such as an I/O error of a file system that has failed.
pub async fn usage(path: &Path, deadline: Instant) -> Result<Usage> {
    check_path("the path", path)?;
    let owned = path.to_owned();
    let read = move || {
        let found = statvfs(&owned).map_err(|error| {
            let message = format!("cannot read the space of {}", owned.display());
            Error::from_io(message, error.into())
        })?;
        Ok(convert(&found))
    };
    bounded("read the space of", path, deadline, read).await
}

fn convert(found: &Statvfs) -> Usage {
    let unit = found.fragment_size();
    let amount = |total: u64, free: u64, available: u64, unit: u64| Amount {
        total: total.saturating_mul(unit),
        used: total.saturating_sub(free).saturating_mul(unit),
        available: available.saturating_mul(unit),
    };
    Usage {
        bytes: amount(found.blocks(), found.blocks_free(), found.blocks_available(), unit),
        inodes: amount(found.files(), found.files_free(), found.files_available(), 1),
    }
}

/// Returns the size of a block device, in bytes.
///
/// # Errors
/// Returns `InvalidArgument` if `device` is not a block device; `TimedOut` at the deadline; otherwise the
/// errors of opening it.
pub async fn device_size(device: &Path, deadline: Instant) -> Result<u64> {
    check_device(device)?;
    let path = device.to_owned();
    let read = move || {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(&path)
            .and_then(block::device_size);
        opened.map_err(|error| {
            Error::from_io(format!("cannot read the size of {}", path.display()), error)
        })
    };
    bounded("read the size of", device, deadline, read).await
}
