//! The storages of the CSI driver's volumes, as the controller of Kubernetes needs them: one line each.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::VolumeId;
use cleat_kube::storage::{Backing, Storage};

/// The volumes of the CSI driver.
#[derive(Debug, Clone, Copy)]
pub struct Volumes;

impl Storage for Volumes {
    fn find(&self, handle: &str) -> Result<Backing> {
        match VolumeId::parse(handle) {
            Some(VolumeId::File { node, .. }) => Ok(Backing::Local { node_id: node }),
            Some(VolumeId::Rbd { .. }) => Err(refused(handle, "an RBD image")),
            None => Err(refused(handle, "a static volume")),
        }
    }
}

fn refused(handle: &str, kind: &str) -> Error {
    let message = format!(
        "cannot attach volume {handle}: it is {kind}, whose clients the controller cannot fence yet"
    );
    Error::new(ErrorKind::Unsupported, message).with_repair(
        "use a CSIDriver with attachRequired: false; the claim of the image then decides which node uses it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_attached_on_its_node_only() {
        let Backing::Local { node_id } = Volumes.find("file/node-1/default/pvc-1").unwrap() else {
            panic!()
        };
        assert_eq!(node_id, "node-1");
    }

    #[test]
    fn a_volume_that_cannot_be_fenced_is_refused_by_name() {
        for handle in ["rbd/ceph/volumes//pvc-1", "static-1"] {
            let error = Volumes.find(handle).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(handle), "{error}");
        }
    }
}
