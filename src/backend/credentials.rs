//! Secrets that a backend needs to reach or to decrypt a volume, and the files that contain them.
//!
//! A secret is never an argument, in the environment of a worker, in a record, in a URI or in a log. A URI names the
//! file that contains it ([`CredentialFile`]), or a backend finds it elsewhere ([`SecretSource`]). For a worker, the supervisor opens this file and passes the
//! descriptor; the worker reads the descriptor before it is confined, and its confinement does not allow
//! the path. A process that opens a volume for itself (`cleat serve`, `cleat volume`) opens the file with the
//! same function.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kernel_key::KernelKey;
use crate::secret::Credentials;

use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of files with secrets that one volume names.
pub const MAX_CREDENTIAL_FILES: usize = 32;

/// A file that contains a secret, or a key of the kernel, as the URI of a volume names it, or another source of it.
#[derive(Debug, Clone)]
pub struct CredentialFile {
    /// The absolute path, the value that names a [`KernelKey`], or any text that describes `source`.
    pub path: PathBuf,
    /// The content, for messages: `keyring`, `passphrase`.
    pub what: &'static str,
    /// The option of the URI that names the file.
    pub option: &'static str,
    /// The maximum length of the content in bytes.
    pub max_bytes: usize,
    /// Whether the supervisor passes a new content to the worker without a command, with
    /// [`RenewCredentials`](crate::RenewCredentials).
    pub is_followed: bool,
    /// Finds the secret if the URI names no file with it.
    pub source: Option<Arc<dyn SecretSource>>,
}

/// Finds a secret that is in no file which a URI names, for example temporary keys of a service.
pub trait SecretSource: fmt::Debug + Send + Sync {
    /// Returns the present secret. Blocks for at most 9 s.
    ///
    /// # Errors
    /// Returns why there is none, without any part of a secret.
    fn find(&self) -> Result<FoundSecret>;
}

/// A secret that a [`SecretSource`] has found.
#[derive(Debug)]
pub struct FoundSecret {
    /// The secret, of at most 64 KiB.
    pub secret: Credentials,
    /// A number that differs between two secrets that the source finds in one process.
    pub version: u64,
}

/// Differs between two contents of a credential file. It contains nothing of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CredentialVersion([i128; 5]);

impl CredentialFile {
    /// Opens the file, or the key, for reading. Follows symbolic links; the checks apply to the file that was opened.
    /// Logs a warning if all users may read the file. Blocks as open(2) does.
    ///
    /// # Errors
    /// Fails as [`SecretSource::find`] does if there is a source. Otherwise returns
    /// `InvalidArgument` for anything but a regular file, `PermissionDenied` for a file that belongs
    /// to neither root nor the calling user, or that other users may write, and the error of open(2)
    /// otherwise. The repair is a command or the option to change. For a key it fails as [`KernelKey::secret`] does, and
    /// returns `NotFound` if there is no such key.
    pub fn open(&self) -> Result<File> {
        let (file, _) = self.open_with_version()?;
        if file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o004 != 0)
        {
            tracing::warn!("all users may read the {self}: chmod 600 {}", self.path.display());
        }
        Ok(file)
    }

    /// Opens the file as [`CredentialFile::open`] does, without the warning: for callers that look again and again. Returns
    /// the version of its content, too. A key of the kernel has always the same one.
    ///
    /// # Errors
    /// As [`CredentialFile::open`].
    pub fn open_with_version(&self) -> Result<(File, CredentialVersion)> {
        if let Some(source) = &self.source {
            let FoundSecret { secret, version } = source.find()?;
            let failed = |error| Error::from_io(format!("cannot pass on the {self}"), error);
            let version = CredentialVersion([version.into(), 0, 0, 0, 0]);
            return Ok((secret.readable().map_err(failed)?, version));
        }
        if let Some(key) = KernelKey::of_path(&self.path) {
            return key.open().map(|file| (file, CredentialVersion([0; 5])));
        }
        // Without O_NONBLOCK, opening a named pipe would block until it has a writer.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(&self.path);
        let (file, metadata) = opened
            .and_then(|file| file.metadata().map(|metadata| (file, metadata)))
            .map_err(|error| self.not_opened(error))?;
        let shown = self.path.display();
        if !metadata.is_file() {
            let message = format!("the {self} is not a regular file");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair(format!("write the {} to a file of its own", self.what)));
        }
        let own = nix::unistd::geteuid().as_raw();
        let refused = |why: String, repair: String| {
            let message = format!("the {self} {why}");
            Err(Error::new(ErrorKind::PermissionDenied, message).with_repair(repair))
        };
        if metadata.uid() != 0 && metadata.uid() != own {
            let why = format!("belongs to user {}, who could replace it", metadata.uid());
            return refused(why, format!("chown {own} {shown}"));
        }
        if metadata.mode() & 0o022 != 0 {
            let why =
                format!("can be written by other users (mode {:03o})", metadata.mode() & 0o777);
            return refused(why, format!("chmod go-w {shown}"));
        }
        let version = CredentialVersion::of(&metadata);
        Ok((file, version))
    }

    /// Reads the secret from a descriptor of the file. Blocks as reads of the file do.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the file is empty or too long, and the error of the read otherwise.
    pub fn read(&self, file: &File) -> Result<Credentials> {
        Credentials::read(file, self.max_bytes).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                let message =
                    format!("the {self} is empty or longer than {} bytes", self.max_bytes);
                Error::new(ErrorKind::InvalidArgument, message)
            }
            _ => Error::from_io(format!("cannot read the {self}"), error),
        })
    }

    fn not_opened(&self, error: io::Error) -> Error {
        let shown = self.path.display();
        let error = Error::from_io(format!("cannot open the {self}"), error);
        let repair = match error.kind() {
            ErrorKind::PermissionDenied => {
                let own = nix::unistd::geteuid();
                format!(
                    "the file must belong to user {own}: chown {own} {shown}; chmod 600 {shown}"
                )
            }
            _ => format!("{}=PATH in the volume's options names another file", self.option),
        };
        error.with_repair(repair)
    }
}

/// Sources are equal if their descriptions are.
impl PartialEq for CredentialFile {
    fn eq(&self, other: &Self) -> bool {
        let parts = |file: &Self| {
            (file.what, file.option, file.max_bytes, file.is_followed, file.source.is_some())
        };
        self.path == other.path && parts(self) == parts(other)
    }
}

impl Eq for CredentialFile {}

impl CredentialVersion {
    /// A file that is replaced has another inode, and one that is written in place another time.
    fn of(file: &Metadata) -> Self {
        let time = |seconds: i64, nanoseconds: i64| {
            i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
        };
        Self([
            file.dev().into(),
            file.ino().into(),
            file.size().into(),
            time(file.mtime(), file.mtime_nsec()),
            time(file.ctime(), file.ctime_nsec()),
        ])
    }
}

/// Prints `keyring /etc/ceph/…`.
impl fmt::Display for CredentialFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.path.display())
    }
}

/// The secrets of a volume, by the paths of their files. Clones share the secrets, which are wiped with the
/// last clone.
#[derive(Debug, Clone, Default)]
pub struct CredentialSet(BTreeMap<PathBuf, Arc<Credentials>>);

impl CredentialSet {
    /// Opens and reads `files`, in the process that uses the secrets.
    ///
    /// # Errors
    /// Fails as [`CredentialFile::open`] and [`CredentialFile::read`] do.
    pub fn load(files: &[CredentialFile]) -> Result<Self> {
        let mut set = Self::default();
        set.complete(files)?;
        Ok(set)
    }

    /// Reads the secrets from descriptors that another process has opened: one for each path. A descriptor
    /// whose path is not that of one of `files` is ignored.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the numbers differ. Otherwise fails as [`CredentialFile::read`] does.
    pub fn receive(
        files: &[CredentialFile],
        paths: &[String],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self> {
        if paths.len() != descriptors.len() || paths.len() > MAX_CREDENTIAL_FILES {
            let message = "the number of descriptors differs from the number of credential files";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let mut set = Self::default();
        for (path, descriptor) in paths.iter().zip(descriptors) {
            let Some(file) = files.iter().find(|file| file.path == Path::new(path)) else {
                continue;
            };
            let secret = file.read(&File::from(descriptor))?;
            set.0.insert(file.path.clone(), Arc::new(secret));
        }
        Ok(set)
    }

    /// Returns a set with one secret in place of the content of the file `path`, which need not exist.
    pub fn with(path: PathBuf, secret: Credentials) -> Self {
        Self([(path, Arc::new(secret))].into())
    }

    /// Opens and reads those of `files` that are not in the set.
    ///
    /// # Errors
    /// Fails as [`CredentialSet::load`] does.
    pub fn complete(&mut self, files: &[CredentialFile]) -> Result<()> {
        for file in files {
            if !self.0.contains_key(&file.path) {
                let secret = file.read(&file.open()?)?;
                self.0.insert(file.path.clone(), Arc::new(secret));
            }
        }
        Ok(())
    }

    /// Returns the secret of the file `path`.
    ///
    /// # Errors
    /// Returns `Internal` if the set does not have it.
    pub fn get(&self, path: &Path) -> Result<Arc<Credentials>> {
        self.0.get(path).cloned().ok_or_else(|| {
            let message = format!("internal: the secret in {} was not read", path.display());
            Error::new(ErrorKind::Internal, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU64, Ordering};

    use zeroize::Zeroizing;

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        file
    }

    fn named(path: impl Into<PathBuf>) -> CredentialFile {
        let (what, option) = ("keyring", "keyring");
        let path = path.into();
        CredentialFile { path, what, option, max_bytes: 7, is_followed: false, source: None }
    }

    #[test]
    fn a_secret_is_read_within_its_bound_and_never_shown() {
        let secret = Credentials::read(&file(b"sesame\n"), 7).unwrap();
        assert_eq!(secret.bytes(), b"sesame\n");
        assert!(!format!("{secret:?}").contains("sesame"));
        for content in [&b""[..], b"sesame!!"] {
            let error = Credentials::read(&file(content), 7).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(!error.to_string().contains("sesame"), "{error}");
        }
    }

    #[test]
    fn only_a_file_that_other_users_cannot_change_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, "sesame").unwrap();
        let key = named(&path);
        let set_mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode));
        for mode in [0o600, 0o400, 0o640, 0o644] {
            set_mode(mode).unwrap();
            assert_eq!(
                CredentialSet::load(std::slice::from_ref(&key)).unwrap().0.len(),
                1,
                "{mode:o}"
            );
        }
        for mode in [0o620, 0o602, 0o666] {
            set_mode(mode).unwrap();
            let error = key.open().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert!(error.message().contains(&format!("{mode:03o}")), "{error}");
            assert!(error.repair().unwrap().starts_with("chmod go-w /"), "{error}");
        }
        set_mode(0o600).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1), None).unwrap();
            let error = key.open().unwrap_err();
            assert!(error.message().contains("belongs to user 1,"), "{error}");
            assert!(error.repair().unwrap().starts_with("chown 0 /"), "{error}");
        }
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for path in [directory.path(), &pipe] {
            let error = named(path).open().unwrap_err();
            assert!(error.message().contains("not a regular file"), "{error}");
        }
        let error = named(directory.path().join("none")).open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.repair().unwrap().contains("keyring=PATH"), "{error}");
    }

    #[test]
    fn a_file_that_is_replaced_or_written_has_another_version() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let key = named(&path);
        let version = || key.open_with_version().unwrap().1;
        std::fs::write(&path, "one").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let first = version();
        assert_eq!(version(), first);
        let next = directory.path().join("next");
        std::fs::copy(&path, &next).unwrap();
        std::fs::rename(&next, &path).unwrap();
        let replaced = version();
        assert_ne!(replaced, first);
        std::fs::write(&path, "longer").unwrap();
        assert_ne!(version(), replaced);
    }

    /// Finds another secret each time.
    #[derive(Debug)]
    struct Counter(AtomicU64);

    impl SecretSource for Counter {
        fn find(&self) -> Result<FoundSecret> {
            let version = self.0.fetch_add(1, Ordering::Relaxed);
            let secret = Credentials::new(Zeroizing::new(format!("no {version}").into_bytes()));
            Ok(FoundSecret { secret, version })
        }
    }

    #[test]
    fn a_secret_of_a_source_is_read_in_place_of_a_file() {
        let mut counted = named("from a counter");
        counted.source = Some(Arc::new(Counter(AtomicU64::new(1))));
        let mut set = CredentialSet::default();
        set.complete(std::slice::from_ref(&counted)).unwrap();
        assert_eq!(set.get(&counted.path).unwrap().bytes(), b"no 1");
        let (file, version) = counted.open_with_version().unwrap();
        assert_eq!(counted.read(&file).unwrap().bytes(), b"no 2");
        assert_ne!(counted.open_with_version().unwrap().1, version);
    }

    #[test]
    fn descriptors_are_used_instead_of_paths() {
        let files = [named("/none/a"), named("/none/b")];
        let paths = ["/none/b", "/none/other", "/none/a"].map(str::to_owned);
        let contents = [&b"b"[..], b"ignored because nothing names it", b"a"];
        let set = CredentialSet::receive(&files, &paths, contents.map(|c| file(c).into()).into());
        let mut set = set.unwrap();
        set.complete(&files).unwrap();
        assert_eq!(set.get(Path::new("/none/a")).unwrap().bytes(), b"a");
        assert_eq!(set.get(Path::new("/none/b")).unwrap().bytes(), b"b");
        assert_eq!(set.get(Path::new("/none/c")).unwrap_err().kind(), ErrorKind::Internal);
        let few = CredentialSet::receive(&files, &paths, vec![file(b"b").into()]).unwrap_err();
        assert_eq!(few.kind(), ErrorKind::InvalidArgument);
        let given = Credentials::new(Zeroizing::new(b"given".to_vec()));
        let mut given = CredentialSet::with("/none/a".into(), given);
        given.complete(&files[..1]).unwrap();
        assert_eq!(given.get(Path::new("/none/a")).unwrap().bytes(), b"given");
        let long = CredentialSet::receive(&files, &paths[..1], vec![file(b"too long").into()]);
        let long = long.unwrap_err();
        assert!(long.message().contains("/none/b is empty or longer than 7 bytes"), "{long}");
    }
}
