//! A node that opens the volume, writes, reads and flushes until it is fenced or ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::oracle::{Change, Content, Image, Oracle, SECTORS};
use super::ram::Ram;
use super::random::Random;
use super::store::Client;
use crate::encryption::KeyFile;
use crate::name::Nonce;
use crate::store::{Pending, Store as _};
use crate::volume::{Config, Failure, Keep, Place, Volume};

/// The bytes of a sector.
pub(super) const SECTOR: usize = 512;

/// The sectors of a map page.
const PAGE_SECTORS: usize = 8;

/// The snapshots that a node keeps at most.
const MAX_SNAPSHOTS: usize = 4;

/// A node.
#[derive(Clone)]
pub(super) struct Actor {
    pub(super) client: Client,
    pub(super) oracle: Arc<Mutex<Oracle>>,
    pub(super) random: Arc<Mutex<Random>>,
    pub(super) config: Config,
    /// The sectors that are written: the first ones.
    pub(super) written: usize,
    /// How many times it waits between two flushes.
    pub(super) idle: u64,
    /// The tail memory of the mapping.
    pub(super) ram: Option<Arc<Ram>>,
    /// The key file of an encrypted volume.
    pub(super) key: Option<KeyFile>,
}

impl Actor {
    pub(super) fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap()
    }

    pub(super) fn random(&self, end: u64) -> u64 {
        self.random.lock().unwrap().below(end)
    }

    pub(super) fn index(&self, end: usize) -> usize {
        usize::try_from(self.random(end as u64)).unwrap()
    }

    /// Opens the volume and works until it fails.
    pub(super) async fn live(self) {
        let failure = match self.open().await {
            Ok((volume, epoch)) => {
                let parts: Vec<Pending<'_, Failure>> = vec![
                    Box::pin(volume.run()),
                    Box::pin(self.work(&volume, epoch)),
                    Box::pin(self.flush(&volume, epoch)),
                    Box::pin(self.flush(&volume, epoch)),
                ];
                let failure = crate::volume::race(parts).await;
                self.judge_open(&volume, &failure);
                failure
            }
            Err(failure) => failure,
        };
        self.judge(&failure);
    }

    /// An identity that no other opener has.
    pub(super) fn nonce(&self) -> Nonce {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.random(u64::MAX).to_le_bytes());
        nonce[8..].copy_from_slice(&(self.client.actor as u64).to_le_bytes());
        Nonce(nonce)
    }

    /// Finds the volume.
    pub(super) async fn find(&self) -> Result<Place, Failure> {
        let store = Arc::new(self.client.clone());
        Place::find_clone(store, self.nonce(), &self.client, self.key.as_ref()).await
    }

    /// Opens the volume and checks it, with the store in order. Returns it for further checks.
    pub(super) async fn open(&self) -> Result<(Volume, u64), Failure> {
        let config = self.config.clone();
        let place = self.find().await?;
        let epoch = place.claim_next("node").await?;
        let ram = self.ram.clone();
        let keep = ram.map(|ram| Keep { memory: ram, owner: 7 });
        let volume = place.open_with(epoch, config, keep.as_ref()).await?;
        let image = read_all(&volume).await?;
        let mut snapshots = BTreeMap::new();
        for snapshot in volume.snapshots() {
            let view = volume.view_snapshot(snapshot.id, self.config.clone()).await?;
            snapshots.insert(snapshot.name, read_all(&view).await?);
        }
        self.if_alive().await;
        self.note(|| format!("open in epoch {epoch}"));
        let before = self.ram.as_ref().and_then(|ram| ram.replace_epoch(epoch));
        self.oracle().opened(epoch, Content { image, snapshots }, before);
        Ok((volume, epoch))
    }

    /// Reports failures that no fault of this store may cause.
    pub(super) fn judge(&self, failure: &Failure) {
        self.note(|| format!("ends: {failure}"));
        if !matches!(failure, Failure::Fenced | Failure::Store { .. } | Failure::Stale { .. }) {
            self.oracle().violate(format!("actor {}: {failure}", self.client.actor));
        }
    }

    /// Reports a failure of the work in the background that an outage of the store has caused: it would never end.
    pub(super) fn judge_open(&self, volume: &Volume, failure: &Failure) {
        let is_store = |failure: &Failure| matches!(failure, Failure::Store { .. });
        if is_store(failure) && volume.failure().as_ref().is_some_and(is_store) {
            let actor = self.client.actor;
            self.oracle()
                .violate(format!("actor {actor}: an outage has ended the volume: {failure}"));
        }
    }

    /// Does not return if the process was killed.
    async fn if_alive(&self) {
        if self.client.life.is_over() {
            std::future::pending::<()>().await;
        }
    }

    async fn pause(&self) {
        for _ in 0..self.random(3) {
            self.client.back_off(1).await;
        }
    }

    async fn work(&self, volume: &Volume, epoch: u64) -> Failure {
        loop {
            let done = match self.random(14) {
                0..6 => self.write(volume, epoch).await,
                6 => self.zero(volume, epoch, true).await,
                7 => self.zero(volume, epoch, false).await,
                8 => {
                    volume.request_checkpoint();
                    Ok(())
                }
                12 => self.change_snapshots(volume, epoch).await,
                _ => self.read(volume, epoch).await,
            };
            match done {
                Ok(()) | Err(Failure::Store { .. }) => {}
                Err(failure) => return failure,
            }
            self.if_alive().await;
            volume.grant_copies(SECTOR as u64);
            if volume.is_kept() {
                self.oracle().kept(epoch);
            }
            self.pause().await;
        }
    }

    async fn write(&self, volume: &Volume, epoch: u64) -> Result<(), Failure> {
        let first = self.index(self.written);
        let most = PAGE_SECTORS - first % PAGE_SECTORS;
        let count = 1 + self.index(most);
        let stamp = self.oracle().begin(epoch, first, first + count, false);
        let data: Vec<u8> = (first..first + count).flat_map(|at| sector(stamp, at)).collect();
        self.note(|| format!("writes {stamp} at {first}..{}", first + count));
        volume.write((first * SECTOR) as u64, &data).await
    }

    async fn zero(&self, volume: &Volume, epoch: u64, is_trim: bool) -> Result<(), Failure> {
        let first = self.index(SECTORS);
        let count = 1 + self.index((SECTORS - first).min(20));
        self.oracle().begin(epoch, first, first + count, true);
        self.note(|| format!("zeroes {first}..{}", first + count));
        let (offset, length) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
        match is_trim {
            true => volume.trim(offset, length).await,
            false => volume.write_zeroes(offset, length).await,
        }
    }

    /// Takes, deletes or reads a snapshot, or rolls the volume back.
    async fn change_snapshots(&self, volume: &Volume, epoch: u64) -> Result<(), Failure> {
        let snapshots = volume.snapshots();
        let what = self.random(8);
        if snapshots.is_empty() || what < 3 && snapshots.len() < MAX_SNAPSHOTS {
            let name = self.oracle().take(epoch);
            self.note(|| format!("takes snapshot {name}"));
            return volume.take_snapshot(&name, 0).await.map(|_| ());
        }
        let chosen = &snapshots[self.index(snapshots.len())];
        let name = chosen.name.clone();
        match what {
            0..5 => {
                self.note(|| format!("deletes snapshot {name}"));
                self.oracle().change(epoch, Change::Delete(name.clone()));
                match volume.delete_snapshot(chosen.id).await {
                    // Nothing was appended to the log.
                    Err(Failure::HasClones | Failure::Store { .. }) => {
                        self.note(|| format!("keeps snapshot {name}"));
                        self.oracle().keep(epoch);
                        Ok(())
                    }
                    other => other,
                }
            }
            5 => {
                self.note(|| format!("rolls back to {name}"));
                self.oracle().change(epoch, Change::RollBack(name));
                volume.roll_back(chosen.id).await
            }
            _ => {
                let view = volume.view_snapshot(chosen.id, self.config.clone()).await?;
                let found = read_all(&view).await?;
                self.oracle().read_snapshot(epoch, &name, &found);
                Ok(())
            }
        }
    }

    async fn read(&self, volume: &Volume, epoch: u64) -> Result<(), Failure> {
        let first = self.index(SECTORS);
        let count = 1 + self.index((SECTORS - first).min(20));
        let mut data = vec![0; count * SECTOR];
        volume.read((first * SECTOR) as u64, &mut data).await?;
        self.oracle().read(epoch, first, &stamps(first, &data));
        Ok(())
    }

    async fn flush(&self, volume: &Volume, epoch: u64) -> Failure {
        loop {
            self.pause().await;
            for _ in 0..=self.idle {
                self.client.back_off(1).await;
            }
            // The last change may be in progress; a flush covers only completed ones.
            let count = self.oracle().changes(epoch).saturating_sub(1);
            if let Err(failure) = volume.flush().await {
                return failure;
            }
            self.if_alive().await;
            self.note(|| format!("has {count} changes acknowledged"));
            self.oracle().acknowledged(epoch, count);
        }
    }

    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        let actor = self.client.actor;
        self.client.cloud.lock().unwrap().note(|| format!("{actor} {}", text()));
    }
}

/// Reads the stamps of all sectors.
pub(super) async fn read_all(volume: &Volume) -> Result<Image, Failure> {
    let mut data = vec![0; SECTORS * SECTOR];
    volume.read(0, &mut data).await?;
    Ok(stamps(0, &data).try_into().unwrap())
}

/// The content of a sector: the stamp, and the number of the sector. Every third one cannot be compressed.
pub(super) fn sector(stamp: u64, at: usize) -> Vec<u8> {
    let word = stamp << 16 | at as u64;
    let mut noise = Random(word);
    let words = (0..SECTOR / 8).map(|place| match place {
        1.. if stamp.is_multiple_of(3) => word ^ noise.next(),
        _ => word,
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// The stamps in the sectors of `data`; an impossible one for a sector that is torn or in a wrong place.
fn stamps(first: usize, data: &[u8]) -> Vec<u64> {
    let stamp = |(at, bytes): (usize, &[u8])| {
        let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let (stamp, number) = (word >> 16, first + at);
        let is_zero = bytes.iter().all(|byte| *byte == 0);
        if is_zero || bytes == sector(stamp, number) { stamp } else { u64::MAX }
    };
    data.chunks(SECTOR).enumerate().map(stamp).collect()
}
