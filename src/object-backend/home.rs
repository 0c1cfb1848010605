//! A place that holds volumes.

pub(crate) mod directory;

use std::path::PathBuf;
use std::sync::Arc;

use cleat_backend::connector::Connector;
use cleat_backend::uri::{Options, invalid};
use cleat_backend::{CacheUse, CredentialFile, CredentialSet};
use cleat_core::error::Result;
use cleat_object::encryption::{KeyFile, MIN_KEY_FILE_BYTES};

use crate::collector::Collector;
use crate::connection::{Access, Connection};
use crate::naming::KEY_FILE;
use crate::remote::{Bucket, Provider, RemoteHome, credential_file};
use directory::Local;

/// The maximum length of a key file in bytes.
const MAX_KEY_FILE: usize = 4096;

/// A place that holds volumes, and how it is accessed. It contains no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Home {
    /// A local directory.
    Directory(Local),
    /// A bucket of an object store, or a part of it.
    Bucket(Bucket),
}

impl Home {
    /// Parses the part of a volume's URI behind the scheme's colon, and returns the home with the name of the volume.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse_volume(
        scheme: &str,
        location: &str,
        options: Options,
    ) -> Result<(Self, String)> {
        if let Some(provider) = Provider::of(scheme) {
            let (bucket, name) = Bucket::parse_volume(provider, location, options)?;
            return Ok((Self::Bucket(bucket), name));
        }
        let (local, name) = Local::parse_volume(location, options)?;
        Ok((Self::Directory(local), name))
    }

    /// Parses the part of a store's URI behind the scheme's colon.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn parse(scheme: &str, location: &str, options: Options) -> Result<Self> {
        match Provider::of(scheme) {
            Some(provider) => Bucket::parse(provider, location, options).map(Self::Bucket),
            None => Local::parse(location, options).map(Self::Directory),
        }
    }

    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Directory(_) => directory::SCHEME,
            Self::Bucket(bucket) => bucket.provider.scheme(),
        }
    }

    /// Returns the location of the home, or of a volume in it.
    pub(crate) fn location(&self, name: Option<&str>) -> String {
        match self {
            Self::Directory(local) => local.location(name),
            Self::Bucket(bucket) => bucket.location(name),
        }
    }

    pub(crate) fn options(&self) -> Vec<(String, String)> {
        match self {
            Self::Directory(local) => {
                let path = |path: &PathBuf| path.to_string_lossy().into_owned();
                let all = [(KEY_FILE, local.key_file.as_ref().map(path))];
                let all = all.into_iter().chain(local.collector.options());
                all.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
            }
            Self::Bucket(bucket) => bucket.options(),
        }
    }

    /// What the URI says about the collector of a volume.
    pub(crate) fn collector(&self) -> Collector {
        match self {
            Self::Directory(local) => local.collector,
            Self::Bucket(bucket) => bucket.collector,
        }
    }

    /// The local cache of a volume. The workers of a bucket with the same credentials can change each other's objects
    /// anyway; those of volumes in directories cannot.
    pub(crate) fn cache(&self) -> CacheUse {
        match self {
            Self::Directory(_) => CacheUse::Own,
            Self::Bucket(bucket) => CacheUse::Shared(bucket.trust()),
        }
    }

    /// The key file of encrypted volumes.
    fn key_file(&self) -> Option<CredentialFile> {
        let path = match self {
            Self::Directory(local) => local.key_file.clone(),
            Self::Bucket(bucket) => bucket.key_file.clone(),
        };
        let (what, option, max_bytes) = ("key", KEY_FILE, MAX_KEY_FILE);
        path.map(|path| CredentialFile {
            path,
            what,
            option,
            max_bytes,
            is_followed: false,
            source: None,
        })
    }

    /// Returns the key that the URI names.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if it is too short.
    pub(crate) fn key(&self, credentials: &CredentialSet) -> Result<Option<KeyFile>> {
        let Some(file) = self.key_file() else { return Ok(None) };
        let key = KeyFile::new(credentials.get(&file.path)?.bytes());
        key.map(Some).ok_or_else(|| {
            let shown = file.path.display();
            invalid(format!("the {file} has less than {MIN_KEY_FILE_BYTES} bytes")).with_repair(
                format!("write random bytes to a new file: head -c 32 /dev/urandom > {shown}"),
            )
        })
    }

    /// Returns a volume's name with its place, for messages.
    pub(crate) fn shown(&self, name: &str) -> String {
        match self {
            Self::Directory(local) => local.root(name).display().to_string(),
            Self::Bucket(bucket) => bucket.shown(name),
        }
    }

    pub(crate) fn credential_files(&self) -> Vec<CredentialFile> {
        let access = match self {
            Self::Directory(_) => None,
            Self::Bucket(bucket) => Some(credential_file(bucket)),
        };
        access.into_iter().chain(self.key_file()).collect()
    }

    /// Returns what a process that serves the volume `name` needs.
    pub(crate) fn access(&self, name: &str) -> Access {
        match self {
            Self::Directory(local) => local.access(name),
            Self::Bucket(bucket) => bucket.access(),
        }
    }

    /// Gets access to the home, whose connections `connector` makes if this process is confined. May start threads.
    ///
    /// # Errors
    /// Returns the error of a missing or malformed credential.
    pub(crate) fn connect(
        &self,
        credentials: &CredentialSet,
        connector: Option<Arc<Connector>>,
    ) -> Result<Arc<dyn Connection>> {
        match self {
            Self::Directory(local) => Ok(Arc::new(local.clone())),
            Self::Bucket(bucket) => {
                Ok(Arc::new(RemoteHome::connect(bucket, credentials, connector)?))
            }
        }
    }

    /// Returns this home with the options of `other`, if it has none of its own.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for another kind of home.
    pub(crate) fn with_access_of(&self, other: &Self) -> Result<Self> {
        let differ =
            || invalid("the options of the two volumes differ, but one client serves both");
        match (self, other) {
            (Self::Directory(one), Self::Directory(other)) => {
                let mut with = one.clone();
                with.key_file = with.key_file.or_else(|| other.key_file.clone());
                with.collector = with.collector.or(other.collector);
                let is_same = other.key_file.is_none() || with.key_file == other.key_file;
                is_same.then_some(Self::Directory(with)).ok_or_else(differ)
            }
            (Self::Bucket(one), Self::Bucket(other)) if one.options() == other.options() => {
                Ok(self.clone())
            }
            (Self::Bucket(_), Self::Bucket(_)) => Err(differ()),
            _ => Err(invalid("the two volumes have different kinds of stores")),
        }
    }
}
