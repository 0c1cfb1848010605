//! The health of volumes and of the storage, as this node sees it (CSI 1.13, alpha). Each reason has its
//! repair in docs/csi.md.

use std::sync::Arc;
use std::time::Duration;

use cleat_csi_api::csi::v1 as csi;
use cleat_node::mapping::{Mapping, View};
use cleat_node::planner::State;
use csi::StorageHealthErrorType as Storage;
use csi::VolumeHealthErrorType as Volume;
use csi::node_get_storage_health_response::StorageBackendHealth;
use csi::volume_health::VolumeHealthEntry;

/// The age of a request from which on its volume counts as hung.
pub(crate) const HUNG_AFTER: Duration = Duration::from_secs(20);

/// Returns the age of the oldest request that has no answer; zero without one.
pub(crate) fn oldest_request(mapping: &Mapping) -> Duration {
    let oldest = mapping.statistics().map_or(0, |page| page.snapshot().oldest_ns);
    let age = if oldest == 0 { 0 } else { cleat_statistics::now_ns().saturating_sub(oldest) };
    Duration::from_nanos(age)
}

/// Returns what is wrong with the volume of a mapping; nothing for a healthy one.
pub(crate) fn of_mapping(mapping: &Mapping) -> Vec<VolumeHealthEntry> {
    of_volume(&mapping.view(), oldest_request(mapping))
}

/// Returns what is wrong with a volume whose oldest request has waited for `waited`. A storage that does not answer at
/// all, such as a stopped OSD, causes no error: only the requests wait.
fn of_volume(view: &View, waited: Duration) -> Vec<VolumeHealthEntry> {
    let mut entries = Vec::new();
    let mut add = |status: Volume, reason: &str, message: String| {
        entries.push(VolumeHealthEntry {
            status: status.into(),
            reason: reason.to_owned(),
            message,
        });
    };
    if let State::Failed(failure) = &view.state {
        let reason = if view.is_replaced() {
            "Replaced"
        } else if view.is_fenced() {
            "Fenced"
        } else {
            "Failed"
        };
        add(
            Volume::Inaccessible,
            reason,
            format!("{}; to repair: {}", failure.message, failure.repair),
        );
    }
    if view.record.sync_failed {
        let message = "a sync has failed, and acknowledged writes may be lost; to repair: unstage the \
                       volume, check its data, and stage it again";
        add(Volume::DataLoss, "SyncFailed", message.to_owned());
    }
    if let Some(outage) = &view.outage {
        let why = outage.reason.as_deref().unwrap_or("its backend does not answer");
        let waiting = outage.queued;
        let message = format!("{waiting} requests wait: {why}; to repair: restore the backend");
        add(Volume::Degraded, "BackendOutage", message);
    } else if waited >= HUNG_AFTER {
        let seconds = waited.as_secs();
        let message =
            format!("a request has waited for {seconds} s; to repair: restore the backend");
        add(Volume::Degraded, "BackendOutage", message);
    }
    if view.state == State::Recovering {
        let message = format!("its worker is being replaced: {}", view.message);
        add(Volume::Degraded, "WorkerReplaced", message);
    }
    entries
}

/// Returns what is wrong with the storage of the volumes of this node.
pub(crate) fn of_storage(mappings: &[Arc<Mapping>]) -> Vec<StorageBackendHealth> {
    let is_waiting = |mapping: &&Arc<Mapping>| {
        mapping.view().outage.is_some() || oldest_request(mapping) >= HUNG_AFTER
    };
    let waiting: Vec<&Arc<Mapping>> = mappings.iter().filter(is_waiting).collect();
    if waiting.is_empty() {
        return Vec::new();
    }
    let all = waiting.len() == mappings.len();
    let status = if all { Storage::StorageUnreachable } else { Storage::StorageDegraded };
    let names: Vec<&str> = waiting.iter().take(8).map(|mapping| mapping.name.as_str()).collect();
    let message = format!(
        "the backend of {} of {} volumes does not answer: {}; to repair: restore the backend",
        waiting.len(),
        mappings.len(),
        names.join(", ")
    );
    vec![StorageBackendHealth {
        status: status.into(),
        reason: "BackendOutage".to_owned(),
        message,
        volume_capability: None,
    }]
}
