//! Volumes in a local directory: `dir:/DIRECTORY/VOLUME`.
//!
//! ```text
//! DIRECTORY/VOLUME            mode 0700: it keeps other users away
//! DIRECTORY/VOLUME/objects    mode 0777: the store
//! ```
//!
//! A worker has a user of its own, which differs from that of the next worker of the volume. It sees nothing but
//! `objects`, so it does not need the permission to pass the directory above.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind as Io, Read as _};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use cleat_backend::uri::{Encoded, Options, decode, invalid, secret_path, shown};
use cleat_backend::{CredentialSet, Network};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::codec::Description;
use cleat_object::name::Name;
use cleat_object::store::Store;
use cleat_object::store::directory::{Directory, remove_temporary};

use crate::collector::{COLLECT_RATE, Collector, MAX_SPACE};
use crate::connection::{Access, Connection};
use crate::naming::{KEY_FILE, is_name};
use crate::nonce::{self, token};

pub(crate) const SCHEME: &str = "dir";

/// The directory of a volume's objects.
const OBJECTS: &str = "objects";

/// Begins the names of directories that are being removed. No volume has such a name.
const REMOVED: &str = ".removed-";

/// The maximum number of entries of a home.
const MAX_ENTRIES: usize = 100_000;

/// The maximum number of parents of a clone, as in the engine.
const MAX_PARENTS: usize = 16;

/// The maximum number of bytes of a description that are read.
const MAX_DESCRIPTION: u64 = 64 << 10;

/// A directory with volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Local {
    /// The absolute path.
    path: PathBuf,
    /// The key file of encrypted volumes.
    pub(super) key_file: Option<PathBuf>,
    pub(super) collector: Collector,
}

impl Local {
    pub(super) fn parse(location: &str, options: Options) -> Result<Self> {
        Self::with(path(location)?, options)
    }

    fn with(path: PathBuf, mut options: Options) -> Result<Self> {
        let key_file = options.take(KEY_FILE);
        let collector = Collector::take(&mut options)?;
        options.finish("dir:", &[KEY_FILE, COLLECT_RATE, MAX_SPACE])?;
        Ok(Self {
            path,
            key_file: key_file.map(|path| secret_path(&path, KEY_FILE)).transpose()?,
            collector,
        })
    }

    pub(super) fn parse_volume(location: &str, options: Options) -> Result<(Self, String)> {
        let whole = path(location)?;
        let home = Self::with(whole.parent().unwrap_or(Path::new("/")).to_owned(), options)?;
        let name = whole.file_name().ok_or_else(|| {
            invalid("dir: needs a directory and the name of a volume in it")
                .with_repair("write dir:/DIRECTORY/VOLUME")
        })?;
        let name = name.to_str().map(str::to_owned);
        let name = name.ok_or_else(|| invalid("the name of the volume is not UTF-8"))?;
        Ok((home, name))
    }

    pub(super) fn location(&self, name: Option<&str>) -> String {
        let path = name.map_or_else(|| self.path.clone(), |name| self.root(name));
        Encoded(path.as_os_str().as_bytes()).to_string()
    }

    /// The directory of a volume.
    pub(super) fn root(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn access(&self, name: &str) -> Access {
        let mut paths = vec![nonce::DEVICE.into()];
        paths.extend(self.parents(name));
        Access {
            paths,
            copies: Vec::new(),
            writable: vec![self.root(name).join(OBJECTS)],
            network: Network::None,
        }
    }

    /// Returns the directories with the objects of the volume's parents. Whoever can write to the volume can change
    /// what it says of them, so a parent counts only if it says the same: it has a pin for the clone.
    fn parents(&self, name: &str) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = Vec::new();
        let mut objects = self.root(name).join(OBJECTS);
        while paths.len() < MAX_PARENTS
            && let Some(own) = description(&objects)
            && let Some(parent) = own.parent
            && is_name(&parent.location)
        {
            objects = self.root(&parent.location).join(OBJECTS);
            let pin = Name::Pin(parent.snapshot.id, own.volume).to_string();
            if fs::symlink_metadata(objects.join(pin)).is_err() {
                break;
            }
            paths.push(objects.clone());
        }
        paths
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        let shown = self.path.display();
        let is_missing = error.kind() == Io::NotFound;
        let error = Error::from_io(format!("cannot {what} in {shown}"), error);
        if is_missing { error.with_repair(format!("mkdir -p {shown}")) } else { error }
    }

    /// Finishes removals, also of processes that have crashed.
    fn remove_renamed(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)?.take(MAX_ENTRIES) {
            let entry = entry?;
            if entry.file_name().as_bytes().starts_with(REMOVED.as_bytes()) {
                match fs::remove_dir_all(entry.path()) {
                    Err(error) if error.kind() != Io::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        File::open(&self.path)?.sync_all()
    }
}

impl Connection for Local {
    fn store(&self, name: &str) -> Result<Arc<dyn Store>> {
        let objects = self.root(name).join(OBJECTS);
        // A link could lead a privileged process to another place.
        let is_there = fs::symlink_metadata(&objects).is_ok_and(|found| found.is_dir());
        if !is_there {
            let message =
                format!("{} is not a volume, or does not exist", self.root(name).display());
            return Err(Error::new(ErrorKind::NotFound, message).with_repair(
                "cleat volume ls shows the volumes of a directory; cleat volume create makes one",
            ));
        }
        let opened = Directory::open(&objects, token()?);
        Ok(Arc::new(opened.map_err(|error| self.failed("open a volume", error))?))
    }

    fn prepare(&self, name: &str) -> Result<()> {
        let made = [(self.root(name), 0o700), (self.root(name).join(OBJECTS), 0o777)];
        for (path, mode) in made {
            let made = match DirBuilder::new().mode(mode).create(&path) {
                Err(error) if error.kind() == Io::AlreadyExists => Ok(()),
                // The mode of the call is limited by the mask of the process.
                Ok(()) => {
                    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode))
                }
                other => other,
            };
            let above = path.parent().unwrap_or(Path::new("/"));
            let durable = made.and_then(|()| File::open(above)?.sync_all());
            durable.map_err(|error| self.failed("create a volume", error))?;
        }
        Ok(())
    }

    fn names(&self, after: Option<&str>, limit: usize) -> Result<(Vec<String>, bool)> {
        let failed = |error| self.failed("list the volumes", error);
        let mut names = Vec::new();
        for (count, entry) in fs::read_dir(&self.path).map_err(failed)?.enumerate() {
            let entry = entry.map_err(failed)?;
            if count >= MAX_ENTRIES {
                let shown = self.path.display();
                return Err(invalid(format!("{shown} has more than {MAX_ENTRIES} entries")));
            }
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_next = after.is_none_or(|after| &*name > after) && is_name(&name);
            if is_next && entry.path().join(OBJECTS).join("desc").is_file() {
                names.push(name);
            }
        }
        names.sort_unstable();
        let has_more = names.len() > limit;
        names.truncate(limit);
        Ok((names, has_more))
    }

    fn remove(&self, name: &str, _go_on: &mut dyn FnMut(u64) -> bool) -> Result<()> {
        let failed = |error| self.failed("remove a volume", error);
        // The volume vanishes at once. Nothing else has the new name.
        let renamed = self.path.join(format!("{REMOVED}{:016x}", token()?));
        match fs::rename(self.root(name), &renamed) {
            Err(error) if error.kind() != Io::NotFound => return Err(failed(error)),
            _ => {}
        }
        self.remove_renamed().map_err(failed)
    }

    fn tidy(&self, name: &str) {
        if let Err(error) = remove_temporary(&self.root(name).join(OBJECTS)) {
            tracing::warn!(volume = name, %error, "cannot remove temporary files");
        }
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        let found = nix::sys::statvfs::statvfs(&self.path)
            .map_err(|error| self.failed("read the free space", error.into()))?;
        Ok(Some(found.blocks_available().saturating_mul(found.fragment_size())))
    }

    fn renew(&self, _credentials: &CredentialSet) -> Result<()> {
        Ok(())
    }
}

/// Reads the description of the volume that has its objects in a directory.
fn description(objects: &Path) -> Option<Description> {
    let mut bytes = Vec::new();
    let file = File::open(objects.join(Name::Description.to_string())).ok()?;
    file.take(MAX_DESCRIPTION).read_to_end(&mut bytes).ok()?;
    Description::decode(&bytes).ok()
}

/// Parses the part of a URI behind `dir:`.
fn path(location: &str) -> Result<PathBuf> {
    let location = location.strip_prefix("//").unwrap_or(location);
    if !location.starts_with('/') {
        return Err(invalid(format!("dir: needs an absolute path, not {:?}", shown(location)))
            .with_repair("write the whole path, as in dir:/var/lib/volumes/a"));
    }
    let bytes = decode(location)?;
    if bytes.contains(&0) {
        return Err(invalid("a path cannot contain a zero byte (%00)"));
    }
    let path = PathBuf::from(OsString::from_vec(bytes));
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(invalid("the path of a volume must not contain .."));
    }
    // Each path has one spelling: without doubled or trailing slashes and without `.`.
    Ok(path.components().filter(|part| *part != Component::CurDir).collect())
}
