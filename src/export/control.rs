//! Control messages to one connection's thread, from the rest of the process.
//!
//! Invariant: they are levels, not a queue: the thread reads them when it is woken, so nothing piles up and
//! nothing is lost. A level only rises, but for a pause, which can be taken back.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use super::paused::PauseSlot;
use cleat_backend::Waker;

/// What the connection should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Desired {
    /// Serve requests.
    Run,
    /// Parse no more requests, answer the running ones, and stay paused; see `handover`. The only level
    /// that can be taken back.
    Pause,
    /// End once paused, and leave the socket open: another process serves it from now on.
    Leave,
    /// Parse no more requests, answer the running ones, and close.
    Stop,
    /// Close now; running requests are dropped or cancelled.
    Abort,
}

/// The levels of one connection, shared with its thread. See the file's comment.
#[derive(Debug)]
pub(super) struct Control {
    desired: AtomicU8,
    fail_io: AtomicBool,
    /// The socket belongs to another process: this one must not shut it down.
    handed_over: AtomicBool,
    /// The client has completed its handshake, or there is none.
    transmits: AtomicBool,
    pause_slot: PauseSlot,
    /// [`NOT_FAILING`], or how many requests, all answered, the backend still has.
    failing: AtomicU32,
    waker: Waker,
}

const NOT_FAILING: u32 = u32::MAX;

impl Control {
    /// Makes the levels of a connection that should do `desired` and fails no I/O.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` when no descriptor is left.
    pub(super) fn new(desired: Desired) -> std::io::Result<Self> {
        Ok(Self {
            desired: AtomicU8::new(desired as u8),
            fail_io: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            transmits: AtomicBool::new(false),
            pause_slot: PauseSlot::default(),
            failing: AtomicU32::new(NOT_FAILING),
            waker: Waker::new()?,
        })
    }

    /// Raises the level to `desired`; a higher one stays.
    pub(super) fn ask(&self, desired: Desired) {
        if desired == Desired::Leave {
            self.handed_over.store(true, Ordering::Release);
        }
        self.desired.fetch_max(desired as u8, Ordering::Release);
        self.waker.wake();
    }

    /// Takes [`Desired::Pause`] back. A higher level stays.
    pub(super) fn resume(&self) {
        let (pause, run) = (Desired::Pause as u8, Desired::Run as u8);
        self.pause_slot.clear(|| {
            // It fails where a higher level was asked for.
            let _ = self.desired.compare_exchange(pause, run, Ordering::AcqRel, Ordering::Relaxed);
        });
        self.waker.wake();
    }

    /// Returns the level.
    pub(super) fn desired(&self) -> Desired {
        match self.desired.load(Ordering::Acquire) {
            0 => Desired::Run,
            1 => Desired::Pause,
            2 => Desired::Leave,
            3 => Desired::Stop,
            _ => Desired::Abort,
        }
    }

    /// Whether the socket belongs to another process.
    pub(super) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }

    /// Called on the connection's thread when it is in transmission.
    pub(super) fn set_transmits(&self) {
        self.transmits.store(true, Ordering::Release);
    }

    /// Whether the connection is in transmission.
    pub(super) fn transmits(&self) -> bool {
        self.transmits.load(Ordering::Acquire)
    }

    /// Where the thread publishes that it is paused.
    pub(super) fn pause_slot(&self) -> &PauseSlot {
        &self.pause_slot
    }

    /// With `true`, every request, running ones included, fails from now on.
    pub(super) fn set_fail_io(&self, fail: bool) {
        self.fail_io.store(fail, Ordering::Release);
        self.waker.wake();
    }

    /// Whether every request should fail.
    pub(super) fn fail_io(&self) -> bool {
        self.fail_io.load(Ordering::Acquire)
    }

    /// Called on the connection's thread: all requests that it had are answered, it starts nothing more,
    /// and the backend still has `at_backend` of them. `None`: it serves requests.
    pub(super) fn report_failing(&self, at_backend: Option<usize>) {
        let count = at_backend.map(|count| u32::try_from(count).unwrap_or(NOT_FAILING - 1));
        self.failing.store(count.unwrap_or(NOT_FAILING), Ordering::Release);
    }

    /// Returns what was last given to [`Control::report_failing`].
    pub(super) fn failing(&self) -> Option<u32> {
        Some(self.failing.load(Ordering::Acquire)).filter(|count| *count != NOT_FAILING)
    }

    /// Wakes the thread, also for completions of the backend.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }
}
