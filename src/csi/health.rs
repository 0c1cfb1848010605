//! The health of volumes and of the storage, as this node sees it (CSI 1.13, alpha). Each reason has its
//! repair in docs/csi.md.

use cleat_csi_api::csi::v1 as csi;
use cleat_node::mapping::View;
use cleat_node::planner::State;
use csi::StorageHealthErrorType as Storage;
use csi::VolumeHealthErrorType as Volume;
use csi::node_get_storage_health_response::StorageBackendHealth;
use csi::volume_health::VolumeHealthEntry;

/// Returns what is wrong with a volume; nothing for a healthy one.
pub(crate) fn of_volume(view: &View) -> Vec<VolumeHealthEntry> {
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
    }
    if view.state == State::Recovering {
        let message = format!("its worker is being replaced: {}", view.message);
        add(Volume::Degraded, "WorkerReplaced", message);
    }
    entries
}

/// Returns what is wrong with the storage of the volumes of this node.
pub(crate) fn of_storage(views: &[View]) -> Vec<StorageBackendHealth> {
    let waiting: Vec<&View> = views.iter().filter(|view| view.outage.is_some()).collect();
    if waiting.is_empty() {
        return Vec::new();
    }
    let all = waiting.len() == views.len();
    let status = if all { Storage::StorageUnreachable } else { Storage::StorageDegraded };
    let names: Vec<&str> = waiting.iter().take(8).map(|view| view.record.name.as_str()).collect();
    let message = format!(
        "the backend of {} of {} volumes does not answer: {}; to repair: restore the backend",
        waiting.len(),
        views.len(),
        names.join(", ")
    );
    vec![StorageBackendHealth {
        status: status.into(),
        reason: "BackendOutage".to_owned(),
        message,
        volume_capability: None,
    }]
}
