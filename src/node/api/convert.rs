//! Converts between the control API's messages and the supervisor's types. Every incoming message is checked
//! here.

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use super::validate;
use crate::executor::MapSpec;
use crate::mapping::{ForceReport, View, node_of};
use crate::planner::State;
use cleat_api::v1 as api;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;
use cleat_core::request::{IoError, Op};
use cleat_kernel::{Device, Holder, Identity, UnmountScope};
use cleat_statistics::{BUCKETS, FIRST_BUCKET_NS, Snapshot};

/// The metadata key of an error's hint in ASCII; see `node.proto`.
pub(crate) const REPAIR_KEY: &str = "cleat-repair";

/// The metadata key of an error's hint in UTF-8; see `node.proto`.
pub(crate) const REPAIR_UTF8_KEY: &str = "cleat-repair-bin";

/// Converts an error to a gRPC status, with the hint in the metadata key [`REPAIR_KEY`]. A hint that is not one
/// line of ASCII is also in [`REPAIR_UTF8_KEY`], unchanged.
pub(crate) fn status(error: &Error) -> Status {
    let mut status = Status::new(code(error.kind()), error.report());
    if let Some(repair) = error.repair() {
        // The values of keys without the suffix "-bin" are one line of ASCII. Older clients read only this key.
        let plain: String =
            repair.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
        if plain != repair {
            let exact = MetadataValue::from_bytes(repair.as_bytes());
            status.metadata_mut().insert_bin(REPAIR_UTF8_KEY, exact);
        }
        if let Ok(value) = MetadataValue::try_from(plain) {
            status.metadata_mut().insert(REPAIR_KEY, value);
        }
    }
    status
}

fn code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::InUse => Code::FailedPrecondition,
        ErrorKind::Aborted => Code::Aborted,
        ErrorKind::PermissionDenied => Code::PermissionDenied,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::TimedOut => Code::DeadlineExceeded,
        ErrorKind::NoSpace => Code::ResourceExhausted,
        ErrorKind::Fenced | ErrorKind::Replaced => Code::DataLoss,
        ErrorKind::Internal => Code::Internal,
    }
}

/// Checks and converts a request to map.
///
/// # Errors
/// Returns `InvalidArgument` if an option is out of range.
pub(crate) fn map_spec(request: api::MapRequest) -> Result<MapSpec> {
    let options = request.options.unwrap_or_default();
    validate::uri(&request.uri)?;
    validate::name(&request.name)?;
    validate::connections(options.connections)?;
    validate::block_size(options.block_size)?;
    validate::timeout_s(options.dead_connection_timeout_s)?;
    validate::quiesce(options.quiesce, options.read_only)?;
    Ok(MapSpec {
        name: request.name,
        uri: request.uri,
        read_only: options.read_only,
        connections: options.connections,
        block_size: options.block_size,
        dead_connection_timeout_s: options.dead_connection_timeout_s,
        policy: policy_change(
            &options.on_outage,
            options.iops,
            options.bytes_per_s,
            &options.busy_poll,
        )?,
        take_over: request.take_over,
        quiesce: options.quiesce,
        grant: 0,
    })
}

/// Checks and converts a change of the policy. An empty text and a missing number leave their part unchanged.
///
/// # Errors
/// Returns `InvalidArgument` if a value is out of range.
pub(crate) fn policy_change(
    on_outage: &str,
    iops: Option<u64>,
    bytes_per_s: Option<u64>,
    busy_poll: &str,
) -> Result<policy::Change> {
    let outage = (!on_outage.is_empty()).then(|| on_outage.parse()).transpose()?;
    let busy_poll = (!busy_poll.is_empty()).then(|| busy_poll.parse()).transpose()?;
    let change = policy::Change { outage, iops, bytes_per_s, busy_poll };
    change.apply(policy::Policy::default()).limits.check()?;
    Ok(change)
}

/// Converts the view of a mapping.
pub(crate) fn mapping(view: &View) -> api::Mapping {
    let record = &view.record;
    let path = |path: Option<std::path::PathBuf>| {
        path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let volume = record.volume.as_ref();
    api::Mapping {
        name: record.name.clone(),
        uri: record.uri.clone(),
        options: Some(api::MapOptions {
            read_only: record.options.read_only,
            connections: record.options.connections,
            block_size: record.options.block_size,
            dead_connection_timeout_s: record.options.dead_connection_timeout_s,
            on_outage: record.options.policy.outage.to_string(),
            iops: Some(record.options.policy.limits.iops),
            bytes_per_s: Some(record.options.policy.limits.bytes_per_s),
            quiesce: record.options.quiesce,
            busy_poll: record.options.policy.busy_poll.to_string(),
        }),
        state: state(&view.state).into(),
        message: view.message.clone(),
        device: path(view.node()),
        symlink: path(view.paths.as_ref().map(|paths| paths.symlink.clone())),
        size_bytes: view.device.map(|d| d.size).or(volume.map(|v| v.size)).unwrap_or(0),
        worker_pid: view.worker_pid,
        worker_version: view.worker_build.clone(),
        mapping_id: record.mapping_id.clone(),
        generation: record.generation,
        mapped_at_s: record.created_at_s,
        block_size: volume.map_or(0, |volume| volume.block_size),
        holders: view.holders.iter().map(holder).collect(),
        read_only: view.is_read_only(),
        fenced: view.is_fenced(),
        sync_failed: view.record.sync_failed,
        unsaved_bytes: view.unsaved_bytes,
        space: view.space.is_counted().then_some(api::SpaceUse {
            put_bytes: view.space.put_bytes,
            written_bytes: view.space.written_bytes,
            object_bytes: view.space.object_bytes,
            live_bytes: view.space.live_bytes,
            copied_bytes: view.space.copied_bytes,
            copy_rate: view.space.copy_rate,
        }),
        outage: view.outage.as_ref().map(|outage| api::Outage {
            since_unix_ms: outage.since_unix_ms,
            reason: outage.reason.clone().unwrap_or_default(),
            queued: outage.queued,
            policy: record.options.policy.outage.to_string(),
        }),
        last_worker_end: view.last_exit.clone().unwrap_or_default(),
        quiet: record.quiesced.as_ref().map(|quiesced| api::Quiet {
            since_unix_ms: quiesced.since_unix_ms,
            hook: path(quiesced.hook.clone()),
        }),
    }
}

/// Converts a device without a record. `force_disconnected`: a forced unmap disconnected it.
pub(crate) fn orphan(
    device: &Device,
    identity: &Identity,
    force_disconnected: bool,
    holders: &[Holder],
) -> api::Mapping {
    let node = node_of(device.index).to_string_lossy().into_owned();
    let message = match force_disconnected {
        true => "unmapped by force; the device disappears when its holders close it".to_owned(),
        false => format!(
            "the device has no record; cleat map URI --name {} adopts it if its worker serves; \
             cleat unmap {node} removes it",
            identity.name()
        ),
    };
    api::Mapping {
        name: identity.name().to_owned(),
        state: api::MappingState::Orphan.into(),
        message,
        holders: holders.iter().map(holder).collect(),
        device: node,
        size_bytes: device.size,
        mapping_id: identity.mapping_id().to_owned(),
        ..api::Mapping::default()
    }
}

/// Converts the result of a forced unmap; `None`: nothing was mapped.
pub(crate) fn forced(forced: Option<&ForceReport>) -> api::UnmapResponse {
    let Some(forced) = forced else { return api::UnmapResponse::default() };
    let steps = forced.steps.iter().map(|done| api::ForcedStep {
        step: done.step.to_owned(),
        took_ms: u32::try_from(done.took.as_millis()).unwrap_or(u32::MAX),
        note: done.note.clone(),
    });
    let left = forced.device_left.map(|index| node_of(index).to_string_lossy().into_owned());
    api::UnmapResponse {
        was_mapped: true,
        remaining_holders: forced.holders.iter().map(holder).collect(),
        steps: steps.collect(),
        unmounted: forced.unmounted.iter().map(holder).collect(),
        device_left: left.unwrap_or_default(),
        unproven: forced.unproven.clone().unwrap_or_default(),
    }
}

/// Converts the choice of mounts that a forced unmap detaches.
pub(crate) fn unmount(unmount: api::Unmount) -> UnmountScope {
    match unmount {
        api::Unmount::Unspecified | api::Unmount::All => UnmountScope::All,
        api::Unmount::Own => UnmountScope::Own,
        api::Unmount::None => UnmountScope::None,
    }
}

fn state(state: &State) -> api::MappingState {
    match state {
        State::Mapping => api::MappingState::Mapping,
        State::Mapped => api::MappingState::Mapped,
        State::Recovering => api::MappingState::Recovering,
        State::Failed(_) => api::MappingState::Failed,
        State::Unmapping | State::Held(_) | State::Unmapped => api::MappingState::Unmapping,
    }
}

/// Converts a holder of a device.
pub(crate) fn holder(holder: &Holder) -> api::Holder {
    use api::holder::{Kind, Mount, Process};
    let kind = match holder {
        Holder::Mount { path, filesystem, namespace_pid } => Kind::Mount(Mount {
            path: path.to_string_lossy().into_owned(),
            namespace_pid: namespace_pid.unwrap_or(0),
            filesystem: filesystem.clone(),
        }),
        Holder::Process { pid, command } => {
            Kind::Process(Process { pid: *pid, command: command.clone() })
        }
        Holder::Device { name, .. } => Kind::Device(name.clone()),
        Holder::Kernel { what } => Kind::Kernel(what.clone()),
    };
    api::Holder { kind: Some(kind) }
}

/// Returns the upper bounds of all `latency_buckets` but the last, which has none.
pub(crate) fn latency_bounds_ns() -> Vec<u64> {
    (0..BUCKETS - 1).map(|index| FIRST_BUCKET_NS << index).collect()
}

/// Converts the counters of a volume.
pub(crate) fn statistics(view: &View, snapshot: &Snapshot) -> api::VolumeStats {
    let ops = Op::ALL.iter().map(|op| {
        let counts = snapshot.op(*op);
        let quantile_ns = |share| counts.quantile_ns(share).unwrap_or(0);
        api::OpStats {
            op: op.name().to_owned(),
            count: counts.count,
            bytes: counts.bytes,
            errors: counts.errors,
            total_ns: counts.total_ns,
            latency_buckets: counts.latency.to_vec(),
            p50_ns: quantile_ns(0.5),
            p90_ns: quantile_ns(0.9),
            p99_ns: quantile_ns(0.99),
            p999_ns: quantile_ns(0.999),
            max_ns: quantile_ns(1.0),
        }
    });
    let errors = IoError::ALL.iter().filter_map(|kind| {
        let count = snapshot.errors_of(*kind);
        (count > 0).then(|| (kind.name().to_owned(), count))
    });
    api::VolumeStats {
        name: view.record.name.clone(),
        device: view.node().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
        ops: ops.collect(),
        in_flight: u32::try_from(snapshot.in_flight).unwrap_or(u32::MAX),
        connections: u32::try_from(snapshot.connections).unwrap_or(u32::MAX),
        errors: errors.collect(),
        queued: snapshot.queued,
        stalled_ns: snapshot.stalled_ns,
        limited_ns: snapshot.limited_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_sent_unchanged_and_as_one_ascii_line_for_older_clients() {
        let hint = "umount /mnt/ä\nthen again";
        let status = status(&Error::new(ErrorKind::InUse, "busy").with_repair(hint));
        assert_eq!(status.code(), Code::FailedPrecondition);
        let repair = status.metadata().get(REPAIR_KEY).unwrap().to_str().unwrap();
        assert_eq!(repair, "umount /mnt/??then again");
        let exact = status.metadata().get_bin(REPAIR_UTF8_KEY).unwrap().to_bytes().unwrap();
        assert_eq!(exact, hint.as_bytes());
    }

    #[test]
    fn a_hint_of_one_ascii_line_is_sent_once() {
        let status = status(&Error::new(ErrorKind::InUse, "busy").with_repair("umount /mnt"));
        let plain = status.metadata().get(REPAIR_KEY).unwrap().to_str().unwrap();
        assert_eq!(plain, "umount /mnt");
        assert!(status.metadata().get_bin(REPAIR_UTF8_KEY).is_none());
    }

    #[test]
    fn invalid_requests_are_refused() {
        let request = |uri: &str, name: &str, connections| api::MapRequest {
            uri: uri.into(),
            name: name.into(),
            options: Some(api::MapOptions { connections, ..Default::default() }),
            timeout_ms: 0,
            take_over: false,
        };
        assert_eq!(map_spec(request("mem:1M", "a", 0)).unwrap().name, "a");
        for bad in [
            request("", "a", 0),
            request("mem:1M", "", 0),
            request("mem:1M", "../a", 0),
            request("mem:1M", "a", 99),
        ] {
            assert_eq!(map_spec(bad).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert!(validate::target(String::new()).is_err());
        assert!(validate::target("a\0".into()).is_err());
        assert!(validate::timeout(u32::MAX, std::time::Duration::ZERO).is_err());
    }
}
