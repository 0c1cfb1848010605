//! The parts of a worker's start: the permit, the first message, and the check of the volume's properties.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::planner::{DeviceProperties, READ_ONLY, Record};
use cleat_backend::VolumeIdentity;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::{ProtocolVersions, Ready, Start};

/// NBD_FLAG_CAN_MULTI_CONN (transmission flags of the NBD protocol): a flush on one connection covers the
/// writes of all connections.
const CAN_MULTI_CONN: u16 = 1 << 8;

/// Waits for the permit to start a worker. The number of permits is limited, so that a start is not slowed
/// down by many others while its timeout runs.
///
/// # Errors
/// Returns `TimedOut` if no permit is free until `deadline`.
pub(crate) async fn start_permit(cx: &Context, deadline: Instant) -> Result<SemaphorePermit<'_>> {
    let permit = timeout_at(deadline, cx.starts.acquire()).await.map_err(|_| {
        Error::new(ErrorKind::TimedOut, "other workers were being started until the deadline")
    })?;
    permit.map_err(|_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down"))
}

/// Returns the first message to a worker, without credentials. `workers` sets its fields about the log and the cache.
pub(crate) fn start_message(cx: &Context, record: &Record, successor: bool) -> Start {
    Start {
        versions: ProtocolVersions::of_this_build(),
        mapping_id: record.mapping_id.clone(),
        name: record.name.clone(),
        generation: record.generation,
        uri: record.uri.clone(),
        connections: record.options.connections,
        read_only: record.options.read_only,
        log: String::new(),
        policy: record.options.policy,
        successor,
        node: cx.settings.node.clone(),
        machine: cx.settings.machine.clone(),
        boot_id: cx.settings.boot_id.clone(),
        take_over: false,
        // An earlier worker opened the volume, and it may have a device.
        resumes: record.volume.is_some(),
        expected: record.volume.as_ref().and_then(|volume| volume.identity.clone()),
        quiesce: record.options.quiesce,
        sync_failed: record.sync_failed,
        credentials: Vec::new(),
        grant: record.grant,
        tail_bytes: tail_bytes(cx, record),
        cache_files: 0,
        cache_file_bytes: 0,
        claim_only: false,
    }
}

/// Returns the length of the tail file of a mapping in bytes; 0 if it needs none.
fn tail_bytes(cx: &Context, record: &Record) -> u64 {
    let volume = cx.registry.volume(&record.uri);
    match record.options.read_only {
        true => 0,
        false => volume.map_or(0, |volume| volume.spec().tail_bytes()),
    }
}

/// Returns the properties of a device for the volume that a worker has opened. A worker that replaces
/// another one must offer no less.
///
/// # Errors
/// Returns `Replaced` if it is another volume than that of the existing device, `InvalidArgument` if the volume
/// does not fit the options of the mapping, and `Internal` if it lacks a feature that the device has.
pub(crate) fn device_properties(record: &Record, ready: &Ready) -> Result<DeviceProperties> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    let before = record.volume.as_ref();
    let expected = before.and_then(|before| before.identity.as_ref());
    if let Some(found) = &ready.identity {
        // The worker has checked this, too.
        VolumeIdentity::check(found, expected, &record.uri)?;
    }
    let requested = record.options.block_size;
    let existing = before.map(|before| before.block_size);
    let min = ready.minimum_block.max(512);
    let block_size = existing.unwrap_or(if requested == 0 { min } else { requested });
    if block_size < min || !block_size.is_multiple_of(min) || block_size > 4096 {
        return Err(invalid(format!("{} needs blocks of {min} bytes", record.uri))
            .with_repair(format!("map it with a block size that is a multiple of {min}")));
    }
    // The volume of an existing device may have grown by less than a block. The device does not reach that
    // end, and it needs a worker.
    let remainder = if before.is_some() { ready.size % u64::from(block_size) } else { 0 };
    let size = ready.size - remainder;
    if size == 0 || !size.is_multiple_of(u64::from(block_size)) {
        let message = format!(
            "the size of {}, {} bytes, is not a positive multiple of {block_size}",
            record.uri, ready.size
        );
        return Err(invalid(message).with_repair(fitting_size(ready.size, min, block_size)));
    }
    if record.options.connections > 1 && ready.transmission_flags & CAN_MULTI_CONN == 0 {
        let message = format!("{} cannot be used over several connections", record.uri);
        return Err(invalid(message).with_repair("map it with connections=1"));
    }
    if let Some(before) = before {
        let (before, now) = (before.transmission_flags, ready.transmission_flags);
        // Write access must not be lost either; its flag marks the absence.
        if before & !now != 0 || now & !before & READ_ONLY != 0 {
            let message =
                format!("{} has fewer features than when its device was connected", record.uri);
            return Err(Error::new(ErrorKind::Internal, message));
        }
    }
    Ok(DeviceProperties {
        identity: ready.identity.as_ref().or(expected).cloned(),
        size,
        block_size,
        transmission_flags: before.map_or(ready.transmission_flags, |v| v.transmission_flags),
        outlives_worker: ready.outlives_worker,
    })
}

/// Returns the hint for a volume of `size` bytes that is not a multiple of `block_size`. The volume accepts
/// blocks of at least `min` bytes.
fn fitting_size(size: u64, min: u32, block_size: u32) -> String {
    let fits = |block: &u32| size > 0 && size.is_multiple_of(u64::from(*block));
    let mut smaller =
        [2048, 1024, 512].into_iter().filter(|block| (min..block_size).contains(block));
    let larger = (size + 1).next_multiple_of(u64::from(block_size));
    match smaller.find(fits) {
        Some(block) => format!("map it with --block-size {block}, or enlarge it to {larger} bytes"),
        None => format!("enlarge it to {larger} bytes"),
    }
}

/// Returns the error for a mapping without a worker.
pub(crate) fn no_worker(record: &Record) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{} has no worker", record.name))
}

/// Returns the time after `timeout`, but no later than `deadline`.
pub(crate) fn within(deadline: Instant, timeout: Duration) -> Instant {
    deadline.min(Instant::now() + timeout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner;
    use cleat_worker_protocol::protocol::{OLDEST_PROTOCOL, PROTOCOL_VERSION};

    fn record(connections: u32, block_size: u32) -> Record {
        let mut record = planner::tests::record(connections, true);
        record.options.block_size = block_size;
        record.volume = None;
        record
    }

    fn ready(size: u64, minimum_block: u32, transmission_flags: u16) -> Ready {
        Ready {
            version: PROTOCOL_VERSION,
            oldest: OLDEST_PROTOCOL,
            build: String::new(),
            binary: String::new(),
            mapping_id: "00000000000000aa".into(),
            generation: 1,
            pid: 1,
            identity: Some(VolumeIdentity::new("a")),
            size,
            minimum_block,
            preferred_block: 4096,
            transmission_flags,
            outlives_worker: true,
            connections: 0,
            opened: None,
        }
    }

    #[test]
    fn the_device_properties_fit_the_volume() {
        let volume = device_properties(&record(1, 0), &ready(8192, 1, 1)).unwrap();
        assert_eq!((volume.size, volume.block_size), (8192, 512));
        assert_eq!(
            device_properties(&record(1, 0), &ready(8192, 4096, 1)).unwrap().block_size,
            4096
        );
        assert_eq!(
            device_properties(&record(1, 4096), &ready(8192, 512, 1)).unwrap().block_size,
            4096
        );
        for (record, ready) in [
            (record(1, 512), ready(8192, 4096, 1)),
            (record(1, 0), ready(0, 1, 1)),
            (record(1, 0), ready(1000, 1, 1)),
            (record(1, 0), ready(65536, 8192, 1)),
            (record(2, 0), ready(8192, 1, 1)),
        ] {
            let error = device_properties(&record, &ready).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
        }
        device_properties(&record(2, 0), &ready(8192, 1, 1 | CAN_MULTI_CONN)).unwrap();
    }

    #[test]
    fn the_hint_for_a_size_that_does_not_fit_can_be_followed() {
        let hint = |block_size, size, minimum| {
            let refused = device_properties(&record(1, block_size), &ready(size, minimum, 1));
            refused.unwrap_err().repair().unwrap().to_owned()
        };
        assert_eq!(hint(0, 513, 1), "enlarge it to 1024 bytes");
        assert_eq!(hint(0, 0, 1), "enlarge it to 512 bytes");
        let smaller = "map it with --block-size 1024, or enlarge it to 8192 bytes";
        assert_eq!(hint(4096, 5120, 1), smaller);
        assert_eq!(hint(4096, 5120, 4096), "enlarge it to 8192 bytes");
        assert_eq!(hint(2048, 1536, 1024), "enlarge it to 2048 bytes");
    }

    #[test]
    fn a_worker_with_another_volume_is_refused() {
        let mut record = record(1, 0);
        record.volume = Some(device_properties(&record, &ready(8192, 1, 1)).unwrap());
        let other = Ready { identity: Some(VolumeIdentity::new("b")), ..ready(8192, 1, 1) };
        let error = device_properties(&record, &other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Replaced);
    }

    #[test]
    fn a_worker_that_offers_less_than_the_device_has_is_refused() {
        let mut record = record(1, 0);
        record.volume = Some(device_properties(&record, &ready(8192, 1, 5)).unwrap());
        assert!(device_properties(&record, &ready(8192, 1, 1)).is_err());
        assert!(device_properties(&record, &ready(8192, 1, 5 | READ_ONLY)).is_err());
        let volume = device_properties(&record, &ready(8192, 1, 5 | 1 << 3)).unwrap();
        assert_eq!(volume.transmission_flags, 5);
        // The volume may have grown by less than a block meanwhile.
        let volume = device_properties(&record, &ready(8192 + 700, 1, 5)).unwrap();
        assert_eq!(volume.size, 8192 + 512);
    }
}
