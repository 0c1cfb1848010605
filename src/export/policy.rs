//! What the connections of a volume share beside the volume: its owner's policy, which may change at
//! any time, the limiter, and a clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::limiter::Limiter;
use cleat_backend::Waker;
use cleat_core::policy::Policy;

/// See the file's comment.
#[derive(Debug)]
pub(super) struct ActivePolicy {
    pub(super) limiter: Limiter,
    /// Of every time in nanoseconds.
    epoch: Instant,
    /// Zero: no waiting; `u64::MAX`: no end of it.
    patience_ns: AtomicU64,
    /// Whoever wants to know when an outage begins and ends.
    watcher: Mutex<Option<Waker>>,
}

impl ActivePolicy {
    pub(super) fn new(policy: Policy) -> Self {
        let active = Self {
            limiter: Limiter::default(),
            epoch: Instant::now(),
            patience_ns: AtomicU64::new(0),
            watcher: Mutex::default(),
        };
        active.set(policy);
        active
    }

    /// Changes the policy; the connections must be woken to look at it.
    pub(super) fn set(&self, policy: Policy) {
        let patience_ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let patience_ns = policy.outage.max_queue_time().map_or(u64::MAX, patience_ns);
        self.patience_ns.store(patience_ns, Ordering::Release);
        self.limiter.set(policy.limits);
    }

    /// The time, in nanoseconds of the volume's connections.
    pub(super) fn elapsed_ns(&self) -> u64 {
        // 64 bits of nanoseconds last for 584 years.
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// How long an outage may last before requests fail, in nanoseconds.
    pub(super) fn patience_ns(&self) -> u64 {
        self.patience_ns.load(Ordering::Acquire)
    }

    /// Has `waker` woken whenever an outage begins or ends on some connection.
    pub(super) fn set_watcher(&self, waker: Waker) {
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
    }

    /// Tells the watcher. Once an outage, not once a request.
    pub(super) fn outage_changed(&self) {
        if let Some(waker) = &*self.watcher.lock().unwrap_or_else(PoisonError::into_inner) {
            waker.wake();
        }
    }
}
