//! Where volumes are kept: `rbd:pool[/namespace]`, `file:/directory`; with the options of the volumes.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::options::{Encoded, Options, Query};
use super::{
    Error, ErrorKind, FileSpec, MAX_URI, RbdStoreSpec, Result, Spec, VolumeUri, invalid, path,
};

/// A place that has volumes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoreUri(StoreSpec);

/// What a backend needs to look after the volumes of a place.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StoreSpec {
    /// A directory; absolute.
    File(PathBuf),
    /// A pool, or a namespace in one.
    Rbd(Box<RbdStoreSpec>),
}

impl StoreUri {
    /// What the backend needs.
    pub fn spec(&self) -> &StoreSpec {
        &self.0
    }

    /// The volume `name` in this place, or a snapshot of it.
    ///
    /// # Errors
    /// `InvalidArgument` for what cannot be a name.
    pub fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<VolumeUri> {
        Ok(VolumeUri(match &self.0 {
            StoreSpec::Rbd(spec) => Spec::Rbd(spec.image(name, snapshot)?),
            StoreSpec::File(directory) => {
                if Path::new(name).file_name() != Some(OsStr::new(name)) || name.contains('\0') {
                    return Err(invalid(format!("{name:?} cannot be the name of a file")));
                }
                if snapshot.is_some() {
                    return Err(no_snapshots());
                }
                Spec::File(FileSpec { path: directory.join(name), direct: false, create: None })
            }
        }))
    }

    /// This place, reached with the options of `other` where it has none itself.
    ///
    /// # Errors
    /// `InvalidArgument` where both have options, and others, or are not of one kind.
    pub fn reached_as(self, other: &Self) -> Result<Self> {
        match (self.0, &other.0) {
            (StoreSpec::Rbd(this), StoreSpec::Rbd(other)) => {
                this.reached_as(other).map(|spec| Self(StoreSpec::Rbd(Box::new(spec))))
            }
            (this @ StoreSpec::File(_), StoreSpec::File(_)) => Ok(Self(this)),
            _ => Err(invalid("a file and an RBD image have nothing in common")),
        }
    }
}

impl VolumeUri {
    /// The place that the volume is kept in, its name there, and that of the snapshot.
    ///
    /// # Errors
    /// `Unsupported` where volumes are not kept, or not under names of text.
    pub fn place(&self) -> Result<(StoreUri, String, Option<String>)> {
        let store = |spec| StoreUri(spec);
        match self.spec() {
            Spec::Rbd(spec) => {
                let place = store(StoreSpec::Rbd(Box::new(spec.store())));
                Ok((place, spec.image.clone(), spec.snapshot.clone()))
            }
            Spec::File(spec) => {
                let name = spec.path.file_name().and_then(OsStr::to_str).ok_or_else(|| {
                    let message = format!("the name of {} is not UTF-8", spec.path.display());
                    Error::new(ErrorKind::Unsupported, message)
                })?;
                let directory = spec.path.parent().unwrap_or(Path::new("/"));
                Ok((store(StoreSpec::File(directory.to_owned())), name.to_owned(), None))
            }
            Spec::Mem(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "a volume in memory is kept nowhere: it lasts from map to unmap",
            )),
            #[cfg(feature = "fault")]
            Spec::Fault(spec) => Err(Error::new(
                ErrorKind::Unsupported,
                "faults are injected into I/O, not into what is done to volumes",
            )
            .with_repair(format!("name the volume itself: {}", spec.inner))),
        }
    }

    /// As [`VolumeUri::place`], for what has to be a snapshot.
    ///
    /// # Errors
    /// As [`VolumeUri::place`]; `InvalidArgument` where no snapshot is named.
    pub fn snapshot_place(&self) -> Result<(StoreUri, String, String)> {
        match self.place()? {
            (store, name, Some(snapshot)) => Ok((store, name, snapshot)),
            (StoreUri(StoreSpec::File(_)), ..) => Err(no_snapshots()),
            (store, name, None) => {
                let volume = store.volume(&name, None)?;
                Err(invalid(format!("{volume} names no snapshot"))
                    .with_repair("write the snapshot behind the image: rbd:POOL/IMAGE@SNAPSHOT"))
            }
        }
    }
}

impl FromStr for StoreUri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() > MAX_URI {
            return Err(invalid(format!("the URI is longer than {MAX_URI} bytes")));
        }
        let (location, options) = text.split_once('?').unwrap_or((text, ""));
        let options = Options::parse(options)?;
        match location.split_once(':') {
            Some(("rbd", pool)) => {
                RbdStoreSpec::parse(pool, options).map(|spec| Self(StoreSpec::Rbd(Box::new(spec))))
            }
            Some(("file", directory)) => {
                options.finish("file:", &[])?;
                path(directory).map(|path| Self(StoreSpec::File(path)))
            }
            _ => Err(invalid(format!("{text:?} is no place that volumes are kept in"))
                .with_repair("write rbd:POOL, rbd:POOL/NAMESPACE or file:/DIRECTORY")),
        }
    }
}

impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            StoreSpec::File(path) => write!(f, "file:{}", Encoded(path.as_os_str().as_bytes())),
            StoreSpec::Rbd(spec) => write!(f, "rbd:{}{}", spec.location(), Query(&spec.options())),
        }
    }
}

/// Files have no snapshots.
fn no_snapshots() -> Error {
    Error::new(ErrorKind::Unsupported, "a file has no snapshots")
        .with_repair("keep the volume in RBD, or take snapshots of the file system that it is on")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(text: &str) -> StoreUri {
        text.parse().unwrap_or_else(|error: Error| panic!("{text}: {}", error.report()))
    }

    fn place(text: &str) -> (StoreUri, String, Option<String>) {
        text.parse::<VolumeUri>().expect(text).place().expect(text)
    }

    #[test]
    fn volumes_are_found_in_their_places_and_back() {
        for (volume, shown, name, snapshot) in [
            ("rbd:p/i", "rbd:p", "i", None),
            ("rbd:p/n/i@s?id=x", "rbd:p/n?id=x", "i", Some("s")),
            ("file:/var/a%20b/c.img", "file:/var/a%20b", "c.img", None),
            ("file:/c.img", "file:/", "c.img", None),
        ] {
            let (found, its_name, its_snapshot) = place(volume);
            assert_eq!(found.to_string(), shown);
            assert_eq!((&*its_name, its_snapshot.as_deref()), (name, snapshot), "{volume}");
            let back = found.volume(name, snapshot).expect(volume);
            assert_eq!(back.to_string(), volume);
        }
        assert_eq!(store("rbd:p/n?id=x"), place("rbd:p/n/i?id=x").0);
        assert_eq!(store("file:/var/lib/"), place("file:/var/lib/a").0);
    }

    #[test]
    fn what_is_no_place_or_no_name_is_refused() {
        for (text, cause) in [
            ("rbd:", "pool's name is empty"),
            ("rbd:a/b/c", "needs a pool"),
            ("rbd:p?direct=true", "\"direct\""),
            ("file:var", "absolute"),
            ("file:/var?direct=true", "\"direct\""),
            ("mem:1G", "no place"),
            ("/var", "no place"),
        ] {
            let error = text.parse::<StoreUri>().expect_err(text);
            assert!(error.message().contains(cause), "{text}: {}", error.message());
        }
        for name in ["", "a/b", "..", "a\0"] {
            assert!(store("file:/var").volume(name, None).is_err(), "{name:?}");
            let rbd = store("rbd:p").volume(name, None);
            assert_eq!(rbd.is_err(), name != "..", "{name:?}");
        }
        assert!(store("rbd:p").volume("i", Some("a@b")).is_err());
        let error = store("file:/var").volume("a", Some("s")).expect_err("no snapshots");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let memory = "mem:1G".parse::<VolumeUri>().expect("it is right");
        assert_eq!(memory.place().expect_err("nowhere").kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn options_of_one_volume_do_for_two() {
        let reached = |this: &str, other: &str| store(this).reached_as(&store(other));
        assert_eq!(reached("rbd:p", "rbd:q?id=x").expect("as q"), store("rbd:p?id=x"));
        assert_eq!(reached("rbd:p?id=x", "rbd:q").expect("as itself"), store("rbd:p?id=x"));
        assert_eq!(reached("rbd:p?id=x", "rbd:q?id=x").expect("alike"), store("rbd:p?id=x"));
        assert!(reached("rbd:p?id=x", "rbd:q?id=y").is_err());
        assert!(reached("rbd:p", "file:/var").is_err());
    }
}
