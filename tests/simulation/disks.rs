//! The content of volumes, the workers that have them open, and the data that their users may expect to
//! read.

use std::collections::BTreeMap;

use cleat_kernel::sim::Ticket;

use crate::world::Claim;

/// The unit of simulated I/O, in bytes.
pub(crate) const SECTOR: u64 = 512;

/// The number of sectors that are used. Every volume is larger.
pub(crate) const SECTORS: u64 = 8;

/// A volume at its backend.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    pub(crate) size: u64,
    /// Identifies the volume. Another volume under the same name has another number.
    pub(crate) number: u64,
    /// The stamp of each sector by its number; a sector that was never written has stamp 0.
    pub(crate) sectors: BTreeMap<u64, u64>,
    /// The workers that have it open.
    pub(crate) claims: Vec<Claim>,
    /// The latest open among those that have written.
    last_writer: u64,
    /// Whether the volume cannot be found at the moment.
    pub(crate) gone: bool,
    /// Whether the volume answers no request at the moment.
    pub(crate) hung: bool,
}

/// The name under which the users of a volume know it. It differs for volumes that follow each other under
/// one name.
pub(crate) fn key(name: &str, number: u64) -> String {
    format!("{name}#{number}")
}

impl Disk {
    pub(crate) fn new(size: u64, number: u64) -> Self {
        Self { size, number, ..Self::default() }
    }

    /// Executes a write at the backend. `epoch` counts opens: a write of an earlier open must not follow one
    /// of a later open.
    pub(crate) fn write(&mut self, sector: u64, stamp: u64, epoch: u64) -> Result<(), String> {
        self.sectors.insert(sector, stamp);
        if epoch < self.last_writer {
            return Err(format!(
                "a write by the worker of open {epoch} landed after one of open {}",
                self.last_writer
            ));
        }
        self.last_writer = epoch;
        Ok(())
    }
}

/// What the users of volumes know about their content. Each write has a unique stamp.
#[derive(Debug, Default)]
pub(crate) struct Model {
    volumes: BTreeMap<String, BTreeMap<u64, Sector>>,
    running: BTreeMap<Ticket, Running>,
    stamps: u64,
    /// The number of requests that have succeeded.
    pub(crate) done: u64,
}

#[derive(Debug, Default)]
struct Sector {
    /// The last write that succeeded.
    acknowledged: u64,
    /// Later writes with an unknown result: each may or may not have been executed.
    doubtful: Vec<u64>,
    busy: bool,
}

#[derive(Debug)]
struct Running {
    key: String,
    sector: u64,
    mapping_id: String,
    asked: Asked,
}

#[derive(Debug, Clone, Copy)]
enum Asked {
    Write(u64),
    Read,
}

impl Model {
    /// Returns a stamp for a write to a sector; `None` while another request for the sector is in flight.
    pub(crate) fn next_stamp(&mut self, key: &str, sector: u64) -> Option<u64> {
        if self.sector(key, sector).busy {
            return None;
        }
        self.stamps += 1;
        Some(self.stamps)
    }

    /// Whether the request in flight for the sector is one of another mapping.
    pub(crate) fn is_busy_elsewhere(&self, key: &str, sector: u64, mapping_id: &str) -> bool {
        let same = |running: &&Running| running.key == key && running.sector == sector;
        self.running.values().find(same).is_some_and(|running| running.mapping_id != mapping_id)
    }

    /// Records that a request of a mapping has started: a write with its stamp, or a read.
    pub(crate) fn begin(
        &mut self,
        ticket: Ticket,
        (key, sector, mapping_id): (&str, u64, &str),
        stamp: Option<u64>,
    ) {
        let known = self.sector(key, sector);
        known.busy = true;
        known.doubtful.extend(stamp);
        let asked = stamp.map_or(Asked::Read, Asked::Write);
        let (key, mapping_id) = (key.to_owned(), mapping_id.to_owned());
        self.running.insert(ticket, Running { key, sector, mapping_id, asked });
    }

    /// Records that a request has ended. The error describes data that its user could not have expected.
    pub(crate) fn ended(&mut self, ticket: Ticket, read: Option<&[u8]>) -> Result<(), String> {
        let Some(Running { key, sector: number, asked, .. }) = self.running.remove(&ticket) else {
            return Ok(());
        };
        let sector = self.sector(&key, number);
        sector.busy = false;
        let Some(bytes) = read else { return Ok(()) };
        let stamp = bytes.first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk));
        let result = match asked {
            Asked::Write(stamp) => {
                sector.acknowledged = stamp;
                sector.doubtful.clear();
                Ok(())
            }
            Asked::Read => sector.expect(stamp),
        };
        self.done += 1;
        result.map_err(|error| format!("sector {number} of {key}: {error}"))
    }

    /// Whether a request is still in flight.
    pub(crate) fn is_running(&self, ticket: Ticket) -> bool {
        self.running.contains_key(&ticket)
    }

    /// Compares the content of a disk with what its users know.
    pub(crate) fn compare(&mut self, key: &str, disk: &Disk) -> Result<(), String> {
        let Some(sectors) = self.volumes.get_mut(key) else { return Ok(()) };
        for (number, sector) in sectors {
            let found = disk.sectors.get(number).copied().unwrap_or(0);
            sector.expect(found).map_err(|error| format!("sector {number} of {key}: {error}"))?;
        }
        Ok(())
    }

    fn sector(&mut self, key: &str, number: u64) -> &mut Sector {
        self.volumes.entry(key.to_owned()).or_default().entry(number).or_default()
    }
}

impl Sector {
    fn expect(&mut self, found: u64) -> Result<(), String> {
        if found == self.acknowledged {
            return Ok(());
        }
        if !self.doubtful.contains(&found) {
            return Err(format!(
                "holds {found}; write {} was the last to be answered, {:?} are in doubt",
                self.acknowledged, self.doubtful
            ));
        }
        // The write was executed; no older data may reappear.
        self.doubtful.retain(|stamp| *stamp > found);
        self.acknowledged = found;
        Ok(())
    }
}
