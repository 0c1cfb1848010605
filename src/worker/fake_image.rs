//! A volume without content for the tests of this crate; a test sets how it behaves.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use cleat_backend::{
    BackgroundWork, Completer, Image, ImageQueue, Resize, RunningTask, SizeChecks, SnapshotQuiesce,
    VolumeIdentity, Waker, WriteHold,
};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::ring::Ring;

#[derive(Default)]
pub(super) struct FakeImage {
    size: AtomicU64,
    /// The size at the backend, if it differs from the one that was read last.
    size_at_backend: Mutex<Option<u64>>,
    /// A read of the size waits for this lock.
    pub(super) turn: Mutex<()>,
    /// When the size of the volume should be read.
    size_checks: Option<SizeChecks>,
    /// How often the size was read.
    pub(super) size_reads: AtomicU64,
    /// The tasks that do not stop; `None` for a backend without background work.
    background: Option<Vec<RunningTask>>,
    background_stopped: AtomicBool,
    /// Whether it has the capability to announce snapshots.
    announces_snapshots: bool,
    /// The snapshot that waits.
    pub(super) waiting: Mutex<Option<u64>>,
    /// The answers to snapshots.
    pub(super) answers: Mutex<Vec<(u64, Result<(), i32>)>>,
    pub(super) hold: Mutex<FakeHold>,
}

/// The hold that another client wants, and how it is answered.
#[derive(Default)]
pub(super) struct FakeHold {
    /// The backend has no holds.
    pub(super) missing: bool,
    pub(super) wanted: Option<u64>,
    /// The storage does not answer.
    pub(super) fails: bool,
    /// The numbers, and whether each was confirmed.
    pub(super) answers: Vec<(u64, bool)>,
}

impl FakeHold {
    fn answer(&mut self, number: u64, held: bool) -> Result<()> {
        self.answers.push((number, held));
        let silent = || Error::new(ErrorKind::TimedOut, "no answer");
        if self.fails { Err(silent()) } else { Ok(()) }
    }
}

impl FakeImage {
    /// A volume whose backend requests that the size is read.
    pub(super) fn with_size_checks(checks: SizeChecks) -> Self {
        Self { size_checks: Some(checks), ..Self::default() }
    }

    /// Changes the size at the backend. The next read of the size returns it.
    pub(super) fn grow_at_backend(&self, size: u64) {
        *self.size_at_backend.lock().unwrap() = Some(size);
    }

    /// A volume whose backend has background work, of which these tasks do not stop.
    pub(super) fn with_background(running: Vec<RunningTask>) -> Self {
        Self { background: Some(running), ..Self::default() }
    }

    pub(super) fn background_is_stopped(&self) -> bool {
        self.background_stopped.load(Ordering::SeqCst)
    }

    /// A volume whose backend announces snapshots.
    pub(super) fn with_snapshots() -> Self {
        Self { announces_snapshots: true, ..Self::default() }
    }
}

impl Image for FakeImage {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 1, maximum: 1 }
    }

    fn features(&self) -> Features {
        Features::default()
    }

    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("a fake")
    }

    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Err(Error::new(ErrorKind::Unsupported, "no data"))
    }

    fn refresh_size(&self) -> Result<u64> {
        let _turn = self.turn.lock().unwrap();
        self.size_reads.fetch_add(1, Ordering::SeqCst);
        if let Some(size) = self.size_at_backend.lock().unwrap().take() {
            self.size.store(size, Ordering::SeqCst);
        }
        Ok(self.size())
    }

    fn size_checks(&self) -> SizeChecks {
        self.size_checks.unwrap_or(SizeChecks::Never)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn background(&self) -> Option<&dyn BackgroundWork> {
        self.background.is_some().then_some(self as &dyn BackgroundWork)
    }

    fn write_hold(&self) -> Option<&dyn WriteHold> {
        (!self.hold.lock().unwrap().missing).then_some(self as &dyn WriteHold)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        self.announces_snapshots.then_some(self as &dyn SnapshotQuiesce)
    }
}

impl Resize for FakeImage {
    fn grow(&self, size: u64) -> Result<()> {
        self.size.store(size, Ordering::SeqCst);
        Ok(())
    }
}

impl BackgroundWork for FakeImage {
    fn stop(&self, _: Instant) -> Vec<RunningTask> {
        self.background_stopped.store(true, Ordering::SeqCst);
        self.background.clone().unwrap_or_default()
    }

    fn restart(&self) {
        self.background_stopped.store(false, Ordering::SeqCst);
    }
}

impl WriteHold for FakeImage {
    fn watch(&self, _: Waker) {}

    fn wanted(&self) -> Option<u64> {
        self.hold.lock().unwrap().wanted
    }

    fn confirm(&self, number: u64) -> Result<()> {
        self.hold.lock().unwrap().answer(number, true)
    }

    fn refuse(&self, number: u64, _: &str) -> Result<()> {
        self.hold.lock().unwrap().answer(number, false)
    }
}

impl SnapshotQuiesce for FakeImage {
    fn watch(&self, _: Waker, _: bool) -> Result<()> {
        Ok(())
    }

    fn pending(&self) -> Option<u64> {
        *self.waiting.lock().unwrap()
    }

    fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        let mut waiting = self.waiting.lock().unwrap();
        let waits = *waiting == Some(number);
        if waits && result.is_err() {
            *waiting = None;
        }
        self.answers.lock().unwrap().push((number, result));
        waits
    }
}
