//! What the rest of the process can tell a connection thread while it serves.
//!
//! Levels, not messages: the thread looks at them when it is woken, so nothing queues up and nothing
//! is lost.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use super::handover::Berth;
use cleat_backend::Waker;

/// What the connection is meant to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Desired {
    /// Serve.
    Run,
    /// Take no more requests, answer the running ones, and rest; see `handover`. The only level that
    /// is taken back.
    Pause,
    /// End at rest: the socket is somebody else's from now on.
    Leave,
    /// Take no more requests, answer the running ones, close.
    Stop,
    /// Close now; running requests are dropped or cancelled.
    Abort,
}

/// One connection's levels, shared with its thread.
#[derive(Debug)]
pub(super) struct Control {
    desired: AtomicU8,
    fail_io: AtomicBool,
    /// The socket has been given away: nobody here shuts it down.
    given: AtomicBool,
    pub(super) berth: Berth,
    /// [`NOT_FAILING`], or how many requests, all answered, the backend still has.
    failing: AtomicU32,
    waker: Waker,
}

const NOT_FAILING: u32 = u32::MAX;

impl Control {
    /// All quiet: `desired`, fail nothing.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn new(desired: Desired) -> std::io::Result<Self> {
        Ok(Self {
            desired: AtomicU8::new(desired as u8),
            fail_io: AtomicBool::new(false),
            given: AtomicBool::new(false),
            berth: Berth::default(),
            failing: AtomicU32::new(NOT_FAILING),
            waker: Waker::new()?,
        })
    }

    /// Asks for `desired`; what was asked for before and goes further stays.
    pub(super) fn ask(&self, desired: Desired) {
        if desired == Desired::Leave {
            self.given.store(true, Ordering::Release);
        }
        self.desired.fetch_max(desired as u8, Ordering::Release);
        self.waker.wake();
    }

    /// Takes [`Desired::Pause`] back.
    pub(super) fn resume(&self) {
        let (pause, run) = (Desired::Pause as u8, Desired::Run as u8);
        // Fails where something else has been asked for meanwhile, which stands.
        self.berth.clear(|| {
            let _ = self.desired.compare_exchange(pause, run, Ordering::AcqRel, Ordering::Relaxed);
        });
        self.waker.wake();
    }

    /// What was asked for.
    pub(super) fn desired(&self) -> Desired {
        match self.desired.load(Ordering::Acquire) {
            0 => Desired::Run,
            1 => Desired::Pause,
            2 => Desired::Leave,
            3 => Desired::Stop,
            _ => Desired::Abort,
        }
    }

    /// Whether the socket is somebody else's.
    pub(super) fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }

    /// With `true`, every request, running ones included, is answered with an I/O error from now on.
    pub(super) fn set_fail_io(&self, fail: bool) {
        self.fail_io.store(fail, Ordering::Release);
        self.waker.wake();
    }

    /// Whether every request is to fail.
    pub(super) fn fail_io(&self) -> bool {
        self.fail_io.load(Ordering::Acquire)
    }

    /// Says, on the connection's thread, that all it had is answered and that it starts nothing more;
    /// `at_backend` requests have not ended there. `None`: it serves.
    pub(super) fn tell_failing(&self, at_backend: Option<usize>) {
        let count = at_backend.map(|count| u32::try_from(count).unwrap_or(NOT_FAILING - 1));
        self.failing.store(count.unwrap_or(NOT_FAILING), Ordering::Release);
    }

    /// What [`Control::tell_failing`] said last.
    pub(super) fn failing(&self) -> Option<u32> {
        Some(self.failing.load(Ordering::Acquire)).filter(|count| *count != NOT_FAILING)
    }

    /// Wakes the thread; the backend's waker as well.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }
}
