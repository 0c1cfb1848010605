//! The snapshots of volumes, for commands. A volume that no client serves is opened for the change; otherwise its
//! writer is asked.

use cleat_backend::store::{Progress, Snapshot, SnapshotStore};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

use crate::ask::Change;
use crate::errors::no_snapshot;
use crate::manage::ObjectStore;
use crate::naming::check_name;
use crate::table::described;
use crate::writer::change;

impl SnapshotStore for ObjectStore {
    fn list(&self, name: &str) -> Result<Vec<Snapshot>> {
        let (volume, place) = self.existing(name)?;
        let view = Self::view(&volume, &place)?;
        Ok(view.snapshots().into_iter().map(described).collect())
    }

    fn create(&self, name: &str, snapshot: &str, _progress: Progress<'_>) -> Result<bool> {
        check_name(snapshot)?;
        let (volume, place) = self.existing(name)?;
        if Self::view(&volume, &place)?.snapshots().iter().any(|found| found.name == snapshot) {
            return Ok(false);
        }
        let wanted = Change::Take { name: snapshot.to_owned(), created_at_s: SystemClock.unix_s() };
        self.change_content(&volume, &place, &wanted)
    }

    fn remove(&self, name: &str, snapshot: &str) -> Result<bool> {
        let (volume, place) = self.existing(name)?;
        let there = Self::view(&volume, &place)?.snapshots();
        if !there.iter().any(|found| found.name == snapshot) {
            return Ok(false);
        }
        let wanted = Change::Delete { name: snapshot.to_owned() };
        self.change_content(&volume, &place, &wanted)
    }

    fn protect(&self, _name: &str, _snapshot: &str, _protect: bool) -> Result<bool> {
        let message = "snapshots on an object store cannot be protected";
        Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("remove only snapshots that are not needed"))
    }

    fn rollback(&self, name: &str, snapshot: &str, _progress: Progress<'_>) -> Result<()> {
        let (volume, place) = self.existing(name)?;
        let shown = volume.shown();
        let found = Self::view(&volume, &place)?.snapshots();
        let found = found.into_iter().find(|found| found.name == snapshot);
        let id = found.ok_or_else(|| no_snapshot(&shown, snapshot))?.id;
        change(&place, &shown, &self.claimant, async |opened| opened.roll_back(id).await)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::ops::ControlFlow;
    use std::path::Path;

    use cleat_backend::claimant::{Claimant, ProcessMark};
    use cleat_backend::store::{Layout, Removal, Store};
    use cleat_backend::uri::Options;
    use cleat_backend::{CredentialSet, Image, OpenOptions};
    use cleat_object::volume::Volume;

    use super::*;
    use crate::executor::block_until;
    use crate::home::Home;
    use crate::image::ObjectImage;
    use crate::spec::VolumeAt;
    use crate::timeouts::{CALL_TIMEOUT, after};

    const SIZE: u64 = 1 << 20;

    pub(crate) fn claimant(mapping: &str) -> Claimant {
        Claimant {
            node: "n".into(),
            boot_id: "b".into(),
            mapping_id: mapping.into(),
            process: ProcessMark::own(),
            ..Claimant::default()
        }
    }

    /// The volumes in a directory.
    pub(crate) fn home(directory: &Path) -> (Home, ObjectStore) {
        let options = Options::parse("").unwrap();
        let home = Home::parse("dir", directory.to_str().unwrap(), options).unwrap();
        let store = ObjectStore::connect(&home, &claimant("c"), CredentialSet::default()).unwrap();
        (home, store)
    }

    pub(crate) fn on(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Writes one byte everywhere, in a volume that no client serves.
    fn fill(store: &ObjectStore, byte: u8) {
        let (volume, place) = store.existing("v").unwrap();
        let written = change(&place, &volume.shown(), &store.claimant, async |opened: Volume| {
            opened.write(0, &vec![byte; usize::try_from(SIZE).unwrap()]).await?;
            opened.flush().await
        });
        written.unwrap();
    }

    fn take(store: &ObjectStore, snapshot: &str) -> Result<bool> {
        SnapshotStore::create(store, "v", snapshot, &mut on)
    }

    fn remove(store: &ObjectStore, snapshot: &str) -> Result<bool> {
        SnapshotStore::remove(store, "v", snapshot)
    }

    fn first_byte(volume: &Volume) -> u8 {
        let mut sector = [0; 512];
        block_until(after(CALL_TIMEOUT), volume.read(0, &mut sector)).unwrap().unwrap();
        sector[0]
    }

    fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn snapshots_are_taken_of_volumes_in_use_and_not_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let home = Home::parse("dir", path, Options::parse("").unwrap()).unwrap();
        let store = ObjectStore::connect(&home, &claimant("c"), CredentialSet::default()).unwrap();
        Store::create(&store, "v", SIZE, &Layout::default()).unwrap();
        fill(&store, 1);
        assert!(take(&store, "one").unwrap());
        assert!(!take(&store, "one").unwrap());
        assert_eq!(kind(take(&store, "a@b")), Some(ErrorKind::InvalidArgument));
        fill(&store, 2);

        let spec = VolumeAt::new(home, "v").unwrap();
        let options = OpenOptions { claimant: claimant("m"), ..OpenOptions::default() };
        let image = ObjectImage::open(&spec, &options).unwrap();
        assert!(take(&store, "two").unwrap(), "the writer was asked");
        assert!(Store::resize(&store, "v", 2 * SIZE, false, &mut on).unwrap());
        assert!(!Store::resize(&store, "v", 2 * SIZE, false, &mut on).unwrap());
        assert!(!take(&store, "two").unwrap(), "it exists");
        assert_eq!(kind(store.rollback("v", "one", &mut on)), Some(ErrorKind::InUse));
        let one = ObjectImage::open(&spec.at("one"), &options).unwrap();
        assert!(one.features().read_only && one.identity() != image.identity());
        drop((one, image));
        assert!(remove(&store, "one").unwrap());
        assert!(!remove(&store, "one").unwrap());
        assert_eq!(kind(ObjectImage::open(&spec.at("one"), &options)), Some(ErrorKind::NotFound));

        fill(&store, 3);
        let names = |store: &ObjectStore| -> Vec<String> {
            SnapshotStore::list(store, "v").unwrap().into_iter().map(|s| s.name).collect()
        };
        assert_eq!(names(&store), ["two"]);
        store.rollback("v", "two", &mut on).unwrap();
        let (volume, place) = store.existing("v").unwrap();
        assert_eq!(first_byte(&ObjectStore::view(&volume, &place).unwrap()), 2);
        let objects = directory.path().join("v/objects");
        for kind in ["ask", "answer"] {
            assert_eq!(std::fs::read_dir(objects.join(kind)).unwrap().count(), 0, "{kind}");
        }
        let removal = || Store::remove(&store, "v", Removal::Now, &mut on);
        assert_eq!(kind(removal()), Some(ErrorKind::InUse));
        assert!(remove(&store, "two").unwrap());
        assert!(removal().unwrap().changed);
    }
}
