//! The objects that the answer to `why` comes from, and what they say by themselves.

use std::collections::BTreeMap;

use cleat_grants::object::Time;
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::ResourceExt;

use super::ago;
use crate::grant::VolumeGrant;
use crate::nodes;
use crate::objects::{Node, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment};

/// The objects that concern a claim.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) driver: &'a str,
    pub(super) now: Time,
    pub(super) claim: PersistentVolumeClaim,
    pub(super) class: Option<StorageClass>,
    pub(super) volume: Option<PersistentVolume>,
    pub(super) csi_driver: Option<CSIDriver>,
    /// The nodes on which the driver is registered, of those below.
    pub(super) registered: Vec<String>,
    /// The last warnings about the claim and the pods, by the uid of the object.
    pub(super) warnings: BTreeMap<String, String>,
    /// Those of the PersistentVolume.
    pub(super) attachments: Vec<VolumeAttachment>,
    pub(super) grant: Option<VolumeGrant>,
    /// Those that use the claim and have not ended.
    pub(super) pods: Vec<Pod>,
    /// Those of the pods, attachments and holders, as far as they exist.
    pub(super) nodes: Vec<Node>,
}

impl Facts<'_> {
    /// The nodes that the objects name, without duplicates.
    pub(super) fn node_names(&self) -> Vec<String> {
        let pods = self.pods.iter().filter_map(node_of).map(str::to_owned);
        let attachments = self.attachments.iter().map(|known| known.spec.node_name.clone());
        let holders = self.grant.iter().flat_map(|grant| &grant.spec.holders);
        let mut names: Vec<String> =
            pods.chain(attachments).chain(holders.map(|holder| holder.node.clone())).collect();
        names.sort();
        names.dedup();
        names
    }

    pub(super) fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name_any() == name)
    }

    pub(super) fn needs_attachment(&self) -> bool {
        let spec = self.csi_driver.as_ref().map(|driver| &driver.spec);
        spec.is_none_or(|spec| spec.attach_required.unwrap_or(true))
    }

    /// The last warning about an object, as the end of a sentence.
    pub(super) fn warning(&self, object: &impl ResourceExt) -> String {
        let warning = object.uid().and_then(|uid| self.warnings.get(&uid));
        warning.map(|warning| format!(": {warning}")).unwrap_or_default()
    }

    pub(super) fn class_name(&self) -> &str {
        let spec = self.claim.spec.as_ref();
        spec.and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default()
    }
}

/// Describes a node that is not ready, out of service, or lost.
pub(super) fn not_ready(node: &Node, now: Time) -> Option<String> {
    let state = nodes::state(node, None);
    let lost = node.annotations().get(nodes::LOST);
    let parts = [
        lost.map(|time| format!("lost since {time} (remediation)")),
        state.out_of_service.then(|| "out of service".to_owned()),
        state.not_ready_since.map(|then| format!("not ready since {} ago", ago(then, now))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(" and "))
}

pub(super) fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

pub(super) fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}
