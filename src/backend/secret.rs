//! A secret in memory.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};

use nix::fcntl::OFlag;
use zeroize::Zeroizing;

/// The bytes of a secret: a key, a token, a passphrase. They are overwritten with zeroes when the value is
/// dropped, and `Debug` does not show them.
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

    /// Wraps a secret that did not come from a file.
    pub fn new(secret: Zeroizing<Vec<u8>>) -> Self {
        Self(secret)
    }

    /// Returns a file from which the secret can be read once. It is a pipe, because the kernel never writes the content of
    /// a pipe to a swap area.
    ///
    /// # Errors
    /// Returns an error for a secret of more than 64 KiB, for which a pipe has no room, and that of pipe(2).
    pub(crate) fn readable(&self) -> io::Result<File> {
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        File::from(writer).write_all(&self.0)?;
        Ok(reader.into())
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
