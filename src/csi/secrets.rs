//! The secrets of a request: the key of a Ceph client and the passphrase of a volume, in the words of ceph-csi.
//! They never reach a log, an error or the disk, and are overwritten when they are dropped.

use std::collections::BTreeMap;
use std::path::Path;

use cleat_backend::{CredentialSet, Credentials};
use cleat_core::error::{Error, ErrorKind, Result};
use zeroize::{Zeroize, Zeroizing};

/// The path that stands for the keyring in URIs. The file need not exist.
const KEYRING: &str = "/run/cleat/csi.keyring";

/// The keys of secrets that name a client, each with the key of its secret.
const CLIENTS: [(&str, &str); 2] = [("userID", "userKey"), ("adminID", "adminKey")];

/// The key of the passphrase of an encrypted volume.
const PASSPHRASE: &str = "encryptionPassphrase";

/// The maximum length of a client's name or key, in bytes.
const MAX_LENGTH: usize = 1024;

/// The secrets of a request.
#[derive(Debug, Default)]
pub(crate) struct Secrets {
    /// The name of the client of a Ceph cluster, and its keyring.
    client: Option<(String, Credentials)>,
    passphrase: Option<Credentials>,
}

impl Secrets {
    /// Takes the client and the passphrase from the secrets of a request, and overwrites them. Without a client, the
    /// configured one is used. Other secrets are ignored.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a client without a key, and for one that no keyring can contain.
    pub(crate) fn take(mut secrets: BTreeMap<String, String>) -> Result<Self> {
        let found = find_client(&secrets);
        let passphrase = secrets.remove(PASSPHRASE).filter(|text| !text.is_empty());
        let passphrase = passphrase.map(|text| Credentials::new(Zeroizing::new(text.into_bytes())));
        for secret in secrets.values_mut() {
            secret.zeroize();
        }
        Ok(Self { client: found?, passphrase })
    }
    /// Returns the client's name and the path that stands for its keyring in a URI.
    pub(crate) fn client(&self) -> Option<(&str, &Path)> {
        self.client.as_ref().map(|(user, _)| (&**user, Path::new(KEYRING)))
    }

    /// Returns the client's name and its keyring.
    pub(crate) fn keyring(&self) -> Option<(&str, &Credentials)> {
        self.client.as_ref().map(|(user, keyring)| (&**user, keyring))
    }

    /// Returns the passphrase of an encrypted volume.
    pub(crate) fn passphrase(&self) -> Option<&[u8]> {
        self.passphrase.as_ref().map(Credentials::bytes)
    }

    /// Returns the client's name in a keyring that this driver has made.
    pub(crate) fn user_in(keyring: &Credentials) -> Option<String> {
        let text = std::str::from_utf8(keyring.bytes()).ok()?;
        let (user, _) = text.strip_prefix("[client.")?.split_once(']')?;
        Some(user.to_owned())
    }

    /// Returns the keyring for [`cleat_backend::uri::StoreUri::connect_with`].
    pub(crate) fn credentials(&self) -> CredentialSet {
        let Some((_, keyring)) = &self.client else { return CredentialSet::default() };
        let copy = Zeroizing::new(keyring.bytes().to_vec());
        CredentialSet::with(KEYRING.into(), Credentials::new(copy))
    }
}

/// Returns the client in the secrets of a request, with its keyring.
fn find_client(secrets: &BTreeMap<String, String>) -> Result<Option<(String, Credentials)>> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    for (id, key) in CLIENTS {
        let Some(user) = secrets.get(id) else { continue };
        let secret =
            secrets.get(key).ok_or_else(|| invalid(format!("the secret has {id} and no {key}")))?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if user.is_empty() || user.len() > MAX_LENGTH || !user.chars().all(is_plain) {
            return Err(invalid(format!("{id} in the secret is not the name of a Ceph client")));
        }
        let secret = secret.trim();
        if secret.is_empty() || secret.len() > MAX_LENGTH || secret.contains(['\n', '[', ']']) {
            return Err(invalid(format!("{key} in the secret is not a key of a Ceph client")));
        }
        // With room for the whole text, so that no copy stays behind.
        let mut keyring = Zeroizing::new(Vec::with_capacity(3 * MAX_LENGTH));
        for part in ["[client.", user, "]\n\tkey = ", secret, "\n"] {
            keyring.extend_from_slice(part.as_bytes());
        }
        return Ok(Some((user.clone(), Credentials::new(keyring))));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pairs: &[(&str, &str)]) -> Result<Secrets> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Secrets::take(pairs.collect())
    }

    #[test]
    fn a_client_becomes_a_keyring() {
        let secrets = take(&[("userID", "csi"), ("userKey", " AQ== \n"), ("other", "x")]).unwrap();
        assert_eq!(secrets.client().unwrap().0, "csi");
        let keyring = secrets.credentials().get(Path::new(KEYRING)).unwrap();
        assert_eq!(keyring.bytes(), b"[client.csi]\n\tkey = AQ==\n");
        assert_eq!(Secrets::user_in(&keyring).unwrap(), "csi");
        assert!(take(&[]).unwrap().client().is_none());
        let passphrase = take(&[("encryptionPassphrase", " x\n")]).unwrap();
        assert!(passphrase.client().is_none());
        assert_eq!(passphrase.passphrase().unwrap(), b" x\n");
        assert!(!format!("{passphrase:?}").contains('x'));
        assert_eq!(take(&[("encryptionPassphrase", "")]).unwrap().passphrase(), None);
    }

    #[test]
    fn errors_do_not_show_secrets() {
        for pairs in [
            &[("userID", "csi")][..],
            &[("userID", "a]b"), ("userKey", "sesame")],
            &[("userID", ""), ("userKey", "sesame")],
            &[("userID", "csi"), ("userKey", "sesame\n[client.admin]")],
            &[("adminID", "csi"), ("adminKey", "")],
        ] {
            let error = take(pairs).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(!format!("{error:?}").contains("sesame"), "{error:?}");
        }
    }
}
