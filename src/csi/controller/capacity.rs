//! GetCapacity: how much new data the storage of volumes can take.

use std::collections::BTreeMap;

use cleat_core::error::{Error, ErrorKind};
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

    /// Returns whether a topology is that of this node, or contains it.
    pub(crate) fn is_here(&self, topology: &csi::Topology) -> bool {
        let own = (self.config.topology_key(), &self.node);
        topology.segments.iter().all(|(key, value)| {
            // Keys are compared without regard to case (CSI, Topology).
            key.eq_ignore_ascii_case(&own.0) && value == own.1
        })
    }
}
