//! Clones on a store that always works, and the rules between the creator of a clone and the deleter of a snapshot.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use zeroize::Zeroizing;

use crate::codec::Compression;
use crate::encryption::KeyFile;
use crate::name::{Nonce, SnapshotId, VolumeId};
use crate::rules::{Rule, without};
use crate::snapshot_tests::{settle, take};
use crate::store::{Pending, Store, StoreError};
use crate::tests::{Memory, block_on, byte_at, create, open, put, with_volume, yield_once};
use crate::volume::{Config, Failure, NewClone, Parents, Place, Volume};

/// Stores by their locations, which are their indices.
pub(crate) struct Stores<'a>(pub(crate) &'a [Arc<dyn Store>]);

impl Parents for Stores<'_> {
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError> {
        let found = location.parse().ok().and_then(|at: usize| self.0.get(at));
        found.cloned().ok_or(StoreError::NotFound)
    }
}

impl Stores<'_> {
    fn place(&self, at: usize, nonce: u8) -> Place {
        self.find(at, nonce, None).unwrap()
    }

    pub(crate) fn find(
        &self,
        at: usize,
        nonce: u8,
        key: Option<&KeyFile>,
    ) -> Result<Place, Failure> {
        let store = Arc::clone(&self.0[at]);
        block_on(Place::find_clone(store, Nonce([nonce; 16]), self, key))
    }

    fn open(&self, at: usize, nonce: u8) -> Volume {
        self.open_with(at, nonce, None)
    }

    pub(crate) fn open_with(&self, at: usize, nonce: u8, key: Option<&KeyFile>) -> Volume {
        let place = self.find(at, nonce, key).unwrap();
        let opened = async { place.open(place.claim_next("node").await?, Config::default()).await };
        block_on(opened).unwrap()
    }

    /// Clones a snapshot of the volume in the store before.
    fn clone_to(&self, at: usize, snapshot: SnapshotId) -> Result<(), Failure> {
        self.clone_with(at, snapshot, None, None)
    }

    pub(crate) fn clone_with(
        &self,
        at: usize,
        snapshot: SnapshotId,
        compression: Option<Compression>,
        key: Option<&KeyFile>,
    ) -> Result<(), Failure> {
        let (store, location) = (Arc::clone(&self.0[at]), (at - 1).to_string());
        let volume = VolumeId([u8::try_from(at).unwrap() + 10; 16]);
        let parent = self.find(at - 1, 99, key)?;
        let key = key.map(|file| (file.clone(), Zeroizing::new([4; 32])));
        let new = NewClone { volume, store, location, compression, key };
        block_on(parent.create_clone(snapshot, &new))
    }
}

#[test]
fn a_clone_of_a_clone_keeps_its_content_and_its_snapshot() {
    let memories: Vec<Arc<Memory>> = (0..3).map(|_| Arc::default()).collect();
    let all: Vec<Arc<dyn Store>> = memories.iter().map(|one| Arc::clone(one) as _).collect();
    let stores = Stores(&all);
    create(&all[0], 8 << 20);
    let first = open(&all[0], 10, Config::default()).unwrap();
    let fill = |volume: &Volume, from: u64, byte: u8| {
        with_volume(volume, async {
            for number in from..8 {
                volume.write((number << 20) + 512, &[byte; 4096]).await?;
            }
            volume.flush().await
        })
        .unwrap();
    };
    fill(&first, 0, 1);
    let id = take(&first, "s");
    let before = memories[0].objects.lock().unwrap().len();
    stores.clone_to(1, id).unwrap();
    let now = [0, 1].map(|at| memories[at].objects.lock().unwrap().len());
    assert_eq!(now, [before + 1, 1], "the pin and the description");
    fill(&first, 0, 2);
    settle(&first, &memories[0]);
    let refused = with_volume(&first, async { first.delete_snapshot(id).await });
    assert_eq!(refused, Err(Failure::HasClones));

    let second = stores.open(1, 20);
    fill(&second, 4, 3);
    settle(&second, &memories[1]);
    let inner = take(&second, "t");
    fill(&second, 0, 4);
    settle(&second, &memories[1]);
    stores.clone_to(2, inner).unwrap();
    for nonce in [30, 31] {
        let third = stores.open(2, nonce);
        let byte = |offset| with_volume(&third, async { byte_at(&third, offset).await });
        assert_eq!((byte(512), byte((7 << 20) + 512), byte(0)), (Ok(1), Ok(3), Ok(99)));
        settle(&third, &memories[2]);
    }
    block_on(stores.place(1, 40).unpin()).unwrap();
    with_volume(&first, async { first.delete_snapshot(id).await }).unwrap();
    assert_eq!(stores.clone_to(1, id), Err(Failure::NoSnapshot));
}

/// What happens before a put.
type Event = Box<dyn FnOnce() + Send>;

/// A store in which something happens before the first put of a name with a prefix.
pub(crate) struct Interposed {
    inner: Arc<Memory>,
    event: Mutex<Option<(&'static str, Event)>>,
}

impl Interposed {
    pub(crate) fn of(inner: &Arc<Memory>) -> Self {
        Self { inner: Arc::clone(inner), event: Mutex::new(None) }
    }

    pub(crate) fn before(&self, prefix: &'static str, event: impl FnOnce() + Send + 'static) {
        *self.event.lock().unwrap() = Some((prefix, Box::new(event)));
    }
}

impl Store for Interposed {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let mut event = self.event.lock().unwrap();
        let due = event.take_if(|(prefix, _)| name.starts_with(*prefix));
        drop(event);
        if let Some((_, event)) = due {
            event();
        }
        self.inner.create(name, bytes)
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.inner.read(name, range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.inner.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.inner.delete(name)
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.inner.back_off(attempt)
    }
}

/// A volume with a snapshot, and the place of a clone.
struct Pair {
    memory: Arc<Memory>,
    store: Arc<Interposed>,
    stores: [Arc<dyn Store>; 2],
    volume: Volume,
    id: SnapshotId,
}

impl Pair {
    fn new() -> Self {
        let memory = Arc::<Memory>::default();
        let store = Arc::new(Interposed::of(&memory));
        let stores: [Arc<dyn Store>; 2] = [Arc::clone(&store) as _, Arc::<Memory>::default()];
        create(&stores[0], 1 << 20);
        let volume = open(&stores[0], 10, Config::default()).unwrap();
        with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
        let id = take(&volume, "s");
        Self { memory, store, stores, volume, id }
    }

    fn delete(&self) -> Result<(), Failure> {
        with_volume(&self.volume, async { self.volume.delete_snapshot(self.id).await })
    }

    fn create_clone(&self) -> Result<(), Failure> {
        Stores(&self.stores).clone_to(1, self.id)
    }
}

/// Whether a snapshot is deleted that has a clone.
fn is_lost_between(
    events: impl FnOnce(Arc<Pair>) -> [Result<(), Failure>; 2],
    rule: Option<Rule>,
) -> bool {
    without(rule, || events(Arc::new(Pair::new())) == [Ok(()), Ok(())])
}

/// A snapshot is deleted between the look of a clone's creator at it, and the pin.
fn deleted_before_the_pin(pair: Arc<Pair>) -> [Result<(), Failure>; 2] {
    let deleted = Arc::new(Mutex::new(Err(Failure::HasClones)));
    let (other, result) = (Arc::clone(&pair), Arc::clone(&deleted));
    pair.store.before("pin/", move || *result.lock().unwrap() = other.delete());
    let cloned = pair.create_clone();
    let deleted = deleted.lock().unwrap().clone();
    [deleted, cloned]
}

/// A clone is created before the deleter has created its token.
fn cloned_before_the_token(pair: Arc<Pair>) -> [Result<(), Failure>; 2] {
    let cloned = Arc::new(Mutex::new(Err(Failure::NoSnapshot)));
    let (other, result) = (Arc::clone(&pair), Arc::clone(&cloned));
    pair.store.before("dead/", move || *result.lock().unwrap() = other.create_clone());
    let deleted = pair.delete();
    let cloned = cloned.lock().unwrap().clone();
    [deleted, cloned]
}

/// The removal of the token of an attempt that was given up is executed again, after a second attempt.
fn removed_again_after_the_second_attempt(pair: Arc<Pair>) -> [Result<(), Failure>; 2] {
    let first = Arc::new(Mutex::new(String::new()));
    let pin = format!("pin/{}/{}", pair.id, VolumeId([9; 16]));
    block_on(pair.memory.create(&pin, b"")).unwrap();
    // The first attempt is the first of its epoch, or has the name of all attempts.
    assert_eq!(pair.delete(), Err(Failure::HasClones));
    let (epoch, attempt) = match crate::rules::applies(Rule::UniqueToken) {
        true => (1, 1),
        false => (0, 0),
    };
    *first.lock().unwrap() = format!("dead/{}/{epoch:016x}-{attempt:016x}", pair.id);
    block_on(pair.memory.delete(&pin)).unwrap();
    let deleted = Arc::new(Mutex::new(Err(Failure::HasClones)));
    let (other, result) = (Arc::clone(&pair), Arc::clone(&deleted));
    pair.store.before("pin/", move || {
        *result.lock().unwrap() = other.delete();
        block_on(other.memory.delete(&first.lock().unwrap())).unwrap();
    });
    let cloned = pair.create_clone();
    let deleted = deleted.lock().unwrap().clone();
    [deleted, cloned]
}

#[test]
fn a_snapshot_is_deleted_or_cloned_and_each_rule_is_needed_for_that() {
    for rule in [Rule::LookForToken, Rule::KeepToken] {
        assert!(is_lost_between(deleted_before_the_pin, Some(rule)), "without {rule:?}");
    }
    assert!(!is_lost_between(deleted_before_the_pin, None));
    assert!(is_lost_between(cloned_before_the_token, Some(Rule::TokenFirst)));
    assert!(!is_lost_between(cloned_before_the_token, None));
    assert!(is_lost_between(removed_again_after_the_second_attempt, Some(Rule::UniqueToken)));
    assert!(!is_lost_between(removed_again_after_the_second_attempt, None));
}

#[test]
fn a_clone_deletes_no_page_of_its_parent() {
    let read_again = |rule| {
        without(rule, || {
            let memories: [Arc<Memory>; 2] = [Arc::default(), Arc::default()];
            let all: Vec<Arc<dyn Store>> =
                memories.iter().map(|one| Arc::clone(one) as _).collect();
            let stores = Stores(&all);
            create(&all[0], 2 << 20);
            let first = open(&all[0], 10, Config::default()).unwrap();
            settle(&first, &memories[0]);
            stores.clone_to(1, take(&first, "s")).unwrap();
            let clone = stores.open(1, 20);
            with_volume(&clone, async { put(&clone, 1 << 20, 7).await })?;
            settle(&clone, &memories[1]);
            // The first object with own pages has the number of that of the parent, whose pages the first checkpoint has
            // replaced. The second one replaces all pages of the first one but that of the second mebibyte.
            settle(&clone, &memories[1]);
            let place = stores.place(1, 21);
            let view = block_on(place.view(Config::default()))?;
            block_on(byte_at(&view, 1 << 20))
        })
    };
    assert_eq!(read_again(None), Ok(7));
    assert!(read_again(Some(Rule::OwnObjects)).is_err());
}

/// The store of a volume with a snapshot that has a clone, and the place of the clone.
fn cloned() -> (Arc<Memory>, [Arc<dyn Store>; 2], SnapshotId) {
    let failing = Arc::<Memory>::default();
    let stores: [Arc<dyn Store>; 2] = [Arc::clone(&failing) as _, Arc::<Memory>::default()];
    create(&stores[0], 1 << 20);
    let volume = open(&stores[0], 10, Config::default()).unwrap();
    with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
    let id = take(&volume, "s");
    Stores(&stores).clone_to(1, id).unwrap();
    (failing, stores, id)
}

#[test]
fn no_token_is_left_of_a_deletion_that_was_given_up() {
    let (failing, stores, id) = cloned();
    let volume = open(&stores[0], 11, Config::default()).unwrap();
    // The store fails for a while: the deletion of the token is repeated.
    failing.fail_deletions(3);
    let refused = with_volume(&volume, async { volume.delete_snapshot(id).await });
    assert_eq!((refused, failing.names("dead/")), (Err(Failure::HasClones), Vec::new()));
    // It fails for longer: the collector repeats the deletion.
    failing.fail_deletions(20);
    let refused = with_volume(&volume, async {
        let refused = volume.delete_snapshot(id).await;
        while !failing.names("dead/").is_empty() {
            yield_once().await;
        }
        refused
    });
    assert!(matches!(refused, Err(Failure::Store { .. })), "{refused:?}");
    // It fails until the process ends: the next writer deletes the token, before it writes anything.
    failing.fail_deletions(u64::MAX);
    let refused = with_volume(&volume, async { volume.delete_snapshot(id).await });
    assert!(matches!(refused, Err(Failure::Store { .. })), "{refused:?}");
    assert_eq!(failing.names("dead/").len(), 1);
    assert_eq!(block_on(Stores(&stores).place(1, 20).is_snapshot_deleted()), Ok(true));
    drop(volume);
    failing.fail_deletions(0);
    let next = open(&stores[0], 12, Config::default()).unwrap();
    with_volume(&next, async {
        while !failing.names("dead/").is_empty() {
            yield_once().await;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(block_on(Stores(&stores).place(1, 21).is_snapshot_deleted()), Ok(false));
    // The token of a snapshot that was deleted stays.
    block_on(Stores(&stores).place(1, 22).unpin()).unwrap();
    with_volume(&next, async { next.delete_snapshot(id).await }).unwrap();
    assert_eq!(failing.names("dead/").len(), 1);
    let last = open(&stores[0], 13, Config::default()).unwrap();
    settle(&last, &failing);
    assert_eq!(failing.names("dead/").len(), 1);
}

/// Without the repetition, the pin of a clone that does not exist would keep the snapshot.
#[test]
fn a_refused_creation_leaves_no_pin_although_deletions_fail_for_a_while() {
    let (failing, stores, id) = cloned();
    block_on(Stores(&stores).place(1, 20).unpin()).unwrap();
    let token = format!("dead/{id}/{:016x}-{:016x}", 7, 1);
    block_on(failing.create(&token, b"\n")).unwrap();
    let others: [Arc<dyn Store>; 2] = [Arc::clone(&stores[0]), Arc::<Memory>::default()];
    failing.fail_deletions(5);
    assert_eq!(Stores(&others).clone_to(1, id), Err(Failure::NoSnapshot));
    assert_eq!(failing.names("pin/"), Vec::<String>::new());
    assert!(Stores(&others).find(1, 21, None).is_err());
}
