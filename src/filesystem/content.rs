//! What a device contains.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::block::device_size;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use tokio::time::Instant;

use crate::blkid::{Found, Signature, probe};
use crate::blocking::bounded;
use crate::path::check_device;
use crate::unlocked::{Stored, stored};
use crate::writers::refuse_if_written;
use crate::zeroes::first_data;

/// How long a device that is in use is tried again. A process that another thread starts has, until its exec,
/// copies of all descriptors, also of one that has the device open exclusively and is closed meanwhile.
pub(crate) const BUSY_TIMEOUT: Duration = Duration::from_secs(3);

/// The time between two attempts.
pub(crate) const BUSY_DELAY: Duration = Duration::from_millis(100);

/// What a device contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Nothing: blkid finds no signature, and all bytes that were read are zero.
    Empty,
    /// A file system.
    Filesystem(Found),
    /// Something that is known, but cannot be mounted, as blkid names it: `crypto_LUKS`, `LVM2_member`,
    /// `linux_raid_member`, `swap`, `zfs_member`, `partition table gpt`.
    Other(String),
    /// Data without a signature, or with signatures that contradict each other. The text says what was found.
    Unknown(String),
}

/// Determines what `device` contains. Opens the device only for reading.
///
/// [`Content::Empty`] means that the low-level probe of blkid finds no file system, no RAID member, no
/// encrypted volume and no partition table; that devices up to 64 MiB contain only zeroes; and that in
/// larger devices the first and the last 4 MiB and at least 1024 samples of 32 KiB at even distances
/// contain only zeroes. Nothing is proved of what lies between the samples. Of a device of dm-crypt, the zeroes are
/// those of the device below it: what was never written is noise above.
///
/// # Errors
/// Returns `InvalidArgument` if `device` is not a block device, or has no bytes; `Aborted` while a format
/// or a repair of an earlier call runs; `InUse` if no signature was found and another program has the
/// device open exclusively, as mkfs has; `TimedOut` at the deadline; `Unsupported` if blkid is not
/// installed. A device that cannot be read is an error.
pub async fn content(device: &Path, deadline: Instant) -> Result<Content> {
    let number = check_device(device)?;
    refuse_if_written(number, device)?;
    match probe(device, deadline).await? {
        Signature::Filesystem(found) => return Ok(Content::Filesystem(found)),
        Signature::Other(name) => return Ok(Content::Other(name)),
        Signature::Unclear(what) => return Ok(Content::Unknown(what)),
        Signature::None => {}
    }
    let last_attempt = deadline.min(Instant::now() + BUSY_TIMEOUT);
    let found = loop {
        let (path, stored) = (device.to_owned(), stored(number, deadline).await?);
        let search = move || search(&path, stored, deadline);
        match bounded("read", device, deadline, search).await {
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < last_attempt => {
                tokio::time::sleep(BUSY_DELAY).await;
            }
            other => break other?,
        }
    };
    Ok(match found {
        None => Content::Empty,
        Some(at) => Content::Unknown(format!("data at byte {at}")),
    })
}

/// Returns the position of the first data in a device without a signature, or in the device where its content is
/// stored.
fn search(device: &Path, stored: Option<Stored>, deadline: Instant) -> Result<Option<u64>> {
    let exclusive = open_exclusively(device)?;
    let (device, below, start) = match &stored {
        Some(Stored { device, start }) => {
            let below = File::open(device).map_err(|error| {
                Error::from_io(format!("cannot open {}", device.display()), error)
            })?;
            (&**device, Some(below), *start)
        }
        None => (device, None, 0),
    };
    let file = below.as_ref().unwrap_or(&exclusive);
    let name = device.display();
    let unreadable = |error| {
        Error::from_io(format!("cannot read {name}, so its content is unknown"), error)
            .with_repair("check the storage of the volume, for example with cleat list, then retry")
    };
    let size = device_size(file).map_err(unreadable)?;
    if size == 0 {
        let message = format!("{name} has 0 bytes: it is not connected to a volume");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    first_data(file, start..size, deadline).map_err(unreadable)
}

/// Opens a device for reading, and keeps programs that would change it (mkfs, fsck, a mount) from opening it
/// while the file is open.
///
/// # Errors
/// Returns `InUse` if such a program has it open.
pub(crate) fn open_exclusively(device: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).custom_flags(OFlag::O_EXCL.bits()).open(device);
    let name = device.display();
    opened.map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            let message = format!(
                "{name} is in use: it is mounted, part of another device, or another program formats, \
                 checks or examines it"
            );
            Error::new(ErrorKind::InUse, message)
                .with_repair(format!("lsblk {name}; fuser --verbose {name}"))
        }
        _ => Error::from_io(format!("cannot open {name}"), error),
    })
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("nothing"),
            Self::Filesystem(Found { kind, uuid: Some(uuid), .. }) => {
                write!(f, "the file system {kind} with UUID {uuid}")
            }
            Self::Filesystem(Found { kind, .. }) => write!(f, "the file system {kind}"),
            Self::Other(name) => write!(f, "{name}"),
            Self::Unknown(what) => write!(f, "unknown content ({what})"),
        }
    }
}
