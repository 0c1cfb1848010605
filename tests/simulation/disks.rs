//! What volumes hold, who has them open, and what their users may expect to read.

use std::collections::BTreeMap;

use cleat_kernel::sim::Ticket;

use crate::world::Claim;

/// The unit of simulated I/O, in bytes.
pub(crate) const SECTOR: u64 = 512;

/// Sectors that are used; every volume is larger.
pub(crate) const SECTORS: u64 = 8;

/// A volume at its backend.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    pub(crate) size: u64,
    /// By number; one never written is 0.
    pub(crate) sectors: BTreeMap<u64, u64>,
    /// Who has it open.
    pub(crate) claims: Vec<Claim>,
    /// Of those that have written, the last that opened it.
    last_writer: u64,
    /// Not to be found just now.
    pub(crate) gone: bool,
    /// Answers nothing just now.
    pub(crate) hung: bool,
}

impl Disk {
    pub(crate) fn new(size: u64) -> Self {
        Self { size, ..Self::default() }
    }

    /// A write that reaches the backend. `epoch` counts opens: nothing of an earlier one may come
    /// after something of a later one.
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

/// What a volume's users know: every write carries a number of its own.
#[derive(Debug, Default)]
pub(crate) struct Model {
    volumes: BTreeMap<String, BTreeMap<u64, Sector>>,
    running: BTreeMap<Ticket, Running>,
    stamps: u64,
    /// Requests that have succeeded.
    pub(crate) done: u64,
}

#[derive(Debug, Default)]
struct Sector {
    /// The last write that was answered.
    acknowledged: u64,
    /// Writes since then whose end is not known: each may have been carried out or not.
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
    /// A number for a write to a sector; `None` while another request for it is under way.
    pub(crate) fn next_stamp(&mut self, key: &str, sector: u64) -> Option<u64> {
        if self.sector(key, sector).busy {
            return None;
        }
        self.stamps += 1;
        Some(self.stamps)
    }

    /// Whether it is another mapping's request that is under way.
    pub(crate) fn is_busy_elsewhere(&self, key: &str, sector: u64, mapping_id: &str) -> bool {
        let same = |running: &&Running| running.key == key && running.sector == sector;
        self.running.values().find(same).is_some_and(|running| running.mapping_id != mapping_id)
    }

    /// A mapping's request is under way: a write with its number, or a read.
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

    /// A request has ended. The error says what its user could not have expected.
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

    /// Whether a request is still under way.
    pub(crate) fn is_running(&self, ticket: Ticket) -> bool {
        self.running.contains_key(&ticket)
    }

    /// Compares a disk with what its users know.
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
        // It was carried out; nothing older may come back.
        self.doubtful.retain(|stamp| *stamp > found);
        self.acknowledged = found;
        Ok(())
    }
}
