//! Secrets in the memory of the kernel: keys of type `user` in the user keyring (user-keyring(7)) of the user that runs
//! this process.
//!
//! Such a key is never written to a disk or a swap area. It survives the process that stored it, so that the next
//! supervisor can start a worker with it, and is gone after a reboot. Other users cannot read it; every process of
//! the same user can.

use std::fs::File;
use std::path::{Path, PathBuf};

use linux_keyutils::{Key, KeyError, KeyRing, KeyRingIdentifier};
use zeroize::Zeroizing;

use crate::secret::Credentials;
use cleat_core::error::{Error, ErrorKind, Result};

/// The beginning of a value that names a key instead of the path of a file.
const SCHEME: &str = "kernel-key:";

/// The beginning of the descriptions in the kernel, so that no key of another program is ever used.
const PREFIX: &str = "cleat:";

/// The maximum length of a key's name in bytes.
const MAX_NAME: usize = 128;

/// The maximum length of a key of type `user`, in bytes (security/keys/user_defined.c).
const MAX_SECRET: usize = 32_767;

/// A key of the kernel with a secret of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelKey {
    /// The description, without [`PREFIX`].
    name: String,
}

impl KernelKey {
    /// Names a key.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a name that is empty, is longer than 128 bytes, or has other characters than
    /// letters and digits of ASCII, `-`, `_` and `.`.
    pub fn new(name: &str) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_plain) {
            let malformed =
                Error::new(ErrorKind::InvalidArgument, "the name of the key is malformed");
            return Err(malformed.with_repair(format!(
                "use up to {MAX_NAME} letters, digits, '-', '_' and '.', as in {SCHEME}image1"
            )));
        }
        Ok(Self { name: name.to_owned() })
    }

    /// Returns the key that a value of an option names, or `None` for the path of a file.
    ///
    /// # Errors
    /// Fails as [`KernelKey::new`] does.
    pub fn parse(value: &str) -> Result<Option<Self>> {
        value.strip_prefix(SCHEME).map(Self::new).transpose()
    }

    /// Returns the key that a path from [`KernelKey::path`] stands for.
    pub fn of_path(path: &Path) -> Option<Self> {
        Self::parse(path.to_str()?).ok().flatten()
    }

    /// Returns the value of an option that names the key, in the form of a path.
    pub fn path(&self) -> PathBuf {
        format!("{SCHEME}{}", self.name).into()
    }

    /// Stores a secret under this name, in place of an earlier one.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the secret is empty or longer than 32767 bytes, `PermissionDenied` if the kernel
    /// or the container forbids keys, and `NoSpace` if the quota for keys is reached
    /// (/proc/sys/kernel/keys).
    pub fn store(&self, secret: &Credentials) -> Result<()> {
        if secret.bytes().is_empty() || secret.bytes().len() > MAX_SECRET {
            let message = format!("the secret is empty or longer than {MAX_SECRET} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let stored =
            keyring().and_then(|keyring| keyring.add_key(&self.description(), secret.bytes()));
        stored.map(drop).map_err(|error| self.failed("store", error))
    }

    /// Returns the secret, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns `PermissionDenied` if the kernel or the container forbids it.
    pub fn secret(&self) -> Result<Option<Credentials>> {
        let Some((_, key)) = self.find().map_err(|error| self.failed("find", error))? else {
            return Ok(None);
        };
        let mut bytes = Zeroizing::new(vec![0; MAX_SECRET]);
        let length = key.read(&mut *bytes).map_err(|error| self.failed("read", error))?;
        bytes.truncate(length);
        Ok(Some(Credentials::new(bytes)))
    }

    /// Removes the key. A key that does not exist is success.
    ///
    /// # Errors
    /// Returns `PermissionDenied` if the kernel or the container forbids it.
    pub fn remove(&self) -> Result<()> {
        let removed = self
            .find()
            .and_then(|found| found.map_or(Ok(()), |(keyring, key)| keyring.unlink_key(key)));
        removed.map_err(|error| self.failed("remove", error))
    }

    /// Opens the secret for one read from its beginning to its end.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no such key. Otherwise fails as [`KernelKey::secret`] does.
    pub(crate) fn open(&self) -> Result<File> {
        let secret = self.secret()?.ok_or_else(|| self.missing())?;
        let failed = |error| Error::from_io(format!("cannot pass on the key {}", self.name), error);
        secret.readable().map_err(failed)
    }

    /// Returns the command that stores its standard input as this key.
    pub fn store_command(&self) -> String {
        format!("keyctl padd user {} @u", self.description())
    }

    fn description(&self) -> String {
        format!("{PREFIX}{}", self.name)
    }

    fn find(&self) -> Result<Option<(KeyRing, Key)>, KeyError> {
        let keyring = keyring()?;
        match keyring.search(&self.description()) {
            Ok(key) => Ok(Some((keyring, key))),
            Err(KeyError::KeyDoesNotExist | KeyError::KeyRevoked | KeyError::KeyExpired) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn missing(&self) -> Error {
        let message = format!("the kernel has no key {}", self.description());
        Error::new(ErrorKind::NotFound, message).with_repair(format!(
            "keys are lost at a reboot; store it again: {} < FILE",
            self.store_command()
        ))
    }

    fn failed(&self, what: &str, error: KeyError) -> Error {
        let kind = match error {
            KeyError::QuotaExceeded => ErrorKind::NoSpace,
            _ => ErrorKind::PermissionDenied,
        };
        let message = format!("cannot {what} the key {}: {error}", self.description());
        Error::new(kind, message).with_repair(
            "keyctl show @u lists the keys; a container must permit the system calls add_key and keyctl",
        )
    }
}

/// Returns the user keyring. Only keys that can be reached from the keyrings of the calling thread may be read, and
/// the session of a service does not contain the user keyring.
fn keyring() -> Result<KeyRing, KeyError> {
    KeyRing::from_special_id(KeyRingIdentifier::Thread, true)?
        .link_keyring_id(KeyRingIdentifier::User)?;
    KeyRing::from_special_id(KeyRingIdentifier::User, true)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn secret(text: &str) -> Credentials {
        Credentials::new(Zeroizing::new(text.as_bytes().to_vec()))
    }

    #[test]
    fn a_secret_is_stored_replaced_read_and_removed() {
        let key = KernelKey::new(&format!("test-{}", std::process::id())).unwrap();
        assert!(key.secret().unwrap().is_none());
        assert_eq!(key.open().unwrap_err().kind(), ErrorKind::NotFound);
        key.store(&secret("sesame")).unwrap();
        key.store(&secret("sesame2")).unwrap();
        // Another thread has another thread keyring.
        let other = key.clone();
        std::thread::spawn(move || {
            let mut text = String::new();
            other.open().unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "sesame2");
            assert_eq!(other.secret().unwrap().unwrap().bytes(), b"sesame2");
        })
        .join()
        .unwrap();
        key.remove().unwrap();
        key.remove().unwrap();
        assert!(key.secret().unwrap().is_none());
        assert_eq!(key.store(&secret("")).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn the_longest_secret_can_be_read_from_its_descriptor() {
        let key = KernelKey::new(&format!("test-long-{}", std::process::id())).unwrap();
        let long = "x".repeat(MAX_SECRET);
        key.store(&secret(&long)).unwrap();
        let mut text = String::new();
        key.open().unwrap().read_to_string(&mut text).unwrap();
        key.remove().unwrap();
        assert_eq!(text.len(), MAX_SECRET);
        let error = key.store(&secret(&format!("{long}x"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn values_name_keys_or_paths() {
        assert_eq!(KernelKey::parse("/etc/ceph/keyring").unwrap(), None);
        let key = KernelKey::parse("kernel-key:img-1").unwrap().unwrap();
        assert_eq!(KernelKey::of_path(&key.path()), Some(key));
        assert_eq!(KernelKey::of_path(Path::new("/kernel-key:img-1")), None);
        for name in ["", "a/b", "a b", "a\n", "ä", &"x".repeat(MAX_NAME + 1)] {
            let error = KernelKey::parse(&format!("kernel-key:{name}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}");
        }
    }
}
