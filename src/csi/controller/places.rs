//! The places that hold volumes: directories of this node, pools of Ceph clusters, and object stores. And how they are
//! opened.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cleat_backend::CredentialSet;
use cleat_backend::claimant::Claimant;
use cleat_backend::group_snapshot::GroupSnapshotStore;
use cleat_backend::store::{CloneStore, Info, LabelStore, Removal, Removed, SnapshotStore, Store};
use cleat_backend::uri::{Encoded, StoreUri};
use cleat_core::error::{Error, ErrorKind, Result};
use std::ops::ControlFlow;
use zeroize::Zeroizing;

use super::Controller;
use super::connections::{Connection, Key};
use crate::secrets::Secrets;
use crate::source::{Cluster, cluster, clusters, pool_uri};
use crate::volume_id::VolumeId;

/// The name of the directory that volumes get whose parameters name none, if there are several.
const DEFAULT_DIRECTORY: &str = "default";

/// A place that holds volumes. The order is that of lists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// A directory of this node, by its name in the configuration.
    File { directory: String },
    /// A pool, or a namespace in it; an empty namespace stands for none.
    Rbd { cluster: String, pool: String, namespace: String },
    /// An object store, by its name in the file of clusters.
    Object { cluster: String },
}

impl Place {
    /// Returns the id of the volume `name` in this place. `node` is this node.
    pub(crate) fn id(&self, node: &str, name: &str) -> VolumeId {
        match self.clone() {
            Self::File { directory } => {
                VolumeId::File { node: node.to_owned(), directory, name: name.to_owned() }
            }
            Self::Rbd { cluster, pool, namespace } => {
                VolumeId::Rbd { cluster, pool, namespace, image: name.to_owned() }
            }
            Self::Object { cluster } => VolumeId::Object { cluster, name: name.to_owned() },
        }
    }

    /// Returns whether volumes of this place exist on one node only.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::File { .. })
    }

    /// Returns whether a volume of `source` can be cloned to this place.
    pub(crate) fn can_clone_from(&self, source: &Self) -> bool {
        match (self, source) {
            (Self::File { .. }, Self::File { .. }) => true,
            (Self::Rbd { cluster, .. }, Self::Rbd { cluster: other, .. })
            | (Self::Object { cluster }, Self::Object { cluster: other }) => cluster == other,
            _ => false,
        }
    }
}

/// Describes the place, for messages.
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { directory } => write!(f, "the directory {directory}"),
            Self::Rbd { cluster, pool, namespace } => {
                let slash = if namespace.is_empty() { "" } else { "/" };
                write!(f, "the pool {pool}{slash}{namespace} of the cluster {cluster}")
            }
            Self::Object { cluster } => write!(f, "the object store {cluster}"),
        }
    }
}

/// A volume of this driver, which need not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) place: Place,
    pub(crate) name: String,
}

/// An open place.
pub(crate) struct OpenPlace {
    pub(crate) uri: StoreUri,
    store: Connection<Box<dyn Store>>,
}

impl OpenPlace {
    /// Returns the store.
    pub(crate) fn store(&self) -> &dyn Store {
        &**self.store
    }

    /// Describes a volume; `None` if it does not exist.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Info>> {
        match self.store.info(name, None) {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the snapshots of the store.
    pub(crate) fn snapshots(&self) -> Result<&dyn SnapshotStore> {
        self.store.snapshots().ok_or_else(|| self.missing("snapshots"))
    }

    /// Returns the group snapshots of the store.
    pub(crate) fn group_snapshots(&self) -> Result<&dyn GroupSnapshotStore> {
        self.store.group_snapshots().ok_or_else(|| self.missing("group snapshots"))
    }

    /// Returns the clones of the store.
    pub(crate) fn clones(&self) -> Result<&dyn CloneStore> {
        self.store.clones().ok_or_else(|| self.missing("clones"))
    }

    /// Returns the labels of the store.
    pub(crate) fn labels(&self) -> Result<&dyn LabelStore> {
        self.store.labels().ok_or_else(|| self.missing("labels"))
    }

    /// Deletes a volume.
    pub(crate) fn remove(&self, name: &str) -> Result<Removed> {
        self.store.remove(name, Removal::Now, &mut on)
    }

    /// Makes a volume larger.
    pub(crate) fn grow(&self, name: &str, size: u64) -> Result<bool> {
        self.store.resize(name, size, false, &mut on)
    }

    fn missing(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("volumes in {} have no {what}", self.uri))
    }
}

/// The progress of an operation that continues to its end.
pub(crate) fn on(_done: u64, _total: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

impl Controller {
    /// Finds the place of a volume by its id. Returns `None` for an id that this driver did not make. Nothing is
    /// opened.
    ///
    /// # Errors
    /// Returns `Unsupported` for a file volume of another node.
    pub(crate) fn locate(&self, id: &VolumeId) -> Result<Located> {
        match id.clone() {
            VolumeId::File { node, directory, name } => {
                if node != self.node {
                    let message = format!(
                        "volume {id} is in a directory of the node {node}, and this controller runs on {}",
                        self.node
                    );
                    return Err(Error::new(ErrorKind::Unsupported, message)
                        .with_repair("call the controller of that node"));
                }
                Ok(Located { place: Place::File { directory }, name })
            }
            VolumeId::Rbd { cluster, pool, namespace, image } => {
                Ok(Located { place: Place::Rbd { cluster, pool, namespace }, name: image })
            }
            VolumeId::Object { cluster, name } => {
                Ok(Located { place: Place::Object { cluster }, name })
            }
        }
    }

    /// Returns the directory of volumes whose parameters name none.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the configuration does not determine it.
    pub(crate) fn default_directory(&self) -> Result<String> {
        let known = &self.config.directories;
        let only = || known.keys().next().filter(|_| known.len() == 1);
        let chosen = known.get_key_value(DEFAULT_DIRECTORY).map(|(name, _)| name).or_else(only);
        chosen.cloned().ok_or_else(|| {
            let names: Vec<&str> = known.keys().map(String::as_str).collect();
            let message = match &*names {
                [] => "no directory for file volumes is configured".to_owned(),
                names => format!("the parameter directory is missing; there are: {}", names.join(", ")),
            };
            Error::new(ErrorKind::InvalidArgument, message).with_repair(
                "set the parameter directory, or clusterID and pool for RBD; [csi.directories] names directories",
            )
        })
    }

    /// Returns the places whose volumes are listed: all configured ones. Reads the file of clusters if it exists.
    ///
    /// # Errors
    /// Returns the errors of reading that file.
    pub(crate) fn places(&self) -> Result<Vec<Place>> {
        let directories = self.config.directories.keys();
        let mut places: Vec<Place> =
            directories.map(|name| Place::File { directory: name.clone() }).collect();
        match remote_places(&self.config.clusters) {
            Ok(remote) => places.extend(remote),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(places),
            Err(error) => return Err(error),
        }
        places.sort();
        places.dedup();
        Ok(places)
    }

    /// Opens a place, with the connection of an earlier call if there is one. Blocks as its storage does.
    ///
    /// # Errors
    /// Returns `Unsupported` if it is not configured, and the errors of the storage.
    pub(crate) fn open(&self, place: &Place, secrets: &Secrets) -> Result<OpenPlace> {
        let text = self.uri(place, secrets)?;
        let uri = self.registry.store(&text)?;
        let keyring = secrets.keyring().map_or(&[][..], |(_, keyring)| keyring.bytes());
        // A directory is opened for each call, because another file system may be mounted on it meanwhile.
        let key = (!place.is_local())
            .then(|| Key { uri: text, keyring: Zeroizing::new(keyring.to_vec()) });
        // The credentials of an object store are in the file that its URI names.
        let credentials = match place {
            Place::Object { .. } => CredentialSet::default(),
            Place::File { .. } | Place::Rbd { .. } => secrets.credentials(),
        };
        // Another client then sees whose claim a change that was interrupted has left.
        let claimant = Claimant::alone(&self.node, false)?;
        let store = self.connections.get(key, || uri.connect_with(&claimant, credentials))?;
        Ok(OpenPlace { uri, store })
    }

    fn uri(&self, place: &Place, secrets: &Secrets) -> Result<String> {
        match place {
            Place::File { directory } => {
                let path = self.config.directories.get(directory).ok_or_else(|| {
                    let known: Vec<&str> =
                        self.config.directories.keys().map(String::as_str).collect();
                    let message = format!(
                        "this node has no directory {directory:?}; it has: {}",
                        known.join(", ")
                    );
                    not_configured(message).with_repair("add it to [csi.directories]")
                })?;
                Ok(format!("file:{}", Encoded(path.as_os_str().as_bytes())))
            }
            Place::Rbd { cluster, pool, namespace } => {
                Ok(pool_uri(&self.cluster(cluster)?, pool, namespace, secrets))
            }
            Place::Object { cluster } => self.cluster(cluster)?.store.ok_or_else(|| {
                not_configured(format!(
                    "the cluster {cluster} is not configured as an object store"
                ))
            }),
        }
    }

    fn cluster(&self, id: &str) -> Result<Cluster> {
        cluster(&self.config, id).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                not_configured(format!("the cluster {id} is not configured")).with_source(error)
            }
            _ => error,
        })
    }
}

/// Returns the pools and object stores in the file of clusters whose volumes are listed.
fn remote_places(file: &Path) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for (id, cluster) in clusters(file)? {
        let store = cluster.store.iter().map(|_| Place::Object { cluster: id.clone() });
        places.extend(store);
        places.extend(cluster.pools.iter().map(|pool| {
            let (pool, namespace) = pool.split_once('/').unwrap_or((pool, ""));
            let (pool, namespace) = (pool.to_owned(), namespace.to_owned());
            Place::Rbd { cluster: id.clone(), pool, namespace }
        }));
    }
    Ok(places)
}

/// Returns the id of a volume `name` in each pool (`pools`) and in each object store of the file of clusters. The volumes
/// need not exist.
///
/// # Errors
/// Returns the errors of reading the file.
pub fn remote_ids(file: &Path, name: &str) -> Result<Vec<VolumeId>> {
    Ok(remote_places(file)?.iter().map(|place| place.id("", name)).collect())
}

/// The error for a place that this node's configuration does not have. It is not `NotFound`: nothing is known
/// about the volumes there.
fn not_configured(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, message).with_repair(
        "add the clusterID, with its monitors or its store, to the file that csi.clusters names",
    )
}
