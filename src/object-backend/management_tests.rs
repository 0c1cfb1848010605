//! Creations, changes and removals of volumes that something interrupts.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_backend::CredentialSet;
use cleat_backend::store::{CloneStore, Layout, Page, Removal, SnapshotStore, Source, Store};
use cleat_core::error::{ErrorKind, Result};
use cleat_object::store::{self as objects, Pending, StoreError};
use cleat_object::volume::Volume;

use crate::claim::newest;
use crate::claim::record::Use;
use crate::connection::Connection;
use crate::errors::wait;
use crate::fence::end;
use crate::home::Home;
use crate::manage::ObjectStore;
use crate::snapshots::tests::{home, on};
use crate::timeouts::{CALL_TIMEOUT, after};
use crate::writer::{change, change_within};

const SIZE: u64 = 1 << 20;

/// A directory with the volume `v`, which has three log objects with data.
struct Fixture {
    store: ObjectStore,
    home: Home,
    directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (home, store) = home(directory.path());
        let fixture = Self { store, home, directory };
        assert_eq!(fixture.create("v"), Ok(true));
        let (volume, place) = fixture.store.existing("v").unwrap();
        let claimant = &fixture.store.claimant;
        let written = change(&place, &volume.shown(), claimant, async |opened: Volume| {
            for byte in 1..4 {
                opened.write(0, &[byte; 512]).await?;
                opened.flush().await?;
            }
            Ok(())
        });
        written.unwrap();
        fixture
    }

    fn create(&self, name: &str) -> std::result::Result<bool, ErrorKind> {
        kind(Store::create(&self.store, name, SIZE, &Layout::default()))
    }

    fn clone_to(&self, name: &str) -> std::result::Result<bool, ErrorKind> {
        let source = Source { store: &self.home, name: "v", snapshot: Some("s") };
        kind(self.store.create_clone(&source, name, &Layout::default(), &mut on))
    }

    fn remove(&self, name: &str) -> std::result::Result<bool, ErrorKind> {
        let removed = Store::remove(&self.store, name, Removal::Now, &mut on);
        kind(removed.map(|removed| removed.changed))
    }

    fn begin_removal(&self, name: &str) {
        let (volume, place) = self.store.existing(name).unwrap();
        let claimant = &self.store.claimant;
        end(&place, &volume.shown(), claimant, Use::Remove, None, after(CALL_TIMEOUT)).unwrap();
    }

    /// Deletes a log object behind which there is another one.
    fn lose_data(&self) {
        let log = self.directory.path().join("v/objects/log");
        let mut slots: Vec<PathBuf> = fs::read_dir(log)
            .unwrap()
            .flat_map(|epoch| fs::read_dir(epoch.unwrap().path()).unwrap())
            .map(|slot| slot.unwrap().path())
            .collect();
        slots.sort();
        fs::remove_file(&slots[1]).unwrap();
    }
}

fn kind<T>(result: Result<T>) -> std::result::Result<T, ErrorKind> {
    result.map_err(|error| error.kind())
}

#[test]
fn a_removal_that_was_interrupted_ends_although_a_part_of_the_log_is_gone() {
    let fixture = Fixture::new();
    fixture.begin_removal("v");
    fixture.lose_data();
    let info = |name| kind(fixture.store.info(name, None).map(drop));
    assert_eq!(info("v"), Err(ErrorKind::NotFound));
    assert_eq!(fixture.create("v"), Err(ErrorKind::InUse), "it is being removed");
    assert_eq!(fixture.remove("v"), Ok(true));
    assert_eq!((fixture.remove("v"), fixture.create("v")), (Ok(false), Ok(true)));
}

#[test]
fn a_damaged_volume_can_be_removed_if_no_clone_needs_it() {
    let fixture = Fixture::new();
    assert!(SnapshotStore::create(&fixture.store, "v", "s", &mut on).unwrap());
    assert_eq!(fixture.clone_to("clone"), Ok(true));
    fs::remove_dir_all(fixture.directory.path().join("v/objects/ckpt")).unwrap();
    assert_eq!(kind(fixture.store.info("v", None).map(drop)), Err(ErrorKind::Internal));
    assert_eq!(fixture.remove("v"), Err(ErrorKind::InUse));
    assert_eq!((fixture.remove("clone"), fixture.remove("v")), (Ok(true), Ok(true)));
}

#[test]
fn a_clone_that_is_being_removed_is_not_created_again() {
    let fixture = Fixture::new();
    assert!(SnapshotStore::create(&fixture.store, "v", "s", &mut on).unwrap());
    assert_eq!(fixture.clone_to("clone"), Ok(true));
    fixture.begin_removal("clone");
    assert_eq!(fixture.clone_to("clone"), Err(ErrorKind::InUse));
    assert_eq!(fixture.remove("clone"), Ok(true));
    assert_eq!(kind(SnapshotStore::remove(&fixture.store, "v", "s")), Ok(true));
}

#[test]
fn a_removal_that_was_interrupted_after_the_rename_ends() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.directory.path().join(name);
    let renamed = at(".removed-0000000000000001");
    fs::rename(at("v"), &renamed).unwrap();
    assert_eq!(fixture.remove("v"), Ok(false));
    assert!(!renamed.exists());
}

#[test]
fn directories_that_cannot_be_volumes_are_not_listed() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.directory.path().join(name);
    fs::create_dir_all(at("v@copy/objects")).unwrap();
    fs::copy(at("v/objects/desc"), at("v@copy/objects/desc")).unwrap();
    let page = Page { after: None, limit: 10, details: true };
    let listed = Store::list(&fixture.store, &page).unwrap();
    let names: Vec<&str> = listed.volumes.iter().map(|entry| &*entry.name).collect();
    assert_eq!(names, ["v"]);
}

#[test]
fn a_change_without_an_answer_releases_its_claim() {
    let fixture = Fixture::new();
    let (volume, place) = fixture.store.existing("v").unwrap();
    let (shown, claimant) = (volume.shown(), &fixture.store.claimant);
    let never = async |_: Volume| std::future::pending().await;
    let limit = Duration::from_millis(500);
    let ended: Result<()> = change_within(limit, (&place, &shown, claimant), never);
    assert_eq!(kind(ended), Err(ErrorKind::TimedOut));
    let (_, place) = fixture.store.existing("v").unwrap();
    assert!(!wait(&shown, after(CALL_TIMEOUT), newest(&place)).unwrap().is_held());
}

/// A home whose stores replace objects that exist.
struct Replacing(Arc<dyn Connection>);

struct ReplacingStore(Arc<dyn objects::Store>);

impl Connection for Replacing {
    fn store(&self, name: &str) -> Result<Arc<dyn objects::Store>> {
        Ok(Arc::new(ReplacingStore(self.0.store(name)?)))
    }

    fn prepare(&self, name: &str) -> Result<()> {
        self.0.prepare(name)
    }

    fn names(&self, after: Option<&str>, limit: usize) -> Result<(Vec<String>, bool)> {
        self.0.names(after, limit)
    }

    fn remove(&self, name: &str, go_on: &mut dyn FnMut(u64) -> bool) -> Result<()> {
        self.0.remove(name, go_on)
    }

    fn tidy(&self, name: &str) {
        self.0.tidy(name);
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        self.0.available_bytes()
    }

    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        self.0.renew(credentials)
    }
}

impl objects::Store for ReplacingStore {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        Box::pin(async {
            self.0.delete(name).await?;
            self.0.create(name, bytes).await
        })
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.0.read(name, range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.0.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.0.delete(name)
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.0.back_off(attempt)
    }
}

#[test]
fn a_store_that_replaces_objects_is_refused_also_when_the_creation_is_repeated() {
    let mut fixture = Fixture::new();
    fixture.store.connection = Arc::new(Replacing(Arc::clone(&fixture.store.connection)));
    for _ in 0..2 {
        assert_eq!(fixture.create("w"), Err(ErrorKind::Unsupported));
    }
    assert_eq!(fixture.remove("w"), Ok(false), "nothing is left");
}
