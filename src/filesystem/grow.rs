//! Grows a mounted file system to the size of its device.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::block;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tokio::time::Instant;

use crate::blocking::bounded;
use crate::call::Call;
use crate::kind::Kind;
use crate::path::{check_device, check_path};
use crate::superblock::{self, Size};
use crate::tools::{BTRFS, RESIZE2FS, XFS_GROWFS};
use crate::writers::refuse_if_written;

/// Grows the file system on `device`, which is mounted at `mountpoint`, to the size of the device. Succeeds
/// if it has this size already. It stays in use meanwhile. A growth that is interrupted can be repeated.
///
/// # Errors
/// Returns `PermissionDenied` if the process has no CAP_SYS_RESOURCE, which ext4 requires; `Unsupported` if
/// the program is not installed; `TimedOut`; otherwise `Internal` with the output of the program.
pub async fn grow(device: &Path, mountpoint: &Path, kind: Kind, deadline: Instant) -> Result<()> {
    let number = check_device(device)?;
    check_path("the mount point", mountpoint)?;
    refuse_if_written(number, device)?;
    let call = match kind {
        Kind::Ext4 => Call::new(RESIZE2FS, device).arg(device),
        Kind::Xfs => Call::new(XFS_GROWFS, mountpoint).arg("-d").arg(mountpoint),
        Kind::Btrfs => {
            Call::new(BTRFS, mountpoint).args(["filesystem", "resize", "max"]).arg(mountpoint)
        }
    };
    let ended = call.run(deadline).await?;
    if ended.reports("Permission denied") || ended.reports("Operation not permitted") {
        return Err(ended.failure(ErrorKind::PermissionDenied).with_repair(
            "run the daemon with CAP_SYS_ADMIN and CAP_SYS_RESOURCE; if dmesg reports errors of the file \
             system, check it: e2fsck -f",
        ));
    }
    let shown = device.display();
    ended.success().map(drop).map_err(|error| {
        error.with_repair(format!("findmnt {shown} and dmesg show the state of the file system"))
    })
}

/// Returns whether the file system on `device` is smaller than the device by at least one of its blocks. It
/// can also return true for a rest at the end that the file system cannot use, and for some seconds after
/// XFS has grown; [`grow`] then has nothing to do, and succeeds.
///
/// # Errors
/// Returns `InvalidArgument` if the device has no file system of this kind; `TimedOut` at the deadline; an
/// error if the device cannot be read.
pub async fn needs_growth(device: &Path, kind: Kind, deadline: Instant) -> Result<bool> {
    check_device(device)?;
    let path = device.to_owned();
    let read = move || {
        let name = path.display();
        let (size, start) = read_start(&path)
            .map_err(|error| Error::from_io(format!("cannot read {name}"), error))?;
        let Some(Size { bytes, block }) = superblock::size(kind, &start) else {
            let message = format!("{name} has no intact superblock of {kind}");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair(format!("blkid -p {name}")));
        };
        Ok(size.saturating_sub(bytes) >= block)
    };
    bounded("read the superblock of", device, deadline, read).await
}

/// Returns the size of a device and the bytes at its beginning.
fn read_start(device: &Path) -> std::io::Result<(u64, Vec<u8>)> {
    let file = File::open(device)?;
    let size = block::device_size(&file)?;
    let length = superblock::LENGTH;
    // XFS writes its superblock without the cache of the device. Pages that are in use, as those of ext4 and
    // btrfs are, stay cached and are up to date.
    let cached = i64::try_from(length).unwrap_or_default();
    posix_fadvise(&file, 0, cached, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    let length = usize::try_from(size).map_or(length, |size| size.min(length));
    let mut start = vec![0; length];
    file.read_exact_at(&mut start, 0)?;
    Ok((size, start))
}
