//! Unlocking an encrypted image. The passphrase stays in this process, and no longer than it is used.

use std::fs::File;
use std::io::Read;

use super::problem::later;
use crate::backend::uri::{Encryption, Luks, invalid};
use crate::error::{Error, ErrorKind, Result};

/// The longest passphrase, in bytes; `cryptsetup` has the same bound for passphrases that are typed,
/// and files of more are hardly meant.
const MAX_PASSPHRASE: u64 = 8192;

/// Makes `image` give plain text.
pub(super) fn unlock(image: &librbd::Image, encryption: &Encryption, name: &str) -> Result<()> {
    let passphrase = passphrase(encryption)?;
    let format = match encryption.format {
        Luks::One => librbd::Luks::One,
        Luks::Two => librbd::Luks::Two,
    };
    image.unlock(format, &passphrase).map_err(|error| {
        let file = encryption.passphrase_file.display();
        let repair = match error.errno() {
            Some(libc::ENOSYS) => "apt install librbd1 (16 or later)".to_owned(),
            Some(libc::EPERM) => {
                format!(
                    "see that {file} holds the passphrase, and no newline that is not part of it"
                )
            }
            _ => format!(
                "see that the image was formatted so: rbd encryption format \
                 {name} luks2 {file}"
            ),
        };
        later(error, name).with_repair(repair)
    })
}

fn passphrase(encryption: &Encryption) -> Result<Vec<u8>> {
    let path = encryption.passphrase_file.display();
    let failed = |e| Error::from_io(format!("cannot read the passphrase {path}"), e);
    let file = File::open(&encryption.passphrase_file).map_err(failed)?;
    let mut passphrase = Vec::new();
    file.take(MAX_PASSPHRASE + 1).read_to_end(&mut passphrase).map_err(failed)?;
    match passphrase.len() as u64 {
        0 => Err(invalid(format!("the passphrase {path} is empty"))),
        1..=MAX_PASSPHRASE => Ok(passphrase),
        _ => Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("the passphrase {path} is longer than {MAX_PASSPHRASE} bytes"),
        )),
    }
}
