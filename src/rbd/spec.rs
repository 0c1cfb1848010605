//! The URIs of images (`rbd:pool[/namespace]/image[@snapshot]`) and of stores (`rbd:pool[/namespace]`).

mod encryption;

use std::collections::BTreeMap;
use std::path::PathBuf;

use cleat_backend::CredentialFile;
use cleat_backend::uri::{Encoded, Options, absolute_path, decode, invalid, secret_path, shown};
use cleat_core::error::{Error, ErrorKind, Result};

use crate::cache::check_option;
pub(crate) use encryption::{Encryption, Luks};

/// An RBD image, with the options for its cluster. It contains no secret, only the paths of files with
/// secrets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RbdSpec {
    /// The pool's name.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The image's name.
    pub image: String,
    /// The snapshot's name. A volume with a snapshot is read-only.
    pub snapshot: Option<String>,
    /// The absolute path of Ceph's configuration file.
    pub conf: Option<PathBuf>,
    /// The client's name, without `client.`.
    pub id: Option<String>,
    /// The absolute path of the file with the client's key, or the value that names a key of the kernel.
    pub keyring: Option<PathBuf>,
    /// The encryption of the content, with the files of the passphrases.
    pub encryption: Option<Encryption>,
    /// Whether TRIM is offered, which returns space to the cluster. The default is true unless the image is
    /// encrypted.
    pub trim: bool,
    /// Whether several clients may write. Then there is no claim, no lock is kept, and no client of another
    /// mapping is fenced.
    pub shared: bool,
    /// Options of Ceph, which override the configuration file.
    pub config: BTreeMap<String, String>,
}

/// A pool or a namespace, with the options for its cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RbdStoreSpec(
    /// The spec of an image with an empty name.
    RbdSpec,
);

/// The prefix of options of Ceph.
const CONFIG: &str = "config.";

/// Options of Ceph that are secrets.
const SECRETS: [&str; 2] = ["key", "auth_client_key"];

/// The maximum length of a keyring, in bytes.
pub(crate) const MAX_KEYRING: usize = 64 << 10;

/// The maximum length of a name, in bytes.
const MAX_NAME: usize = 255;

impl RbdSpec {
    pub(crate) fn parse(location: &str, options: Options) -> Result<Self> {
        let (path, snapshot) = match location.split_once('@') {
            Some((path, snapshot)) => (path, Some(part(snapshot, "snapshot")?)),
            None => (location, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(part(namespace, "namespace")?), image),
            _ => {
                let message = format!("rbd: needs a pool and an image, not {:?}", shown(location));
                return Err(invalid(message).with_repair(
                    "write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE, or either with @SNAPSHOT",
                ));
            }
        };
        let name = part(image, "image")?;
        Self::with(part(pool, "pool")?, namespace, name, snapshot, options)
    }

    fn with(
        pool: String,
        namespace: Option<String>,
        image: String,
        snapshot: Option<String>,
        mut options: Options,
    ) -> Result<Self> {
        let encryption = Encryption::take(&mut options)?;
        let spec = Self {
            pool,
            namespace,
            image,
            snapshot,
            conf: file(&mut options, "conf")?,
            id: options.take("id").map(|id| client(&id)).transpose()?,
            keyring: secret(&mut options, "keyring")?,
            trim: options.flag("trim")?.unwrap_or(encryption.is_none()),
            encryption,
            shared: shared(options.take("lock").as_deref())?,
            config: config(options.split_prefix(CONFIG))?,
        };
        let valid = [
            "conf",
            "id",
            "keyring",
            "encryption",
            "passphrase_file",
            "trim",
            "lock",
            "config.OPTION",
        ];
        options.finish("rbd:", &valid)?;
        Ok(spec)
    }

    /// Returns the file that `keyring=` names.
    pub(crate) fn keyring_file(&self) -> Option<CredentialFile> {
        let path = self.keyring.clone()?;
        Some(CredentialFile {
            path,
            what: "keyring",
            option: "keyring",
            max_bytes: MAX_KEYRING,
            is_followed: false,
            source: None,
        })
    }

    /// Returns the keyring and the passphrase files, each path once.
    pub(crate) fn files_with_secrets(&self) -> Vec<CredentialFile> {
        let mut files: Vec<_> = self.keyring_file().into_iter().collect();
        for file in self.encryption.iter().flat_map(Encryption::files) {
            if files.iter().all(|other| other.path != file.path) {
                files.push(file);
            }
        }
        files
    }

    /// Returns the pool or namespace of the image.
    pub(crate) fn store(&self) -> RbdStoreSpec {
        RbdStoreSpec(Self { image: String::new(), snapshot: None, ..self.clone() })
    }

    /// Returns `pool[/namespace]/image[@snapshot]`, for messages and commands.
    pub(crate) fn image_name(&self) -> String {
        let space = self.namespace.as_ref().map(|name| format!("/{name}")).unwrap_or_default();
        let snapshot = self.snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
        format!("{}{space}/{}{snapshot}", self.pool, self.image)
    }

    pub(crate) fn location_text(&self) -> String {
        let encoded = |text: &str| Encoded(text.as_bytes()).to_string();
        let mut location = encoded(&self.pool);
        for part in [self.namespace.as_deref(), Some(&*self.image)].into_iter().flatten() {
            location.push('/');
            location.push_str(&encoded(part));
        }
        if let Some(snapshot) = &self.snapshot {
            location.push('@');
            location.push_str(&encoded(snapshot));
        }
        location
    }

    pub(crate) fn option_list(&self) -> Vec<(String, String)> {
        let path = |path: &PathBuf| path.to_string_lossy().into_owned();
        let encryption = self.encryption.as_ref().map(Encryption::option_values);
        let (formats, files) = encryption.unzip();
        let first = [
            ("conf", self.conf.as_ref().map(path)),
            ("id", self.id.clone()),
            ("keyring", self.keyring.as_ref().map(path)),
            ("encryption", formats),
            ("passphrase_file", files),
            ("trim", (self.trim != self.encryption.is_none()).then(|| self.trim.to_string())),
            ("lock", self.shared.then(|| "shared".to_owned())),
        ];
        let first = first.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let config =
            self.config.iter().map(|(key, value)| (format!("{CONFIG}{key}"), value.clone()));
        first.chain(config).collect()
    }
}

impl RbdStoreSpec {
    pub(crate) fn parse(location: &str, options: Options) -> Result<Self> {
        let parts: Vec<&str> = location.split('/').collect();
        let (pool, namespace) = match parts[..] {
            [pool] => (pool, None),
            [pool, namespace] => (pool, Some(part(namespace, "namespace")?)),
            _ => {
                let message = format!("rbd: needs a pool, not {:?}", shown(location));
                return Err(invalid(message).with_repair("write rbd:POOL or rbd:POOL/NAMESPACE"));
            }
        };
        let pool = part(pool, "pool")?;
        RbdSpec::with(pool, namespace, String::new(), None, options).map(Self)
    }

    /// Returns the pool's name.
    pub(crate) fn pool(&self) -> &str {
        &self.0.pool
    }

    /// Returns the options for the cluster, as the spec of an image with an empty name.
    pub(crate) fn client(&self) -> &RbdSpec {
        &self.0
    }

    /// Returns the namespace in the pool.
    pub(crate) fn namespace(&self) -> Option<&str> {
        self.0.namespace.as_deref()
    }

    /// Returns the spec of an image, or of a snapshot of it.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an invalid name.
    pub(crate) fn image(&self, name: &str, snapshot: Option<&str>) -> Result<RbdSpec> {
        plain(name, "image")?;
        snapshot.map(|snapshot| plain(snapshot, "snapshot")).transpose()?;
        let (image, snapshot) = (name.to_owned(), snapshot.map(str::to_owned));
        Ok(RbdSpec { image, snapshot, ..self.0.clone() })
    }

    /// Returns `pool[/namespace]`, encoded for a URI.
    pub(crate) fn location_text(&self) -> String {
        let location = self.0.location_text();
        location.strip_suffix('/').unwrap_or(&location).to_owned()
    }

    pub(crate) fn option_list(&self) -> Vec<(String, String)> {
        self.0.option_list()
    }

    /// Returns this store with the options of `other`, if it has no options of its own.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if both have options and they differ.
    pub(crate) fn with_options_of(mut self, other: &Self) -> Result<Self> {
        if self.option_list().is_empty() {
            let Self(RbdSpec { conf, id, keyring, config, .. }) = other.clone();
            self.0 = RbdSpec { conf, id, keyring, config, ..self.0 };
        } else if !other.option_list().is_empty() && self.option_list() != other.option_list() {
            return Err(invalid(
                "the options of the two volumes differ, but one client serves both",
            )
            .with_repair("give the options for only one of them"));
        }
        Ok(self)
    }
}

/// Decodes a name of a location. A name cannot contain the separators, which RBD's own tools use, too.
fn part(text: &str, what: &str) -> Result<String> {
    let name = String::from_utf8(decode(text)?)
        .map_err(|_| invalid(format!("the {what}'s name {:?} is not UTF-8", shown(text))))?;
    if name.is_empty() {
        return Err(invalid(format!("the {what}'s name is empty")).with_repair(
            "write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE, or either with @SNAPSHOT",
        ));
    }
    plain(&name, what)?;
    Ok(name)
}

fn plain(name: &str, what: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME || name.contains(['/', '@', '\0']) {
        let message = format!("{:?} cannot be the {what}'s name", shown(name));
        return Err(invalid(message)
            .with_repair(format!("names have 1 to {MAX_NAME} bytes, without /, @ and zero")));
    }
    Ok(())
}

fn file(options: &mut Options, key: &str) -> Result<Option<PathBuf>> {
    options.take(key).map(|path| absolute_path(&path, key)).transpose()
}

fn secret(options: &mut Options, key: &str) -> Result<Option<PathBuf>> {
    options.take(key).map(|value| secret_path(&value, key)).transpose()
}

fn shared(lock: Option<&str>) -> Result<bool> {
    match lock {
        None | Some("exclusive") => Ok(false),
        Some("shared") => Ok(true),
        Some(other) => Err(invalid(format!("lock is exclusive or shared, not {other:?}"))),
    }
}

fn client(id: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if id.is_empty() || id.len() > MAX_NAME || !id.chars().all(plain) {
        return Err(invalid(format!("{id:?} is not a valid client name")));
    }
    match id.strip_prefix("client.") {
        Some(bare) => Err(invalid(format!("the id is {bare:?}, without \"client.\""))
            .with_repair(format!("write id={bare}"))),
        None => Ok(id.to_owned()),
    }
}

fn config(options: Options) -> Result<BTreeMap<String, String>> {
    let mut config = BTreeMap::new();
    for (key, value) in options.into_pairs() {
        // Ceph treats these characters as equal. One spelling keeps URIs comparable.
        let key = key.replace(['-', ' '], "_");
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if key.is_empty() || !key.chars().all(plain) || value.contains('\0') {
            return Err(invalid(format!("{CONFIG}{key} is not an option of Ceph")));
        }
        if SECRETS.contains(&&*key) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{CONFIG}{key} would put a secret into the volume's URI"),
            )
            .with_repair("write the key to a file and give its path: keyring=/etc/ceph/…"));
        }
        check_option(&key, &value)?;
        if config.insert(key.clone(), value).is_some() {
            return Err(invalid(format!("the option {CONFIG}{key} is given twice")));
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
