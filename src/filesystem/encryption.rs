//! Encrypted devices: LUKS 2 on the device, and dm-crypt above it, both by cryptsetup.
//!
//! The device above has a name, which the caller chooses. The volume key is in its table and not in a keyring
//! (`--disable-keyring`), where root can read it, so that the device can be grown without the passphrase.
//! Discards are passed on, so that the storage can reclaim space: it sees which blocks are unused.

use std::io::Write;
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::call::Call;
use crate::content::{Content, content};
use crate::path::check_device;
use crate::tools::CRYPTSETUP;
use crate::unlocked::{BUSY, ended};

/// The memory in KiB that the key derivation (Argon2id) of a new device takes; it takes as much each time the device is
/// unlocked. The default of cryptsetup, up to 1 GiB, can exceed the limit of a container.
const DERIVATION_KIB: &str = "65536";

/// The maximum length of a passphrase in bytes. It fits into a pipe.
const PASSPHRASE_MAX: usize = 4096;

/// The exit code of cryptsetup for a passphrase that is not one of the device (cryptsetup(8), RETURN CODES).
const WRONG_PASSPHRASE: i32 = 2;

/// Makes an empty device encrypted. Reads it first, in this call. The program is not killed at the deadline, as in
/// [`crate::format()`].
///
/// # Errors
/// Returns `InUse` if the device contains anything; `InvalidArgument` for a passphrase that is empty or longer than
/// 4096 bytes, and for a device that is too small (the header of LUKS 2 takes 16 MiB); `Unsupported` if cryptsetup is
/// not installed; otherwise as [`content()`].
pub async fn encrypt(device: &Path, passphrase: &[u8], deadline: Instant) -> Result<()> {
    let found = content(device, deadline).await?;
    if found != Content::Empty {
        let message = format!("cannot encrypt {}: it contains {found}", device.display());
        return Err(Error::new(ErrorKind::InUse, message));
    }
    let call = Call::new(CRYPTSETUP, device)
        .args(["luksFormat", "--type", "luks2", "--batch-mode", "--key-file", "-"])
        .args(["--pbkdf-memory", DERIVATION_KIB])
        .arg(device)
        .writes(check_device(device)?);
    run(with_passphrase(call, passphrase)?, deadline).await
}

/// Makes the content of an encrypted device visible as the device `name` of the device mapper.
///
/// # Errors
/// Returns `PermissionDenied` if the passphrase is not one of the device; `AlreadyExists` if the name is in use;
/// `Unsupported` if cryptsetup is not installed or the kernel has no dm-crypt; `TimedOut`; otherwise `Internal` with
/// the output of cryptsetup.
pub async fn unlock(
    device: &Path,
    name: &str,
    passphrase: &[u8],
    read_only: bool,
    deadline: Instant,
) -> Result<()> {
    check_device(device)?;
    let call = Call::new(CRYPTSETUP, device)
        .args(["open", "--type", "luks", "--batch-mode", "--disable-keyring", "--key-file", "-"])
        .arg("--allow-discards")
        .args(read_only.then_some("--readonly"))
        .arg(device)
        .arg(name);
    run(with_passphrase(call, passphrase)?, deadline).await
}

/// Gives the passphrase to a program by a pipe.
fn with_passphrase<'a>(call: Call<'a>, passphrase: &[u8]) -> Result<Call<'a>> {
    if passphrase.is_empty() || passphrase.len() > PASSPHRASE_MAX {
        let message = format!("a passphrase has 1 to {PASSPHRASE_MAX} bytes");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let failed = |error| Error::from_io("cannot pass the passphrase to cryptsetup", error);
    let (read, write) = std::io::pipe().map_err(failed)?;
    // It fits into the pipe, so this does not block.
    (&write).write_all(passphrase).map_err(failed)?;
    Ok(call.input(read.into()))
}

async fn run(call: Call<'_>, deadline: Instant) -> Result<()> {
    let ended = ended(call, deadline).await?;
    match ended.code() {
        Some(WRONG_PASSPHRASE) => Err(ended
            .failure(ErrorKind::PermissionDenied)
            .with_repair("correct encryptionPassphrase in the secret of the volume")),
        Some(BUSY) => Err(ended.failure(ErrorKind::AlreadyExists)),
        // Not erased here: the key may have been removed on purpose, and be restored from a backup of the header.
        _ if ended.reports("No usable keyslot") => {
            Err(ended.failure(ErrorKind::Internal).with_repair(
                "its encryption was cut off, if the volume is new: erase it, if its data is not needed, with \
                 blkdiscard --force --zeroout",
            ))
        }
        _ if ended.reports("too small") => Err(ended
            .failure(ErrorKind::InvalidArgument)
            .with_repair("an encrypted volume needs more than 16 MiB for its header")),
        _ => ended.success().map(drop).map_err(|error| {
            error.with_repair("modprobe dm-crypt; dmesg shows what the kernel refused")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_that_does_not_fit_is_refused() {
        for length in [0, PASSPHRASE_MAX + 1] {
            let call = Call::new(CRYPTSETUP, Path::new("/dev/nbd0"));
            let error = with_passphrase(call, &vec![b'x'; length]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
}
