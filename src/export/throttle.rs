//! The effect of the volume's rate limits on one connection: until when it holds requests back, and for how
//! long it has done so.
//!
//! Invariant: `since_ns` is set from the first request that the limits have held back to the first that
//! they have let pass again. Times are nanoseconds on the connections' clock.

use super::limiter::Limiter;
use cleat_core::request::Request;

/// See the file's comment.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    since_ns: Option<u64>,
    until_ns: u64,
}

/// Whether the limits let a request pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// The request passes.
    Pass,
    /// The request passes, after requests were held back for `held_ns`.
    PassAfter { held_ns: u64 },
    /// The request is held back. [`Throttle::due_ns`] returns the time of the next attempt.
    Hold,
}

impl Throttle {
    /// Checks a request against the limits, and charges it to them if it passes.
    pub(super) fn admit(&mut self, limiter: &Limiter, request: &Request, now_ns: u64) -> Admission {
        match limiter.admit(request, now_ns) {
            Ok(()) => self.pass(now_ns),
            Err(wait_ns) => {
                self.since_ns.get_or_insert(now_ns);
                self.until_ns = now_ns.saturating_add(wait_ns);
                Admission::Hold
            }
        }
    }

    /// Lets a request pass without a check.
    pub(super) fn pass(&mut self, now_ns: u64) -> Admission {
        match self.since_ns.take() {
            None => Admission::Pass,
            Some(since_ns) => Admission::PassAfter { held_ns: now_ns.saturating_sub(since_ns) },
        }
    }

    /// Makes the next attempt due at once, because the limits may have changed.
    pub(super) fn ask_again(&mut self) {
        self.until_ns = 0;
    }

    /// Whether requests are held back now.
    pub(super) fn holds(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }

    /// Returns when the limits may let the held request pass; `None` while they hold nothing back.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.since_ns.map(|_| self.until_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::policy::RateLimits;
    use cleat_core::request::{Flags, Op};

    #[test]
    fn the_time_in_which_requests_were_held_back_is_counted_once() {
        let (limiter, mut throttle) = (Limiter::default(), Throttle::default());
        limiter.set(RateLimits { iops: 10, bytes_per_s: 0 });
        let read = Request { op: Op::Read, flags: Flags::default(), offset: 0, length: 512 };
        let mut now_ns = 1_000_000_000;
        while throttle.admit(&limiter, &read, now_ns) == Admission::Pass {}
        let began_ns = now_ns;
        assert!(throttle.holds(now_ns) && throttle.due_ns().is_some());
        now_ns = throttle.due_ns().unwrap();
        assert!(!throttle.holds(now_ns));
        let held_ns = now_ns - began_ns;
        let admission = throttle.admit(&limiter, &read, now_ns);
        assert_eq!(admission, Admission::PassAfter { held_ns });
        assert_eq!(throttle.due_ns(), None);
    }
}
