//! Swap areas.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;

/// Stops the use of the swap area `path` (swapoff(2)). Blocks until everything in it is back in memory.
///
/// # Errors
/// Returns `EINVAL` if `path` is not a swap area in use; `ENOMEM` if the memory cannot hold its content; `EPERM`
/// without CAP_SYS_ADMIN.
pub fn swap_off(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a string that ends with a zero byte and lives until the call returns.
    Errno::result(unsafe { libc::swapoff(path.as_ptr()) })?;
    Ok(())
}
