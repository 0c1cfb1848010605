//! The storages of the CSI driver's volumes, as the controller of Kubernetes needs them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use cleat_backend::Stored;
use cleat_backend::store::Page;
use cleat_backend::uri::StoreUri;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::{VolumeId, remote_ids, remote_uri};
use cleat_kube::storage::{Backing, Storage};

use crate::backends::REGISTRY;

/// The name of a volume, which need not exist, for what is the same for all volumes of a place.
const ANY: &str = "any";

/// The number of volumes that are listed at a time.
const PAGE: usize = 1000;

/// The volumes of the CSI driver.
#[derive(Debug, Clone)]
pub struct Volumes {
    /// The path of the file of clusters (`csi.clusters`). `None` if only file volumes are attached.
    pub clusters: Option<PathBuf>,
}

impl Storage for Volumes {
    fn find(&self, handle: &str) -> Result<Backing> {
        let Some(id) = VolumeId::parse(handle) else {
            return Err(refused(handle, "it is a static volume").with_repair(
                "kubectl cleat take-over PV prints objects for the same RBD image that can be attached; or use a \
                 CSIDriver with attachRequired: false",
            ));
        };
        if let VolumeId::File { node, .. } = id {
            return Ok(Backing::Local { node_id: node });
        }
        let Some(clusters) = &self.clusters else {
            return Err(refused(handle, "the controller runs without --clusters"));
        };
        let uri = remote_uri(clusters, &id)?;
        let record = uri.map(|uri| REGISTRY.volume(&uri)?.spec().grant_record()).transpose()?;
        let record = record.flatten().ok_or_else(|| refused(handle, "its storage has no records"));
        record.map(Backing::Granted)
    }

    fn places(&self) -> Result<BTreeSet<String>> {
        let ids = self.clusters.as_ref().map(|clusters| remote_ids(clusters, ANY)).transpose()?;
        let ids = ids.unwrap_or_default().into_iter().map(|id| id.to_string());
        Ok(ids.filter_map(|id| id.strip_suffix(&format!("/{ANY}")).map(str::to_owned)).collect())
    }

    fn volumes_in(&self, place: &str, deadline: Instant) -> Result<Vec<String>> {
        let Some((any, Stored { store, .. })) = self.any_in(place)? else { return Ok(Vec::new()) };
        let store = StoreUri::new(store).connect()?;
        let (mut handles, mut after) = (Vec::new(), None);
        loop {
            let listing = store.list(&Page { after, limit: PAGE, details: false })?;
            let listed = listing.volumes.iter().map(|entry| any.beside(&entry.name).to_string());
            handles.extend(listed);
            after = listing.next;
            if after.is_none() {
                return Ok(handles);
            }
            if SystemClock.now() >= deadline {
                let message = format!("{} volumes are in {place}, and more", handles.len());
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
        }
    }
}

impl Volumes {
    /// Returns the id of a volume in a place that several nodes reach, and where it is stored. The volume need not exist.
    fn any_in(&self, place: &str) -> Result<Option<(VolumeId, Stored)>> {
        let Some(any) = VolumeId::parse(&format!("{place}/{ANY}")) else { return Ok(None) };
        let Some(clusters) = &self.clusters else { return Ok(None) };
        let Some(uri) = remote_uri(clusters, &any)? else { return Ok(None) };
        let stored = REGISTRY.volume(&uri)?.spec().stored()?;
        Ok(stored.map(|stored| (any, stored)))
    }
}

fn refused(handle: &str, why: &str) -> Error {
    let message = format!(
        "cannot attach volume {handle}: {why}, so that the controller cannot fence its clients"
    );
    Error::new(ErrorKind::Unsupported, message).with_repair(
        "use a CSIDriver with attachRequired: false; the claim of the image then decides which node uses it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes() -> Volumes {
        Volumes { clusters: Some(PathBuf::from("/no/clusters.json")) }
    }

    #[test]
    fn a_file_is_attached_on_its_node_only() {
        let Backing::Local { node_id } = volumes().find("file/node-1/default/pvc-1").unwrap()
        else {
            panic!()
        };
        assert_eq!(node_id, "node-1");
    }

    #[test]
    fn a_volume_that_cannot_be_fenced_is_refused_by_name() {
        let error = volumes().find("static-1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("static-1"), "{error}");
        let error = volumes().find("rbd/ceph/volumes//pvc-1").unwrap_err();
        assert!(error.message().contains("/no/clusters.json"), "{error}");
        let error = Volumes { clusters: None }.find("rbd/ceph/volumes//pvc-1").unwrap_err();
        assert!(error.message().contains("rbd/ceph/volumes//pvc-1"), "{error}");
    }
}
