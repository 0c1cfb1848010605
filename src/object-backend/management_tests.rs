//! Creations, changes and removals of volumes that something interrupts.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_backend::store::{
    CheckStore, CloneStore, Layout, Page, Removal, SnapshotStore, Source, Store,
};
use cleat_backend::{CredentialSet, OpenOptions};
use cleat_core::clock::SystemClock;
use cleat_core::error::{ErrorKind, Result};
use cleat_object::name::Name;
use cleat_object::store::{self as objects, Pending, StoreError};
use cleat_object::volume::Volume;

use crate::claim::decision::Purpose;
use crate::claim::record::Use;
use crate::claim::{Attempt, newest};
use crate::connection::Connection;
use crate::errors::wait;
use crate::executor::block_until;
use crate::fence::end;
use crate::home::Home;
use crate::image::ObjectImage;
use crate::manage::ObjectStore;
use crate::snapshots::tests::{claimant, home, on};
use crate::spec::VolumeAt;
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

#[test]
fn a_writer_whose_process_has_ended_is_not_waited_for() {
    let fixture = Fixture::new();
    let (volume, place) = fixture.store.existing("v").unwrap();
    let process = ProcessMark { pid: u32::MAX, ..ProcessMark::own().unwrap() };
    let claimant = Claimant { process: Some(process), ..claimant("m") };
    let (purpose, usage, clock) = (Purpose::Open, Use::Serve, &SystemClock);
    let (place, name, claimant) = (&place, &*volume.shown(), &claimant);
    let attempt = Attempt { place, name, claimant, purpose, usage, only: None, clock };
    block_until(after(CALL_TIMEOUT), attempt.acquire()).unwrap().unwrap().unwrap();
    // A command does not replace the worker of a mapping, which may have writes in its tail file.
    let error = SnapshotStore::create(&fixture.store, "v", "s", &mut on).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.message().contains("has ended"), "{error}");
    assert!(!fixture.directory.path().join("v/objects/ask").exists(), "nobody was asked");
}

/// An attempt to delete a snapshot was given up, and the store has refused to delete its token.
#[test]
fn a_clone_of_a_snapshot_with_a_token_says_why_it_cannot_be_used_until_a_repair() {
    let fixture = Fixture::new();
    assert!(SnapshotStore::create(&fixture.store, "v", "s", &mut on).unwrap());
    assert_eq!(fixture.clone_to("clone"), Ok(true));
    let (volume, place) = fixture.store.existing("v").unwrap();
    let snapshot = ObjectStore::view(&volume, &place).unwrap().snapshots()[0].id;
    let token = Name::Token { snapshot, epoch: 1, attempt: 1 }.to_string();
    let objects = fixture.store.connection.store("v").unwrap();
    block_until(after(CALL_TIMEOUT), objects.create(&token, b"\n")).unwrap().unwrap();
    let open = || {
        let spec = VolumeAt::new(fixture.home.clone(), "clone").unwrap();
        let options = OpenOptions { claimant: claimant("m"), ..OpenOptions::default() };
        ObjectImage::open(&spec, &options)
    };
    let Err(error) = open() else { panic!("the clone was opened") };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("snapshot v@s was deleted, or is being"), "{error}");
    assert_eq!(fixture.clone_to("clone"), Err(ErrorKind::Unavailable));
    assert_eq!(fixture.clone_to("another"), Err(ErrorKind::Unavailable));
    assert_eq!(fixture.remove("another"), Ok(false), "nothing is left");
    let repaired = CheckStore::repair(&fixture.store, "v", false, &mut on).unwrap();
    // On a slow host, a collection has not ended yet, and the repair deletes the objects that it has left, too.
    let (tokens, logs): (Vec<_>, Vec<_>) =
        repaired.deleted.into_iter().partition(|name| *name == token);
    assert_eq!(tokens, [token]);
    assert!(logs.iter().all(|name| name.starts_with("log/")), "{logs:?}");
    open().unwrap();
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
