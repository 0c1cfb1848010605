//! What an open image shares with its queues and with its own futures.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use cleat_backend::Waker;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::request::Request;
use cleat_core::space::SpaceUse;
use cleat_object::name::SnapshotId;
use cleat_object::volume::{Config, Failure, Place, Status, Volume};

use crate::collector::Collector;
use crate::executor::{Spawner, TaskId};
use crate::pauses::Pauses;
use crate::quiesce::Quiesce;

/// The state of an open image.
pub(crate) struct Shared {
    /// The volume's name, for logs.
    pub(crate) name: String,
    pub(crate) spawner: Spawner,
    /// The engine. `None` before a successor has taken over, after a release, and after closing.
    volume: RwLock<Option<Volume>>,
    /// The snapshot that is read.
    snapshot: Option<SnapshotId>,
    pub(crate) collector: Collector,
    /// Where a reader looks again; `None` for a writer.
    reader: OnceLock<Place>,
    /// The read-ahead of a reader.
    reading: Mutex<Option<TaskId>>,
    size: AtomicU64,
    is_fenced: AtomicBool,
    /// The supervisor passes the tail file to the next process.
    tail_is_passed_on: AtomicBool,
    pauses: Pauses,
    /// The snapshots that wait until the volume is quiesced.
    pub(crate) quiesce: Quiesce,
    /// Why the volume cannot continue, unless it is fenced.
    broken: Mutex<Option<String>>,
    waker: Mutex<Option<Waker>>,
    /// Gets the data that is not durable yet, in bytes.
    report: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
    /// Gets what the volume has put to its store and takes there.
    space_report: OnceLock<Box<dyn Fn(SpaceUse) + Send + Sync>>,
}

impl Shared {
    pub(crate) fn new(
        name: String,
        spawner: Spawner,
        size: u64,
        (snapshot, collector): (Option<SnapshotId>, Collector),
    ) -> Self {
        Self {
            name,
            spawner,
            volume: RwLock::new(None),
            snapshot,
            collector,
            reader: OnceLock::new(),
            reading: Mutex::default(),
            size: AtomicU64::new(size),
            is_fenced: AtomicBool::new(false),
            tail_is_passed_on: AtomicBool::new(true),
            pauses: Pauses::default(),
            quiesce: Quiesce::default(),
            broken: Mutex::default(),
            waker: Mutex::default(),
            report: OnceLock::new(),
            space_report: OnceLock::new(),
        }
    }

    pub(crate) fn volume(&self) -> Option<Volume> {
        self.volume.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets or removes the engine. Returns the earlier one.
    pub(crate) fn set_volume(&self, volume: Option<Volume>) -> Option<Volume> {
        if let Some(volume) = &volume {
            self.size.store(volume.size(), Ordering::Release);
        }
        std::mem::replace(&mut self.volume.write().unwrap_or_else(PoisonError::into_inner), volume)
    }

    /// Serves reads from what the volume has now, and later from what it has then if the writer has deleted that.
    ///
    /// # Errors
    /// Returns the failure of the store.
    pub(crate) async fn read_from(&self, place: Place) -> Result<(), Failure> {
        let view = self.look(&place).await?;
        self.follow(view);
        // The first place stays. Both are of the same volume.
        let _ = self.reader.set(place);
        Ok(())
    }

    /// Serves reads from `view`, and reads ahead of them.
    fn follow(&self, view: Volume) {
        self.set_volume(Some(view.clone()));
        let task = self.spawner.spawn(async move {
            // It ends with the failure of the view, which requests report.
            let _ = view.read_ahead().await;
        });
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(earlier) = reading.replace(task) {
            self.spawner.cancel(earlier);
        }
    }

    async fn look(&self, place: &Place) -> Result<Volume, Failure> {
        match self.snapshot {
            Some(id) => place.view_snapshot(id, Config::default()).await,
            None => place.view(Config::default()).await,
        }
    }

    /// Looks at the volume again after `failure`, if this is a reader whose data was deleted by the writer. Returns
    /// the present content, or the failure.
    ///
    /// # Errors
    /// Returns `failure`, or that of the store.
    pub(crate) async fn look_again(&self, failure: Failure) -> Result<Volume, Failure> {
        match (self.reader.get(), &failure) {
            (Some(place), Failure::Lost(_) | Failure::Fenced) => {
                let view = self.look(place).await?;
                self.follow(view.clone());
                Ok(view)
            }
            _ => Err(failure),
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Records the size, and wakes the owner of the image if it has changed.
    pub(crate) fn note_size(&self, size: u64) {
        if self.size.swap(size, Ordering::AcqRel) != size {
            self.wake();
        }
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Acquire)
    }

    /// Sets whether the next process of the mapping gets the tail file. If not, what is in it is sent now.
    pub(crate) fn permit_tail_file(&self, is_passed_on: bool) {
        self.tail_is_passed_on.store(is_passed_on, Ordering::Release);
        if let Some(volume) = self.volume().filter(|_| !is_passed_on) {
            self.spawner.spawn(async move {
                // A failure is reported by the requests.
                let _ = volume.flush().await;
            });
        }
    }

    pub(crate) fn set_report(&self, report: Box<dyn Fn(u64) + Send + Sync>) {
        // There is one owner.
        let _ = self.report.set(report);
    }

    /// Reports the data of acknowledged writes that is not durable yet, in bytes.
    pub(crate) fn report_unsaved(&self, bytes: u64) {
        if let Some(report) = self.report.get() {
            report(bytes);
        }
    }

    pub(crate) fn set_space_report(&self, report: Box<dyn Fn(SpaceUse) + Send + Sync>) {
        // There is one owner.
        let _ = self.space_report.set(report);
    }

    /// Reports what the volume has put to its store and takes there.
    pub(crate) fn report_space(&self, status: &Status) {
        if let Some(report) = self.space_report.get() {
            report(SpaceUse {
                put_bytes: status.put_bytes,
                written_bytes: status.written_bytes,
                object_bytes: status.object_bytes,
                live_bytes: status.live_bytes,
                copied_bytes: status.copied_bytes,
                copy_rate: self.collector.rate.unwrap_or(0),
            });
        }
    }

    /// Whether a write of this many bytes survives the process once it is in the tail memory, and has room there.
    pub(crate) fn can_keep(&self, volume: &Volume, bytes: u64) -> bool {
        self.tail_is_passed_on.load(Ordering::Acquire) && volume.can_keep(bytes)
    }

    /// Whether a write can be acknowledged before it is durable: it survives the process, which was not stopped.
    pub(crate) fn is_kept(&self, volume: &Volume) -> bool {
        self.tail_is_passed_on.load(Ordering::Acquire)
            && volume.is_kept()
            && self.pauses.are_over(SystemClock.boot_ns())
    }

    /// Records that this process works. Must be called about every second.
    pub(crate) fn is_working(&self) {
        self.pauses.look(SystemClock.boot_ns());
    }

    /// Makes a record durable that was just appended, and everything before it.
    ///
    /// # Errors
    /// Returns the failure of the store, and `Fenced` if another client has taken the volume over.
    pub(crate) async fn put(&self, volume: &Volume) -> Result<(), Failure> {
        let pauses = self.pauses.look(SystemClock.boot_ns());
        volume.flush().await?;
        self.pauses.end(pauses);
        Ok(())
    }

    /// Records that another client owns the volume, and wakes the owner of the image.
    pub(crate) fn set_fenced(&self) {
        if !self.is_fenced.swap(true, Ordering::AcqRel) {
            tracing::error!(volume = %self.name, "another client has taken the volume over");
            self.wake();
        }
    }

    /// Records what a failure of the engine, in a request or in the background, means for the whole image.
    pub(crate) fn note(&self, failure: &Failure, request: Option<&Request>) {
        match failure {
            Failure::Fenced | Failure::Stale { .. } => self.set_fenced(),
            Failure::Damaged { .. }
            | Failure::Lost(_)
            | Failure::Unsupported(_)
            | Failure::TailMemory(_) => {
                let mut broken = self.broken();
                let reason = failure.to_string();
                if broken.as_ref() != Some(&reason) {
                    // It says which part of the volume is affected.
                    let range = request.map(|Request { offset, length, .. }| {
                        *offset..offset.saturating_add(*length)
                    });
                    tracing::error!(volume = %self.name, %reason, ?range, "the volume is damaged");
                    *broken = Some(reason);
                }
            }
            Failure::Store { .. }
            | Failure::NoSnapshot
            | Failure::HasClones
            | Failure::NeedParent(_)
            | Failure::Locked
            | Failure::WrongKey
            | Failure::NotEncrypted
            | Failure::Invalid(_) => {}
        }
    }

    pub(crate) fn broken(&self) -> MutexGuard<'_, Option<String>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn watch(&self, waker: Waker) {
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
