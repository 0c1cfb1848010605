//! The storage of the tests: records in memory, with the rules of `cleat_grants`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Claim, FencePlan, Record, Refusal, Target};
use cleat_kube::storage::{Backing, Fencing, Storage};

/// All volumes of a test. `shared/NAME` can be fenced, `local/NODE/NAME` exists on the node NODE only,
/// `rbd/…` is an image of a Ceph cluster, `object/…` a volume on an object store, and `by-hand` a static volume of one. Every other volume is refused.
#[derive(Debug, Default)]
pub(crate) struct TestStorage {
    images: Mutex<BTreeMap<String, Arc<Image>>>,
    load: Arc<Load>,
}

/// A volume.
#[derive(Debug, Default)]
pub(crate) struct Image {
    record: Mutex<Record>,
    cut: Mutex<BTreeSet<String>>,
    is_down: AtomicBool,
    is_deleted: AtomicBool,
    /// The calls for this volume that are in progress.
    calls: AtomicUsize,
    /// The calls for this volume that have begun.
    begun: AtomicUsize,
    /// How long the next call hangs, in milliseconds.
    hang_ms: AtomicU64,
    load: Arc<Load>,
}

/// The calls of all volumes.
#[derive(Debug, Default)]
pub(crate) struct Load {
    /// How long each call takes, in milliseconds.
    pub(crate) call_ms: AtomicU64,
    calls: AtomicUsize,
    /// The highest number of calls that were in progress, of all volumes and of one.
    pub(crate) most: AtomicUsize,
    pub(crate) most_of_one: AtomicUsize,
}

impl TestStorage {
    /// Returns the volume `handle`.
    pub(crate) fn image(&self, handle: &str) -> Arc<Image> {
        let new = || Arc::new(Image { load: Arc::clone(&self.load), ..Image::default() });
        Arc::clone(self.images.lock().unwrap().entry(handle.to_owned()).or_insert_with(new))
    }

    pub(crate) fn load(&self) -> &Load {
        &self.load
    }
}

impl Storage for TestStorage {
    fn find(&self, handle: &str) -> Result<Backing> {
        match handle.split('/').collect::<Vec<_>>()[..] {
            ["shared", _] => Ok(Backing::Granted(self.image(handle))),
            ["local", node, _] => Ok(Backing::Local { node_id: node.to_owned() }),
            ["rbd" | "object", ..] | ["by-hand"] => crate::rbd::volumes().find(handle),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!("cannot attach volume {handle}: its clients cannot be fenced"),
            )),
        }
    }

    fn places(&self) -> Result<BTreeSet<String>> {
        Ok(BTreeSet::from(["shared".to_owned()]))
    }

    fn volumes_in(&self, place: &str, deadline: Instant) -> Result<Vec<String>> {
        if place != "shared" {
            return crate::rbd::volumes().volumes_in(place, deadline);
        }
        let images = self.images.lock().unwrap();
        Ok(images.keys().filter(|handle| handle.starts_with("shared/")).cloned().collect())
    }
}

impl Image {
    /// Claims the volume as a client of `node`, which is named after it.
    pub(crate) fn claim(&self, node: &str, generation: Generation) -> Result<(), Refusal> {
        let mut record = self.record.lock().unwrap();
        let (client, node) = (client(node), node.to_owned());
        let mode = Mode::ReadWrite;
        *record = record.admit_claim(Claim { node, generation, client, mode })?.record;
        Ok(())
    }

    /// Releases the claim of `node`.
    pub(crate) fn release_claim(&self, node: &str) {
        let mut record = self.record.lock().unwrap();
        *record = record.release(&client(node)).expect("the node has a claim");
    }

    /// Returns the record.
    pub(crate) fn read(&self) -> Record {
        self.record.lock().unwrap().clone()
    }

    /// Sets whether the storage answers calls for this volume with an error.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::SeqCst);
    }

    /// Deletes the volume at the storage.
    pub(crate) fn delete(&self) {
        self.is_deleted.store(true, Ordering::SeqCst);
    }

    /// Has the next call hang for this time. Later calls are answered meanwhile.
    pub(crate) fn hang_once(&self, time: Duration) {
        self.hang_ms.store(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// Returns how many calls for this volume have begun.
    pub(crate) fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// Carries out a call of the controller.
    fn call<T>(&self, run: impl FnOnce() -> T) -> Result<T> {
        let begin = |calls: &AtomicUsize, most: &AtomicUsize| {
            most.fetch_max(calls.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        };
        begin(&self.load.calls, &self.load.most);
        begin(&self.calls, &self.load.most_of_one);
        self.begun.fetch_add(1, Ordering::SeqCst);
        let time_ms = self.load.call_ms.load(Ordering::SeqCst);
        let time_ms = time_ms + self.hang_ms.swap(0, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(time_ms));
        let result = match self.is_down.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Unavailable, "the storage does not answer")),
            false if self.is_deleted.load(Ordering::SeqCst) => {
                Err(Error::new(ErrorKind::NotFound, "the volume does not exist"))
            }
            false => Ok(run()),
        };
        self.calls.fetch_sub(1, Ordering::SeqCst);
        self.load.calls.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Returns whether the client of `node` is cut off.
    pub(crate) fn is_cut(&self, node: &str) -> bool {
        self.cut.lock().unwrap().contains(&client(node))
    }
}

fn client(node: &str) -> String {
    format!("client-of-{node}")
}

impl Fencing for Image {
    fn record(&self, _: Instant) -> Result<Record> {
        self.call(|| self.read())
    }

    fn fence(&self, target: &Target, _: Instant) -> Result<()> {
        self.call(|| {
            let mut record = self.record.lock().unwrap();
            if let FencePlan::Cut(client) = record.plan_fence(target) {
                self.cut.lock().unwrap().extend(client.clone());
                *record = record.seal(target, client);
            }
        })
    }

    fn unfence(&self, client: &str, _: Instant) -> Result<()> {
        self.call(|| {
            let mut record = self.record.lock().unwrap();
            if let Some(clean) = record.unfence(client) {
                self.cut.lock().unwrap().remove(client);
                *record = clean;
            }
        })
    }

    fn release(&self, _: &str, client: &str, _: Instant) -> Result<()> {
        self.call(|| {
            let mut record = self.record.lock().unwrap();
            if let Some(released) = record.release(client) {
                self.cut.lock().unwrap().insert(client.to_owned());
                *record = released;
            }
        })
    }
}
