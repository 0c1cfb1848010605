//! Checks of paths that become arguments of programs.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::{DeviceNumber, block_device};

/// Checks that `path` is absolute, so that no program takes it for an option, and has no control characters,
/// which error messages and tables of mounts cannot show on one line.
///
/// # Errors
/// Returns `InvalidArgument`. `what` names the path in the message.
pub(crate) fn check_path(what: &str, path: &Path) -> Result<()> {
    let is_plain = path.as_os_str().as_bytes().iter().all(|byte| !byte.is_ascii_control());
    if path.is_absolute() && is_plain {
        return Ok(());
    }
    let message = format!("{what} {path:?} is not an absolute path without control characters");
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

/// Returns the number of the block device at `device`. Blocks only while the directory of the device node
/// does.
///
/// # Errors
/// Returns `InvalidArgument` if the path has a form that is not accepted or leads to another kind of file;
/// otherwise the errors of `statx`, such as `NotFound`.
pub(crate) fn check_device(device: &Path) -> Result<DeviceNumber> {
    check_path("the device", device)?;
    let name = device.display();
    let found = block_device(device)
        .map_err(|error| Error::from_io(format!("cannot examine the device {name}"), error))?;
    found.ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, format!("{name} is not a block device"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_of_block_devices_are_accepted() {
        for bad in ["dev/nbd0", "-F", "", "/dev/nbd0\n"] {
            let error = check_device(Path::new(bad)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{bad:?}");
            assert!(!error.message().contains('\n'), "{error}");
        }
        let file = check_device(Path::new("/etc/hostname")).unwrap_err();
        assert_eq!(file.kind(), ErrorKind::InvalidArgument);
        let missing = check_device(Path::new("/dev/no-such-device")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
