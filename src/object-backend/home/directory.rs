//! Volumes in a local directory: `dir:/DIRECTORY/VOLUME`.
//!
//! ```text
//! DIRECTORY/VOLUME            mode 0700: it keeps other users away
//! DIRECTORY/VOLUME/objects    mode 0777: the store
//! ```
//!
//! A worker has a user of its own, which differs from that of the next worker of the volume. It sees nothing but
//! `objects`, so it does not need the permission to pass the directory above. A removal deletes DIRECTORY/VOLUME, so a volume
//! has it for itself: another directory that exists is not used, and nothing is removed together with other files.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind as Io, Read as _};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
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
use crate::naming::{KEY_FILE, is_volume_name};
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
            && is_volume_name(&parent.location)
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

    /// Makes a directory durable. Returns false if something has its name, which may be left of a creation that was
    /// interrupted.
    fn make_directory(&self, path: &Path) -> Result<bool> {
        let failed = |error| self.failed("create a volume", error);
        let is_new = match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == Io::AlreadyExists => false,
            made => made.map(|()| true).map_err(failed)?,
        };
        let above = path.parent().unwrap_or(Path::new("/"));
        File::open(above).and_then(|above| above.sync_all()).map_err(failed)?;
        Ok(is_new)
    }

    fn set_mode(&self, path: &Path, mode: u32) -> Result<()> {
        let set = fs::set_permissions(path, Permissions::from_mode(mode));
        set.map_err(|error| self.failed("create a volume", error))
    }

    /// Checks that nobody else can change what a directory has, whatever its mode is.
    fn check_owner(&self, path: &Path) -> Result<()> {
        let failed = |error| self.failed("create a volume", error);
        let found = fs::symlink_metadata(path).map_err(failed)?;
        if found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw() {
            return Ok(());
        }
        let message = format!("{} exists, and is not a directory of this user", path.display());
        Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose the name of a directory that does not exist; cleat makes it"))
    }

    /// Returns a file in the directory of a volume that is not of the volume.
    fn other_file(&self, root: &Path) -> Result<Option<String>> {
        let failed = |error| self.failed("read the directory of a volume", error);
        let entries = match fs::read_dir(root) {
            Err(error) if error.kind() == Io::NotFound => return Ok(None),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            if name != OBJECTS {
                return Ok(Some(format!("{:?}", shown(&name.to_string_lossy()))));
            }
        }
        Ok(None)
    }

    /// Finishes removals, also of processes that have crashed.
    fn remove_renamed(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)?.take(MAX_ENTRIES) {
            let entry = entry?;
            if is_removed(entry.file_name().as_bytes()) {
                // What someone has added to the directory of the volume meanwhile is not deleted.
                let removed =
                    [fs::remove_dir_all(entry.path().join(OBJECTS)), fs::remove_dir(entry.path())];
                let is_expected = |kind| matches!(kind, Io::NotFound | Io::DirectoryNotEmpty);
                for error in removed.into_iter().filter_map(io::Result::err) {
                    if !is_expected(error.kind()) {
                        return Err(error);
                    }
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
        let root = self.root(name);
        if !self.make_directory(&root)? {
            self.check_owner(&root)?;
            if let Some(other) = self.other_file(&root)? {
                let message = format!("{} exists, and has other files: {other}", root.display());
                return Err(Error::new(ErrorKind::AlreadyExists, message).with_repair(
                    "choose the name of a directory that does not exist; cleat makes it",
                ));
            }
            self.set_mode(&root, 0o700)?;
        }
        let objects = root.join(OBJECTS);
        self.make_directory(&objects)?;
        self.check_owner(&objects)?;
        self.set_mode(&objects, 0o777)
    }

    fn check_removal(&self, name: &str) -> Result<()> {
        let root = self.root(name);
        let Some(other) = self.other_file(&root)? else { return Ok(()) };
        let message =
            format!("{} has other files than those of the volume: {other}", root.display());
        Err(Error::new(ErrorKind::InUse, message)
            .with_repair("move them to another directory, then repeat the command"))
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
            let is_next = after.is_none_or(|after| &*name > after) && is_volume_name(&name);
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
        self.finish_removals()
    }

    fn finish_removals(&self) -> Result<()> {
        match self.remove_renamed() {
            Err(error) if error.kind() != Io::NotFound => {
                Err(self.failed("remove a volume", error))
            }
            _ => Ok(()),
        }
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

/// Whether a directory has the name of one that is being removed.
fn is_removed(name: &[u8]) -> bool {
    let token = name.strip_prefix(REMOVED.as_bytes());
    token.is_some_and(|token| token.len() == 16 && token.iter().all(u8::is_ascii_hexdigit))
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

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::os::unix::fs::symlink;

    use cleat_backend::store::{Layout, Removal, Store as _};

    use super::*;
    use crate::manage::ObjectStore;
    use crate::snapshots::tests::home;

    const SIZE: u64 = 1 << 20;

    fn store(directory: &Path) -> ObjectStore {
        home(directory).1
    }

    fn create(store: &ObjectStore, name: &str, size: u64) -> std::result::Result<bool, ErrorKind> {
        store.create(name, size, &Layout::default()).map_err(|error| error.kind())
    }

    #[test]
    fn a_volume_has_its_directory_for_itself() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let store = store(directory.path());
        fs::create_dir(at("used")).unwrap();
        fs::write(at("used/file"), "content").unwrap();
        symlink(at("used"), at("link")).unwrap();
        fs::write(at("file"), "content").unwrap();
        for name in ["used", "link", "file"] {
            assert_eq!(create(&store, name, SIZE), Err(ErrorKind::AlreadyExists), "{name}");
        }
        assert!(!at("used/objects").exists());
        fs::create_dir_all(at("interrupted/objects")).unwrap();
        assert_eq!(create(&store, "interrupted", SIZE), Ok(true));
        assert_eq!(fs::metadata(at("interrupted/objects")).unwrap().mode() & 0o777, 0o777);
        fs::create_dir(at("empty")).unwrap();
        fs::set_permissions(at("empty"), Permissions::from_mode(0o777)).unwrap();
        assert_eq!(create(&store, "empty", SIZE), Ok(true));
        assert_eq!(fs::metadata(at("empty")).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_removal_deletes_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        assert_eq!(create(&store, "v", SIZE), Ok(true));
        let other = directory.path().join("v/notes");
        fs::write(&other, "content").unwrap();
        let beside = directory.path().join(".removed-by-me");
        fs::create_dir(&beside).unwrap();
        let remove = || {
            let removed = store.remove("v", Removal::Now, &mut |_, _| ControlFlow::Continue(()));
            removed.map(|removed| removed.changed)
        };
        let error = remove().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains("\"notes\""), "{error}");
        assert_eq!(fs::read_to_string(&other).unwrap(), "content");
        fs::remove_file(&other).unwrap();
        assert!(remove().unwrap());
        assert!(!directory.path().join("v").exists() && beside.exists());
        // Someone adds a file after the check.
        assert_eq!(create(&store, "v", SIZE), Ok(true));
        let renamed = directory.path().join(".removed-0000000000000001");
        fs::rename(directory.path().join("v"), &renamed).unwrap();
        fs::write(renamed.join("notes"), "content").unwrap();
        assert_eq!(create(&store, "w", SIZE), Ok(true));
        assert!(
            store.remove("w", Removal::Now, &mut |_, _| ControlFlow::Continue(())).unwrap().changed
        );
        assert!(renamed.join("notes").exists() && !renamed.join("objects").exists());
    }

    #[test]
    fn a_wrong_size_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        for size in [1, 513, 4 << 60] {
            assert_eq!(create(&store, "v", size), Err(ErrorKind::InvalidArgument), "{size}");
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
