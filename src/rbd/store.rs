//! The management of RBD images. The [`Store`] is a pool or a namespace.
//!
//! - One RADOS client serves all calls. An image is opened for each call, read-only if possible: a reader
//!   does not watch the image, so it does not count as a watcher.
//! - librbd has the image's holder carry out the operations that the holder can do: a snapshot, growth or a
//!   flattening of a mapped image. Operations that remove or overwrite data of a holder are refused with the
//!   name of the client: of a client that has the image open, and of one with an active claim, even if it
//!   is not connected.

mod changes;
mod encrypted;
mod hold;
mod info;
mod labels;
mod layout;
mod listing;
mod network_fence;
mod other_clients;
mod reclaim;
mod snapshots;
mod trash;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use librbd::{Image, Open, Pool, RBD_FEATURE_EXCLUSIVE_LOCK};

use crate::connection::{config, connect, load_library};
use crate::errors::open_error;
use crate::keyring::ClientKey;
use crate::mirror::check_primary;
use crate::spec::{RbdSpec, RbdStoreSpec};
use crate::timeouts::{CALL_TIMEOUT, Tracker, answer, with_progress, with_timeout};
use crate::{encryption, errors};
use cleat_backend::CredentialSet;
use cleat_backend::changes::ChangeStore;
use cleat_backend::claimant::Claimant;
use cleat_backend::group_snapshot::GroupSnapshotStore;
use cleat_backend::network_fence::NetworkFenceStore;
use cleat_backend::store::{
    CloneStore, Info, LabelStore, Layout, Listing, Page, Progress, Purged, ReclaimStore, Removal,
    Removed, Snapshot, SnapshotStore, Source, Store, TrashStore, Trashed,
};
use cleat_backend::uri::{Size, StoreUri, VolumeUri, invalid};
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout of taking a snapshot. A client that has mapped the image may first have to write its dirty
/// data (quiesce).
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(120);

/// The additional timeout of creating an image with labels. If an image exists without them, each of its objects
/// may have to be looked up.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(120);

/// A pool or a namespace, with its own connection.
#[derive(Clone)]
pub(crate) struct RbdStore {
    pool: Arc<Pool>,
    spec: RbdStoreSpec,
    /// The identity for decisions about claims.
    claimant: Claimant,
}

/// The image or snapshot of a call. It need not exist.
struct Target {
    pool: Arc<Pool>,
    spec: RbdSpec,
    /// The id of an image in the trash.
    id: Option<String>,
    /// `pool[/namespace]/image[@snapshot]`, for messages.
    name: String,
    uri: String,
    claimant: Claimant,
}

impl RbdStore {
    /// Connects to the pool.
    ///
    /// # Errors
    /// Returns `NotFound` if the pool or namespace does not exist, `TimedOut` if the cluster does not
    /// answer, and otherwise the cluster's error.
    pub(crate) fn connect(
        spec: &RbdStoreSpec,
        claimant: &Claimant,
        credentials: CredentialSet,
    ) -> Result<Self> {
        load_library()?;
        let wanted = spec.clone();
        let open = move || open_pool(&wanted, credentials);
        let pool = with_timeout(CALL_TIMEOUT, &answer(spec.pool()), open)?;
        Ok(Self { pool, spec: spec.clone(), claimant: claimant.clone() })
    }

    fn uri(&self) -> StoreUri {
        StoreUri::new(Arc::new(self.spec.clone()))
    }

    fn target(&self, name: &str, snapshot: Option<&str>) -> Result<Target> {
        let spec = self.spec.image(name, snapshot)?;
        let uri = VolumeUri::new(Arc::new(spec.clone())).to_string();
        let (pool, name) = (Arc::clone(&self.pool), spec.image_name());
        Ok(Target { pool, name, spec, id: None, uri, claimant: self.claimant.clone() })
    }

    /// Runs `work` with a target, with the timeout `CALL_TIMEOUT`.
    fn call<T: Send + 'static>(
        &self,
        name: &str,
        snapshot: Option<&str>,
        work: impl FnOnce(&Target) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let target = self.target(name, snapshot)?;
        with_timeout(CALL_TIMEOUT, &answer(&target.name), move || work(&target))
    }

    /// Runs `work` with a target as long as it makes progress.
    fn follow<T: Send + 'static>(
        &self,
        name: &str,
        snapshot: Option<&str>,
        progress: Progress<'_>,
        work: impl FnOnce(&Target, &Tracker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let target = self.target(name, snapshot)?;
        with_progress(&target.name.clone(), progress, move |tracker| work(&target, tracker))
    }
}

impl Store for RbdStore {
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool> {
        let layout = layout.clone();
        let target = self.target(name, None)?;
        let unlocking =
            target.spec.encryption.as_ref().map_or(Duration::ZERO, |_| encrypted::FORMAT_TIMEOUT);
        let timeout = CALL_TIMEOUT + unlocking + adoption_timeout(&layout);
        with_timeout(timeout, &answer(&target.name), move || target.create_labelled(size, &layout))
    }

    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed> {
        match how {
            Removal::Trash { keep } => {
                self.call(name, None, move |target| target.move_to_trash(keep))
            }
            Removal::Now => self.follow(name, None, progress, Target::delete),
        }
    }

    fn resize(&self, name: &str, size: u64, shrink: bool, progress: Progress<'_>) -> Result<bool> {
        self.follow(name, None, progress, move |target, tracker| {
            target.resize(size, shrink, tracker)
        })
    }

    fn list(&self, page: &Page) -> Result<Listing> {
        self.listing(page)
    }

    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info> {
        self.call(name, snapshot, Target::info)
    }

    fn snapshots(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }

    fn group_snapshots(&self) -> Option<&dyn GroupSnapshotStore> {
        Some(self)
    }

    fn clones(&self) -> Option<&dyn CloneStore> {
        Some(self)
    }

    fn trash(&self) -> Option<&dyn TrashStore> {
        Some(self)
    }

    fn reclaim(&self) -> Option<&dyn ReclaimStore> {
        Some(self)
    }

    fn labels(&self) -> Option<&dyn LabelStore> {
        Some(self)
    }

    fn changes(&self) -> Option<&dyn ChangeStore> {
        Some(self)
    }

    fn network_fence(&self) -> Option<&dyn NetworkFenceStore> {
        Some(self)
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        self.pool_space()
    }
}

impl CloneStore for RbdStore {
    fn create_clone(
        &self,
        source: &Source<'_>,
        name: &str,
        layout: &Layout,
        _progress: Progress<'_>,
    ) -> Result<bool> {
        let spec: &dyn Any = source.store;
        let (Some(spec), Some(snapshot)) = (spec.downcast_ref::<RbdStoreSpec>(), source.snapshot)
        else {
            return Err(invalid("an RBD image can only be cloned from a snapshot of an RBD image"));
        };
        let parent = spec.image(source.name, Some(snapshot))?;
        let (target, layout) = (self.target(name, None)?, layout.clone());
        let timeout = CALL_TIMEOUT + adoption_timeout(&layout);
        with_timeout(timeout, &answer(&target.name), move || target.clone_labelled(&parent, layout))
    }

    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool> {
        self.follow(name, None, progress, Target::flatten)
    }
}

impl SnapshotStore for RbdStore {
    fn list(&self, name: &str) -> Result<Vec<Snapshot>> {
        self.call(name, None, |target| target.snapshots_of(&*target.open(Open::ReadOnly)?))
    }

    fn create(&self, name: &str, snapshot: &str, _progress: Progress<'_>) -> Result<bool> {
        let target = self.target(name, Some(snapshot))?;
        with_timeout(SNAPSHOT_TIMEOUT, &answer(&target.name), move || target.snapshot_create())
    }

    fn remove(&self, name: &str, snapshot: &str) -> Result<bool> {
        self.call(name, Some(snapshot), Target::snapshot_remove)
    }

    fn protect(&self, name: &str, snapshot: &str, protect: bool) -> Result<bool> {
        self.call(name, Some(snapshot), move |target| target.snapshot_protect(protect))
    }

    fn rollback(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<()> {
        self.follow(name, Some(snapshot), progress, Target::snapshot_rollback)
    }
}

impl TrashStore for RbdStore {
    fn entries(&self) -> Result<Vec<Trashed>> {
        let this = self.clone();
        with_timeout(CALL_TIMEOUT, &answer(self.spec.pool()), move || this.trashed())
    }

    fn restore(&self, name: &str, id: Option<&str>, new_name: Option<&str>) -> Result<bool> {
        let name = self.target(name, None)?.spec.image;
        let new_name = self.target(new_name.unwrap_or(&name), None)?;
        let (this, id) = (self.clone(), id.map(str::to_owned));
        with_timeout(CALL_TIMEOUT, &answer(self.spec.pool()), move || {
            this.restore_entry(&name, id.as_deref(), &new_name)
        })
    }

    fn purge(&self, ids: &[String], force: bool, progress: Progress<'_>) -> Result<Purged> {
        let (this, ids) = (self.clone(), ids.to_vec());
        let what = format!("the trash of {}", self.pool_path());
        with_progress(&what, progress, move |tracker| this.purge_entries(&ids, force, tracker))
    }
}

impl Target {
    fn create(&self, size: u64, layout: &Layout) -> Result<bool> {
        let new = layout::new_image(layout)?;
        match self.pool.create(&self.spec.image, self.raw_size(size, layout)?, &new) {
            Ok(()) => self.encrypt(size, layout).map(|_| true),
            Err(error) if self.spec.encryption.is_some() && error.errno() == Some(libc::EEXIST) => {
                drop(self.open_existing(error)?);
                self.encrypt(size, layout)
            }
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                let image = self.open_existing(error)?;
                let mut differences =
                    layout::differences(layout, &image).map_err(|error| self.failed(error))?;
                let is = image.size().map_err(|error| self.failed(error))?;
                if is != size {
                    differences.insert(0, format!("a size of {}, not {}", Size(is), Size(size)));
                }
                self.check_same(&differences)
            }
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                Err(self.invalid_layout(error, layout))
            }
            Err(error) => Err(self.create_error(error, layout)),
        }
    }

    fn clone_of(&self, parent: &RbdSpec, layout: Layout) -> Result<bool> {
        let source = parent.image_name();
        let mut new = layout::new_image(&layout)?;
        new.clone_format.get_or_insert(2);
        let snapshot = parent.snapshot.as_deref().unwrap_or_default();
        let from = self
            .pool
            .cluster()
            .pool(&parent.pool, parent.namespace.as_deref())
            .map_err(|error| pool_error(error, parent))?;
        let cloned = self.pool.clone_image(&from, &parent.image, snapshot, &self.spec.image, &new);
        let Err(error) = cloned else { return Ok(true) };
        match error.errno() {
            Some(libc::EEXIST) => {
                let image = self.open_existing(error)?;
                let is = image.parent().map_err(|error| self.failed(error))?;
                let differences = match is.map(|parent| info::parent(&parent)) {
                    Some(is) if is.name == source && !is.in_trash => Vec::new(),
                    Some(is) => vec![format!("the parent {is}, not {source}")],
                    None => vec![format!("no parent instead of {source}")],
                };
                self.check_same(&differences)
            }
            Some(libc::EINVAL) if new.clone_format == Some(1) => {
                Err(self.failed(error).with_repair(format!(
                    "a clone of format 1 needs a protected snapshot: cleat volume snapshot protect \
                     rbd:{source}"
                )))
            }
            Some(libc::ENOENT) if layout.data_pool.is_none() => Err(Error::new(
                ErrorKind::NotFound,
                format!("there is no snapshot {source} to be cloned"),
            )
            .with_source(error)),
            _ => Err(self.create_error(error, &layout)),
        }
    }

    fn create_error(&self, error: librbd::Error, layout: &Layout) -> Error {
        let (kind, failed) = (errors::kind(&error), self.failed(error));
        match (&layout.data_pool, kind) {
            (Some(pool), ErrorKind::NotFound) => {
                failed.with_repair(format!("check that the pool {pool} exists (ceph osd pool ls)"))
            }
            (Some(pool), ErrorKind::PermissionDenied) => {
                failed.with_repair(errors::missing_caps_repair(&self.spec, Some(pool)))
            }
            _ => failed,
        }
    }

    /// Opens the image that a creation found to exist already.
    fn open_existing(&self, found: librbd::Error) -> Result<Arc<Image>> {
        self.find(Open::ReadOnly)?.ok_or_else(|| {
            let message = format!("{} exists in part: its creation was interrupted", self.name);
            Error::new(ErrorKind::AlreadyExists, message)
                .with_repair(format!(
                    "{}, then create it again",
                    self.command("remove --now", &self.name)
                ))
                .with_source(found)
        })
    }

    fn check_same(&self, differences: &[String]) -> Result<bool> {
        if differences.is_empty() {
            return Ok(false);
        }
        let message = format!("{} exists with {}", self.name, differences.join("; "));
        Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose another name, or give the properties that it has"))
    }

    fn delete(&self, tracker: &Tracker) -> Result<Removed> {
        if let Some(image) = self.find(Open::ReadOnly)? {
            self.check_removable(&image)?;
        }
        // An image that was created or removed in part cannot be opened, but it can be removed.
        let deleted =
            self.pool.remove(&self.spec.image, &mut |done, total| tracker.report(done, total));
        let changed = match deleted {
            Ok(()) => true,
            Err(error) if error.errno() == Some(libc::ENOENT) => false,
            Err(error) => {
                return Err(self
                    .stopped_error(error, "it is still listed, with a part of its data removed"));
            }
        };
        Ok(Removed { changed, trash: None })
    }

    fn resize(&self, size: u64, shrink: bool, tracker: &Tracker) -> Result<bool> {
        let failed = |error| self.failed(error);
        let image = self.open(Open::Write)?;
        let header = self.unlock(&image)?;
        let now = image.size().map_err(failed)?;
        if now == size {
            return Ok(false);
        }
        if size < now {
            if !shrink {
                let message =
                    format!("{} holds {}, more than {}", self.name, Size(now), Size(size));
                return Err(invalid(message).with_repair(
                    "shrink the file system on it, then repeat with --shrink: data beyond the new size \
                     is removed",
                ));
            }
            self.check_unused(&image)?;
            self.lock_exclusively(&image)?;
        }
        let mut tell = |done, total| tracker.report(done, total);
        match encryption::resize(&image, header, size, shrink, &mut tell) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EINVAL) => Err(self.too_large(error)),
            Err(error) => Err(self.stopped_error(
                error,
                "it still has its old size, with a part of the data beyond the new size removed",
            )),
        }
    }

    fn flatten(&self, tracker: &Tracker) -> Result<bool> {
        let image = self.open(Open::Write)?;
        if image.parent().map_err(|error| self.failed(error))?.is_none() {
            return Ok(false);
        }
        match image.flatten(&mut |done, total| tracker.report(done, total)) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.stopped_error(error, "it is still a clone")),
        }
    }

    fn open(&self, how: Open) -> Result<Arc<Image>> {
        self.open_at(None, how)
    }

    fn open_at(&self, snapshot: Option<&str>, how: Open) -> Result<Arc<Image>> {
        let opened = match &self.id {
            None => self.pool.open(&self.spec.image, snapshot, how),
            Some(id) => self.pool.open_by_id(id, how),
        };
        let image = opened.map_err(|error| open_error(error, &self.name, &self.spec))?;
        if how == Open::Write {
            check_primary(&image, &self.name)?;
        }
        Ok(image)
    }

    /// Opens the image with the exclusive lock (if it has that feature), so that no other client can start
    /// to write to it. Fails if a client has the image open.
    fn open_exclusively(&self) -> Result<Arc<Image>> {
        let image = self.open(Open::Write)?;
        self.lock_exclusively(&image)?;
        Ok(image)
    }

    fn lock_exclusively(&self, image: &Image) -> Result<()> {
        let failed = |error| self.failed(error);
        if image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK != 0 {
            image.lock_acquire().map_err(|error| match error.errno() {
                Some(libc::EROFS) => {
                    Error::new(ErrorKind::InUse, format!("{} is open for writing", self.name))
                        .with_repair("unmap it first: cleat volume info shows the client")
                        .with_source(error)
                }
                _ => failed(error),
            })?;
        }
        self.check_unused(image)
    }

    /// Like [`Target::open`], but returns `None` if there is no such image.
    fn find(&self, how: Open) -> Result<Option<Arc<Image>>> {
        match self.open(how) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    fn check_removable(&self, image: &Image) -> Result<()> {
        check_primary(image, &self.name)?;
        self.check_unused(image)?;
        let mut snapshots = self.snapshots_of(image)?;
        // Snapshots of mirroring are removed with the image.
        snapshots.retain(|snapshot| snapshot.kind != "mirror");
        let Some(first) = snapshots.first() else { return Ok(()) };
        let names: Vec<&str> = snapshots.iter().map(|snapshot| &*snapshot.name).collect();
        let clones = self.clones(image)?.unwrap_or_default();
        let (with, repair) = if clones.is_empty() {
            let first = format!("{}@{}", self.name, first.name);
            (String::new(), format!("remove them: {}", self.command("snapshot remove", &first)))
        } else {
            let flatten = self.command("flatten", &clones[0]);
            let repair = format!("flatten the clones ({flatten}), then remove the snapshots");
            (format!(", and the clones {}", clones.join(", ")), repair)
        };
        let message = format!("{} has the snapshots {}{with}", self.name, names.join(", "));
        Err(Error::new(ErrorKind::InUse, message).with_repair(repair))
    }

    /// Returns a command for the image or snapshot `name`, with the options of this target.
    fn command(&self, verb: &str, name: &str) -> String {
        match self.uri.split_once('?') {
            Some((_, options)) => format!("cleat volume {verb} 'rbd:{name}?{options}'"),
            None => format!("cleat volume {verb} rbd:{name}"),
        }
    }

    fn failed(&self, error: librbd::Error) -> Error {
        let repair = errors::repair(&error, &self.spec);
        let failed = errors::image_error(error, &self.name);
        match repair {
            Some(repair) => failed.with_repair(repair),
            None => failed,
        }
    }

    /// Returns the error for a new image that librbd rejects with EINVAL. Other causes were checked before.
    fn invalid_layout(&self, error: librbd::Error, layout: &Layout) -> Error {
        let repair = match layout {
            Layout { data_pool: Some(pool), .. } => format!(
                "an erasure-coded pool must allow overwrites: ceph osd pool set {pool} \
                 allow_ec_overwrites true"
            ),
            Layout { stripes: Some(_), object_size: None, .. } => {
                "also give the object size (--object-size), at least that of the stripe unit"
                    .to_owned()
            }
            _ => return self.too_large(error),
        };
        self.failed(error).with_repair(repair)
    }

    /// Returns the error for an image with more objects than an object map can have
    /// (`MAX_OBJECT_MAP_OBJECT_COUNT`).
    fn too_large(&self, error: librbd::Error) -> Error {
        self.failed(error).with_repair(format!(
            "with the feature object-map an image has at most 256,000,000 objects: create it with \
             larger objects (--object-size) or without the feature (--features; rbd feature disable \
             {} fast-diff object-map)",
            self.name
        ))
    }

    /// Returns the error of an operation that can be interrupted. `left` describes the state that an
    /// interruption leaves.
    fn stopped_error(&self, error: librbd::Error, left: &str) -> Error {
        if error.errno() != Some(libc::ECANCELED) {
            return self.failed(error);
        }
        let message = format!("{}: the operation was interrupted; {left}", self.name);
        Error::new(ErrorKind::Aborted, message).with_repair("repeat the command to continue")
    }
}

fn adoption_timeout(layout: &Layout) -> Duration {
    if layout.labels.is_empty() { Duration::ZERO } else { ADOPTION_TIMEOUT }
}

fn open_pool(spec: &RbdStoreSpec, mut credentials: CredentialSet) -> Result<Arc<Pool>> {
    let failed = |error| pool_error(error, spec.client());
    let keyring: Vec<_> = spec.client().keyring_file().into_iter().collect();
    credentials.complete(&keyring)?;
    let key = ClientKey::find(spec.client(), &credentials)?;
    let cluster = connect(&config(spec.client()), key.as_ref()).map_err(failed)?;
    let pool = cluster.pool(spec.pool(), spec.namespace()).map_err(failed)?;
    if let Some(name) = spec.namespace() {
        match cluster.pool(spec.pool(), None).map_err(failed)?.has_namespace(name) {
            Ok(true) => {}
            // A client that may only use this namespace cannot read the list.
            Err(error) if error.errno() == Some(libc::EPERM) => {}
            Err(error) => return Err(failed(error)),
            Ok(false) => return Err(errors::no_namespace(spec.pool(), name)),
        }
    }
    Ok(pool)
}

/// Converts an error of a pool.
fn pool_error(error: librbd::Error, spec: &RbdSpec) -> Error {
    let kind = errors::kind(&error);
    let repair = errors::repair(&error, spec).or_else(|| {
        (kind == ErrorKind::NotFound).then(|| {
            "check that the pool exists (ceph osd pool ls), and the files that conf=PATH and \
             keyring=PATH name"
                .to_owned()
        })
    });
    let failed =
        Error::new(kind, format!("cannot reach the pool {}", spec.pool)).with_source(error);
    match repair {
        Some(repair) => failed.with_repair(repair),
        None => failed,
    }
}
