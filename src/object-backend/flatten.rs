//! Flattening of clones, for commands. A clone that no client serves is opened for it; otherwise its writer copies in
//! the background, and this asks for the progress. What was copied stays, so a command that is repeated continues.

use cleat_backend::store::Progress;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::volume::Place;

use crate::ask::{Change, Writer, ask};
use crate::claim::newest;
use crate::errors::wait;
use crate::manage::ObjectStore;
use crate::spec::VolumeAt;
use crate::timeouts::{CALL_TIMEOUT, FLATTEN_TIMEOUT, after};
use crate::writer::change_within;

/// Makes a clone independent of its parent. Returns false if it is.
///
/// # Errors
/// Returns `InUse` if a snapshot of the clone reads from the parent, or if the client that serves the clone does not
/// answer, `Aborted` if `progress` stopped the operation, and otherwise the failure of a volume or of the store.
pub(crate) fn flatten(store: &ObjectStore, name: &str, progress: Progress<'_>) -> Result<bool> {
    let (volume, place) = store.existing(name)?;
    if place.parent().is_none() {
        // A command that was interrupted at its end has left the pin.
        store.remove_pin(&place)?;
        return Ok(false);
    }
    Run { store, volume: &volume, place: &place, progress, is_stopped: false }.copy()?;
    wait(&volume.shown(), after(CALL_TIMEOUT), place.make_independent())?;
    Ok(true)
}

struct Run<'a> {
    store: &'a ObjectStore,
    volume: &'a VolumeAt,
    place: &'a Place,
    progress: Progress<'a>,
    is_stopped: bool,
}

impl Run<'_> {
    /// Has everything copied that the clone reads from its parent.
    fn copy(mut self) -> Result<()> {
        loop {
            match self.copy_here() {
                Err(_) if self.is_stopped => return Err(self.stopped()),
                Err(error) if error.kind() == ErrorKind::InUse => {
                    let seen = wait(&self.volume.shown(), after(CALL_TIMEOUT), newest(self.place))?;
                    if !seen.is_held() {
                        return Err(error);
                    }
                    if self.ask_writer(seen.epoch)? {
                        return Ok(());
                    }
                }
                other => return other,
            }
        }
    }

    /// Copies in this process.
    ///
    /// # Errors
    /// Returns `InUse` if another client serves the clone.
    fn copy_here(&mut self) -> Result<()> {
        let (place, shown, claimant) = (self.place, self.volume.shown(), &self.store.claimant);
        let (progress, is_stopped) = (&mut *self.progress, &mut self.is_stopped);
        let mut step = |done, total| {
            let step = progress(done, total);
            *is_stopped |= step.is_break();
            step
        };
        change_within(FLATTEN_TIMEOUT, (place, &shown, claimant), async |opened| {
            opened.flatten(&mut step).await
        })
    }

    /// Lets the writer of `epoch` copy. Returns false if there is another one, or none, before everything is copied.
    fn ask_writer(&mut self, epoch: u64) -> Result<bool> {
        let (shown, store) = (self.volume.shown(), self.store.connection.store(&self.volume.name)?);
        // The next worker of a mapping goes on, so a flattening waits for it.
        let writer = Writer { epoch, has_ended: &|| false };
        let ask = |wanted: &Change| ask(&*store, &shown, (&writer, wanted), after(CALL_TIMEOUT));
        loop {
            let progress = match ask(&Change::Flatten) {
                Ok(outcome) => outcome.progress,
                Err(error) => {
                    let now = wait(&shown, after(CALL_TIMEOUT), newest(self.place))?;
                    return match now.epoch != epoch || !now.is_held() {
                        true => Ok(false),
                        false => Err(error),
                    };
                }
            };
            let Some((done, total)) = progress else { return Ok(true) };
            if (self.progress)(done, total).is_break() {
                // Without an answer, the writer goes on, which does no harm.
                let _ = ask(&Change::StopFlatten);
                return Err(self.stopped());
            }
        }
    }

    fn stopped(&self) -> Error {
        let name = self.volume.shown();
        let message = format!("{name}: the operation was interrupted; it is still a clone");
        Error::new(ErrorKind::Aborted, message).with_repair("repeat the command to continue")
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use cleat_backend::OpenOptions;
    use cleat_backend::store::{CloneStore, Layout, Removal, SnapshotStore, Source, Store};
    use cleat_object::volume::Volume;

    use super::*;
    use crate::executor::block_until;
    use crate::home::Home;
    use crate::image::ObjectImage;
    use crate::snapshots::tests::{claimant, home, on};
    use crate::writer::change;

    const SIZE: u64 = 8 << 20;
    const DATA: usize = 1 << 20;

    /// A directory with a volume, and two clones of its snapshot.
    struct Fixture {
        store: ObjectStore,
        home: Home,
        directory: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let (home, store) = home(directory.path());
            Store::create(&store, "v", SIZE, &Layout::default()).unwrap();
            let (volume, place) = store.existing("v").unwrap();
            let written =
                change(&place, &volume.shown(), &store.claimant, async |opened: Volume| {
                    opened.write(SIZE / 2, &vec![7; DATA]).await?;
                    opened.flush().await
                });
            written.unwrap();
            SnapshotStore::create(&store, "v", "s", &mut on).unwrap();
            let fixture = Self { store, home, directory };
            for name in ["served", "idle"] {
                assert!(fixture.clone_to(name).unwrap());
            }
            fixture
        }

        fn clone_to(&self, name: &str) -> Result<bool> {
            let source = Source { store: &self.home, name: "v", snapshot: Some("s") };
            self.store.create_clone(&source, name, &Layout::default(), &mut on)
        }

        fn flatten(&self, name: &str) -> Result<bool> {
            CloneStore::flatten(&self.store, name, &mut on)
        }

        fn pins(&self) -> usize {
            let pins = self.directory.path().join("v/objects/pin");
            let snapshots = std::fs::read_dir(pins).unwrap().flatten();
            snapshots.map(|one| std::fs::read_dir(one.path()).unwrap().count()).sum()
        }

        fn byte(&self, name: &str) -> u8 {
            let (volume, place) = self.store.existing(name).unwrap();
            let view = ObjectStore::view(&volume, &place).unwrap();
            let mut sector = [0; 512];
            let read = view.read(SIZE / 2 + DATA as u64 - 512, &mut sector);
            block_until(after(CALL_TIMEOUT), read).unwrap().unwrap();
            sector[511]
        }
    }

    #[test]
    fn clones_are_flattened_in_use_and_not_in_use() {
        let fixture = Fixture::new();
        let spec = VolumeAt::new(fixture.home.clone(), "served").unwrap();
        let options = OpenOptions { claimant: claimant("m"), ..OpenOptions::default() };
        let image = ObjectImage::open(&spec, &options).unwrap();
        assert_eq!(fixture.pins(), 2);
        let mut stop = |_, _| ControlFlow::Break(());
        for name in ["served", "idle"] {
            // Taken before anything is copied.
            assert!(SnapshotStore::create(&fixture.store, name, "early", &mut on).unwrap());
            let refused = fixture.flatten(name).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InUse, "{}", refused.report());
            assert!(refused.report().contains("early"), "{}", refused.report());
            assert!(SnapshotStore::remove(&fixture.store, name, "early").unwrap());
            let stopped = CloneStore::flatten(&fixture.store, name, &mut stop).unwrap_err();
            assert_eq!(stopped.kind(), ErrorKind::Aborted, "{}", stopped.report());
        }
        assert_eq!(fixture.pins(), 2);
        let parent = VolumeAt::new(fixture.home.clone(), "v").unwrap();
        let in_use = || SnapshotStore::remove(&fixture.store, "v", "s").unwrap_err();
        assert_eq!(in_use().kind(), ErrorKind::InUse);
        let served = ObjectImage::open(&parent, &options).unwrap();
        assert_eq!(in_use().kind(), ErrorKind::InUse, "its writer says so");
        drop(served);
        for (name, left) in [("served", 1), ("idle", 0)] {
            assert!(fixture.flatten(name).unwrap());
            assert_eq!(fixture.pins(), left);
            assert!(!fixture.flatten(name).unwrap());
            assert!(Store::info(&fixture.store, name, None).unwrap().parent.is_none());
        }
        assert!(SnapshotStore::remove(&fixture.store, "v", "s").unwrap());
        assert!(Store::remove(&fixture.store, "v", Removal::Now, &mut on).unwrap().changed);
        assert_eq!((fixture.byte("served"), fixture.byte("idle")), (7, 7));
        drop(image);
        drop(ObjectImage::open(&spec, &options).unwrap());
        assert_eq!(fixture.byte("served"), 7);
        for name in ["served", "idle"] {
            assert!(Store::remove(&fixture.store, name, Removal::Now, &mut on).unwrap().changed);
        }
    }

    #[test]
    fn a_pin_that_an_interrupted_command_has_left_is_removed_by_the_next_one() {
        let fixture = Fixture::new();
        for name in ["served", "idle"] {
            assert!(fixture.flatten(name).unwrap());
        }
        let (_, parent) = fixture.store.existing("v").unwrap();
        let snapshot = ObjectStore::view(&fixture.store.volume("v").unwrap(), &parent).unwrap();
        let id = snapshot.snapshots()[0].id;
        let pin = |name: &str| {
            let clone = fixture.store.existing(name).unwrap().1.description().volume;
            wait(name, after(CALL_TIMEOUT), parent.pin(id, clone)).unwrap();
        };
        pin("served");
        pin("idle");
        assert_eq!(fixture.pins(), 2);
        assert!(!fixture.flatten("served").unwrap());
        assert!(Store::remove(&fixture.store, "idle", Removal::Now, &mut on).unwrap().changed);
        assert_eq!(fixture.pins(), 0);
        // It is no clone of the snapshot any more.
        assert_eq!(fixture.clone_to("served").unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fixture.pins(), 0);
    }
}
