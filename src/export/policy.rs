//! The policy in force for a volume, and the clock that its connections share.
//!
//! Invariant: the policy may change at any time; a connection reads it when it decides, never earlier. All
//! times of the connections are nanoseconds on this clock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::limiter::Limiter;
use cleat_backend::Waker;
use cleat_core::clock::Clock;
use cleat_core::policy::{BusyPoll, Policy};

/// See the file's comment.
#[derive(Debug)]
pub(super) struct ActivePolicy {
    limiter: Limiter,
    clock: Arc<dyn Clock>,
    /// 0: requests fail at once; `u64::MAX`: they wait without a limit.
    outage_limit_ns: AtomicU64,
    polls: AtomicBool,
    /// Woken when an outage begins or ends.
    watcher: Mutex<Option<Waker>>,
}

impl ActivePolicy {
    /// Puts `policy` into force.
    pub(super) fn new(policy: Policy, clock: Arc<dyn Clock>) -> Self {
        let active = Self {
            limiter: Limiter::default(),
            clock,
            outage_limit_ns: AtomicU64::new(0),
            polls: AtomicBool::new(false),
            watcher: Mutex::default(),
        };
        active.set(policy);
        active
    }

    /// Changes the policy. The caller wakes the connections afterwards.
    pub(super) fn set(&self, policy: Policy) {
        let limit_ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let limit_ns = policy.outage.max_queue_time().map_or(u64::MAX, limit_ns);
        self.outage_limit_ns.store(limit_ns, Ordering::Release);
        self.polls.store(policy.busy_poll == BusyPoll::Auto, Ordering::Relaxed);
        self.limiter.set(policy.limits);
    }

    /// The rate limits of all connections together.
    pub(super) fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// Whether connections may poll before they sleep.
    pub(super) fn polls(&self) -> bool {
        self.polls.load(Ordering::Relaxed)
    }

    /// The clock.
    pub(super) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The time, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) fn now_ns(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    /// How long an outage may last before requests fail, in nanoseconds; `u64::MAX`: without a limit.
    pub(super) fn outage_limit_ns(&self) -> u64 {
        self.outage_limit_ns.load(Ordering::Acquire)
    }

    /// Wakes `waker` from now on whenever an outage begins or ends on a connection.
    pub(super) fn set_watcher(&self, waker: Waker) {
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
    }

    /// Wakes the watcher: an outage has begun or ended. Called once per outage, not per request.
    pub(super) fn outage_changed(&self) {
        if let Some(waker) = &*self.watcher.lock().unwrap_or_else(PoisonError::into_inner) {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::clock::ManualClock;
    use cleat_core::policy::{OnOutage, RateLimits};
    use cleat_core::request::{Flags, Op, Request};

    const READ: Request = Request {
        op: Op::Read,
        flags: Flags { fua: false, no_hole: false, fast_zero: false },
        offset: 0,
        length: 512,
    };

    #[test]
    fn a_changed_policy_is_in_force_at_once() {
        let limits = RateLimits { iops: 1, bytes_per_s: 0 };
        let policy = |outage| Policy { outage, limits, busy_poll: BusyPoll::Off };
        let active = ActivePolicy::new(policy(OnOutage::Fail), Arc::new(ManualClock::new()));
        assert_eq!((active.outage_limit_ns(), active.polls()), (0, false));
        assert_eq!(active.limiter().admit(&READ, 0), Ok(()));
        assert!(active.limiter().admit(&READ, 0).is_err());
        active.set(Policy::default());
        assert_eq!((active.outage_limit_ns(), active.polls()), (u64::MAX, true));
        assert_eq!(active.limiter().admit(&READ, 0), Ok(()));
        active.set(policy(OnOutage::QueueFor(Duration::from_secs(30))));
        assert_eq!(active.outage_limit_ns(), 30_000_000_000);
    }

    #[test]
    fn time_is_that_of_the_clock() {
        let clock = Arc::new(ManualClock::new());
        let active = ActivePolicy::new(Policy::default(), clock.clone());
        let before = active.now_ns();
        clock.advance(Duration::from_secs(1));
        assert_eq!(active.now_ns() - before, 1_000_000_000);
        assert_eq!(active.now_ns(), active.clock().monotonic_ns());
    }

    #[test]
    fn the_watcher_is_woken_when_an_outage_begins_or_ends() {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let active = ActivePolicy::new(Policy::default(), Arc::new(ManualClock::new()));
        // Without a watcher there is nothing to do.
        active.outage_changed();
        let waker = Waker::new().unwrap();
        active.set_watcher(waker.clone());
        let is_woken = || {
            let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
            poll(&mut set, PollTimeout::ZERO).unwrap() > 0
        };
        assert!(!is_woken());
        active.outage_changed();
        assert!(is_woken());
    }
}
