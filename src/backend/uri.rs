//! Volume URIs: `SCHEME:WHERE?key=value&…`, parsed once into what the backend needs.
//!
//! ```text
//! mem:SIZE                              memory; gone with the worker
//! file:/absolute/path                   a raw file or a block device
//!     direct=true|false                 past the page cache (O_DIRECT); default false
//!     create=SIZE                       make the file, sparse, where it is missing or empty
//! rbd:pool[/namespace]/image[@snapshot] an RBD image of Ceph, or one of its snapshots
//!     conf=PATH keyring=PATH            Ceph's files; default /etc/ceph/ceph.conf and what it says
//!     id=NAME                           the client, without `client.`; default admin
//!     encryption=luks1|luks2|luks       how its content is encrypted, and the file whose content
//!     passphrase_file=PATH              unlocks it; of a clone, each with a comma, then its parent's
//!     trim=true|false                   give back what is trimmed; default true, unless encrypted
//!     lock=exclusive|shared             shared: several write at a time and nobody is kept out, which
//!                                       destroys what does not expect it; default exclusive
//!     config.OPTION=VALUE               an option of Ceph, for this volume
//! fault:URI                             (feature `fault`) any other, with injected faults
//!     fault.KEY=VALUE                   see `fault::plan`; other options are the inner volume's
//! ```
//!
//! A `%XX` in the path or in a value stands for that byte; `?` and `%` in a path must be written so.
//! Sizes take the suffixes K, M, G, T, P, E (also Ki, Mi, …): powers of 1024. Credentials are never
//! part of a URI.

mod encryption;
mod options;
mod rbd;
mod size;
mod store;

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use cleat_core::error::{Error, ErrorKind, Result};
use options::{Encoded, Query, decode};

pub use encryption::{Encryption, Luks};
pub(crate) use options::Options;
pub use rbd::{RbdSpec, RbdStoreSpec};
pub use size::{Size, parse_size, parse_size_or_zero};
pub use store::{StoreSpec, StoreUri};

/// The longest URI, in bytes.
pub const MAX_URI: usize = 4096;

/// The longest name that [`VolumeUri::default_name`] gives, and that a mapping may have.
pub const MAX_NAME: usize = 128;

/// Which volume, and how it is to be opened. Its `Display` is canonical: equal volumes with equal
/// options print equally, and the text parses back to the same value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeUri(Spec);

/// What a backend needs to open its volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Spec {
    /// `mem:`
    Mem(MemSpec),
    /// `file:`
    File(FileSpec),
    /// `rbd:`
    Rbd(RbdSpec),
    /// `fault:`
    #[cfg(feature = "fault")]
    Fault(FaultSpec),
}

/// A volume in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MemSpec {
    /// In bytes; never zero.
    pub size: u64,
}

/// A file or a block device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileSpec {
    /// Absolute.
    pub path: PathBuf,
    /// Past the page cache.
    pub direct: bool,
    /// The size in bytes to make the file with, where it is missing or empty.
    pub create: Option<u64>,
}

/// A volume with injected faults.
#[cfg(feature = "fault")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FaultSpec {
    /// The volume underneath; never a `fault:` itself.
    pub inner: Box<VolumeUri>,
    /// The faults to begin with.
    pub plan: super::fault::Plan,
}

impl VolumeUri {
    /// What the backend needs.
    pub fn spec(&self) -> &Spec {
        &self.0
    }

    /// The part before the colon.
    pub fn scheme(&self) -> &'static str {
        match &self.0 {
            Spec::Mem(_) => "mem",
            Spec::File(_) => "file",
            Spec::Rbd(_) => "rbd",
            #[cfg(feature = "fault")]
            Spec::Fault(_) => "fault",
        }
    }

    /// The same volume without what unlocks it, which is enough to claim it.
    #[must_use]
    pub fn locked(&self) -> Self {
        Self(match &self.0 {
            Spec::Rbd(spec) => Spec::Rbd(RbdSpec { encryption: None, trim: true, ..spec.clone() }),
            other => other.clone(),
        })
    }

    /// A mapping's name made from the volume, `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`. Options do not
    /// enter. Where characters are lost (other than `/`, which becomes `-`), a hash keeps names of
    /// different volumes apart.
    pub fn default_name(&self) -> String {
        let location = self.location();
        let mut name = String::from(self.scheme());
        let mut lossy = false;
        name.push('-');
        for c in location.chars() {
            match c {
                'A'..='Z' | 'a'..='z' | '0'..='9' | '.' | '_' | '-' => name.push(c),
                '/' | ':' if name.ends_with('-') => {}
                '/' | ':' => name.push('-'),
                _ => {
                    lossy = true;
                    name.push('_');
                }
            }
        }
        if lossy || name.len() > MAX_NAME {
            let hash = format!("-{:016x}", fnv1a(location.as_bytes()));
            name.truncate(MAX_NAME - hash.len());
            name.push_str(&hash);
        }
        name
    }

    /// What stands between the scheme's colon and the options.
    fn location(&self) -> String {
        match &self.0 {
            Spec::Mem(spec) => Size(spec.size).to_string(),
            Spec::File(spec) => Encoded(spec.path.as_os_str().as_bytes()).to_string(),
            Spec::Rbd(spec) => spec.location(),
            #[cfg(feature = "fault")]
            Spec::Fault(spec) => format!("{}:{}", spec.inner.scheme(), spec.inner.location()),
        }
    }

    fn options(&self) -> Vec<(String, String)> {
        match &self.0 {
            Spec::Mem(_) => Vec::new(),
            Spec::File(spec) => {
                let direct = spec.direct.then(|| ("direct".to_owned(), "true".to_owned()));
                let create = spec.create.map(|size| ("create".to_owned(), Size(size).to_string()));
                direct.into_iter().chain(create).collect()
            }
            Spec::Rbd(spec) => spec.options(),
            #[cfg(feature = "fault")]
            Spec::Fault(spec) => {
                let mut options = spec.inner.options();
                let faults = spec.plan.options();
                options.extend(
                    faults
                        .into_iter()
                        .map(|(key, value)| (format!("{}{key}", super::fault::PREFIX), value)),
                );
                options
            }
        }
    }
}

impl FromStr for VolumeUri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() > MAX_URI {
            return Err(invalid(format!("the volume URI is longer than {MAX_URI} bytes")));
        }
        let (location, options) = match text.split_once('?') {
            Some((location, options)) => (location, options),
            None => (text, ""),
        };
        parse(location, Options::parse(options)?).map(Self)
    }
}

impl fmt::Display for VolumeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.scheme(), self.location(), Query(&self.options()))
    }
}

impl TryFrom<String> for VolumeUri {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<VolumeUri> for String {
    fn from(uri: VolumeUri) -> Self {
        uri.to_string()
    }
}

/// An `InvalidArgument`, the kind of nearly every error here.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

fn parse(text: &str, options: Options) -> Result<Spec> {
    let Some((scheme, location)) = text.split_once(':') else {
        let error = invalid(format!("the volume {text:?} has no scheme"));
        return Err(if text.starts_with('/') {
            error.with_repair(format!("write file:{text} for a file or a block device"))
        } else {
            error.with_repair(EXAMPLES)
        });
    };
    match scheme {
        "mem" => parse_mem(location, options),
        "file" => parse_file(location, options),
        "rbd" => RbdSpec::parse(location, options).map(Spec::Rbd),
        #[cfg(feature = "fault")]
        "fault" => parse_fault(location, options),
        #[cfg(not(feature = "fault"))]
        "fault" => Err(Error::new(
            ErrorKind::Unsupported,
            "this binary was built without fault: volumes, which are for tests",
        )
        .with_repair("build it with `cargo build --features fault`")),
        "s3" | "gs" | "az" | "dir" => Err(Error::new(
            ErrorKind::Unsupported,
            format!("{scheme}: volumes are not supported by this version of cleat"),
        )
        .with_repair("use file:, rbd: or mem:")),
        _ => Err(invalid(format!("the volume scheme {scheme:?} is unknown")).with_repair(EXAMPLES)),
    }
}

fn parse_mem(location: &str, options: Options) -> Result<Spec> {
    options.finish("mem:", &[])?;
    let size = parse_size(location)?;
    Ok(Spec::Mem(MemSpec { size }))
}

fn parse_file(location: &str, mut options: Options) -> Result<Spec> {
    let path = path(location)?;
    if path == Path::new("/") {
        return Err(invalid("file:/ names no file"));
    }
    let direct = options.flag("direct")?.unwrap_or(false);
    let create = options.take("create").map(|text| parse_size(&text)).transpose()?;
    options.finish("file:", &["direct", "create"])?;
    Ok(Spec::File(FileSpec { path, direct, create }))
}

/// What stands behind `file:`.
fn path(location: &str) -> Result<PathBuf> {
    // RFC 8089 has both file:/path and file:///path.
    let location = location.strip_prefix("//").unwrap_or(location);
    if !location.starts_with('/') {
        return Err(invalid(format!("file: needs an absolute path, not {location:?}"))
            .with_repair("write the whole path, as in file:/var/lib/images/a.img"));
    }
    let bytes = decode(location)?;
    if bytes.contains(&0) {
        return Err(invalid("a path cannot contain a zero byte (%00)"));
    }
    let path = PathBuf::from(OsString::from_vec(bytes));
    // One spelling for each path: no doubled or trailing slashes, no `.`. `..` stays, since what it
    // means depends on symbolic links.
    Ok(path.components().filter(|part| *part != Component::CurDir).collect())
}

#[cfg(feature = "fault")]
fn parse_fault(location: &str, mut options: Options) -> Result<Spec> {
    let plan = super::fault::Plan::parse(options.split_prefix(super::fault::PREFIX))?;
    if location.starts_with("fault:") {
        return Err(invalid("fault: cannot wrap another fault: volume"));
    }
    let inner = Box::new(VolumeUri(parse(location, options)?));
    Ok(Spec::Fault(FaultSpec { inner, plan }))
}

/// 64-bit FNV-1a: stable over versions and machines, which std's hasher does not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const EXAMPLES: &str = "volumes are written as mem:1G, file:/var/lib/images/a.img, file:/dev/sdb?direct=true or rbd:pool/image";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uri(text: &str) -> VolumeUri {
        text.parse().unwrap_or_else(|error: Error| panic!("{text}: {}", error.report()))
    }

    fn refused(text: &str) -> Error {
        text.parse::<VolumeUri>().expect_err(text)
    }

    #[test]
    fn canonical_forms() {
        for (given, canonical) in [
            ("mem:1024M", "mem:1G"),
            ("mem:1536Mi", "mem:1536M"),
            ("mem:4097", "mem:4097"),
            ("file:/var//lib/./a.img/", "file:/var/lib/a.img"),
            ("file:///dev/sdb?direct=false", "file:/dev/sdb"),
            ("file:/a%3fb%20c?create=1024&direct=true", "file:/a%3fb%20c?direct=true&create=1K"),
            ("file:/ä", "file:/%c3%a4"),
        ] {
            assert_eq!(uri(given).to_string(), canonical, "{given}");
        }
    }

    #[test]
    fn errors_name_the_cause_and_the_choice() {
        for (given, kind, cause, repair) in [
            ("/dev/sdb", ErrorKind::InvalidArgument, "no scheme", "file:/dev/sdb"),
            ("disk", ErrorKind::InvalidArgument, "no scheme", "mem:1G"),
            ("nfs:/x", ErrorKind::InvalidArgument, "\"nfs\" is unknown", "mem:1G"),
            ("s3://b/p", ErrorKind::Unsupported, "s3:", "file:"),
            ("file:a.img", ErrorKind::InvalidArgument, "absolute", "whole path"),
            ("file:/a?drect=true", ErrorKind::InvalidArgument, "\"drect\"", "direct, create"),
            ("file:/a?direct=true&direct=true", ErrorKind::InvalidArgument, "twice", ""),
            ("file:/a?direct=yes", ErrorKind::InvalidArgument, "true or false", ""),
            ("file:/a?direct", ErrorKind::InvalidArgument, "has no value", ""),
            ("file:/a%0", ErrorKind::InvalidArgument, "%", "%25"),
            ("file:/a%00", ErrorKind::InvalidArgument, "zero byte", ""),
            ("file:/", ErrorKind::InvalidArgument, "names no file", ""),
            ("mem:1G?direct=true", ErrorKind::InvalidArgument, "\"direct\"", "no options"),
            ("mem:", ErrorKind::InvalidArgument, "size", "1G"),
            ("mem:0", ErrorKind::InvalidArgument, "zero", ""),
            ("mem:1GB", ErrorKind::InvalidArgument, "1GB", "1024"),
            ("mem:99E", ErrorKind::InvalidArgument, "largest", ""),
        ] {
            let error = refused(given);
            assert_eq!(error.kind(), kind, "{given}");
            assert!(error.message().contains(cause), "{given}: {}", error.message());
            assert!(error.repair().unwrap_or("").contains(repair), "{given}: {:?}", error.repair());
        }
        assert!(refused(&format!("file:/{}", "a".repeat(MAX_URI))).message().contains("4096"));
    }

    #[test]
    fn default_names() {
        assert_eq!(uri("file:/var/lib/a.img").default_name(), "file-var-lib-a.img");
        assert_eq!(uri("file:/var/lib/a.img?direct=true").default_name(), "file-var-lib-a.img");
        assert_eq!(uri("mem:1G").default_name(), "mem-1G");
        let (a, b) = (uri("file:/a b").default_name(), uri("file:/a+b").default_name());
        assert_ne!(a, b);
    }

    #[cfg(feature = "fault")]
    #[test]
    fn faults_wrap_a_volume() {
        let text = "fault:file:/a?direct=true&fault.latency=10ms";
        assert_eq!(uri(text).to_string(), text);
        assert_eq!(uri(text).default_name(), "fault-file-a");
        assert!(refused("fault:fault:mem:1G").message().contains("another fault:"));
        assert!(refused("fault:mem:1G?latency=1s").message().contains("latency"));
        assert!(refused("fault:mem:1G?fault.latency=x").message().contains("latency"));
    }

    proptest! {
        #[test]
        fn any_path_survives_the_round_trip(
            parts in prop::collection::vec(prop::collection::vec(1_u8..=255, 1..30), 1..8),
            direct: bool,
            create in prop::option::of(1..size::MAX_SIZE),
        ) {
            let mut path = PathBuf::from("/");
            for part in parts {
                let part: Vec<u8> =
                    part.into_iter().map(|b| if b == b'/' { b'x' } else { b }).collect();
                path.push(OsString::from_vec(part));
            }
            let path: PathBuf = path.components().filter(|p| *p != Component::CurDir).collect();
            prop_assume!(path != Path::new("/"));
            let original = VolumeUri(Spec::File(FileSpec { path, direct, create }));
            let text = original.to_string();
            prop_assert_eq!(&uri(&text), &original);
            let name = original.default_name();
            prop_assert!(name.len() <= MAX_NAME && name.starts_with("file"));
            prop_assert!(
                name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)), "{}", name
            );
        }

        #[test]
        fn no_text_panics_and_what_parses_is_canonical(text in "(mem|file|fault|rbd):.{0,60}") {
            if let Ok(parsed) = text.parse::<VolumeUri>() {
                prop_assert_eq!(uri(&parsed.to_string()), parsed);
            }
        }
    }
}
