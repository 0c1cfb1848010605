//! CreateSnapshot, DeleteSnapshot and GetSnapshot. A snapshot is one of its volume in the storage.
//!
//! The name of a snapshot is unique among all volumes of this driver, but the storage keeps snapshots by volume.
//! Before the first creation of a snapshot, the other volumes are therefore searched for its name.

use std::collections::BTreeMap;

use cleat_backend::store::{Page, Snapshot};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::Timestamp;
use cleat_csi_api::csi::v1 as csi;

use super::Controller;
use super::group_id::GroupId;
use super::labels::{of_snapshot, snapshot_key};
use super::names;
use super::places::{Located, OpenPlace, Place, on};
use super::refused::Answer;
use super::snapshot_id::SnapshotId;
use super::volumes::{missing, signed};
use super::walk::affects_all;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

/// The number of volumes that are listed at a time.
const PAGE: usize = 1000;

impl Controller {
    /// Returns a snapshot in the form of the messages.
    pub(crate) fn snapshot(&self, place: &Place, volume: &str, found: &Snapshot) -> csi::Snapshot {
        let volume = place.id(&self.node, volume);
        let source_volume_id = volume.to_string();
        let group = GroupId::of_snapshot(&found.name);
        let id = SnapshotId { volume, snapshot: found.name.clone() };
        csi::Snapshot {
            size_bytes: signed(found.size_bytes),
            snapshot_id: id.to_string(),
            source_volume_id,
            creation_time: Some(Timestamp { seconds: found.created_at_s, nanos: 0 }),
            ready_to_use: true,
            group_snapshot_id: group.map_or_else(String::new, |group| group.to_string()),
            accessible_topology: self.topology(place),
        }
    }

    /// Takes a snapshot, or finds the one that an earlier call has taken.
    pub(crate) fn create_snapshot(
        &self,
        source: &VolumeId,
        name: &str,
        secrets: &Secrets,
    ) -> Answer<csi::Snapshot> {
        let located = self.locate(source)?;
        let Located { place, name: volume } = &located;
        let open = self.open(place, secrets)?;
        let info = open.find(volume)?.ok_or_else(|| missing(source))?;
        let stored = names::of_snapshot(name);
        let label = of_snapshot(name, &stored);
        if let Some((key, name)) = &label
            && let Some(other) = info.labels.get(key).filter(|other| *other != name)
        {
            let message = format!("the snapshot {stored} of {source} has the name {other:?}");
            return Err(Error::new(ErrorKind::AlreadyExists, message).into());
        }
        if let Some(found) = info.snapshots.iter().find(|snapshot| snapshot.name == stored) {
            return Ok(self.snapshot(place, volume, found));
        }
        self.check_other_volumes(&located, &open, &stored, secrets)?;
        if let Some(label) = label {
            open.labels()?.set(volume, &[label].into())?;
        }
        open.snapshots()?.create(volume, &stored, &mut on)?;
        let snapshots = open.snapshots()?.list(volume)?;
        let found = snapshots.iter().find(|snapshot| snapshot.name == stored).ok_or_else(|| {
            let message = format!("the snapshot {stored} of {source} was removed meanwhile");
            Error::new(ErrorKind::Aborted, message).with_repair("repeat the call")
        })?;
        Ok(self.snapshot(place, volume, found))
    }

    /// Checks that no other volume has a snapshot of this name.
    fn check_other_volumes(
        &self,
        located: &Located,
        open: &OpenPlace,
        stored: &str,
        secrets: &Secrets,
    ) -> Result<()> {
        let is_same = |snapshot: &str| snapshot == stored;
        check_volumes(open, Some(&located.name), &is_same)?;
        self.check_other_places(&[&located.place], secrets, &is_same)
    }

    /// Checks that no volume in another place than `checked` has a snapshot whose name is in `conflict`. All places
    /// are in the storage of the first one.
    pub(crate) fn check_other_places(
        &self,
        checked: &[&Place],
        secrets: &Secrets,
        conflict: &dyn Fn(&str) -> bool,
    ) -> Result<()> {
        for place in self.places()? {
            let is_reached = checked.first().is_some_and(|first| place.can_clone_from(first));
            if checked.contains(&&place) || !is_reached {
                continue;
            }
            match self.open(&place, secrets).and_then(|open| check_volumes(&open, None, conflict)) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
                Err(error) => {
                    tracing::warn!("cannot search {place} for a snapshot: {}", error.report());
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Removes a snapshot. One that does not exist is success.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a snapshot of a group.
    pub(crate) fn delete_snapshot(&self, id: &SnapshotId, secrets: &Secrets) -> Answer<()> {
        if let Some(group) = GroupId::of_snapshot(&id.snapshot) {
            let message = format!("the snapshot {id} belongs to the group snapshot {group}");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("delete the group snapshot")
                .into());
        }
        let Located { place, name } = self.locate(&id.volume)?;
        let open = match self.open(&place, secrets) {
            Ok(open) => open,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        open.snapshots()?.remove(&name, &id.snapshot)?;
        let key = snapshot_key(&id.snapshot);
        if open.find(&name)?.is_some_and(|info| info.labels.contains_key(&key)) {
            open.labels()?.set(&name, &[(key, String::new())].into())?;
        }
        Ok(())
    }

    /// Describes a snapshot.
    ///
    /// # Errors
    /// Returns `NotFound` if it does not exist.
    pub(crate) fn get_snapshot(&self, id: &SnapshotId, secrets: &Secrets) -> Answer<csi::Snapshot> {
        let Located { place, name } = self.locate(&id.volume)?;
        let info = self.open(&place, secrets)?.find(&name)?;
        let snapshots = info.map(|info| info.snapshots).unwrap_or_default();
        match snapshots.iter().find(|snapshot| is_listed(snapshot) && snapshot.name == id.snapshot)
        {
            Some(found) => Ok(self.snapshot(&place, &name, found)),
            None => {
                let message = format!("the snapshot {id} does not exist");
                Err(Error::new(ErrorKind::NotFound, message).into())
            }
        }
    }
}

/// The parameters of a VolumeSnapshotClass or VolumeGroupSnapshotClass that ceph-csi has. They have no effect: the
/// source says where it is.
const PARAMETERS: [&str; 4] = ["clusterID", "pool", "snapshotNamePrefix", "volumeGroupNamePrefix"];

/// Checks the parameters of a VolumeSnapshotClass.
///
/// # Errors
/// Returns `InvalidArgument`, with the known ones, for an unknown parameter.
pub(crate) fn check_parameters(parameters: &BTreeMap<String, String>) -> Result<()> {
    let is_known = |key: &str| PARAMETERS.contains(&key) || key.starts_with("csi.storage.k8s.io/");
    let Some(key) = parameters.keys().find(|key| !is_known(key)) else { return Ok(()) };
    let shown: String = key.chars().take(60).collect();
    let message = format!(
        "{shown:?} is not a parameter of snapshots; known, and without effect, are {}",
        PARAMETERS.join(", ")
    );
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .with_repair("correct the parameters of the class of the snapshot"))
}

/// Returns whether a snapshot is one for callers: neither a step of another call, nor one that a feature of the
/// storage keeps for itself.
pub(crate) fn is_listed(snapshot: &Snapshot) -> bool {
    snapshot.kind == "user" && !names::is_step(&snapshot.name)
}

/// Checks that no volume of a place but `except` has a snapshot whose name is in `conflict`.
///
/// # Errors
/// Returns `AlreadyExists` with the snapshot, and the errors of the storage.
pub(crate) fn check_volumes(
    open: &OpenPlace,
    except: Option<&str>,
    conflict: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let mut after = None;
    loop {
        let page = Page { after, limit: PAGE, details: false };
        let listing = open.store().list(&page)?;
        for entry in listing.volumes {
            if except == Some(&*entry.name) {
                continue;
            }
            let snapshots = match open.snapshots()?.list(&entry.name) {
                Ok(snapshots) => snapshots,
                // The volume was removed since the list was read, or it exists in part.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if affects_all(error.kind()) => return Err(error),
                // One damaged volume must not keep the others from their snapshots.
                Err(error) => {
                    tracing::warn!(
                        volume = entry.uri,
                        "its snapshots are unknown: {}",
                        error.report()
                    );
                    continue;
                }
            };
            if let Some(found) = snapshots.iter().find(|snapshot| conflict(&snapshot.name)) {
                let message = format!("the snapshot {} exists, of {}", found.name, entry.uri);
                return Err(
                    Error::new(ErrorKind::AlreadyExists, message).with_repair("use another name")
                );
            }
        }
        match listing.next {
            Some(next) => after = Some(next),
            None => return Ok(()),
        }
    }
}
