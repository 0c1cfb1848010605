//! The list of volumes.

use std::collections::BTreeMap;

use cleat_grants::object::{Generation, Mode, Signal, Time, Truth};
use kube::ResourceExt;
use serde::Serialize;

use super::handle;
use crate::grant::{VolumeGrant, grant_name};
use crate::objects::PersistentVolume;

/// A volume of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeRow {
    /// The PersistentVolume; none if only the grant is left, or for an inline volume.
    pub persistent_volume: Option<String>,
    /// The claim that is bound to it, as `NAMESPACE/NAME`.
    pub claim: Option<String>,
    /// The CSI volume handle.
    pub handle: String,
    /// The grant; none if no node has had the volume, and for volumes without grants.
    pub grant: Option<String>,
    /// The nodes that may use the volume.
    pub holders: Vec<HolderRow>,
    /// What the volume waits for.
    pub waits_for: Vec<String>,
    /// What an administrator can do about it.
    pub actions: Vec<String>,
}

/// A node that may use a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HolderRow {
    /// The node.
    pub node: String,
    /// How it may use the volume.
    pub mode: Mode,
    /// The generation of the grant.
    pub generation: Generation,
    /// Since when it has the grant or, if it is revoked, since when it has to end its use.
    pub since: Time,
    /// Whether it has to end its use.
    pub revoked: bool,
    /// Whether the node reports that the volume can be mounted.
    pub safe_to_mount: bool,
    /// Whether the node reports that nothing on it can write to the volume.
    pub safe_to_detach: bool,
    /// The device on the node.
    pub device: Option<String>,
}

/// Returns a row for each volume, in the order of the PersistentVolumes' names; those without one follow.
pub(super) fn rows(
    driver: &str,
    volumes: &[PersistentVolume],
    grants: &[VolumeGrant],
) -> Vec<VolumeRow> {
    let by_name: BTreeMap<String, &VolumeGrant> =
        grants.iter().map(|grant| (grant.name_any(), grant)).collect();
    // Several PersistentVolumes may be of one volume.
    let mut without_volume = by_name.clone();
    let mut rows = Vec::new();
    for volume in volumes {
        let Some(handle) = handle(volume, driver) else { continue };
        let name = grant_name(driver, handle);
        rows.push(row(Some(volume), handle, by_name.get(&name).copied()));
        without_volume.remove(&name);
    }
    rows.sort_by(|a, b| a.persistent_volume.cmp(&b.persistent_volume));
    let left = without_volume.into_values();
    rows.extend(left.map(|grant| row(None, grant.volume().unwrap_or_default(), Some(grant))));
    rows
}

fn row(volume: Option<&PersistentVolume>, handle: &str, grant: Option<&VolumeGrant>) -> VolumeRow {
    let claim = volume.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
    let claim = claim.and_then(|claim| {
        Some(format!("{}/{}", claim.namespace.as_deref()?, claim.name.as_deref()?))
    });
    let waiting = grant.iter().flat_map(|grant| &grant.status.waiting);
    VolumeRow {
        persistent_volume: volume.map(ResourceExt::name_any),
        claim,
        handle: handle.to_owned(),
        grant: grant.map(ResourceExt::name_any),
        holders: grant.map(holders).unwrap_or_default(),
        waits_for: waiting.clone().map(|waiting| waiting.message.clone()).collect(),
        actions: waiting.map(|waiting| waiting.action.clone()).collect(),
    }
}

/// Returns the holders of a grant.
pub(super) fn holders(grant: &VolumeGrant) -> Vec<HolderRow> {
    let stored = grant.stored().grant;
    let holder = |holder: &cleat_grants::object::Holder| {
        let entry = stored.entry(&holder.node);
        let is = |signal| entry.is_some_and(|e| e.is(signal, Truth::True, holder.generation));
        HolderRow {
            node: holder.node.clone(),
            mode: holder.mode,
            generation: holder.generation,
            since: holder.since,
            revoked: holder.revoked,
            safe_to_mount: is(Signal::SafeToMount),
            safe_to_detach: is(Signal::SafeToDetach),
            device: entry.and_then(|entry| entry.device_path.clone()),
        }
    };
    stored.spec.holders.iter().map(holder).collect()
}
