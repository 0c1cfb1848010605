//! Tests of the planner: a model that fails at every step (`model`, `properties`), and single plans.

mod handover;
mod mapped;
mod model;
mod properties;
mod unmapped;

use super::{
    DeviceProperties, Intent, Observed, ObservedDevice, ObservedQuiesce, ObservedWorker, Options,
    Record,
};
use cleat_backend::VolumeIdentity;
use cleat_core::policy::Policy;

/// Returns the record of a new mapping.
pub(crate) fn record(connections: u32, outlives_worker: bool) -> Record {
    Record {
        version: Record::VERSION,
        mapping_id: "00c1ea70".into(),
        name: "v".into(),
        uri: "file:/v".into(),
        grant: 0,
        options: Options {
            read_only: false,
            connections,
            block_size: 0,
            dead_connection_timeout_s: 60,
            replay_delay_ms: 1000,
            policy: Policy::default(),
            quiesce: false,
        },
        intent: Intent::Mapped,
        generation: 0,
        revision: 0,
        worker: None,
        predecessor: None,
        volume: Some(DeviceProperties {
            identity: Some(VolumeIdentity::new("a")),
            size: 1 << 20,
            block_size: 512,
            transmission_flags: 1,
            outlives_worker,
        }),
        established: false,
        fenced: false,
        sync_failed: false,
        replaced: None,
        quiesced: None,
        created_at_s: 0,
        boot_id: "boot".into(),
    }
}

/// Returns the record of a mapping that has worked.
pub(crate) fn established(connections: u32, outlives_worker: bool) -> Record {
    Record { established: true, ..record(connections, outlives_worker) }
}

/// Returns the observation of a mapping with one device and `worker`, and nothing unusual.
pub(crate) fn observed_with(worker: ObservedWorker) -> Observed {
    Observed {
        devices: vec![ObservedDevice { index: 3, size: 1 << 20 }],
        worker,
        predecessor: ObservedWorker::Gone,
        handed_over: None,
        holders: Vec::new(),
        paths_known: true,
        failures: 0,
        history: String::new(),
        unserved_too_long: false,
        refusing: false,
        resize_deferred: false,
        quiesced: ObservedQuiesce::default(),
        sync_failed: false,
        connecting: false,
    }
}
