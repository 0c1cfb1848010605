//! RBD images as a whole, through librbd; the pool or namespace is the [`Store`].
//!
//! - One RADOS client for all calls. Images are opened for one call each, for reading where that does:
//!   a reader does not watch, and so is not among the watchers that are counted.
//! - What an image's holder can do for us librbd has it do: a snapshot, another size, a flattening of an
//!   image that is mapped. What cuts off or overwrites data under a holder is refused, by name: under
//!   whoever has it open, and under a claim that stands, whether its client is heard of or not.

mod encrypted;
mod info;
mod layout;
mod listing;
mod other_clients;
mod snapshots;
mod trash;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use librbd::{Image, Open, Pool, RBD_FEATURE_EXCLUSIVE_LOCK};

use crate::connection::{config, load_library};
use crate::errors::problem;
use crate::mirror::check_primary;
use crate::spec::{RbdSpec, RbdStoreSpec};
use crate::timeouts::{Course, PATIENCE, answer, followed, within};
use crate::{encryption, errors};
use cleat_backend::claimant::Claimant;
use cleat_backend::store::{
    CloneStore, Info, Layout, Listing, Page, Progress, Purged, Removal, Removed, Snapshot,
    SnapshotStore, Source, Store, TrashStore, Trashed,
};
use cleat_backend::uri::{Size, StoreUri, VolumeUri, invalid};
use cleat_core::error::{Error, ErrorKind, Result};

/// How long taking a snapshot may take: whoever has the image mapped may write out what it holds first.
const QUIESCE_PATIENCE: Duration = Duration::from_secs(120);

/// A pool, or a namespace in one, on a connection of its own.
#[derive(Clone)]
pub(crate) struct RbdStore {
    pool: Arc<Pool>,
    spec: RbdStoreSpec,
    /// For whom.
    claimant: Claimant,
}

/// An image, or a snapshot, that a call is about. It need not exist.
struct Target {
    pool: Arc<Pool>,
    spec: RbdSpec,
    /// Where it lies in the trash.
    id: Option<String>,
    /// `pool[/namespace]/image[@snapshot]`
    name: String,
    uri: String,
    claimant: Claimant,
}

impl RbdStore {
    /// Connects.
    pub(crate) fn connect(spec: &RbdStoreSpec, claimant: &Claimant) -> Result<Self> {
        load_library()?;
        let wanted = spec.clone();
        let pool = within(PATIENCE, &answer(spec.pool()), move || open_pool(&wanted))?;
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

    /// Does `work` with an image, within a limit.
    fn call<T: Send + 'static>(
        &self,
        name: &str,
        snapshot: Option<&str>,
        work: impl FnOnce(&Target) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let target = self.target(name, snapshot)?;
        within(PATIENCE, &answer(&target.name), move || work(&target))
    }

    /// Does `work` with an image, for as long as it takes.
    fn follow<T: Send + 'static>(
        &self,
        name: &str,
        snapshot: Option<&str>,
        progress: Progress<'_>,
        work: impl FnOnce(&Target, &Course) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let target = self.target(name, snapshot)?;
        followed(&target.name.clone(), progress, move |course| work(&target, course))
    }
}

impl Store for RbdStore {
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool> {
        let layout = layout.clone();
        let target = self.target(name, None)?;
        let unlocking =
            target.spec.encryption.as_ref().map_or(Duration::ZERO, |_| encrypted::PATIENCE);
        within(PATIENCE + unlocking, &answer(&target.name), move || target.create(size, &layout))
    }

    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed> {
        match how {
            Removal::Trash { keep } => self.call(name, None, move |target| target.discard(keep)),
            Removal::Now => self.follow(name, None, progress, Target::delete),
        }
    }

    fn resize(&self, name: &str, size: u64, shrink: bool, progress: Progress<'_>) -> Result<bool> {
        self.follow(name, None, progress, move |target, course| target.resize(size, shrink, course))
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

    fn clones(&self) -> Option<&dyn CloneStore> {
        Some(self)
    }

    fn trash(&self) -> Option<&dyn TrashStore> {
        Some(self)
    }
}

impl CloneStore for RbdStore {
    fn create_clone(&self, source: &Source<'_>, name: &str, layout: &Layout) -> Result<bool> {
        let place: &dyn Any = source.store;
        let Some(place) = place.downcast_ref::<RbdStoreSpec>() else {
            return Err(invalid("an RBD image is cloned from another one's snapshot only"));
        };
        let parent = place.image(source.name, Some(source.snapshot))?;
        let layout = layout.clone();
        self.call(name, None, move |target| target.clone_of(&parent, layout))
    }

    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool> {
        self.follow(name, None, progress, Target::flatten)
    }
}

impl SnapshotStore for RbdStore {
    fn list(&self, name: &str) -> Result<Vec<Snapshot>> {
        self.call(name, None, |target| target.snapshots_of(&*target.open(Open::ReadOnly)?))
    }

    fn create(&self, name: &str, snapshot: &str) -> Result<bool> {
        let target = self.target(name, Some(snapshot))?;
        within(QUIESCE_PATIENCE, &answer(&target.name), move || target.snapshot_create())
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
        within(PATIENCE, &answer(self.spec.pool()), move || this.trashed())
    }

    fn restore(&self, name: &str, id: Option<&str>, new_name: Option<&str>) -> Result<bool> {
        let name = self.target(name, None)?.spec.image;
        let new_name = self.target(new_name.unwrap_or(&name), None)?;
        let (this, id) = (self.clone(), id.map(str::to_owned));
        within(PATIENCE, &answer(self.spec.pool()), move || {
            this.restore_entry(&name, id.as_deref(), &new_name)
        })
    }

    fn purge(&self, ids: &[String], force: bool, progress: Progress<'_>) -> Result<Purged> {
        let (this, ids) = (self.clone(), ids.to_vec());
        let what = format!("the trash of {}", self.place());
        followed(&what, progress, move |course| this.purge_entries(&ids, force, course))
    }
}

impl Target {
    fn create(&self, size: u64, layout: &Layout) -> Result<bool> {
        let new = layout::new_image(layout)?;
        match self.pool.create(&self.spec.image, self.whole(size, layout)?, &new) {
            Ok(()) => self.encrypt(size, layout).map(|_| true),
            Err(error) if self.spec.encryption.is_some() && error.errno() == Some(libc::EEXIST) => {
                drop(self.half_made(error)?);
                self.encrypt(size, layout)
            }
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                let image = self.half_made(error)?;
                let mut differences =
                    layout::differences(layout, &image).map_err(|error| self.failed(error))?;
                let is = image.size().map_err(|error| self.failed(error))?;
                if is != size {
                    differences.insert(0, format!("a size of {}, not {}", Size(is), Size(size)));
                }
                self.same(&differences)
            }
            Err(error) if error.errno() == Some(libc::EINVAL) => Err(self.invalid(error, layout)),
            Err(error) => Err(self.not_made(error, layout)),
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
            .map_err(|error| pool_problem(error, parent))?;
        let cloned = self.pool.clone_image(&from, &parent.image, snapshot, &self.spec.image, &new);
        let Err(error) = cloned else { return Ok(true) };
        match error.errno() {
            Some(libc::EEXIST) => {
                let image = self.half_made(error)?;
                let is = image.parent().map_err(|error| self.failed(error))?;
                let differences = match is.map(|parent| info::parent(&parent)) {
                    Some(is) if is.name == source && !is.in_trash => Vec::new(),
                    Some(is) => vec![format!("the parent {is}, not {source}")],
                    None => vec![format!("no parent, not {source}")],
                };
                self.same(&differences)
            }
            Some(libc::EINVAL) if new.clone_format == Some(1) => {
                Err(self.failed(error).with_repair(format!(
                    "a clone in the format 1 needs a protected snapshot: cleat volume snapshot \
                     protect rbd:{source}"
                )))
            }
            Some(libc::ENOENT) if layout.data_pool.is_none() => Err(Error::new(
                ErrorKind::NotFound,
                format!("there is no snapshot {source} to be cloned"),
            )
            .with_source(error)),
            _ => Err(self.not_made(error, &layout)),
        }
    }

    fn not_made(&self, error: librbd::Error, layout: &Layout) -> Error {
        let (kind, failed) = (errors::kind(&error), self.failed(error));
        match (&layout.data_pool, kind) {
            (Some(pool), ErrorKind::NotFound) => {
                failed.with_repair(format!("see that the pool {pool} exists (ceph osd pool ls)"))
            }
            (Some(pool), ErrorKind::PermissionDenied) => {
                failed.with_repair(errors::lacks_rights(&self.spec, Some(pool)))
            }
            _ => failed,
        }
    }

    /// Opens what creating it has found there already.
    fn half_made(&self, found: librbd::Error) -> Result<Arc<Image>> {
        self.find(Open::ReadOnly)?.ok_or_else(|| {
            let message = format!("{} is there in part: its creation was cut off", self.name);
            Error::new(ErrorKind::AlreadyExists, message)
                .with_repair(format!(
                    "{}, then create it",
                    self.command("remove --now", &self.name)
                ))
                .with_source(found)
        })
    }

    fn same(&self, differences: &[String]) -> Result<bool> {
        if differences.is_empty() {
            return Ok(false);
        }
        let message = format!("{} exists with {}", self.name, differences.join("; "));
        Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose another name, or the properties that it has"))
    }

    fn delete(&self, course: &Course) -> Result<Removed> {
        if let Some(image) = self.find(Open::ReadOnly)? {
            self.check_removable(&image)?;
        }
        // What was made, or removed, in part only cannot be opened, but removed.
        let deleted =
            self.pool.remove(&self.spec.image, &mut |done, total| course.tell(done, total));
        let changed = match deleted {
            Ok(()) => true,
            Err(error) if error.errno() == Some(libc::ENOENT) => false,
            Err(error) => {
                return Err(self.ended(error, "it is still listed, with a part of its data gone"));
            }
        };
        Ok(Removed { changed, trash: None })
    }

    fn resize(&self, size: u64, shrink: bool, course: &Course) -> Result<bool> {
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
                    "make what is on it smaller, then repeat with --shrink: the rest is cut off",
                ));
            }
            self.check_unused(&image)?;
            self.keep_alone(&image)?;
        }
        let mut tell = |done, total| course.tell(done, total);
        match encryption::resize(&image, header, size, shrink, &mut tell) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EINVAL) => Err(self.too_large(error)),
            Err(error) => Err(self.ended(
                error,
                "it still has its old size, with a part of what was to be cut off gone",
            )),
        }
    }

    fn flatten(&self, course: &Course) -> Result<bool> {
        let image = self.open(Open::Write)?;
        if image.parent().map_err(|error| self.failed(error))?.is_none() {
            return Ok(false);
        }
        match image.flatten(&mut |done, total| course.tell(done, total)) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.ended(error, "it is still the clone that it was")),
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
        let image = opened.map_err(|error| problem(error, &self.name, &self.spec))?;
        if how == Open::Write {
            check_primary(&image, &self.name)?;
        }
        Ok(image)
    }

    /// Opens the image so that nobody comes to write to it meanwhile: with the exclusive lock, where it
    /// has that. A mapping that was faster is refused as one that was there.
    fn open_alone(&self) -> Result<Arc<Image>> {
        let image = self.open(Open::Write)?;
        self.keep_alone(&image)?;
        Ok(image)
    }

    fn keep_alone(&self, image: &Image) -> Result<()> {
        let failed = |error| self.failed(error);
        if image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK != 0 {
            image.lock_acquire().map_err(|error| match error.errno() {
                Some(libc::EROFS) => {
                    Error::new(ErrorKind::InUse, format!("{} is being written to", self.name))
                        .with_repair("unmap it there first: cleat volume info names the client")
                        .with_source(error)
                }
                _ => failed(error),
            })?;
        }
        self.check_unused(image)
    }

    /// As [`Target::open`]; `None` where there is no such image.
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
        // Those go with it.
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

    /// What to type to do something with `name`, reached as this image is.
    fn command(&self, verb: &str, name: &str) -> String {
        match self.uri.split_once('?') {
            Some((_, options)) => format!("cleat volume {verb} 'rbd:{name}?{options}'"),
            None => format!("cleat volume {verb} rbd:{name}"),
        }
    }

    fn failed(&self, error: librbd::Error) -> Error {
        let repair = errors::repair(&error, &self.spec);
        let failed = errors::later(error, &self.name);
        match repair {
            Some(repair) => failed.with_repair(repair),
            None => failed,
        }
    }

    /// What librbd only calls invalid of a new image, where all else was looked at before.
    fn invalid(&self, error: librbd::Error, layout: &Layout) -> Error {
        let repair = match layout {
            Layout { data_pool: Some(pool), .. } => format!(
                "an erasure-coded pool has to allow what images need: ceph osd pool set {pool} \
                 allow_ec_overwrites true"
            ),
            Layout { stripes: Some(_), object_size: None, .. } => {
                "give the object size, too (--object-size): no less than the stripe unit".to_owned()
            }
            _ => return self.too_large(error),
        };
        self.failed(error).with_repair(repair)
    }

    /// There is no room in an object map for so many objects (`MAX_OBJECT_MAP_OBJECT_COUNT`).
    fn too_large(&self, error: librbd::Error) -> Error {
        self.failed(error).with_repair(format!(
            "with the feature object-map an image has at most 256,000,000 objects: make it with larger \
             ones (--object-size), or without the feature (--features; rbd feature disable {} \
             fast-diff object-map)",
            self.name
        ))
    }

    /// An error of an operation that can be ended half way; `left` is what that leaves.
    fn ended(&self, error: librbd::Error, left: &str) -> Error {
        if error.errno() != Some(libc::ECANCELED) {
            return self.failed(error);
        }
        let message = format!("{}: ended half way, as it was told to; {left}", self.name);
        Error::new(ErrorKind::Aborted, message)
            .with_repair("repeat the command: it goes on from there")
    }
}

fn open_pool(spec: &RbdStoreSpec) -> Result<Arc<Pool>> {
    let failed = |error| pool_problem(error, spec.client());
    let cluster = librbd::Cluster::connect(&config(spec.client())).map_err(failed)?;
    let pool = cluster.pool(spec.pool(), spec.namespace()).map_err(failed)?;
    if let Some(name) = spec.namespace() {
        match cluster.pool(spec.pool(), None).map_err(failed)?.has_namespace(name) {
            Ok(true) => {}
            // Whoever may use this namespace only cannot see the list.
            Err(error) if error.errno() == Some(libc::EPERM) => {}
            Err(error) => return Err(failed(error)),
            Ok(false) => {
                let place = format!("{}/{name}", spec.pool());
                let message = format!("the pool {} has no namespace {name}", spec.pool());
                return Err(Error::new(ErrorKind::NotFound, message).with_repair(format!(
                    "rbd namespace create {place}, or see rbd namespace ls"
                )));
            }
        }
    }
    Ok(pool)
}

/// An error of what is above the images.
fn pool_problem(error: librbd::Error, spec: &RbdSpec) -> Error {
    let kind = errors::kind(&error);
    let repair = errors::repair(&error, spec).or_else(|| {
        (kind == ErrorKind::NotFound).then(|| {
            "see that the pool exists (ceph osd pool ls), and the files that conf=PATH and \
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
