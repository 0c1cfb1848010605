//! Describes images for `cleat volume info` and lists.

use librbd::{
    Image, LinkedImage, Open, RBD_FEATURE_DATA_POOL, RBD_FEATURE_FAST_DIFF,
    RBD_FLAG_FAST_DIFF_INVALID, RBD_FLAG_OBJECT_MAP_INVALID, SnapshotKind,
};

use super::{Target, labels, layout};
use crate::claim::record::KEY;
use cleat_backend::store::{Entry, Info, Lock, Parent, Snapshot, Watcher};
use cleat_core::error::{ErrorKind, Result};

/// The properties in a list for which an image must be opened.
pub(crate) struct Details {
    size: u64,
    parent: Option<String>,
    snapshots: usize,
    watchers: usize,
}

impl Details {
    pub(crate) fn put_into(self, entry: &mut Entry) {
        entry.size_bytes = Some(self.size);
        entry.parent = self.parent;
        entry.snapshots = Some(self.snapshots);
        entry.watchers = Some(self.watchers);
    }
}

impl Target {
    /// Reads the properties for a list. Returns `None` if there is no such image.
    pub(crate) fn details(&self) -> Result<Option<Details>> {
        let Some(image) = self.find(Open::ReadOnly)? else { return Ok(None) };
        let details = || {
            Ok(Details {
                size: image.size()?,
                parent: image.parent()?.map(|found| parent(&found).to_string()),
                snapshots: image.snapshots()?.len(),
                watchers: image.watchers()?.len(),
            })
        };
        details().map(Some).map_err(|error| self.failed(error))
    }

    pub(crate) fn info(&self) -> Result<Info> {
        let image = self.open_at(self.spec.snapshot.as_deref(), Open::ReadOnly)?;
        let snapshots = self.snapshots_of(&image)?;
        let clones = if snapshots.is_empty() { Some(Vec::new()) } else { self.clones(&image)? };
        let described = self.describe(&image, snapshots, clones);
        described.map_err(|error| self.failed(error))
    }

    fn describe(
        &self,
        image: &Image,
        snapshots: Vec<Snapshot>,
        clones: Option<Vec<String>>,
    ) -> librbd::Result<Info> {
        let (stat, objects) = (image.stat()?, image.objects()?);
        let (features, flags) = (image.features()?, image.flags()?);
        let invalid = RBD_FLAG_FAST_DIFF_INVALID | RBD_FLAG_OBJECT_MAP_INVALID;
        let has_map = features & RBD_FEATURE_FAST_DIFF != 0 && flags & invalid == 0;
        let has_data_pool = features & RBD_FEATURE_DATA_POOL != 0;
        let watchers = image.watchers()?.into_iter();
        let locks = image.lockers()?.into_iter();
        Ok(Info {
            name: self.spec.image.clone(),
            uri: self.uri.clone(),
            id: Some(image.id()?),
            size_bytes: stat.size,
            used_bytes: has_map.then(|| image.used()).transpose()?,
            created_at_s: Some(image.created_at()?),
            objects: Some(objects.count),
            object_size_bytes: Some(stat.object_size),
            object_prefix: Some(objects.prefix),
            stripe_unit_bytes: Some(stat.stripe_unit),
            stripe_count: Some(stat.stripe_count),
            data_pool: has_data_pool.then(|| image.data_pool()).transpose()?,
            compression: None,
            encryption: None,
            features: layout::names(features),
            flags: flag_names(flags),
            parent: image.parent()?.map(|found| parent(&found)),
            snapshots,
            clones,
            claim: image
                .metadata_get(KEY)?
                .map(|text| serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text))),
            watchers: watchers
                .map(|w| Watcher { client: format!("client.{}", w.client), address: w.address })
                .collect(),
            locks: locks
                .map(|l| Lock {
                    client: l.client,
                    cookie: Some(l.cookie),
                    address: Some(l.address),
                })
                .collect(),
            // Labels that cannot be read count as none here; a change of them reports the error.
            labels: labels::read(image)?.unwrap_or_default(),
        })
    }

    /// Lists the image's snapshots, oldest first.
    pub(crate) fn snapshots_of(&self, image: &Image) -> Result<Vec<Snapshot>> {
        let mut listed = image.snapshots().map_err(|error| self.failed(error))?;
        listed.sort_by_key(|snapshot| snapshot.id);
        let mut snapshots = Vec::with_capacity(listed.len());
        for snapshot in listed {
            let protected = match snapshot.kind {
                SnapshotKind::User => image.snapshot_is_protected(&snapshot.name),
                SnapshotKind::Trash | SnapshotKind::Mirror | SnapshotKind::Other => Ok(false),
            };
            let protected = match protected {
                Ok(protected) => protected,
                // It was removed in the meantime.
                Err(error) if error.errno() == Some(libc::ENOENT) => continue,
                Err(error) => return Err(self.failed(error)),
            };
            snapshots.push(Snapshot {
                id: snapshot.id,
                name: snapshot.name,
                size_bytes: snapshot.size,
                created_at_s: snapshot.taken_at,
                protected,
                kind: match snapshot.kind {
                    SnapshotKind::User => "user",
                    SnapshotKind::Trash => "trash",
                    SnapshotKind::Mirror => "mirror",
                    SnapshotKind::Other => "other",
                },
            });
        }
        Ok(snapshots)
    }

    /// Lists the names of the image's clones, or of the clones of the snapshot that it is open at. Returns
    /// `None` if this client may not read all pools.
    pub(crate) fn clones(&self, image: &Image) -> Result<Option<Vec<String>>> {
        match image.children() {
            Ok(children) => {
                let mut names: Vec<String> = children.iter().map(linked).collect();
                names.sort();
                Ok(Some(names))
            }
            Err(error) => match self.failed(error) {
                error if error.kind() == ErrorKind::PermissionDenied => Ok(None),
                error => Err(error),
            },
        }
    }
}

pub(crate) fn parent(found: &librbd::Parent) -> Parent {
    Parent {
        name: format!("{}@{}", linked(&found.image), found.snapshot),
        image_id: found.image.id.clone(),
        in_trash: found.image.in_trash,
        overlap_bytes: found.overlap,
    }
}

/// Returns `pool[/namespace]/image`.
fn linked(image: &LinkedImage) -> String {
    match &*image.namespace {
        "" => format!("{}/{}", image.pool, image.name),
        namespace => format!("{}/{namespace}/{}", image.pool, image.name),
    }
}

fn flag_names(flags: u64) -> Vec<String> {
    let known = [
        (RBD_FLAG_OBJECT_MAP_INVALID, "object map invalid"),
        (RBD_FLAG_FAST_DIFF_INVALID, "fast diff invalid"),
    ];
    let set = known.iter().filter(|(flag, _)| flags & flag != 0);
    set.map(|(_, name)| (*name).to_owned()).collect()
}
