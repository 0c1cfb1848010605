//! The storages of the CSI driver's volumes, as the controller of Kubernetes needs them.

use std::path::PathBuf;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::{VolumeId, remote_uri};
use cleat_kube::storage::{Backing, Storage};

use crate::backends::REGISTRY;

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
