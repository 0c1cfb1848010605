//! An open volume: the log writer, the reader, checkpoints and the collector.
//!
//! All methods are futures without a runtime. [`Volume::run`] is the work in the background: puts of log
//! objects, checkpoints, collection. The embedder polls it as long as the volume is open, and drops it to stop
//! the volume at any moment: what was not flushed is lost then, as in a crash.
//!
//! Memory is bounded by [`Config`]: the tail of the log that is not in the map yet, the pages of the map, what is read
//! ahead, and about 50 bytes for each log object; by 20 MiB for a request that reads, and by 12 MiB for a checkpoint that is
//! written. Writes wait while the tail is full.

mod access;
mod ahead;
mod apply;
mod budget;
mod check;
mod checkpoint;
mod cloning;
mod collect;
mod content;
mod difference;
mod extents;
mod fetch;
mod flatten;
mod flattening;
mod keep;
mod lineage;
mod merge;
mod opening;
mod page_objects;
mod pages;
mod place;
mod ranges;
mod read_ahead;
mod reading;
mod recovery;
mod repair;
mod request;
mod shared;
mod snapshot_requests;
mod snapshots;
mod stored;
mod sweep;
mod table;
mod tail;
mod tasks;
mod upload;
mod usage;

use std::ops::Range;
use std::sync::Arc;

pub use access::Failure;
pub use check::{Check, Defect, Depth, WrongUsage};
pub use cloning::NewClone;
pub use difference::Difference;
pub use flattening::Flattening;
pub use keep::Keep;
pub use lineage::Parents;
pub use place::{Newest, Place};
pub use reading::Found;
pub use repair::{Findings, Progress, Rebuilt, Refusal, Repair};

use crate::codec::{Description, MAX_DATA_BYTES, MAX_MAP_PAGES, Snapshot};
use crate::name::{Name, Nonce, SnapshotId};
use crate::store::Store;
use crate::tail_memory::TailMemory;
use access::{Access, Put};
use request::SECTOR_BYTES;
use shared::Shared;
use tasks::Part;
#[cfg(test)]
pub(crate) use tasks::all;
pub(crate) use tasks::race;

/// The limits of an open volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The data of a log object in bytes, at most half of what the format permits. A batch with more is sent
    /// without a flush.
    pub object_bytes: usize,
    /// The records of a log object.
    pub object_records: usize,
    /// The maximum data in the tail of the log in bytes.
    pub tail_bytes: usize,
    /// The maximum number of slots in the tail of the log.
    pub tail_slots: usize,
    /// The log objects that are sent at the same time.
    pub puts_in_flight: usize,
    /// The memory for pages of the map in bytes. Half of it may have changes that are not in a checkpoint.
    pub map_bytes: usize,
    /// The memory for data that is read ahead of sequential reads, in bytes; 0: nothing is read ahead.
    pub read_ahead_bytes: usize,
    /// The slots after which a checkpoint is written.
    pub checkpoint_slots: u64,
    /// The checkpoints between two searches for objects that nothing refers to.
    pub sweep_checkpoints: u64,
    /// The objects with pages that a volume may have besides twice the number that the needed pages would fill. If there
    /// are more, pages are written again, together.
    pub spare_page_objects: usize,
    /// The space of log objects, in percent of the data in them that is needed, from which the collector
    /// relocates data.
    pub max_space_percent: u64,
    /// The data that the collector may copy without another [`Volume::grant_copies`], at most, in bytes; `None`: it
    /// copies without a limit. The limit does not apply while the space is above `max_space_percent` and 50 percent
    /// more, plus two objects.
    pub max_copies: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            object_bytes: 8 << 20,
            object_records: 4096,
            tail_bytes: 64 << 20,
            tail_slots: 256,
            puts_in_flight: 4,
            map_bytes: 64 << 20,
            read_ahead_bytes: 56 << 20,
            checkpoint_slots: 256,
            sweep_checkpoints: 64,
            spare_page_objects: 16,
            max_space_percent: 150,
            max_copies: None,
        }
    }
}

impl Config {
    fn clamp(&mut self) {
        self.object_bytes = self.object_bytes.clamp(MIN_OBJECT_BYTES, MAX_OBJECT_BYTES);
    }
}

/// The minimum of [`Config::object_bytes`].
const MIN_OBJECT_BYTES: usize = 4 << 10;

/// The maximum of [`Config::object_bytes`]. Requests at the same time may add to a batch.
#[allow(clippy::cast_possible_truncation, reason = "it is 8 MiB")]
const MAX_OBJECT_BYTES: usize = MAX_DATA_BYTES as usize / 2;

/// What an open volume uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The epoch in which the volume was opened.
    pub epoch: u64,
    /// The log objects.
    pub objects: usize,
    /// The data in them that the volume needs, in bytes.
    pub live_bytes: u64,
    /// Their space in bytes; objects of less than 64 KiB count as this.
    pub space_bytes: u64,
    /// All data in them in bytes, before compression.
    pub object_bytes: u64,
    /// The bytes of the objects that were put to the store since the volume was opened, those of the collector
    /// included.
    pub put_bytes: u64,
    /// The bytes that were written since then, without those of the collector.
    pub written_bytes: u64,
    /// The bytes that the collector has copied since then.
    pub copied_bytes: u64,
    /// The memory of the map's pages in bytes.
    pub map_bytes: usize,
    /// The data that was read ahead in bytes.
    pub ahead_bytes: u64,
    /// The data in the tail of the log in bytes.
    pub tail_bytes: usize,
    /// The data of records that are in the tail memory and not confirmed in the store, in bytes.
    pub kept_bytes: u64,
    /// The checkpoints that were written since the volume was opened.
    pub checkpoints: u64,
}

/// A volume that this process has opened for writing. Clones are handles of the same volume.
#[derive(Clone)]
pub struct Volume(Arc<Shared>);

impl Volume {
    /// Creates a volume.
    ///
    /// # Errors
    /// Returns an error if the place has a volume already, if the size is not a multiple of 512 bytes, or if the
    /// store fails.
    pub async fn create(store: Arc<dyn Store>, description: &Description) -> Result<(), Failure> {
        Self::check_size(description.size, description.page_bytes)?;
        let access = Access::new(store, description.volume, description.nonce);
        match access.put_soon(Name::Description, &description.encode()).await? {
            Put::Own => Ok(()),
            Put::Foreign => Err(Failure::Invalid("a volume exists in this place already")),
        }
    }

    /// Checks the size of a new volume, in bytes.
    ///
    /// # Errors
    /// Returns an error if it is not a multiple of 512 bytes, or needs too many pages of the map.
    pub fn check_size(size: u64, page_bytes: u32) -> Result<(), Failure> {
        if !size.is_multiple_of(SECTOR_BYTES) {
            return Err(Failure::Invalid("the size is not a multiple of 512 bytes"));
        }
        if size.div_ceil(page_bytes.into()) > MAX_MAP_PAGES {
            return Err(Failure::Invalid("the size is too large for the pages of the map"));
        }
        Ok(())
    }

    /// Claims the next epoch, whoever has the newest one, and opens the volume for writing: fences the writer that
    /// has it, and recovers what that one has written. `nonce` is random and was never used before. `owner` names
    /// the opener for people. [`Place`] has the same in steps.
    ///
    /// # Errors
    /// Returns [`Failure::Fenced`] if another opener was faster, and another error if there is no volume, if it is
    /// damaged, or if the store fails.
    pub async fn open(
        store: Arc<dyn Store>,
        nonce: Nonce,
        owner: &str,
        config: Config,
    ) -> Result<Self, Failure> {
        let place = Place::find(store, nonce).await?;
        let epoch = place.claim_next(owner).await?;
        place.open(epoch, config).await
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// The epoch in which the volume was opened.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// What the volume uses now.
    pub fn status(&self) -> Status {
        let state = self.0.lock();
        Status {
            epoch: self.0.epoch,
            objects: state.usage.len(),
            live_bytes: state.usage.all().live,
            space_bytes: state.usage.all().space,
            object_bytes: state.usage.all().bytes,
            put_bytes: self.0.access.put_bytes(),
            written_bytes: state.written_bytes,
            copied_bytes: state.budget.copied(),
            map_bytes: state.map.bytes(),
            ahead_bytes: state.ahead.bytes(),
            tail_bytes: state.tail.bytes(),
            kept_bytes: state.tail_memory.as_ref().map_or(0, TailMemory::bytes),
            checkpoints: state.checkpoints.count,
        }
    }

    /// Writes data. It is durable after the next [`Volume::flush`]. Waits while the tail of the log is full.
    ///
    /// # Errors
    /// Returns an error if the range is invalid or if the volume has failed, for example because it is fenced.
    pub async fn write(&self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.0.write(offset, data).await
    }

    /// Makes a range read as zeroes, because its content is no longer needed.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub async fn trim(&self, offset: u64, length: u64) -> Result<(), Failure> {
        self.0.zero(offset, length, true).await
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub async fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Failure> {
        self.0.zero(offset, length, false).await
    }

    /// Reads a range. Data of writes that were not flushed is included.
    ///
    /// # Errors
    /// As [`Volume::write`]; also if the store fails, or if an object is lost or damaged.
    pub async fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        self.0.read(offset, buffer).await
    }

    /// Has the processor load what the lookups of reads at these offsets need from the memory, at the same time.
    pub fn load_entries(&self, offsets: impl Iterator<Item = u64>) {
        self.0.load_entries(offsets);
    }

    /// Begins a read that needs no store and no disk, because the map, the tail and the cache have everything in memory.
    /// Never waits for the store. Returns `None` if something is missing or fails; [`Volume::read`] must be called then. Other reads may
    /// begin before [`Volume::prepare`] is called for all of them, and then [`Volume::copy_at_once`]: so the processor loads
    /// what they need at the same time.
    pub fn look_up_at_once(&self, offset: u64, buffer: &mut [u8]) -> Option<Found> {
        self.0.look_up_at_once(offset, buffer)
    }

    /// Prepares the copies of a read.
    pub fn prepare(&self, found: &Found) {
        self.0.prepare(found);
    }

    /// Ends the read, with the same buffer. Never waits for the store. Returns false if [`Volume::read`] must be called.
    pub fn copy_at_once(&self, found: &Found, buffer: &mut [u8]) -> bool {
        self.0.copy_at_once(found, buffer)
    }

    /// Returns when everything that was written before the call is durable in the store. Flushes at the same
    /// time share a put.
    ///
    /// # Errors
    /// Returns an error if the volume has failed, for example because it is fenced.
    pub async fn flush(&self) -> Result<(), Failure> {
        self.0.flush().await
    }

    /// Makes the volume larger, up to `size` bytes. The change is durable when the call returns.
    ///
    /// # Errors
    /// Returns an error if the size is smaller than before, is not a multiple of 512 bytes or is too large, or if
    /// the volume has failed.
    pub async fn grow(&self, size: u64) -> Result<(), Failure> {
        self.0.grow(size).await
    }

    /// Splits a range into at most `limit` consecutive parts, each with whether it has data. The parts without
    /// data read as zeroes. They end before the range does if the limit is reached.
    ///
    /// # Errors
    /// As [`Volume::read`].
    pub async fn extents(
        &self,
        range: Range<u64>,
        limit: usize,
    ) -> Result<Vec<(Range<u64>, bool)>, Failure> {
        self.0.extents(range, limit).await
    }

    /// Splits a range into at most `limit` consecutive parts by how they differ from `since`, an earlier content of the same
    /// volume: a view of a snapshot, for example. The parts end before the range does if the limit is reached. A range
    /// behind the end of `since` is compared with zeroes.
    ///
    /// Reads pages of the map that the two do not share, and no data. A range that was written counts as different, also
    /// with the same data. So does a range that the collector has moved or a flattening has copied; neither happens to a
    /// range that `since` has in common, as long as the snapshot exists, except for a clone that is flattened.
    ///
    /// # Errors
    /// As [`Volume::read`]; also `Invalid` if `since` is a content of another volume.
    pub async fn differences(
        &self,
        since: &Self,
        range: Range<u64>,
        limit: usize,
    ) -> Result<Vec<(Range<u64>, Difference)>, Failure> {
        self.0.differences(&since.0, range, limit).await
    }

    /// The snapshots of the volume, the oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.0.snapshots()
    }

    /// Takes a snapshot of everything that was written before the call, with one record in the log. It is durable
    /// when the call returns. `created_at_s` is the time in seconds since 1970, for people. Waits while a checkpoint is
    /// in progress, and after a roll-back for the first one.
    ///
    /// # Errors
    /// Returns an error if the name is too long or that of another snapshot, if there are too many snapshots, or if the
    /// volume has failed.
    pub async fn take_snapshot(
        &self,
        name: &str,
        created_at_s: u64,
    ) -> Result<SnapshotId, Failure> {
        self.0.take_snapshot(name, created_at_s).await
    }

    /// Deletes a snapshot. The deletion is durable when the call returns; the space is freed later.
    ///
    /// # Errors
    /// Returns an error if there is no such snapshot, or if the volume has failed.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<(), Failure> {
        self.0.delete_snapshot(id).await
    }

    /// Gives the volume the content and the size of a snapshot. The change is durable when the call returns. No other
    /// request may run meanwhile.
    ///
    /// # Errors
    /// As [`Volume::delete_snapshot`]; also if an object is lost or damaged.
    pub async fn roll_back(&self, id: SnapshotId) -> Result<(), Failure> {
        self.0.roll_back(id).await
    }

    /// Returns the content of a snapshot, to read it. Reads return [`Failure::Lost`] some time after the snapshot was
    /// deleted. Must not be run, written or flushed.
    ///
    /// # Errors
    /// As [`Volume::roll_back`].
    pub async fn view_snapshot(&self, id: SnapshotId, mut config: Config) -> Result<Self, Failure> {
        config.clamp();
        self.0.view_snapshot(id, config).await.map(|shared| Self(Arc::new(shared)))
    }

    /// Looks whether another opener has claimed a later epoch. If so, the volume has failed from then on: the
    /// opener fences this one, or is about to.
    ///
    /// # Errors
    /// Returns [`Failure::Fenced`] for a later claim, and another error if the store fails.
    pub async fn check_claim(&self) -> Result<(), Failure> {
        match opening::is_superseded(&self.0.access, self.0.epoch).await? {
            true => {
                self.0.fail(&Failure::Fenced);
                Err(Failure::Fenced)
            }
            false => Ok(()),
        }
    }

    /// Whether everything that was written is in the store or in the tail memory, so that it survives the process.
    pub fn is_kept(&self) -> bool {
        self.0.lock().tail_memory.as_ref().is_some_and(TailMemory::is_complete)
    }

    /// Whether the volume keeps what is written in the tail memory, and has room for a write of this many bytes
    /// without a wait.
    pub fn can_keep(&self, bytes: u64) -> bool {
        self.is_kept() && self.0.has_room(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Sends records that no flush covers. `seen` is the result of the call before: what was written before that call
    /// is sent now.
    pub fn send_older(&self, seen: u64) -> u64 {
        let mut state = self.0.lock();
        let next = state.tail.next();
        if state.tail.open_records() == 0 {
            return 0;
        }
        if next == seen {
            state.tail.flush_wanted = true;
            state.changed();
        }
        next
    }

    /// Whether puts of the log are in progress or due.
    pub fn has_puts(&self) -> bool {
        !self.0.lock().tail.is_quiet()
    }

    /// Lets the work in the background start nothing new, and returns when what it was doing has ended, puts
    /// included. Requests that follow are served only as long as the tail has room.
    ///
    /// # Errors
    /// Returns an error if the volume has failed; nothing is in progress then, except for puts without an answer.
    pub async fn pause(&self) -> Result<(), Failure> {
        {
            let mut state = self.0.lock();
            state.pause.is_wanted = true;
            state.changed();
        }
        self.0.wait(|state| (state.pause.running == 0 && state.tail.is_quiet()).then_some(())).await
    }

    /// Lets the work in the background go on after [`Volume::pause`].
    pub fn resume(&self) {
        let mut state = self.0.lock();
        state.pause.is_wanted = false;
        state.changed();
    }

    /// Lets the work in the background copy what the volume, a clone, still reads from its parent. A flattening that was
    /// stopped or has failed begins again, and copies only what was not copied.
    pub fn start_flatten(&self) {
        self.0.start_flatten();
    }

    /// Ends a flattening that is in progress. What was copied stays copied.
    pub fn stop_flatten(&self) {
        self.0.stop_flatten();
    }

    /// How far the flattening is.
    pub fn flattening(&self) -> Flattening {
        self.0.flattening()
    }

    /// Starts a flattening, and waits until it has ended. `progress` gets the bytes of the volume that were looked at, and
    /// all; it can stop the flattening. [`Place::make_independent`] may follow.
    ///
    /// # Errors
    /// Returns [`Failure::NeedParent`] if snapshots of the volume need its parent, `Invalid` if the flattening was
    /// stopped, and another error if the volume or the parent is damaged, or if the volume has failed.
    pub async fn flatten(&self, progress: Progress<'_>) -> Result<(), Failure> {
        self.0.follow_flatten(progress).await
    }

    /// Lets the collector copy this many bytes more, if [`Config::max_copies`] limits it.
    pub fn grant_copies(&self, bytes: u64) {
        if self.0.config.max_copies.is_some() {
            let mut state = self.0.lock();
            state.budget.grant(bytes);
            state.changed();
        }
    }

    /// Asks for a checkpoint. It is written in the background.
    pub fn request_checkpoint(&self) {
        let mut state = self.0.lock();
        state.checkpoints.wanted = true;
        state.changed();
    }

    /// Why the volume has failed.
    #[cfg(test)]
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.0.lock().check().err()
    }

    /// The number of names of superfluous objects that are in memory.
    #[cfg(test)]
    pub(crate) fn superfluous_names(&self) -> usize {
        self.0.lock().garbage.names()
    }

    /// Compares the live bytes of every log object with the map.
    #[cfg(test)]
    pub(crate) async fn check_accounting(&self) -> Result<(), Failure> {
        let mut check = Check::new(Depth::Objects);
        for number in 0..self.map_pages() {
            if !check.page(self, number).await?.is_empty() {
                return Err(Failure::Invalid("a page has defects"));
            }
        }
        match check.wrong_usage(self).as_slice() {
            [] => Ok(()),
            _ => Err(Failure::Invalid("the accounting differs from the map")),
        }
    }

    /// Reads ahead of sequential reads until the volume fails, for a volume that is not run: a view of one moment.
    pub async fn read_ahead(&self) -> Failure {
        let parts =
            (0..read_ahead::STEPS).map(|_| -> Part<'_, Failure> { Box::pin(self.0.read_ahead()) });
        race(parts.collect()).await
    }

    /// Does the work in the background until the volume fails. It must be polled for flushes to end. Puts are
    /// repeated without a limit while the store fails, so an outage delays flushes and does not fail them.
    pub async fn run(&self) -> Failure {
        let shared = &self.0;
        let mut parts: Vec<Part<'_, Failure>> = Vec::new();
        for _ in 0..shared.config.puts_in_flight {
            parts.push(Box::pin(shared.upload()));
        }
        parts.push(Box::pin(shared.apply()));
        parts.push(Box::pin(shared.collect()));
        parts.push(Box::pin(shared.flatten()));
        for _ in 0..read_ahead::STEPS {
            parts.push(Box::pin(shared.read_ahead()));
        }
        race(parts).await
    }
}
