//! Encrypted images: unlocked, made, and given another size. Passphrases stay in this process, and no
//! longer than they are used.
//!
//! To turn a passphrase into a key takes as long as whoever formatted the image had it take on his
//! machine, two seconds by default, and up to 4 GiB of memory (argon2id; 1 GiB by default).

use std::fs::{File, OpenOptions};
use std::ops::ControlFlow;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use librbd::{Image, Key};

use crate::errors::later;
use crate::spec::{Encryption, Luks};
use crate::timeouts;
use cleat_backend::Credentials;
use cleat_backend::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long unlocking may take. A busy machine was seen to take more than a minute for what takes two
/// seconds of its time; a newline in the wrong place takes twice as long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The longest passphrase, in bytes; `cryptsetup` has the same bound for passphrases that are typed,
/// and files of more are hardly meant.
const MAX_PASSPHRASE: usize = 8192;

/// The block that the library encrypts at a time, in bytes: parts of it would be read, changed and
/// written, and not at once.
pub(crate) const ENCRYPTED_BLOCK: u32 = 4096;

/// What a header of LUKS begins with, before two bytes with its version.
const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";

/// The same, where Ceph 18 has formatted a clone, which reads its parent with another key.
const CLONE_MAGIC: &[u8; 6] = b"RBDL\xba\xbe";

/// What an image begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Luks(u16),
    Clone,
}

/// Passphrases, one for each image of a chain of clones.
pub(crate) struct Passphrases(Vec<(Luks, Credentials)>);

impl Passphrases {
    /// Reads them.
    pub(crate) fn read(encryption: &Encryption) -> Result<Self> {
        let layers = encryption.layers.iter();
        let read = layers.map(|layer| Ok((layer.format, passphrase(&layer.passphrase_file)?)));
        read.collect::<Result<_>>().map(Self)
    }

    /// Makes `image` give plain text. Returns how many bytes of it are none.
    pub(crate) fn unlock(&self, image: &Arc<Image>, name: &str) -> Result<u64> {
        let began = Instant::now();
        let failed = |error| later(error, name);
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
            // Ceph 16's own tools leave a newline at the end out, when they format, later ones do not.
            let shorter = self.keys(true);
            for (key, shorter) in keys.iter_mut().zip(shorter) {
                key.passphrase = shorter.passphrase;
            }
            unlocked = image.unlock(&keys);
            if unlocked.is_ok() {
                tracing::warn!(
                    image = name,
                    "the passphrase is without the newline at the end of its file: take that out, \
                     and unlocking takes half the time"
                );
            }
        }
        unlocked.map_err(|error| self.problem(error, image, name))?;
        let plain = image.size().map_err(failed)?;
        tracing::info!(image = name, took_ms = began.elapsed().as_millis(), "unlocked");
        Ok(whole.saturating_sub(plain))
    }

    /// Writes a header over the beginning of `image`, which gives plain text from then on. Returns as
    /// [`Passphrases::unlock`] does.
    pub(crate) fn format(&self, image: &Image, name: &str) -> Result<u64> {
        let failed = |error| later(error, name);
        let whole = image.size().map_err(failed)?;
        let keys = self.keys(false);
        let [own, ..] = &*keys else { return Err(invalid("there is no passphrase")) };
        image.format(*own).map_err(|error| match error.errno() {
            Some(libc::ENOSYS) => {
                later(error, name).with_repair("apt install librbd1 (of Ceph 16 or later)")
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

    fn problem(&self, error: librbd::Error, image: &Arc<Image>, name: &str) -> Error {
        let repair = match error.errno() {
            Some(libc::ENOSYS) if self.0.len() > 1 => return too_old(name).with_source(error),
            Some(libc::ENOSYS) => "apt install librbd1 (of Ceph 16 or later)",
            Some(libc::EPERM) => "see that passphrase_file names a file with the right passphrase",
            Some(libc::ENOMEM) => {
                "unlocking takes as much memory as was chosen when the image was formatted: see \
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
                    "see that the header is whole: `cryptsetup luksDump` on an export of the image"
                }
            },
            _ => return later(error, name),
        };
        later(error, name).with_repair(repair)
    }
}

/// As [`Passphrases::unlock`], within [`PATIENCE`]; with the image.
pub(crate) fn unlock_in_time(
    passphrases: Passphrases,
    image: Arc<Image>,
    name: String,
) -> Result<(Arc<Image>, u64)> {
    let what = format!("unlock {name}");
    let unlocked = timeouts::within(TIMEOUT, &what, move || {
        let header = passphrases.unlock(&image, &name)?;
        Ok((image, header))
    });
    unlocked.map_err(|error| match error.kind() {
        ErrorKind::TimedOut => error.with_repair(
            "is this machine busy, or short of memory? Or the cluster away (ceph status)?",
        ),
        _ => error,
    })
}

/// Gives an image another size. Of an unlocked one, it is that of the plain text: `header` bytes more
/// are the image's.
pub(crate) fn resize(
    image: &Image,
    header: Option<u64>,
    size: u64,
    shrink: bool,
    progress: &mut (dyn FnMut(u64, u64) -> ControlFlow<()> + Send),
) -> librbd::Result<()> {
    let Some(header) = header else { return image.resize(size, shrink, progress) };
    let mut unseen = |_, _| ControlFlow::Continue(());
    // What a size means depends on the version: that of the plain text, or (in Ceph 16) that of all. The
    // size that it has is refused by the second kind, as a smaller one that was not allowed.
    let now = image.size()?;
    match image.resize(now, false, &mut unseen) {
        Ok(()) => return image.resize(size, shrink, progress),
        Err(error) if error.errno() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    if size < now {
        // Nothing becomes of it, unless `header` is too small for the image as it is now.
        image.resize(now.saturating_add(header), false, &mut unseen)?;
    }
    image.resize(size.saturating_add(header), shrink, progress)
}

/// What an image that is not unlocked begins with.
pub(crate) fn kind(image: &Arc<Image>) -> librbd::Result<Kind> {
    let begin = image.read(0, MAGIC.len() + 2)?;
    let version = |magic| begin.strip_prefix(magic).and_then(|version| version.try_into().ok());
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
    invalid(format!("{name} is not encrypted: it has no header of LUKS")).with_repair(
        "leave encryption and passphrase_file out; formatting it would destroy its content",
    )
}

fn passphrase(path: &Path) -> Result<Credentials> {
    let shown = path.display();
    let failed = |error| {
        let error = Error::from_io(format!("cannot read the passphrase {shown}"), error);
        match error.kind() {
            // Without capabilities, an owner counts.
            ErrorKind::PermissionDenied => error.with_repair(format!(
                "see that the file belongs to the daemon's user: chown root {shown}; chmod 600 {shown}"
            )),
            _ => error,
        }
    };
    // The open of a pipe waits for its other end.
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    check(&file, path).map_err(failed)??;
    Credentials::read(&file, MAX_PASSPHRASE).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => invalid(format!(
            "the passphrase {shown} is empty, or longer than {MAX_PASSPHRASE} bytes"
        )),
        _ => failed(error),
    })
}

fn check(file: &File, path: &Path) -> std::io::Result<Result<()>> {
    let metadata = file.metadata()?;
    let path = path.display();
    if !metadata.is_file() {
        return Ok(Err(invalid(format!("the passphrase {path} is not a regular file"))
            .with_repair("put it into a file of its own")));
    }
    if metadata.permissions().mode() & 0o007 != 0 {
        tracing::warn!("everybody may read the passphrase {path}: chmod 600 {path}");
    }
    Ok(Ok(()))
}
