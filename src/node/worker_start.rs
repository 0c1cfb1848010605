//! What the start of a worker needs: its turn, its first message, and the check of what it offers.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::planner::{DeviceProperties, READ_ONLY, Record};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::protocol::{OLDEST_PROTOCOL, PROTOCOL_VERSION, Ready, Start};

/// NBD_FLAG_CAN_MULTI_CONN (the protocol's transmission flags): the volume's contract holds across
/// connections.
const CAN_MULTI_CONN: u16 = 1 << 8;

/// The right to start a worker. A few have it at a time, so that each has the machine while its own
/// bound runs.
pub(crate) async fn start_permit(cx: &Context, deadline: Instant) -> Result<SemaphorePermit<'_>> {
    let turn = timeout_at(deadline, cx.starts.acquire()).await.map_err(|_| {
        Error::new(ErrorKind::TimedOut, "other workers were being started until the deadline")
    })?;
    turn.map_err(|_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down"))
}

/// What a worker is told first; who speaks and where logs go is filled in by `workers`.
pub(crate) fn start_message(cx: &Context, record: &Record, successor: bool) -> Start {
    Start {
        version: PROTOCOL_VERSION,
        oldest: OLDEST_PROTOCOL,
        build: String::new(),
        mapping_id: record.mapping_id.clone(),
        name: record.name.clone(),
        generation: record.generation,
        uri: record.uri.clone(),
        read_only: record.options.read_only,
        log: String::new(),
        policy: record.options.policy,
        successor,
        node: cx.settings.node.clone(),
        machine: cx.settings.machine.clone(),
        boot_id: cx.settings.boot_id.clone(),
        take_over: false,
        // A worker has had it, and perhaps a device was made.
        resumes: record.volume.is_some(),
        quiesce: record.options.quiesce,
    }
}

/// What the device is made from. A worker that replaces another must offer no less.
pub(crate) fn device_properties(record: &Record, ready: &Ready) -> Result<DeviceProperties> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    let asked = record.options.block_size;
    let before = record.volume.map(|volume| volume.block_size);
    let least = ready.minimum_block.max(512);
    let block_size = before.unwrap_or(if asked == 0 { least } else { asked });
    if block_size < least || !block_size.is_multiple_of(least) || block_size > 4096 {
        return Err(invalid(format!("{} needs blocks of {least} bytes", record.uri))
            .with_repair(format!("map it with a block size that is a multiple of {least}")));
    }
    // A volume that grew by less than a block under its device is no reason to leave that without a
    // worker: the end is out of its reach.
    let rest = if record.volume.is_some() { ready.size % u64::from(block_size) } else { 0 };
    let size = ready.size - rest;
    if size == 0 || !size.is_multiple_of(u64::from(block_size)) {
        let message = format!(
            "the size of {}, {} bytes, is not a positive multiple of {block_size}",
            record.uri, ready.size
        );
        return Err(invalid(message).with_repair("use a smaller block size, or grow the volume"));
    }
    if record.options.connections > 1 && ready.transmission_flags & CAN_MULTI_CONN == 0 {
        let message = format!("{} cannot be used over several connections", record.uri);
        return Err(invalid(message).with_repair("map it with connections=1"));
    }
    if let Some(before) = record.volume {
        let (had, has) = (before.transmission_flags, ready.transmission_flags);
        // Among what it must not lose is the right to write, which has a flag for its absence.
        if had & !has != 0 || has & !had & READ_ONLY != 0 {
            let message = format!("{} can do less than when its device was made", record.uri);
            return Err(Error::new(ErrorKind::Internal, message));
        }
    }
    Ok(DeviceProperties {
        size,
        block_size,
        transmission_flags: record
            .volume
            .map_or(ready.transmission_flags, |v| v.transmission_flags),
        outlives_worker: ready.outlives_worker,
    })
}

pub(crate) fn no_worker(record: &Record) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the worker of {} has gone", record.name))
}

pub(crate) fn within(deadline: Instant, limit: Duration) -> Instant {
    deadline.min(Instant::now() + limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner;

    fn record(connections: u32, block_size: u32) -> Record {
        let mut record = planner::tests::record(connections, true);
        record.options.block_size = block_size;
        record.volume = None;
        record
    }

    fn ready(size: u64, minimum_block: u32, transmission_flags: u16) -> Ready {
        Ready {
            version: PROTOCOL_VERSION,
            oldest: 0,
            build: String::new(),
            binary: String::new(),
            mapping_id: "00000000000000aa".into(),
            generation: 1,
            pid: 1,
            size,
            minimum_block,
            preferred_block: 4096,
            transmission_flags,
            outlives_worker: true,
            connections: 0,
        }
    }

    #[test]
    fn a_device_fits_its_volume() {
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
    fn a_later_worker_offers_no_less() {
        let mut record = record(1, 0);
        record.volume = Some(device_properties(&record, &ready(8192, 1, 5)).unwrap());
        assert!(device_properties(&record, &ready(8192, 1, 1)).is_err());
        assert!(device_properties(&record, &ready(8192, 1, 5 | READ_ONLY)).is_err());
        let volume = device_properties(&record, &ready(8192, 1, 5 | 1 << 3)).unwrap();
        assert_eq!(volume.transmission_flags, 5);
        // It may have grown by less than a block meanwhile.
        let volume = device_properties(&record, &ready(8192 + 700, 1, 5)).unwrap();
        assert_eq!(volume.size, 8192 + 512);
    }
}
