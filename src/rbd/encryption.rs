//! Unlocks, formats and resizes encrypted images. Passphrases stay in this process, and only for as long
//! as they are used.
//!
//! The key derivation was calibrated when the image was formatted. It takes two seconds by default on the
//! machine that formatted it, and up to 4 GiB of memory (argon2id; 1 GiB by default).

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use librbd::{Image, Key};

use crate::errors::image_error;
use crate::spec::{Encryption, Luks};
use crate::timeouts;
use cleat_backend::uri::invalid;
use cleat_backend::{CredentialSet, Credentials};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout of unlocking. On a busy machine, a key derivation of two CPU seconds took more than a
/// minute. A passphrase file with a trailing newline may need two derivations.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The unit of encryption, in bytes. A write of a part of a block is a read-modify-write in the library,
/// which is not atomic.
pub(crate) const ENCRYPTED_BLOCK: u32 = 4096;

/// The first bytes of a LUKS header, before the two bytes of its version.
const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";

/// The first bytes of a clone that Ceph 18 has formatted and whose parent has another key.
const CLONE_MAGIC: &[u8; 6] = b"RBDL\xba\xbe";

/// The kind of content that an image's first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Luks(u16),
    Clone,
}

/// The passphrases of a chain of clones: the image's own first, then its parent's.
pub(crate) struct Passphrases(Vec<(Luks, Arc<Credentials>)>);

impl Passphrases {
    /// Takes the passphrases from `credentials`.
    ///
    /// # Errors
    /// Returns `Internal` if a passphrase is missing.
    pub(crate) fn find(encryption: &Encryption, credentials: &CredentialSet) -> Result<Self> {
        let layers = encryption.layers.iter();
        let found =
            layers.map(|layer| Ok((layer.format, credentials.get(&layer.passphrase_file)?)));
        found.collect::<Result<_>>().map(Self)
    }

    /// Opens and reads the passphrase files, in the process that uses the passphrases.
    ///
    /// # Errors
    /// Fails as [`CredentialSet::load`] does.
    pub(crate) fn load(encryption: &Encryption) -> Result<Self> {
        let files: Vec<_> = encryption.files().collect();
        Self::find(encryption, &CredentialSet::load(&files)?)
    }

    /// Unlocks `image`, so that reads return plain text. Returns the size of the encryption header in
    /// bytes, by which the image is larger than its plain text. Blocks for seconds (see the module).
    pub(crate) fn unlock(&self, image: &Arc<Image>, name: &str) -> Result<u64> {
        let started = SystemClock.now();
        let failed = |error| image_error(error, name);
        let whole = image.size().map_err(failed)?;
        let mut keys: Vec<Key<'_>> = self.keys(false);
        if let [only] = &mut *keys
            && only.format == librbd::Luks::Any
            && !image.can_unlock_chains()
        {
            only.format = match kind(image).map_err(failed)? {
                Kind::Luks(1) => librbd::Luks::One,
                Kind::Luks(2) => librbd::Luks::Two,
                Kind::Luks(_) | Kind::Clone => return Err(too_old(name)),
                Kind::Plain => return Err(not_formatted(name)),
            };
        }
        let mut unlocked = image.unlock(&keys);
        let refused = |result: &librbd::Result<()>| {
            result.as_ref().is_err_and(|error| error.errno() == Some(libc::EPERM))
        };
        if refused(&unlocked)
            && self.0.iter().any(|(_, passphrase)| passphrase.bytes().ends_with(b"\n"))
        {
            // When formatting, Ceph 16's own tools strip a trailing newline; later versions do not.
            let shorter = self.keys(true);
            for (key, shorter) in keys.iter_mut().zip(shorter) {
                key.passphrase = shorter.passphrase;
            }
            unlocked = image.unlock(&keys);
            if unlocked.is_ok() {
                tracing::warn!(
                    image = name,
                    "the passphrase does not contain the newline at the end of its file; remove it from \
                     the file to halve the time for unlocking"
                );
            }
        }
        unlocked.map_err(|error| self.unlock_error(error, image, name))?;
        let plain = image.size().map_err(failed)?;
        let took_ms = SystemClock.elapsed_since(started).as_millis();
        tracing::info!(image = name, took_ms, "unlocked");
        Ok(whole.saturating_sub(plain))
    }

    /// Writes an encryption header over the beginning of `image`, which is unlocked afterwards. Returns
    /// the size of the header like [`Passphrases::unlock`].
    pub(crate) fn format(&self, image: &Image, name: &str) -> Result<u64> {
        let failed = |error| image_error(error, name);
        let whole = image.size().map_err(failed)?;
        let keys = self.keys(false);
        let [own, ..] = &*keys else { return Err(invalid("no passphrase is given")) };
        image.format(*own).map_err(|error| match error.errno() {
            Some(libc::ENOSYS) => {
                image_error(error, name).with_repair("apt install librbd1 (of Ceph 16 or later)")
            }
            _ => failed(error),
        })?;
        Ok(whole.saturating_sub(image.size().map_err(failed)?))
    }

    fn keys(&self, without_newline: bool) -> Vec<Key<'_>> {
        let keys = self.0.iter().map(|(format, passphrase)| {
            let whole = passphrase.bytes();
            let shorter = whole.strip_suffix(b"\n").filter(|_| without_newline);
            Key { format: of_library(*format), passphrase: shorter.unwrap_or(whole) }
        });
        keys.collect()
    }

    fn unlock_error(&self, error: librbd::Error, image: &Arc<Image>, name: &str) -> Error {
        let repair = match error.errno() {
            Some(libc::ENOSYS) if self.0.len() > 1 => return too_old(name).with_source(error),
            Some(libc::ENOSYS) => "apt install librbd1 (of Ceph 16 or later)",
            Some(libc::EPERM) => {
                "check that passphrase_file names a file with the right passphrase"
            }
            Some(libc::ENOMEM) => {
                "unlocking needs the amount of memory that was chosen when the image was formatted: see \
                 `cryptsetup luksDump`"
            }
            Some(libc::EINVAL) => match (kind(image), &*self.0) {
                (Ok(Kind::Plain), _) => return not_formatted(name).with_source(error),
                (Ok(Kind::Clone), _) if !image.can_unlock_chains() => {
                    return too_old(name).with_source(error);
                }
                (Ok(Kind::Luks(is @ (1 | 2))), [(asked, _), ..]) if *asked != luks(is) => {
                    let message = format!("{name} is encrypted as {}", luks(is).name());
                    return invalid(message)
                        .with_repair(format!("write encryption={}", luks(is).name()))
                        .with_source(error);
                }
                _ => {
                    "check that the header is intact: `cryptsetup luksDump` on an export of the image"
                }
            },
            _ => return image_error(error, name),
        };
        image_error(error, name).with_repair(repair)
    }
}

/// Runs [`Passphrases::unlock`] with the timeout [`TIMEOUT`]. Returns the image and the size of the header.
pub(crate) fn unlock_in_time(
    passphrases: Passphrases,
    image: Arc<Image>,
    name: String,
) -> Result<(Arc<Image>, u64)> {
    let what = format!("unlock {name}");
    let unlocked = timeouts::with_timeout(TIMEOUT, &what, move || {
        let header = passphrases.unlock(&image, &name)?;
        Ok((image, header))
    });
    unlocked.map_err(|error| match error.kind() {
        ErrorKind::TimedOut => error.with_repair(
            "check whether this machine is busy or short of memory, and whether the cluster answers \
             (ceph status)",
        ),
        _ => error,
    })
}

/// Resizes an image. For an unlocked image, `size` is that of the plain text, and `header` is the size of
/// the encryption header; the image is larger by that.
pub(crate) fn resize(
    image: &Image,
    header: Option<u64>,
    size: u64,
    shrink: bool,
    progress: &mut (dyn FnMut(u64, u64) -> ControlFlow<()> + Send),
) -> librbd::Result<()> {
    let Some(header) = header else { return image.resize(size, shrink, progress) };
    let mut ignore = |_, _| ControlFlow::Continue(());
    // Depending on the version, the library expects the size of the plain text or (in Ceph 16) of the
    // whole image. In the second case it takes the present size of the plain text for a smaller size,
    // which it refuses without `shrink`.
    let now = image.size()?;
    match image.resize(now, false, &mut ignore) {
        Ok(()) => return image.resize(size, shrink, progress),
        Err(error) if error.errno() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    if size < now {
        // Changes nothing, but fails if `header` is too small. Without this check the shrink would remove
        // plain text.
        image.resize(now.saturating_add(header), false, &mut ignore)?;
    }
    image.resize(size.saturating_add(header), shrink, progress)
}

/// Reads the kind of content of an image that is not unlocked.
pub(crate) fn kind(image: &Arc<Image>) -> librbd::Result<Kind> {
    let start = image.read(0, MAGIC.len() + 2)?;
    let version = |magic| start.strip_prefix(magic).and_then(|version| version.try_into().ok());
    Ok(match (version(MAGIC), version(CLONE_MAGIC)) {
        (Some(version), _) => Kind::Luks(u16::from_be_bytes(version)),
        (None, Some(_)) => Kind::Clone,
        (None, None) => Kind::Plain,
    })
}

fn luks(version: u16) -> Luks {
    if version == 1 { Luks::One } else { Luks::Two }
}

fn of_library(format: Luks) -> librbd::Luks {
    match format {
        Luks::One => librbd::Luks::One,
        Luks::Two => librbd::Luks::Two,
        Luks::Any => librbd::Luks::Any,
    }
}

fn too_old(name: &str) -> Error {
    let message = format!("this librbd cannot unlock {name}, a clone with a key of its own");
    Error::new(ErrorKind::Unsupported, message)
        .with_repair("install the librbd1 of Ceph 18 or later (Debian 13 has it)")
}

fn not_formatted(name: &str) -> Error {
    invalid(format!("{name} is not encrypted: it has no LUKS header")).with_repair(
        "remove encryption and passphrase_file from the options; formatting the image would destroy \
         its content",
    )
}
