//! Keyrings of Ceph, in the form that `ceph auth get` writes.
//!
//! The key goes to librados in memory, as its option `key`, and librados reads no keyring. librados writes
//! the value of this option to its log if it cannot decode it (`KeyRing::from_ceph_context`), so the key is
//! checked first.

use std::ffi::CStr;

use cleat_backend::uri::invalid;
use cleat_backend::{CredentialFile, CredentialSet, KernelKey};
use cleat_core::error::{Error, ErrorKind, Result};
use data_encoding::{BASE64, Encoding};
use zeroize::Zeroizing;

use crate::errors::client_name;
use crate::spec::RbdSpec;

/// The bytes of a key before the secret, which are not secret: two of type, eight of time, two of length.
const HEADER: usize = 12;

/// The maximum length of a key that is decoded, in bytes: room for the types of later versions.
const MAX_KEY: usize = 128;

/// The types of keys, and the lengths of their secrets in bytes: AES with 128 bits (`CEPH_CRYPTO_AES`), the only one up to Ceph
/// 18, and with 256 bits (`CEPH_CRYPTO_AES256KRB5`), the only one that a new cluster of Ceph 20 makes.
const AES: (u16, usize) = (1, 16);
const AES256K: (u16, usize) = (2, 32);

/// The maximum number of clients that an error names.
const MAX_NAMED: usize = 8;

/// The key of a client, from the file that `keyring=` names.
pub(crate) struct ClientKey {
    /// `client.NAME`.
    client: String,
    file: CredentialFile,
    /// The key in base64, and a zero byte.
    key: Zeroizing<Vec<u8>>,
    is_aes256k: bool,
}

impl ClientKey {
    /// Finds the key for `spec` in the content of its keyring. Returns `None` if `spec` names no keyring;
    /// librados then reads the one of its configuration.
    ///
    /// # Errors
    /// Returns `PermissionDenied` for a keyring without a key of the client, `InvalidArgument` for a malformed
    /// key, and `Unsupported` for a key of an unknown type.
    pub(crate) fn find(spec: &RbdSpec, credentials: &CredentialSet) -> Result<Option<Self>> {
        let Some(file) = spec.keyring_file() else { return Ok(None) };
        let (client, content) = (client_name(spec), credentials.get(&file.path)?);
        let (key, is_aes256k) = key(content.bytes(), &client, &file)?;
        let key = Zeroizing::new([key, b"\0"].concat());
        Ok(Some(Self { client, file, key, is_aes256k }))
    }

    /// Opens the keyring of `spec` and finds the key, in the process that uses it.
    ///
    /// # Errors
    /// Fails as [`CredentialFile::open`] and [`ClientKey::find`] do.
    pub(crate) fn load(spec: &RbdSpec) -> Result<Option<Self>> {
        let files: Vec<_> = spec.keyring_file().into_iter().collect();
        Self::find(spec, &CredentialSet::load(&files)?)
    }

    /// Returns the key in base64.
    pub(crate) fn text(&self) -> &CStr {
        // A checked key has no other zero byte.
        CStr::from_bytes_until_nul(&self.key).unwrap_or_default()
    }

    /// Returns whether the key is of the type that only newer libraries can decode.
    pub(crate) fn is_aes256k(&self) -> bool {
        self.is_aes256k
    }

    /// Returns whether the keyring in `credentials` has the same key.
    ///
    /// # Errors
    /// Fails as [`ClientKey::find`] does.
    pub(crate) fn is_in(&self, credentials: &CredentialSet) -> Result<bool> {
        let content = credentials.get(&self.file.path)?;
        Ok(key(content.bytes(), &self.client, &self.file)?.0 == self.text().to_bytes())
    }
}

/// Returns the key of `client` in a keyring, and whether it is of the type aes256k. `file` names the keyring in errors.
fn key<'a>(keyring: &'a [u8], client: &str, file: &CredentialFile) -> Result<(&'a [u8], bool)> {
    let (mut section, mut clients) = (&b""[..], Vec::new());
    let mut found: Option<&[u8]> = None;
    for line in keyring.split(|byte| *byte == b'\n') {
        // Neither a name nor a key contains these characters.
        let line = line.split(|byte| b"#;".contains(byte)).next().unwrap_or_default().trim_ascii();
        if let Some(name) = line.strip_prefix(b"[").and_then(|rest| rest.strip_suffix(b"]")) {
            section = name.trim_ascii();
            clients.push(section);
        }
        let mut parts = line.splitn(2, |byte| *byte == b'=').map(<[u8]>::trim_ascii);
        let (Some(b"key"), Some(value)) = (parts.next(), parts.next()) else { continue };
        if section != client.as_bytes() {
            continue;
        }
        if found.is_some_and(|earlier| earlier != value) {
            return Err(invalid(format!("the {file} has two different keys of {client}"))
                .with_repair(new_keyring(client, file)));
        }
        found = Some(value);
    }
    let key = found.ok_or_else(|| no_key(&clients, client, file))?;
    Ok((key, check(key, client, file)?))
}

/// As Ceph decodes keys (`ceph_unarmor`): base64 with padding, and with any value of the bits that no byte uses.
fn encoding() -> Encoding {
    let mut specification = BASE64.specification();
    specification.check_trailing_bits = false;
    specification.encoding().unwrap_or(BASE64)
}

/// Checks that a librados can decode a key. Returns whether the key is of the type aes256k.
fn check(key: &[u8], client: &str, file: &CredentialFile) -> Result<bool> {
    let malformed = || {
        invalid(format!("the key of {client} in the {file} is malformed"))
            .with_repair(new_keyring(client, file))
    };
    let encoding = encoding();
    let mut bytes = Zeroizing::new([0; MAX_KEY]);
    let longest = encoding.decode_len(key.len()).map_err(|_| malformed())?;
    let room = bytes.get_mut(..longest).ok_or_else(malformed)?;
    let length = encoding.decode_mut(key, room).map_err(|_| malformed())?;
    let Some((header, secret)) = bytes[..length].split_first_chunk::<HEADER>() else {
        return Err(malformed());
    };
    let kind = u16::from_le_bytes([header[0], header[1]]);
    let secret_length = u16::from_le_bytes([header[10], header[11]]);
    // A larger number is no type: the first characters are missing, and it is a part of the secret.
    if kind > u16::from(u8::MAX) {
        return Err(malformed());
    }
    let Some((_, length)) = [AES, AES256K].into_iter().find(|(known, _)| *known == kind) else {
        let message = format!(
            "the key of {client} in the {file} has the type {kind}; the known ones are 1 (aes) and 2 (aes256k)"
        );
        return Err(Error::new(ErrorKind::Unsupported, message).with_repair(format!(
            "upgrade cleat; or create a client with a key of a known type, and give its keyring: {}=PATH",
            file.option
        )));
    };
    if secret.len() != length || usize::from(secret_length) != length {
        return Err(malformed());
    }
    Ok(kind == AES256K.0)
}

fn no_key(clients: &[&[u8]], client: &str, file: &CredentialFile) -> Error {
    // Only names: a file of another kind may have secrets in brackets.
    let plain = |name: &&str| {
        let rest = name.strip_prefix("client.").unwrap_or("?");
        rest.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) && name.len() < 64
    };
    let named: Vec<&str> = clients
        .iter()
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(plain)
        .take(MAX_NAMED)
        .collect();
    let has = match &*named {
        [] => String::new(),
        named => format!("; it has an entry for {}", named.join(", ")),
    };
    Error::new(ErrorKind::PermissionDenied, format!("the {file} has no key of {client}{has}"))
        .with_repair(format!(
            "id=NAME and keyring=PATH in the volume's options select another client; or write a \
             keyring: {}",
            new_keyring(client, file)
        ))
}

/// Returns the command that writes a keyring.
fn new_keyring(client: &str, file: &CredentialFile) -> String {
    match KernelKey::of_path(&file.path) {
        Some(key) => format!("ceph auth get {client} | {}", key.store_command()),
        None => format!("ceph auth get {client} -o {}", file.path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::MAX_KEYRING;

    const OWN: &str = "AQBbCH1lAAAAABAAZ5F5Yr0zQAg9tGv0n8bRJQ==";
    const OTHER: &str = "AQCcCH1lAAAAABAAa5F5Yr0zQAg9tGv0n8bRJQ==";

    /// Of the type aes256k.
    const LONG: &str = "AgCAO7FqAAAAACAABwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSY=";

    fn file() -> CredentialFile {
        CredentialFile {
            path: "/k".into(),
            what: "keyring",
            option: "keyring",
            max_bytes: MAX_KEYRING,
            is_followed: false,
            source: None,
        }
    }

    fn find(keyring: &str) -> Result<String> {
        let found = key(keyring.as_bytes(), "client.a", &file());
        found.map(|(key, _)| String::from_utf8(key.to_vec()).unwrap())
    }

    fn refused(keyring: &str, kind: ErrorKind, part: &str) {
        let error = find(keyring).expect_err(keyring);
        assert_eq!(error.kind(), kind, "{keyring:?}: {error}");
        assert!(error.message().contains(part), "{keyring:?}: {error}");
        let all = format!("{error:?} {}", error.repair().expect(keyring));
        assert!(!all.contains("AQ") && !all.contains("r0zQAg9t"), "the error shows a key: {all}");
    }

    #[test]
    fn the_key_of_the_client_is_found_among_several_entries() {
        for keyring in [
            format!("[client.a]\n\tkey = {OWN}\n"),
            format!("[client.a]\nkey={OWN}"),
            format!("# made by hand\r\n [ client.a ] \r\n key = {OWN} ; mine\r\n"),
            format!(
                "[mon.]\n\tkey = {OTHER}\n\tcaps mon = \"allow *\"\n\n[client.a]\n\tcaps mon = \
                 \"profile rbd\"\n\tkey = {OWN}\n[client.ab]\n\tkey = {OTHER}\n"
            ),
            format!("key = {OTHER}\n[client.a]\nkey = {OWN}\nkeys = {OTHER}\n"),
            format!("[client.a]\nkey = {OWN}\n[client.a]\nkey = {OWN}\n"),
        ] {
            assert_eq!(find(&keyring).unwrap(), OWN, "{keyring}");
        }
        // Ceph ignores the last bits of the last character.
        let bits = OWN.replace("Q==", "R==");
        assert_eq!(find(&format!("[client.a]\nkey = {bits}\n")).unwrap(), bits);
    }

    #[test]
    fn a_key_of_ceph_20_is_found_with_its_type() {
        let keyring = format!("[client.a]\nkey = {OWN}\n[client.b]\nkey = {LONG}\n");
        let found = |client: &str| key(keyring.as_bytes(), client, &file()).unwrap();
        assert_eq!(found("client.a"), (OWN.as_bytes(), false));
        assert_eq!(found("client.b"), (LONG.as_bytes(), true));
    }

    #[test]
    fn a_keyring_without_the_key_is_refused_with_the_names_of_its_clients() {
        use ErrorKind::PermissionDenied;
        for empty in
            ["", "\n", "[client.a]\n", "[client.a]\ncaps mon = \"allow r\"\n", OWN, "\0\u{1}"]
        {
            refused(empty, PermissionDenied, "the keyring /k has no key of client.a");
        }
        let others = format!("[client.b]\nkey = {OTHER}\n[client.c]\nkey = {OTHER}\n[{OTHER}]\n");
        refused(&others, PermissionDenied, "it has an entry for client.b, client.c");
        let many: String = (0..5000).map(|n| format!("[client.{n}]\n")).collect();
        refused(&many, PermissionDenied, "client.0, client.1");
        assert!(find(&many).unwrap_err().message().len() < 300);
    }

    #[test]
    fn a_malformed_key_is_refused_before_librados_could_log_it() {
        use ErrorKind::{InvalidArgument, Unsupported};
        for malformed in [
            "",
            "AQ",
            "none",
            &OWN[..39],
            &OWN.replace('=', "A"),
            &format!("{OWN}=="),
            &OWN.replace("Yr0z", "Yr 0"),
            &OWN.replace("Yr0z", "Yr=="),
            &OWN.replace("ABAA", "ACAA"),
            &format!("\"{OWN}\""),
        ] {
            let keyring = format!("[client.a]\nkey = {malformed}\n");
            refused(
                &keyring,
                InvalidArgument,
                "the key of client.a in the keyring /k is malformed",
            );
        }
        refused(&format!("[client.a]\nkey = Aw{}\n", &OWN[2..]), Unsupported, "the type 3");
        let short = format!("[client.a]\nkey = Ag{}\n", &OWN[2..]);
        refused(&short, InvalidArgument, "the key of client.a in the keyring /k is malformed");
        let twice = format!("[client.a]\nkey = {OWN}\nkey = {OTHER}\n");
        refused(&twice, InvalidArgument, "two different keys of client.a");
    }

    #[test]
    fn a_huge_keyring_is_refused_and_the_longest_one_is_searched() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("k");
        let spec = |path: &std::path::Path| {
            let options = format!("id=a&keyring={}", path.display());
            RbdSpec::parse("p/i", cleat_backend::uri::Options::parse(&options).unwrap()).unwrap()
        };
        let own = format!("[client.a]\nkey = {OWN}\n");
        std::fs::write(&path, " ".repeat(MAX_KEYRING - own.len()) + &own).unwrap();
        assert_eq!(
            ClientKey::load(&spec(&path)).unwrap().unwrap().text().to_bytes(),
            OWN.as_bytes()
        );
        std::fs::write(&path, " ".repeat(MAX_KEYRING) + &own).unwrap();
        let error = ClientKey::load(&spec(&path)).err().expect("too long");
        assert!(error.message().contains("longer than 65536 bytes"), "{error}");
    }
}
