//! Checks a file system that is not mounted.

use std::path::Path;
use std::str::FromStr;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::call::{Call, Ended};
use crate::content::{BUSY_DELAY, BUSY_TIMEOUT};
use crate::kind::Kind;
use crate::path::check_device;
use crate::tools::{BTRFS, E2FSCK, XFS_REPAIR};
use crate::writers::refuse_if_written;

/// How thoroughly a file system is checked before a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CheckPolicy {
    /// Not at all.
    Never,
    /// ext4: replays the journal, and if the file system was marked as damaged, checks it and repairs what is
    /// safe to repair (`e2fsck -p`). XFS and btrfs: nothing, because the mount does what is necessary.
    #[default]
    Preen,
    /// Reads all metadata, which may take minutes. ext4: repairs what is safe to repair (`e2fsck -f -p`). XFS
    /// and btrfs: reports errors and repairs nothing (`xfs_repair -n`, `btrfs check --readonly`).
    Full,
}

impl FromStr for CheckPolicy {
    type Err = Error;

    /// Parses `never`, `preen` or `full`.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for other words.
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "never" => Ok(Self::Never),
            "preen" => Ok(Self::Preen),
            "full" => Ok(Self::Full),
            _ => {
                let message = format!("{word:?} is not a policy for checks of file systems");
                Err(Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("use never, preen or full"))
            }
        }
    }
}

/// The result of a check without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checked {
    /// The policy requires no check, or the check was not possible: XFS has a log that the next mount
    /// replays.
    Skipped,
    /// The check found no errors.
    Clean,
    /// The check found errors and repaired them.
    Repaired,
}

/// Checks the file system on `device`, which must not be mounted.
///
/// A check that may write is never killed by this process: at the deadline it continues, and until it has
/// ended, calls for the device fail with `Aborted`.
///
/// # Errors
/// Returns `Internal` if the file system has errors that were not repaired; the repair hint is the command
/// for a person to run. Returns `InUse` if the device is mounted or open exclusively; `TimedOut`; `Aborted`
/// while a format or a check of an earlier call runs; `Unsupported` if the program is not installed.
pub async fn check(
    device: &Path,
    kind: Kind,
    policy: CheckPolicy,
    deadline: Instant,
) -> Result<Checked> {
    let number = check_device(device)?;
    refuse_if_written(number, device)?;
    let name = device.display();
    match (kind, policy) {
        (_, CheckPolicy::Never) | (Kind::Xfs | Kind::Btrfs, CheckPolicy::Preen) => {
            Ok(Checked::Skipped)
        }
        (Kind::Ext4, CheckPolicy::Preen | CheckPolicy::Full) => {
            let force = (policy == CheckPolicy::Full).then_some("-f");
            let call =
                || Call::new(E2FSCK, device).arg("-p").args(force).arg(device).writes(number);
            let ended = run(call, deadline).await?;
            e2fsck(&ended).map_err(|error| hint(error, &format!("e2fsck -f {name}")))
        }
        (Kind::Xfs, CheckPolicy::Full) => {
            let call = || Call::new(XFS_REPAIR, device).arg("-n").arg(device);
            let ended = run(call, deadline).await?;
            read_only_check(&ended).map_err(|error| hint(error, &format!("xfs_repair {name}")))
        }
        (Kind::Btrfs, CheckPolicy::Full) => {
            let call = || Call::new(BTRFS, device).args(["check", "--readonly"]).arg(device);
            let ended = run(call, deadline).await?;
            read_only_check(&ended)
                .map_err(|error| hint(error, &format!("btrfs scrub, after a mount of {name}")))
        }
    }
}

/// What the programs write if another one has the device open exclusively. If it is mounted, they write that instead.
const BUSY: [&str; 2] = ["is in use", "evice or resource busy"];

/// Runs a check. If the device is busy, the check has read and written nothing, and is tried again for a short time.
async fn run<'a>(call: impl Fn() -> Call<'a>, deadline: Instant) -> Result<Ended> {
    let last_attempt = deadline.min(Instant::now() + BUSY_TIMEOUT);
    loop {
        let ended = call().run(deadline).await?;
        if !says(&ended, &BUSY) || ended.status.success() || Instant::now() >= last_attempt {
            return Ok(ended);
        }
        tokio::time::sleep(BUSY_DELAY).await;
    }
}

/// Adds the command that examines errors of the file system.
fn hint(error: Error, command: &str) -> Error {
    match error.kind() {
        ErrorKind::InUse => error.with_repair("unmount the file system first"),
        _ => error.with_repair(format!("take a snapshot of the volume, then run: {command}")),
    }
}

/// Interprets the exit code of e2fsck (e2fsck(8), EXIT CODE), which is a sum of flags.
fn e2fsck(ended: &Ended) -> Result<Checked> {
    /// Errors were corrected, and the system should be restarted, which is meant for a mounted file system.
    const REPAIRED: i32 = 1 | 2;
    match ended.code() {
        Some(0) => Ok(Checked::Clean),
        Some(code) if code & !REPAIRED == 0 => Ok(Checked::Repaired),
        _ => Err(ended.failure(failure_kind(ended))),
    }
}

/// Interprets the exit code of xfs_repair -n and of btrfs check: 0 without errors, 1 with errors.
fn read_only_check(ended: &Ended) -> Result<Checked> {
    // xfs_repair -n ignores a log that is not empty, and then reports errors that the log would have mended.
    let has_log = "valuable metadata changes in a log";
    let ignores_log = ended.stderr.contains(has_log) || ended.stdout.contains(has_log);
    match ended.code() {
        Some(0) => Ok(Checked::Clean),
        Some(_) if ignores_log => Ok(Checked::Skipped),
        _ => Err(ended.failure(failure_kind(ended))),
    }
}

fn failure_kind(ended: &Ended) -> ErrorKind {
    let mounted = ["is mounted", "mounted and writable", "currently mounted"];
    let is_in_use = says(ended, &mounted) || says(ended, &BUSY);
    if is_in_use { ErrorKind::InUse } else { ErrorKind::Internal }
}

/// Whether the program has written one of these texts. e2fsck writes some of them to its standard output.
fn says(ended: &Ended, texts: &[&str]) -> bool {
    texts.iter().any(|text| ended.stderr.contains(text) || ended.stdout.contains(text))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exit_codes_of_e2fsck_are_interpreted() {
        let result = |code| e2fsck(&Ended::of(code, "", "some text")).map_err(|error| error.kind());
        assert_eq!(result(0), Ok(Checked::Clean));
        for repaired in [1, 2, 3] {
            assert_eq!(result(repaired), Ok(Checked::Repaired));
        }
        for failed in [4, 5, 8, 12, 16, 32, 128] {
            assert_eq!(result(failed), Err(ErrorKind::Internal), "{failed}");
        }
        let mounted = Ended::of(8, "", "/dev/nbd0 is mounted.\ne2fsck: Cannot continue, aborting.");
        assert_eq!(e2fsck(&mounted).unwrap_err().kind(), ErrorKind::InUse);
    }

    #[test]
    fn exit_codes_of_read_only_checks_are_interpreted() {
        let result = |code, output: &str| read_only_check(&Ended::of(code, output, ""));
        assert_eq!(result(0, "").unwrap(), Checked::Clean);
        assert_eq!(result(1, "bad magic number").unwrap_err().kind(), ErrorKind::Internal);
        let log =
            "ALERT: The filesystem has valuable metadata changes in a log which is being ignored";
        assert_eq!(result(1, log).unwrap(), Checked::Skipped);
        let mounted = Ended::of(1, "", "ERROR: /dev/nbd0 is currently mounted");
        assert_eq!(read_only_check(&mounted).unwrap_err().kind(), ErrorKind::InUse);
    }

    #[test]
    fn a_policy_is_parsed() {
        assert_eq!("preen".parse::<CheckPolicy>().unwrap(), CheckPolicy::default());
        assert_eq!("full".parse::<CheckPolicy>().unwrap(), CheckPolicy::Full);
        assert!("always".parse::<CheckPolicy>().is_err());
    }

    proptest! {
        /// Success is reported only for the codes 0 to 3 of e2fsck, and 0 of the others.
        #[test]
        fn no_unknown_exit_code_means_success(code in 0..256) {
            let ended = Ended::of(code, "", "");
            prop_assert_eq!(e2fsck(&ended).is_ok(), code <= 3);
            prop_assert_eq!(read_only_check(&ended).is_ok(), code == 0);
        }
    }
}
