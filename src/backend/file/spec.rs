//! The URIs `file:/path?direct=…&create=…` for a volume and `file:/directory` for a store.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use cleat_core::error::Result;

use crate::uri::{Options, decode, invalid, parse_size, shown};

/// The subdirectory of a store with everything that is not a volume.
pub(super) const HIDDEN: &str = ".cleat";

/// A file or a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileSpec {
    /// The absolute path.
    pub(super) path: PathBuf,
    /// Bypass the page cache (O_DIRECT).
    pub(super) direct: bool,
    /// The size in bytes with which the file is created if it is missing or empty.
    pub(super) create: Option<u64>,
}

impl FileSpec {
    pub(super) fn parse(location: &str, mut options: Options) -> Result<Self> {
        let path = path(location)?;
        if path == Path::new("/") {
            return Err(invalid("file:/ names no file"));
        }
        let direct = options.flag("direct")?.unwrap_or(false);
        let create = options.take("create").map(|text| parse_size(&text)).transpose()?;
        options.finish("file:", &["direct", "create"])?;
        Ok(Self { path, direct, create })
    }
}

/// A directory of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DirectorySpec {
    /// The absolute path.
    pub(super) path: PathBuf,
}

impl DirectorySpec {
    pub(super) fn parse(location: &str, options: Options) -> Result<Self> {
        options.finish("file:", &[])?;
        Ok(Self { path: path(location)? })
    }

    /// Returns the file `name` in this directory.
    pub(super) fn file(&self, name: &str) -> Result<FileSpec> {
        if name == HIDDEN {
            return Err(invalid(format!("{name:?} has the snapshots of a directory's volumes")));
        }
        if Path::new(name).file_name() != Some(OsStr::new(name)) || name.contains('\0') {
            let message = format!("{:?} cannot be the name of a file", shown(name));
            return Err(invalid(message));
        }
        Ok(FileSpec { path: self.path.join(name), direct: false, create: None })
    }
}

/// Parses the part of the URI behind `file:`.
fn path(location: &str) -> Result<PathBuf> {
    // RFC 8089 has both file:/path and file:///path.
    let location = location.strip_prefix("//").unwrap_or(location);
    if !location.starts_with('/') {
        return Err(invalid(format!("file: needs an absolute path, not {:?}", shown(location)))
            .with_repair("write the whole path, as in file:/var/lib/images/a.img"));
    }
    let bytes = decode(location)?;
    if bytes.contains(&0) {
        return Err(invalid("a path cannot contain a zero byte (%00)"));
    }
    let path = PathBuf::from(OsString::from_vec(bytes));
    // Each path has one spelling: without doubled or trailing slashes and without `.`. `..` stays, because
    // its meaning depends on symbolic links.
    Ok(path.components().filter(|part| *part != Component::CurDir).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::sync::Arc;

    use super::*;
    use crate::uri::{MAX_NAME, MAX_SIZE, VolumeUri};

    fn parsed(text: &str) -> FileSpec {
        let (location, options) = text.split_once('?').unwrap_or((text, ""));
        let location = location.strip_prefix("file:").expect("the scheme");
        FileSpec::parse(location, Options::parse(options).expect("options")).expect("a file")
    }

    proptest! {
    #[test]
    fn every_path_is_printed_and_parsed_unchanged(
        parts in prop::collection::vec(prop::collection::vec(1_u8..=255, 1..30), 1..8),
        direct: bool,
        create in prop::option::of(1..MAX_SIZE),
    ) {
        let mut path = PathBuf::from("/");
        for part in parts {
            let part: Vec<u8> =
                part.into_iter().map(|b| if b == b'/' { b'x' } else { b }).collect();
            path.push(OsString::from_vec(part));
        }
        let path: PathBuf = path.components().filter(|p| *p != Component::CurDir).collect();
        prop_assume!(path != Path::new("/"));
        let spec = FileSpec { path, direct, create };
        let original = VolumeUri::new(Arc::new(spec.clone()));
        let text = original.to_string();
        prop_assert_eq!(&parsed(&text), &spec);
        let name = original.default_name();
        prop_assert!(name.len() <= MAX_NAME && name.starts_with("file"));
        prop_assert!(
            name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)), "{}", name
        );
    }

    }
}
