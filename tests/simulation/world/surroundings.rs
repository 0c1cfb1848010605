//! What a simulated worker sees of the world in its turn, and the rules that are checked there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use cleat_backend::VolumeIdentity;
use cleat_core::error::ErrorKind;
use cleat_worker::protocol::Start;

use super::disk_name;
use crate::disks::Disk;
use crate::workers::Worker;

/// The parts of the world that a worker uses in its turn.
pub(crate) struct Surroundings<'a> {
    pub(crate) now: Instant,
    pub(crate) disks: &'a mut BTreeMap<String, Disk>,
    pub(super) served: &'a mut BTreeMap<String, u64>,
    pub(super) violations: &'a mut Vec<String>,
    pub(super) generations: &'a mut BTreeMap<String, u64>,
    pub(super) readers: &'a mut BTreeMap<u64, u32>,
    pub(super) gone: &'a BTreeSet<String>,
    pub(super) touched: &'a BTreeSet<String>,
    /// Whether changes of records may have been lost.
    pub(super) was_unrecordable: bool,
    pub(super) epochs: &'a mut u64,
    pub(super) records: PathBuf,
}

/// Returns the identity that a worker reports for the volume `number`.
pub(crate) fn volume_identity(number: u64) -> VolumeIdentity {
    VolumeIdentity::new(format!("volume {number}"))
}

/// A worker that has a volume open.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) pid: u32,
    read_only: bool,
    pub(crate) mapping_id: String,
}

impl Surroundings<'_> {
    pub(crate) fn violation(&mut self, what: String) {
        tracing::error!("VIOLATION: {what}");
        self.violations.push(what);
    }

    /// Checks the start message of a worker.
    pub(crate) fn started(&mut self, worker: &Worker, start: &Start) {
        let id = &start.mapping_id;
        tracing::debug!(pid = worker.id.pid, id, generation = start.generation, "WORLD started");
        let before = self.generations.insert(id.clone(), start.generation).unwrap_or(0);
        if start.generation <= before {
            self.violation(format!("{id}: generation {} after {before}", start.generation));
        }
        if self.gone.contains(id) {
            self.violation(format!("{id}: a worker was started for what is gone"));
        }
        // A stopped worker reads the message late; it was right when it was sent.
        let record = self.record(id);
        let recorded = record["worker"]["pid"] == worker.id.pid
            && record["worker"]["started_ticks"] == worker.id.started_ticks
            && record["generation"] == start.generation;
        if !recorded && !worker.was_stopped && !self.touched.contains(id) {
            self.violation(format!("{id}: a worker was started before it was recorded"));
        }
    }

    /// Checks that a supervisor ends a serving worker only when the mapping is being removed.
    pub(crate) fn stopped_by_supervisor(&mut self, worker: &Worker) {
        let Some(id) = worker.mapping_id().filter(|_| worker.serves()) else { return };
        // A stopped worker may continue after the supervisor has given it up.
        let excused = worker.was_stopped || self.touched.contains(id) || self.was_unrecordable;
        if self.record(id)["intent"] == "mapped" && !excused {
            let pid = worker.id.pid;
            self.violation(format!("{id}: worker {pid} serves what is mapped, and was ended"));
        }
    }

    fn record(&self, id: &str) -> serde_json::Value {
        super::records::newest(&self.records, id)
    }

    /// Records that a process reads a socket. No other process may read it until `reads_no_more`, or until the
    /// process has ended.
    pub(crate) fn reads(&mut self, inode: u64, pid: u32) {
        let reader = *self.readers.entry(inode).or_insert(pid);
        if reader != pid {
            self.violation(format!("workers {reader} and {pid} read the same connection"));
        }
    }

    pub(crate) fn reads_no_more(&mut self, inode: u64, pid: u32) {
        if self.readers.get(&inode) == Some(&pid) {
            self.readers.remove(&inode);
        }
    }

    /// Opens the volume of a worker.
    pub(crate) fn open(&mut self, worker: &mut Worker) -> Result<(), (ErrorKind, String)> {
        let Some(start) = &worker.start else { return Err((ErrorKind::Internal, "?".into())) };
        let name = disk_name(start);
        if name.starts_with("mem:") && !start.successor {
            *self.epochs += 1;
            self.disks.insert(name.clone(), Disk::new(1 << 16, *self.epochs));
        }
        let claim = Claim {
            pid: worker.id.pid,
            read_only: start.read_only,
            mapping_id: start.mapping_id.clone(),
        };
        let disk = self.disks.get_mut(&name).filter(|disk| !disk.gone);
        let Some(disk) = disk else {
            return Err((ErrorKind::NotFound, format!("{name} does not exist")));
        };
        let found = volume_identity(disk.number);
        if start.expected.as_ref().is_some_and(|expected| *expected != found)
            && !worker.quirks.ignores_identity
        {
            return Err((ErrorKind::Replaced, format!("{name} is another volume: {found}")));
        }
        // A successor shares the open volume of its predecessor.
        let shared = |other: &Claim| start.successor && other.mapping_id == claim.mapping_id;
        let clashes = |other: &&Claim| !(other.read_only && claim.read_only || shared(other));
        let clash = disk.claims.iter().find(clashes).cloned();
        if let Some(other) = clash {
            if other.mapping_id == claim.mapping_id {
                let (one, two) = (other.pid, claim.pid);
                self.violation(format!("worker {two} was started while {one} could still write"));
            }
            return Err((ErrorKind::InUse, format!("{name} is open elsewhere")));
        }
        disk.claims.push(claim);
        *self.epochs += 1;
        (worker.epoch, worker.disk, worker.number) = (*self.epochs, name, disk.number);
        Ok(())
    }

    /// Checks that the connections of a device reach only one volume, whatever is found under its name.
    pub(crate) fn serves(&mut self, worker: &Worker) {
        let Some(id) = worker.mapping_id() else { return };
        let first = *self.served.entry(id.to_owned()).or_insert(worker.number);
        if first != worker.number {
            let (pid, now) = (worker.id.pid, worker.number);
            self.violation(format!(
                "{id}: worker {pid} serves volume {now}; its users have data of volume {first}"
            ));
        }
    }
}
