//! Clones of snapshots, for commands. A clone is in the same home as its parent.

use std::any::Any;

use cleat_backend::store::{CloneStore, Layout, Parent, Progress, Source};
use cleat_backend::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::codec::{self, Snapshot};
use cleat_object::name::VolumeId;
use cleat_object::volume::{Failure, NewClone, Place};

use crate::claim::{newest, removed};
use crate::errors::{no_snapshot, wait};
use crate::flatten;
use crate::home::Home;
use crate::image::identity;
use crate::labels::VolumeLabels;
use crate::manage::{ObjectStore, check_compression, check_layout};
use crate::naming::is_volume_name;
use crate::nonce::{key, random};
use crate::spec::VolumeAt;
use crate::timeouts::{CALL_TIMEOUT, after};

impl CloneStore for ObjectStore {
    fn create_clone(
        &self,
        source: &Source<'_>,
        name: &str,
        layout: &Layout,
        _progress: Progress<'_>,
    ) -> Result<bool> {
        let compression = check_layout(layout)?;
        let Some(wanted) = source.snapshot else {
            return Err(invalid("a volume on an object store is cloned from a snapshot")
                .with_repair("take a snapshot first: cleat volume snapshot create"));
        };
        self.check_home(source)?;
        let (parent, place) = self.existing(source.name)?;
        let found = snapshot(&parent, &place, wanted)?;
        let (shown, clone) = (parent.shown(), self.volume(name)?);
        if let Some((_, existing)) = self.find(name)? {
            let own = existing.description();
            if !existing.parent().is_some_and(|of| is_of(of, &place, &found)) {
                let message =
                    format!("{} exists, and is no clone of {shown}@{wanted}", clone.shown());
                return Err(
                    Error::new(ErrorKind::AlreadyExists, message).with_repair("use another name")
                );
            }
            if wait(&clone.shown(), after(CALL_TIMEOUT), newest(&existing))?.is_being_removed() {
                return Err(removed(&clone.shown()));
            }
            let is_complete = wait(&clone.shown(), after(CALL_TIMEOUT), existing.is_pinned())?;
            check_compression(&clone, &existing, compression)?;
            self.check_labels(name, &existing, &layout.labels)?;
            keeping(&shown, wanted, place.pin(found.id, own.volume))?;
            // It may have been flattened, and its pin removed, since the look.
            if let Some((_, now)) = self.find(name)?
                && now.parent().is_none()
            {
                self.remove_pin(&now)?;
            }
            return Ok(!is_complete);
        }
        self.connection.prepare(name)?;
        let new = NewClone {
            volume: VolumeId(random()?),
            store: self.connection.store(name)?,
            location: parent.name.clone(),
            compression: compression.unwrap_or(place.description().compression),
            key: self.key.clone().map(|file| Ok((file, key()?))).transpose()?,
        };
        let labels = VolumeLabels { store: &*new.store, shown: &clone.shown(), volume: new.volume };
        labels.set(&layout.labels)?;
        keeping(&shown, wanted, place.create_clone(found.id, &new)).map(|()| true)
    }

    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool> {
        flatten::flatten(self, name, progress)
    }
}

impl ObjectStore {
    /// Checks that a source is in this home.
    fn check_home(&self, source: &Source<'_>) -> Result<()> {
        let spec: &dyn Any = source.store;
        let place = |home: &Home| (home.scheme(), home.location(None));
        match spec.downcast_ref::<Home>() {
            Some(home) if place(home) == place(&self.home) => Ok(()),
            _ => {
                let message = "a clone on an object store must be where its parent is";
                Err(Error::new(ErrorKind::Unsupported, message)
                    .with_repair("use the same directory, or the same bucket and prefix"))
            }
        }
    }

    /// Describes the parent of a volume.
    pub(crate) fn parent(place: &Place) -> Option<Parent> {
        let parent = place.parent()?;
        Some(Parent {
            name: format!("{}@{}", parent.location, parent.snapshot.name),
            image_id: identity(parent.volume).to_string(),
            in_trash: false,
            overlap_bytes: parent.snapshot.size,
        })
    }

    /// Ends the need of a volume for its parent, if it is a clone: it is being removed, or needs the parent no more.
    ///
    /// # Errors
    /// Returns an error if a store fails.
    pub(crate) fn remove_pin(&self, place: &Place) -> Result<()> {
        let own = place.description();
        // The description is written by whoever can write to the store.
        let Some(parent) = own.parent.as_ref().filter(|of| is_volume_name(&of.location)) else {
            return Ok(());
        };
        match self.find_alone(&parent.location)? {
            Some((volume, found)) if found.description().volume == parent.volume => {
                let removed = found.remove_pin(parent.snapshot.id, own.volume);
                wait(&volume.shown(), after(CALL_TIMEOUT), removed)
            }
            _ => Ok(()),
        }
    }

    /// Returns the identities of the clones of a snapshot.
    pub(crate) fn clones_of(
        &self,
        volume: &VolumeAt,
        place: &Place,
        snapshot: &Snapshot,
    ) -> Result<Vec<String>> {
        let clones = wait(&volume.shown(), after(CALL_TIMEOUT), place.clones(snapshot.id))?;
        Ok(clones.into_iter().map(|clone| identity(clone).to_string()).collect())
    }
}

/// Finds a snapshot of a volume.
fn snapshot(volume: &VolumeAt, place: &Place, name: &str) -> Result<Snapshot> {
    let found = ObjectStore::view(volume, place)?.snapshots();
    let found = found.into_iter().find(|found| found.name == name);
    found.ok_or_else(|| no_snapshot(&volume.shown(), name))
}

/// Runs an operation that keeps an existing snapshot of the volume `shown` for a clone.
///
/// # Errors
/// Returns `Unavailable` if the snapshot has a token of a deletion, and otherwise the failure of the operation.
fn keeping(
    shown: &str,
    snapshot: &str,
    operation: impl Future<Output = std::result::Result<(), Failure>>,
) -> Result<()> {
    let is_kept = wait(shown, after(CALL_TIMEOUT), async {
        match operation.await {
            Err(Failure::NoSnapshot) => Ok(false),
            other => other.map(|()| true),
        }
    })?;
    if is_kept {
        return Ok(());
    }
    let message = format!("{shown}@{snapshot} was deleted, or is being deleted");
    Err(Error::new(ErrorKind::Unavailable, message).with_repair(format!(
        "repeat the command. If the snapshot stays: repeat it in a minute if a client serves {shown}, otherwise run cleat \
         volume fsck --repair for {shown} first"
    )))
}

fn is_of(parent: &codec::Parent, place: &Place, snapshot: &Snapshot) -> bool {
    parent.volume == place.description().volume && parent.snapshot.id == snapshot.id
}
