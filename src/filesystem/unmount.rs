//! Unmounts.

use std::path::Path;

use cleat_core::error::{ErrorKind, Result};
use cleat_kernel::MountEntry;
use tokio::time::Instant;

use crate::call::{Call, Ended};
use crate::mount_table::find;
use crate::tools::UMOUNT;

/// Unmounts everything that is mounted at `target`, one mount after the other if several cover each other.
/// The kernel writes the dirty data of a file system before its last mount is gone. Succeeds if nothing is
/// mounted there. Returns whether something was.
///
/// At the deadline the unmount may continue in the kernel; [`find`] shows its result.
///
/// # Errors
/// Returns `InUse` if processes have files of the mount open, or other mounts are below it; `TimedOut`;
/// otherwise the errors of [`find`] and of umount(8).
pub async fn unmount(target: &Path, deadline: Instant) -> Result<bool> {
    remove(target, &[], deadline).await
}

/// Removes everything that is mounted at `target` from the directory tree, also while it is in use
/// (MNT_DETACH), together with the mounts below it. The file system stays in use until the last process has
/// closed its files, and its device must not be given to another volume before. Succeeds if nothing is
/// mounted there. Returns whether something was.
///
/// # Errors
/// Returns the errors of [`unmount`] except `InUse`.
pub async fn detach(target: &Path, deadline: Instant) -> Result<bool> {
    remove(target, &["--lazy"], deadline).await
}

async fn remove(target: &Path, options: &[&str], deadline: Instant) -> Result<bool> {
    let mut has_removed = false;
    while let Some(entry) = find(target, deadline).await? {
        // The path of the entry has no symlinks, so umount need not examine a file system that may have
        // failed.
        let call = Call::new(UMOUNT, target).args(["--internal-only", "--no-canonicalize"]);
        let call = call.args(options.iter().copied()).arg(&entry.mount.path);
        let ended = call.run(deadline).await?;
        if !ended.status.success() && is_still_there(&entry, target, deadline).await? {
            return Err(failure(&ended, target));
        }
        has_removed = true;
    }
    Ok(has_removed)
}

/// Whether the mount is still there. Another program may have unmounted it in the meantime.
async fn is_still_there(entry: &MountEntry, target: &Path, deadline: Instant) -> Result<bool> {
    Ok(find(target, deadline).await?.is_some_and(|found| found.id == entry.id))
}

fn failure(ended: &Ended, target: &Path) -> cleat_core::error::Error {
    if ended.reports("target is busy") {
        let users = format!("fuser --verbose --mount {}", target.display());
        return ended.failure(ErrorKind::InUse).with_repair(users);
    }
    let is_denied = ended.reports("must be superuser") || ended.reports("ermission denied");
    let kind = if is_denied { ErrorKind::PermissionDenied } else { ErrorKind::Internal };
    ended.failure(kind)
}
