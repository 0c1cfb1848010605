//! GetCapacity: how much new data the storage of volumes can take.

use std::collections::BTreeMap;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;

use super::Controller;
use super::access::check_capability;
use super::places::Place;
use super::refused::Answer;
use crate::secrets::Secrets;

impl Controller {
    /// Returns the number of bytes that volumes with these parameters can still use. Without parameters, it is
    /// that of volumes of a StorageClass without parameters.
    pub(crate) fn available(&self, request: csi::GetCapacityRequest) -> Answer<u64> {
        let parameters = self.parameters(request.parameters, BTreeMap::new())?;
        let place = match (parameters.place, parameters.layout.data_pool) {
            (Place::Rbd { cluster, .. }, Some(pool)) => {
                Place::Rbd { cluster, pool, namespace: String::new() }
            }
            (place, _) => place,
        };
        let elsewhere =
            request.accessible_topology.is_some_and(|topology| !self.is_here(&topology));
        if place.is_local() && elsewhere {
            return Ok(0);
        }
        let mut capabilities = request.volume_capabilities.into_iter();
        if capabilities.any(|capability| check_capability(Some(&place), Some(capability)).is_err())
        {
            return Ok(0);
        }
        let open = self.open(&place, &Secrets::default())?;
        open.store().available_bytes()?.ok_or_else(|| {
            let message = format!("the free space of {place} is not known");
            Error::new(ErrorKind::Unsupported, message).into()
        })
    }

    /// Checks that a volume in `place`, and those made from its snapshots, can be accessed where a request requires.
    ///
    /// # Errors
    /// Returns `NoSpace`, the specification's code, if they can be accessed on this node only, and the request
    /// requires another one.
    pub(crate) fn check_topology(
        &self,
        place: &Place,
        required: Option<csi::TopologyRequirement>,
    ) -> Result<()> {
        let required = required.unwrap_or_default();
        let wanted =
            if required.requisite.is_empty() { required.preferred } else { required.requisite };
        let is_elsewhere = !wanted.is_empty() && !wanted.iter().any(|place| self.is_here(place));
        if !place.is_local() || !is_elsewhere {
            return Ok(());
        }
        let message =
            format!("file volumes and their snapshots can only be made on the node {}", self.node);
        Err(Error::new(ErrorKind::NoSpace, message).with_repair(
            "call the controller of a wanted node (--node-deployment of csi-provisioner and \
             csi-snapshotter)",
        ))
    }

    /// Returns where the volumes of `place` can be accessed, and so where its snapshots can be used: on this node,
    /// or everywhere.
    pub(crate) fn topology(&self, place: &Place) -> Vec<csi::Topology> {
        let here =
            || csi::Topology { segments: [(self.config.topology_key(), self.node.clone())].into() };
        if place.is_local() { vec![here()] } else { Vec::new() }
    }

    /// Returns whether a topology is that of this node, or contains it.
    pub(crate) fn is_here(&self, topology: &csi::Topology) -> bool {
        let own = (self.config.topology_key(), &self.node);
        topology.segments.iter().all(|(key, value)| {
            // Keys are compared without regard to case (CSI, Topology).
            key.eq_ignore_ascii_case(&own.0) && value == own.1
        })
    }
}
