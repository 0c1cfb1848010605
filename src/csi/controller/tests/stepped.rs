//! File volumes whose store stops a call at one of its steps, as a SIGKILL of the process does. They imitate what only
//! RBD has: clones by a snapshot, group snapshots, and the release of blocks of zeroes.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cleat_backend::CredentialSet;
use cleat_backend::claimant::Claimant;
use cleat_backend::group_snapshot::{GroupSnapshotStore, Hold};
use cleat_backend::store::{
    CloneStore, Info, LabelStore, Labels, Layout, Listing, Page, Progress, ReclaimStore, Removal,
    Removed, Snapshot, SnapshotStore, Source, Store,
};
use cleat_backend::uri::Options;
use cleat_backend::{Backend, Nested, StoreParser, StoreSpec, VolumeSpec};
use cleat_core::error::Result;

pub(super) static STEPPED: cleat_backend::Registry = cleat_backend::Registry::new(&[&Stepped]);

/// The moment of a step at which a call is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    Before,
    /// In the middle, where the storage executes the step in several parts: their numbers count from 0.
    Within(usize),
    /// After the effect, before the caller learns of it.
    After,
}

/// The steps of a call on the volumes of one directory.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) names: Vec<String>,
    /// The step, from 0, and the moment at which the call is stopped.
    pub(super) stop: Option<(usize, Moment)>,
    pub(super) has_stopped: bool,
    /// Whether a clone of a volume needs a snapshot, as on RBD.
    pub(super) clones_snapshots: bool,
}

/// The steps of each directory that a test uses. It stands in front of those of other tests.
static DIRECTORIES: Mutex<Vec<(PathBuf, Arc<Mutex<Steps>>)>> = Mutex::new(Vec::new());

/// Makes calls for volumes below `directory` pass through `steps`.
pub(super) fn install(directory: PathBuf, steps: Arc<Mutex<Steps>>) {
    let mut directories = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner);
    directories.retain(|(other, _)| *other != directory);
    directories.push((directory, steps));
}

/// Returns the backend of files.
fn files() -> &'static dyn Backend {
    super::REGISTRY.backends().next().expect("the backend of these tests")
}

#[derive(Debug)]
struct Stepped;

impl Backend for Stepped {
    fn scheme(&self) -> &'static str {
        files().scheme()
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        files().parse(location, options, nested)
    }

    fn stores(&self) -> Option<&dyn StoreParser> {
        Some(self)
    }
}

impl StoreParser for Stepped {
    fn forms(&self) -> &'static [&'static str] {
        &["file:/DIRECTORY"]
    }

    fn parse_store(&self, location: &str, options: Options) -> Result<Arc<dyn StoreSpec>> {
        let parser = files().stores().expect("files have stores");
        Ok(Arc::new(SteppedSpec(parser.parse_store(location, options)?)))
    }
}

#[derive(Debug)]
struct SteppedSpec(Arc<dyn StoreSpec>);

impl StoreSpec for SteppedSpec {
    fn scheme(&self) -> &'static str {
        self.0.scheme()
    }

    fn location(&self) -> String {
        self.0.location()
    }

    fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<Arc<dyn VolumeSpec>> {
        self.0.volume(name, snapshot)
    }

    fn connect(&self, claimant: &Claimant, credentials: CredentialSet) -> Result<Box<dyn Store>> {
        let store = self.0.connect(claimant, credentials)?;
        let path = PathBuf::from(self.location());
        let directories = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = directories.iter().filter(|(directory, _)| path.starts_with(directory));
        let steps = known.next_back().expect("the directory of a test").1.clone();
        Ok(Box::new(SteppedStore { store, path, steps }))
    }

    fn with_access_of(&self, other: &dyn StoreSpec) -> Result<Arc<dyn StoreSpec>> {
        self.0.with_access_of(other)
    }
}

/// Executes a step. `parts` makes what each part of the step leaves, in order.
fn step<T>(
    steps: &Mutex<Steps>,
    name: &str,
    parts: &[&dyn Fn()],
    all: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut steps = steps.lock().unwrap_or_else(PoisonError::into_inner);
    steps.names.push(name.to_owned());
    let here = steps.names.len() - 1;
    let moment = steps.stop.filter(|(step, _)| *step == here).map(|(_, moment)| moment);
    let is_possible = |moment: &Moment| match moment {
        Moment::Within(part) => *part < parts.len(),
        Moment::Before | Moment::After => true,
    };
    let Some(moment) = moment.filter(is_possible) else {
        drop(steps);
        return all();
    };
    steps.has_stopped = true;
    drop(steps);
    match moment {
        Moment::Before => {}
        Moment::Within(part) => parts[..=part].iter().for_each(|part| part()),
        Moment::After => drop(all()),
    }
    // Ends the thread of the call without a message. Nothing of the controller runs after this.
    std::panic::resume_unwind(Box::new("stopped"))
}

struct SteppedStore {
    store: Box<dyn Store>,
    path: PathBuf,
    steps: Arc<Mutex<Steps>>,
}

impl SteppedStore {
    fn step<T>(
        &self,
        name: &str,
        parts: &[&dyn Fn()],
        all: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        step(&self.steps, name, parts, all)
    }

    fn part(&self, name: &str) {
        let path = self.path.join(name);
        fs::create_dir_all(path.parent().expect("a file")).expect("a directory");
        fs::write(path, "a part").expect("a file");
    }
}

impl Store for SteppedStore {
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool> {
        let empty = || drop(fs::File::create(self.path.join(name)).expect("a file"));
        let sized = || fs::File::create(self.path.join(name)).unwrap().set_len(size).unwrap();
        let all = || self.store.create(name, size, layout);
        self.step("create", &[&empty, &sized], all)
    }

    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed> {
        let file = || drop(fs::remove_file(self.path.join(name)));
        self.step("remove", &[&file], || self.store.remove(name, how, progress))
    }

    fn resize(&self, name: &str, size: u64, shrink: bool, progress: Progress<'_>) -> Result<bool> {
        self.step("resize", &[], || self.store.resize(name, size, shrink, progress))
    }

    fn list(&self, page: &Page) -> Result<Listing> {
        self.store.list(page)
    }

    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info> {
        self.store.info(name, snapshot)
    }

    fn snapshots(&self) -> Option<&dyn SnapshotStore> {
        Some(self)
    }

    fn clones(&self) -> Option<&dyn CloneStore> {
        Some(self)
    }

    fn labels(&self) -> Option<&dyn LabelStore> {
        Some(self)
    }

    fn group_snapshots(&self) -> Option<&dyn GroupSnapshotStore> {
        Some(self)
    }

    fn reclaim(&self) -> Option<&dyn ReclaimStore> {
        Some(self)
    }
}

impl SnapshotStore for SteppedStore {
    fn list(&self, name: &str) -> Result<Vec<Snapshot>> {
        self.real_snapshots().list(name)
    }

    fn create(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<bool> {
        let part = || self.part(&format!(".cleat/snapshots/{name}/.{snapshot}"));
        let all = || self.real_snapshots().create(name, snapshot, progress);
        self.step("create a snapshot", &[&part], all)
    }

    fn remove(&self, name: &str, snapshot: &str) -> Result<bool> {
        self.step("remove a snapshot", &[], || self.real_snapshots().remove(name, snapshot))
    }

    fn protect(&self, name: &str, snapshot: &str, protect: bool) -> Result<bool> {
        self.real_snapshots().protect(name, snapshot, protect)
    }

    fn rollback(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<()> {
        self.real_snapshots().rollback(name, snapshot, progress)
    }
}

impl SteppedStore {
    fn real_snapshots(&self) -> &dyn SnapshotStore {
        self.store.snapshots().expect("files have snapshots")
    }

    fn real_clones(&self) -> &dyn CloneStore {
        self.store.clones().expect("files have clones")
    }
}

impl CloneStore for SteppedStore {
    fn create_clone(
        &self,
        source: &Source<'_>,
        name: &str,
        layout: &Layout,
        progress: Progress<'_>,
    ) -> Result<bool> {
        let store: &dyn std::any::Any = source.store;
        let spec = store.downcast_ref::<SteppedSpec>().expect("a store of this backend");
        let source = Source { store: &*spec.0, ..*source };
        let part = || self.part(&format!(".cleat/new/{name}"));
        let all = || self.real_clones().create_clone(&source, name, layout, progress);
        self.step("clone", &[&part], all)
    }

    fn clones_volumes(&self) -> bool {
        !self.steps.lock().unwrap_or_else(PoisonError::into_inner).clones_snapshots
    }

    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool> {
        self.real_clones().flatten(name, progress)
    }
}

impl LabelStore for SteppedStore {
    fn set(&self, name: &str, changes: &Labels) -> Result<bool> {
        let labels = self.store.labels().expect("files have labels");
        self.step("set labels", &[], || labels.set(name, changes))
    }
}

impl GroupSnapshotStore for SteppedStore {
    fn hold(&self, _: &str) -> Result<Box<dyn Hold>> {
        let hold = || -> Result<Box<dyn Hold>> { Ok(Box::new(SteppedHold(self.steps.clone()))) };
        self.step("hold", &[], hold)
    }

    fn rename_snapshot(&self, name: &str, from: &str, to: &str) -> Result<bool> {
        let path = |snapshot| self.path.join(".cleat/snapshots").join(name).join(snapshot);
        let rename = || match (path(from).exists(), path(to).exists()) {
            (true, false) => fs::rename(path(from), path(to)).map(|()| true),
            (false, true) => Ok(false),
            exist => panic!("{name}@{from} and {name}@{to} exist: {exist:?}"),
        };
        self.step("rename a snapshot", &[], || Ok(rename().expect("a rename")))
    }
}

/// A hold of a volume that nobody uses.
struct SteppedHold(Arc<Mutex<Steps>>);

impl Hold for SteppedHold {
    fn wait(&self, _: Instant) -> Result<()> {
        step(&self.0, "wait for the hold", &[], || Ok(()))
    }

    fn check(&self) -> Result<()> {
        step(&self.0, "check the hold", &[], || Ok(()))
    }

    fn end(self: Box<Self>) -> Result<()> {
        step(&self.0, "end the hold", &[], || Ok(()))
    }
}

impl ReclaimStore for SteppedStore {
    fn reclaim(&self, _: &str, _: Progress<'_>) -> Result<()> {
        self.step("free zeroes", &[], || Ok(()))
    }
}
