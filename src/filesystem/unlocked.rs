//! The devices of dm-crypt above encrypted devices: found in sysfs, grown and removed by cryptsetup.
//!
//! An encrypted device that has never been written shows noise and not zeroes, because the zeroes below it are
//! decrypted. So whether it is empty is decided by what the device below it contains ([`stored`]).

use std::fs;
use std::path::{Path, PathBuf};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::DeviceNumber;
use tokio::time::Instant;

use crate::blocking::bounded;
use crate::call::{Call, Ended};
use crate::tools::CRYPTSETUP;

/// The directory with the block devices.
const BLOCK_DEVICES: &str = "/sys/class/block";

/// The unit of offsets and sizes in the kernel and in the output of cryptsetup, in bytes.
const SECTOR: u64 = 512;

/// The exit codes of cryptsetup (cryptsetup(8), RETURN CODES).
const NO_SUCH_DEVICE: i32 = 4;
pub(crate) const BUSY: i32 = 5;

/// A device of the device mapper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unlocked {
    /// The path of its node.
    pub node: PathBuf,
    /// Its number, as in the table of mounts.
    pub number: DeviceNumber,
    /// The devices below it.
    pub below: Vec<DeviceNumber>,
    /// Its size in bytes.
    pub size: u64,
}

/// Returns the device of the device mapper with this name; `None` if there is none. Reads sysfs only.
///
/// # Errors
/// Returns an error if sysfs cannot be read, and `TimedOut` at the deadline.
pub async fn unlocked(name: &str, deadline: Instant) -> Result<Option<Unlocked>> {
    let wanted = name.to_owned();
    bounded("find", Path::new(name), deadline, move || find(&wanted)).await
}

fn find(name: &str) -> Result<Option<Unlocked>> {
    let directory = Path::new(BLOCK_DEVICES);
    let failed = |error| Error::from_io(format!("cannot read {BLOCK_DEVICES}"), error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if value(&path.join("dm/name")).as_deref() != Some(name) {
            continue;
        }
        // It can end at any moment, so what cannot be read is a device that is gone.
        let found = || {
            let number = number(&path)?;
            let size = value(&path.join("size"))?.parse::<u64>().ok()?.checked_mul(SECTOR)?;
            let slaves = fs::read_dir(path.join("slaves")).ok()?;
            let numbers = slaves.map(|slave| self::number(&slave.ok()?.path()));
            let node = Path::new("/dev").join(entry.file_name());
            Some(Unlocked { node, number, below: numbers.collect::<Option<_>>()?, size })
        };
        return Ok(found());
    }
    Ok(None)
}

/// Returns the number of the device with this directory in sysfs.
fn number(directory: &Path) -> Option<DeviceNumber> {
    let text = value(&directory.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// Returns the text of a file in sysfs.
fn value(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

/// Removes the device `name` of the device mapper. One that does not exist is success. With `deferred`, one that is in
/// use is removed by the kernel when its last user ends, and that is success, too.
///
/// # Errors
/// Returns `InUse` if it has users; `TimedOut`; otherwise `Internal` with the output of cryptsetup.
pub async fn lock(name: &str, deferred: bool, deadline: Instant) -> Result<()> {
    if unlocked(name, deadline).await?.is_none() {
        return Ok(());
    }
    let call = Call::new(CRYPTSETUP, Path::new(name))
        .arg("close")
        .args(deferred.then_some("--deferred"))
        .arg(name);
    match ended(call, deadline).await? {
        ended if ended.code() == Some(NO_SUCH_DEVICE) => Ok(()),
        ended if ended.code() == Some(BUSY) => {
            let repair =
                format!("lsblk /dev/mapper/{name}; fuser --verbose --mount /dev/mapper/{name}");
            Err(ended.failure(ErrorKind::InUse).with_repair(repair))
        }
        ended => ended.success().map(drop),
    }
}

/// Makes the device `name` as large as the encrypted device below it.
///
/// # Errors
/// Returns `TimedOut`, and `Internal` with the output of cryptsetup.
pub async fn grow_unlocked(name: &str, deadline: Instant) -> Result<()> {
    let call = Call::new(CRYPTSETUP, Path::new(name)).arg("resize").arg(name);
    ended(call, deadline).await?.success().map(drop)
}

/// The part of a device that an encrypted device stores its content in.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) device: PathBuf,
    /// The offset of the content in bytes.
    pub(crate) start: u64,
}

/// Returns where the content of a device is stored, if the device is one of dm-crypt.
///
/// # Errors
/// Returns `Internal` if cryptsetup does not say it; otherwise as [`lock`].
pub(crate) async fn stored(number: DeviceNumber, deadline: Instant) -> Result<Option<Stored>> {
    let directory = format!("/sys/dev/block/{}:{}/dm", number.major, number.minor);
    let of = |file: &str| value(&Path::new(&directory).join(file));
    let (Some(name), Some(uuid)) = (of("name"), of("uuid")) else { return Ok(None) };
    if !uuid.starts_with("CRYPT-") {
        return Ok(None);
    }
    let call = Call::new(CRYPTSETUP, Path::new(&name)).arg("status").arg(&name);
    let status = ended(call, deadline).await?.success()?;
    let stored = parse_status(&status.stdout).ok_or_else(|| {
        let message = format!("cannot parse the output of cryptsetup: {:?}", status.stdout);
        Error::new(ErrorKind::Internal, message)
    })?;
    Ok(Some(stored))
}

/// Parses the output of `cryptsetup status`, of which each line is `NAME: VALUE`. The offset is in sectors in all
/// versions; the text after it is not.
fn parse_status(text: &str) -> Option<Stored> {
    let value = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.trim_start().strip_prefix(name));
        lines.next().map(str::trim_start)
    };
    let device = PathBuf::from(value("device:")?.trim_end());
    let sectors: u64 = value("offset:")?.split_whitespace().next()?.parse().ok()?;
    Some(Stored { device, start: sectors.checked_mul(SECTOR)? })
}

/// Runs cryptsetup. It makes the node of a device itself and does not wait for udev: in a container, the semaphore by
/// which udev answers belongs to another namespace, and the wait would not end.
pub(crate) async fn ended(call: Call<'_>, deadline: Instant) -> Result<Ended> {
    call.env("DM_DISABLE_UDEV", "1").run(deadline).await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_place_of_the_content_is_parsed() {
        let older = "/dev/mapper/a is active and is in use.\n  type:    LUKS2\n  device:  /dev/nbd0\n  \
                     sector size:  512\n  offset:  32768 sectors\n  size:    1 sectors\n";
        let newer = "  device:  /dev/nbd0\n  offset:  32768 [512-byte units] (16777216 [bytes])\n";
        for text in [older, newer] {
            let stored = parse_status(text).unwrap();
            assert_eq!(stored.device, Path::new("/dev/nbd0"));
            assert_eq!(stored.start, 16 << 20);
        }
        assert!(parse_status("/dev/mapper/a is inactive.\n").is_none());
    }

    #[tokio::test]
    async fn a_device_that_does_not_exist_is_locked() {
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(unlocked("cleat-no-such-device", deadline).await.unwrap(), None);
        lock("cleat-no-such-device", false, deadline).await.unwrap();
    }

    proptest! {
        #[test]
        fn no_output_makes_the_parser_panic(text in "(device:|offset:|[\\PC\n]){0,40}") {
            parse_status(&text);
        }
    }
}
