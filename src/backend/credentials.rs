//! Secrets that a backend needs to reach or to decrypt a volume.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use zeroize::Zeroizing;

/// The bytes of a secret: a key, a token, a passphrase. They are overwritten with zeroes when the value is
/// dropped, and `Debug` does not show them.
///
/// A secret reaches a worker as an open descriptor, from which [`Credentials::read`] takes it, and never
/// as an argument, in the environment, in a record or in a log. A worker can receive new credentials
/// while it runs: [`RenewCredentials`](crate::RenewCredentials).
///
/// The existing backends pass no secret between processes. For `rbd:` volumes the confined worker opens the
/// files that the URI names (`passphrase_file=`, `keyring=`) by their paths, which its confinement allows
/// it to read ([`Confinement::BeforeOpen`](crate::Confinement::BeforeOpen)). The worker reads a passphrase
/// into this type; librados reads the keyring by itself and keeps the key in its own memory.
pub struct Credentials(Zeroizing<Vec<u8>>);

impl Credentials {
    /// Reads a secret from its current position in `file` to the end. Blocks as reads of the file do.
    ///
    /// # Errors
    /// Returns `InvalidData` if the secret is empty or longer than `max_bytes`, and the error of the read otherwise.
    pub fn read(file: &File, max_bytes: usize) -> io::Result<Self> {
        // A vector that grows leaves a copy of its content behind. `read_to_end` grows a full vector, so
        // there must be space left at the end.
        let mut bytes = Zeroizing::new(Vec::with_capacity(2 * max_bytes + 64));
        file.take(max_bytes as u64 + 1).read_to_end(&mut bytes)?;
        if bytes.is_empty() || bytes.len() > max_bytes {
            let message = format!("the secret is empty, or longer than {max_bytes} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(Self(bytes))
    }

    /// Returns the secret.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        file
    }

    #[test]
    fn a_secret_is_read_within_its_bound_and_never_shown() {
        let secret = Credentials::read(&file(b"sesame\n"), 7).unwrap();
        assert_eq!(secret.bytes(), b"sesame\n");
        assert!(!format!("{secret:?}").contains("sesame"));
        for content in [&b""[..], b"sesame!!"] {
            let error = Credentials::read(&file(content), 7).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(!error.to_string().contains("sesame"), "{error}");
        }
    }
}
