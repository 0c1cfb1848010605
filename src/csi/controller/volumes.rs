//! CreateVolume, DeleteVolume, ControllerGetVolume and ControllerExpandVolume.
//!
//! The steps of CreateVolume, each of which can be repeated:
//!
//! 1. The volume is created in its storage, empty or as a clone, with its labels. The storage stores the labels
//!    with the volume, or recognizes an empty volume without labels as one whose creation was interrupted.
//! 2. A clone grows to the size of the request.
//! 3. The labels of the mutable parameters are stored.
//! 4. The snapshot that a clone of a volume needed is removed.

use std::collections::BTreeMap;

use cleat_backend::store::{Info, Layout, Source};
use cleat_backend::uri::Size;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::volume_content_source::{SnapshotSource, Type as SourceType, VolumeSource};

use super::Controller;
use super::labels::{Made, of_mutable};
use super::names;
use super::parameters::{self, Parameters, attributes};
use super::places::{Located, OpenPlace, Place, on};
use super::refused::{Answer, Refused};
use super::size::Range;
use super::snapshot_id::SnapshotId;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

/// The minimum size of an encrypted volume in bytes: its header takes 16 MiB.
const ENCRYPTED_MIN: u64 = 32 << 20;

/// A checked CreateVolume request.
pub(crate) struct NewVolume {
    /// The name in the request.
    pub(crate) name: String,
    pub(crate) range: Range,
    pub(crate) parameters: Parameters,
    pub(crate) source: Option<Origin>,
}

impl NewVolume {
    /// Returns the name in the storage.
    pub(crate) fn stored(&self) -> String {
        names::of_volume(&self.parameters.prefix, &self.name)
    }
}

/// What a volume is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Snapshot(SnapshotId),
    Volume(VolumeId),
}

impl Origin {
    /// Parses the source of a request.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a source without an id, and `NotFound` for an id that this driver did not
    /// make.
    pub(crate) fn parse(source: &csi::VolumeContentSource) -> Result<Self> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message));
        let missing = |what: &str, id: &str| {
            let message =
                format!("the {what} {id} does not exist: this driver did not make its id");
            Error::new(ErrorKind::NotFound, message)
        };
        match &source.r#type {
            None => invalid("the content source is neither a snapshot nor a volume"),
            Some(SourceType::Snapshot(SnapshotSource { snapshot_id: id })) if id.is_empty() => {
                invalid("the content source has no snapshot id")
            }
            Some(SourceType::Volume(VolumeSource { volume_id: id })) if id.is_empty() => {
                invalid("the content source has no volume id")
            }
            Some(SourceType::Snapshot(SnapshotSource { snapshot_id: id })) => SnapshotId::parse(id)
                .map(Self::Snapshot)
                .ok_or_else(|| missing("source snapshot", id)),
            Some(SourceType::Volume(VolumeSource { volume_id: id })) => {
                VolumeId::parse(id).map(Self::Volume).ok_or_else(|| missing("source volume", id))
            }
        }
    }

    /// Returns the volume of the source.
    pub(crate) fn volume(&self) -> &VolumeId {
        match self {
            Self::Snapshot(id) => &id.volume,
            Self::Volume(id) => id,
        }
    }
}

/// Prints the id.
impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Snapshot(id) => write!(f, "{id}"),
            Self::Volume(id) => write!(f, "{id}"),
        }
    }
}

/// Returns the source in the form of the messages, from its id in a label.
pub(crate) fn content_source(id: &str) -> csi::VolumeContentSource {
    let id = id.to_owned();
    let source = if SnapshotId::parse(&id).is_some() {
        SourceType::Snapshot(SnapshotSource { snapshot_id: id })
    } else {
        SourceType::Volume(VolumeSource { volume_id: id })
    };
    csi::VolumeContentSource { r#type: Some(source) }
}

/// The open source of a clone.
struct OpenSource {
    place: OpenPlace,
    name: String,
    snapshot: Option<String>,
    size: u64,
}

impl Controller {
    /// Returns a volume in the form of the messages.
    pub(crate) fn volume(&self, place: &Place, info: &Info, made: &Made) -> csi::Volume {
        let mut volume_context = attributes(&made.parameters);
        volume_context.extend(made.mutable.clone());
        csi::Volume {
            capacity_bytes: signed(info.size_bytes),
            volume_id: place.id(&self.node, &info.name).to_string(),
            volume_context,
            content_source: made.source.as_deref().map(content_source),
            accessible_topology: self.topology(place),
        }
    }

    /// Creates a volume, or finds the one that an earlier call has created.
    pub(crate) fn create_volume(&self, new: &NewVolume, secrets: &Secrets) -> Answer<csi::Volume> {
        let (place, stored) = (&new.parameters.place, new.stored());
        let open = self.open(place, secrets)?;
        let made = match open.find(&stored)?.as_ref().and_then(Made::read) {
            Some(made) => {
                self.check_same(new, &made)?;
                made
            }
            None => self.make(new, &open, &stored, secrets)?,
        };
        let info = open.store().info(&stored, None)?;
        if info.size_bytes < made.size {
            open.grow(&stored, made.size)?;
        }
        // Those that a later call has changed stay.
        let mut initial = of_mutable(&new.parameters.mutable.texts);
        initial.retain(|key, _| !info.labels.contains_key(key));
        if !initial.is_empty() {
            open.labels()?.set(&stored, &initial)?;
        }
        if let Some(Origin::Volume(source)) = &new.source {
            self.remove_clone_snapshot(source, &stored, secrets)?;
        }
        let info = open.store().info(&stored, None)?;
        let made = Made::read(&info).unwrap_or(made);
        Ok(self.volume(place, &info, &made))
    }

    /// Checks that an existing volume is the one that a request wants.
    fn check_same(&self, new: &NewVolume, made: &Made) -> Result<()> {
        let mut differences = Vec::new();
        if made.name != new.name {
            differences.push(format!("it was made for the name {:?}", made.name));
        }
        if !new.range.contains(made.size) {
            differences.push(format!("its size is {}, not {}", Size(made.size), new.range));
        }
        if made.parameters != new.parameters.fixed {
            differences.push(format!("its parameters are {:?}", made.parameters));
        }
        let source = new.source.as_ref().map(Origin::to_string);
        if made.source != source {
            let is = made.source.as_deref().unwrap_or("nothing");
            differences.push(format!("it was made from {is}"));
        }
        if differences.is_empty() {
            return Ok(());
        }
        let message = format!("a volume {:?} exists, but {}", new.name, differences.join("; "));
        Err(Error::new(ErrorKind::AlreadyExists, message).with_repair("use another name"))
    }

    /// Creates a volume with its labels.
    fn make(
        &self,
        new: &NewVolume,
        open: &OpenPlace,
        stored: &str,
        secrets: &Secrets,
    ) -> Answer<Made> {
        let source = match &new.source {
            None => None,
            Some(origin) => Some(self.open_source(new, origin, stored, secrets)?),
        };
        let least = if new.parameters.is_encrypted() { ENCRYPTED_MIN } else { 0 };
        let size = new.range.size(source.as_ref().map_or(0, |source| source.size).max(least))?;
        let made = Made {
            name: new.name.clone(),
            size,
            parameters: new.parameters.fixed.clone(),
            source: new.source.as_ref().map(Origin::to_string),
            mutable: BTreeMap::new(),
        };
        let layout = Layout { labels: made.labels(stored)?, ..new.parameters.layout.clone() };
        match source {
            None => open.store().create(stored, size, &layout)?,
            Some(OpenSource { place, name, snapshot, .. }) => {
                let source =
                    Source { store: place.uri.spec(), name: &name, snapshot: snapshot.as_deref() };
                open.clones()?.create_clone(&source, stored, &layout, &mut on)?
            }
        };
        Ok(made)
    }

    /// Opens the source of a clone. Where the storage clones only snapshots, takes one of a volume.
    fn open_source(
        &self,
        new: &NewVolume,
        origin: &Origin,
        stored: &str,
        secrets: &Secrets,
    ) -> Answer<OpenSource> {
        let Located { place, name } = self.locate(origin.volume())?;
        if !new.parameters.place.can_clone_from(&place) {
            let message = format!(
                "a volume in {} cannot be made from {origin}, which is in {place}",
                new.parameters.place
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("use a StorageClass with the storage of the source")
                .into());
        }
        let open = self.open(&place, secrets)?;
        let missing = || {
            let message = format!("the source {origin} does not exist");
            Refused::from(Error::new(ErrorKind::NotFound, message))
        };
        let made = open.find(&name)?.as_ref().and_then(Made::read);
        let is_encrypted = new.parameters.is_encrypted();
        if made.is_some_and(|made| parameters::is_encrypted(&made.parameters) != is_encrypted) {
            let message = format!(
                "{origin} is {}encrypted, and a volume that is made from it must be so, too",
                if is_encrypted { "not " } else { "" }
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair(format!("use a StorageClass with encrypted: \"{}\"", !is_encrypted))
                .into());
        }
        match origin {
            Origin::Snapshot(id) => {
                let info = match open.store().info(&name, Some(&id.snapshot)) {
                    Ok(info) => info,
                    Err(error) if error.kind() == ErrorKind::NotFound => return Err(missing()),
                    Err(error) => return Err(error.into()),
                };
                let snapshot = Some(id.snapshot.clone());
                Ok(OpenSource { place: open, name, snapshot, size: info.size_bytes })
            }
            Origin::Volume(_) => {
                let info = open.find(&name)?.ok_or_else(missing)?;
                let snapshot = if open.clones()?.clones_volumes() {
                    None
                } else {
                    let snapshot = names::of_clone_snapshot(stored);
                    open.snapshots()?.create(&name, &snapshot, &mut on)?;
                    Some(snapshot)
                };
                Ok(OpenSource { place: open, name, snapshot, size: info.size_bytes })
            }
        }
    }

    /// Removes the snapshot from which a volume was cloned. A missing one is success, and so is one that the storage
    /// keeps for the clone: it is removed with the clone, or with the source.
    fn remove_clone_snapshot(
        &self,
        source: &VolumeId,
        stored: &str,
        secrets: &Secrets,
    ) -> Result<()> {
        let Located { place, name } = self.locate(source)?;
        let open = self.open(&place, secrets)?;
        if !open.clones()?.clones_volumes() {
            match open.snapshots()?.remove(&name, &names::of_clone_snapshot(stored)) {
                Err(error) if error.kind() == ErrorKind::InUse => {}
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Deletes a volume. One that does not exist is success.
    pub(crate) fn delete_volume(&self, id: &VolumeId, secrets: &Secrets) -> Answer<()> {
        let Located { place, name } = self.locate(id)?;
        let open = match self.open(&place, secrets) {
            Ok(open) => open,
            // The pool or the directory does not exist, so neither does the volume.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tracing::warn!(volume = %id, "nothing to delete: {}", error.report());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let Some(info) = open.find(&name)? else {
            // An image that was removed in part cannot be described, but the rest of it can be removed.
            open.remove(&name)?;
            return Ok(());
        };
        let Some(made) = Made::read(&info) else {
            let message =
                format!("volume {id} was not made by this driver, which does not delete it");
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair(format!(
                    "if it is not needed: cleat volume remove --now '{}'",
                    info.uri
                ))
                .into());
        };
        if self.local.health(&id.to_string()).is_some() {
            let message = format!("volume {id} is staged on the node {}", self.node);
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("end the pods that use it")
                .into());
        }
        // A creation of a clone or of a group snapshot that was killed, and not repeated, has left one.
        for snapshot in info.snapshots.iter().filter(|snapshot| names::is_step(&snapshot.name)) {
            open.snapshots()?.remove(&name, &snapshot.name)?;
        }
        open.remove(&name)?;
        self.leave_place(&id.to_string());
        let source = made.source.filter(|_| matches!(place, Place::Object { .. }));
        if let Some(source) = source.as_deref().and_then(VolumeId::parse)
            && let Err(error) = self.remove_clone_snapshot(&source, &name, secrets)
        {
            // It is removed with the source.
            tracing::debug!(volume = %id, "a snapshot of {source} stays: {}", error.report());
        }
        Ok(())
    }

    /// Describes a volume of this driver, with the nodes that may use it.
    ///
    /// # Errors
    /// Returns `NotFound` if it does not exist, or if this driver did not make it.
    pub(crate) fn get_volume(
        &self,
        id: &VolumeId,
        secrets: &Secrets,
    ) -> Answer<(csi::Volume, Vec<String>)> {
        let Located { place, name } = self.locate(id)?;
        let info = self.open(&place, secrets)?.find(&name)?.ok_or_else(|| missing(id))?;
        let made = Made::read(&info).ok_or_else(|| missing(id))?;
        let nodes = self.publishing_nodes(&id.to_string(), &info);
        Ok((self.volume(&place, &info, &made), nodes))
    }

    /// Makes a volume at least as large as the range requires, and returns its size in bytes.
    pub(crate) fn expand_volume(
        &self,
        id: &VolumeId,
        range: &Range,
        secrets: &Secrets,
    ) -> Answer<u64> {
        let Located { place, name } = self.locate(id)?;
        let open = self.open(&place, secrets)?;
        let info = open.find(&name)?.ok_or_else(|| missing(id))?;
        let size = range.size(info.size_bytes)?;
        if size > info.size_bytes && !range.contains(info.size_bytes) {
            open.grow(&name, size)?;
            return Ok(size);
        }
        Ok(info.size_bytes)
    }
}

/// The error for a volume that does not exist.
pub(crate) fn missing(id: &VolumeId) -> Error {
    Error::new(ErrorKind::NotFound, format!("volume {id} does not exist"))
}

/// Converts a size for a message.
pub(crate) fn signed(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}
