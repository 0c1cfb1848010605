//! The rate limits of a volume: requests and bytes per second, on all its connections together.
//!
//! A bucket is one number, the time at which all that was admitted would be done at the rate (the
//! "theoretical arrival time" of GCRA, ITU-T I.371). A request is admitted when that time is at most
//! [`BURST_NS`] ahead, and moves it by its cost. So an idle volume may do a tenth of a second's work
//! at once, a request of any size is admitted at some time, an excess is compensated by waiting,
//! and in the long run the rate is kept exactly. Two connections that check at the same moment may
//! both be admitted although only one should be; later requests compensate for that, too.
//!
//! A flush costs nothing and is not held back itself. It waits behind requests that came before it on
//! its connection, which are left in the socket.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cleat_core::policy::RateLimits;
use cleat_core::request::{Op, Request};

/// How much work an idle volume may save up, in nanoseconds at its rate.
const BURST_NS: u64 = 100_000_000;

/// The shortest wait, in nanoseconds: wakes up a thousand times a second at most, and then admits
/// what has become due, which is far less than a burst.
const SHORTEST_WAIT_NS: u64 = 1_000_000;

/// Shared by the connections of a volume. Times are nanoseconds on their common clock.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    ops: Bucket,
    bytes: Bucket,
}

#[derive(Debug, Default)]
struct Bucket {
    /// The rate per second; zero means no limit.
    rate: AtomicU64,
    done_at_ns: AtomicU64,
}

impl Limiter {
    /// Changes the limits. What was admitted before is forgotten.
    pub(super) fn set(&self, limits: RateLimits) {
        self.ops.set(limits.iops);
        self.bytes.set(limits.bytes_per_s);
    }

    /// Admits `request`, or returns how long it has to wait before the next attempt, in nanoseconds.
    pub(super) fn admit(&self, request: &Request, now_ns: u64) -> Result<(), u64> {
        if request.op == Op::Flush {
            return Ok(());
        }
        let payload = if matches!(request.op, Op::Read | Op::Write) { request.length } else { 0 };
        let wait_ns = self.ops.wait_ns(now_ns).max(match payload {
            0 => 0,
            _ => self.bytes.wait_ns(now_ns),
        });
        if wait_ns > 0 {
            return Err(wait_ns.max(SHORTEST_WAIT_NS));
        }
        self.ops.charge(1, now_ns);
        self.bytes.charge(payload, now_ns);
        Ok(())
    }
}

impl Bucket {
    fn set(&self, rate: u64) {
        if self.rate.swap(rate, Relaxed) != rate {
            self.done_at_ns.store(0, Relaxed);
        }
    }

    fn wait_ns(&self, now_ns: u64) -> u64 {
        if self.rate.load(Relaxed) == 0 {
            return 0;
        }
        self.done_at_ns.load(Relaxed).saturating_sub(now_ns + BURST_NS)
    }

    fn charge(&self, amount: u64, now_ns: u64) {
        let rate = self.rate.load(Relaxed);
        if rate == 0 || amount == 0 {
            return;
        }
        let cost_ns = amount.saturating_mul(1_000_000_000).div_ceil(rate);
        let later = |at_ns: u64| Some(at_ns.max(now_ns).saturating_add(cost_ns));
        // It always has a new value, so it cannot fail.
        let _ = self.done_at_ns.fetch_update(Relaxed, Relaxed, later);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::request::Flags;

    const SECOND: u64 = 1_000_000_000;

    fn request(op: Op, length: u64) -> Request {
        Request { op, flags: Flags::default(), offset: 0, length }
    }

    /// Requests that a client which always has one more gets through from `from_ns` to `to_ns`.
    fn admitted(limiter: &Limiter, request: &Request, from_ns: u64, to_ns: u64) -> u64 {
        let (mut now_ns, mut count) = (from_ns, 0);
        while now_ns < to_ns {
            match limiter.admit(request, now_ns) {
                Ok(()) => count += 1,
                Err(wait_ns) => now_ns += wait_ns,
            }
        }
        count
    }

    #[test]
    fn the_rate_is_kept_beyond_the_burst() {
        for iops in [1, 7, 100, 5000, 200_000] {
            let limiter = Limiter::default();
            limiter.set(RateLimits { iops, bytes_per_s: 0 });
            let count = admitted(&limiter, &request(Op::Write, 4096), 0, 20 * SECOND);
            let (least, most) = (iops * 20, iops * 20 + iops / 10 + 1 + iops / 900);
            assert!((least..=most).contains(&count), "{count} at {iops}");
            // And in the second after, without the burst.
            let count = admitted(&limiter, &request(Op::Trim, 4096), 20 * SECOND, 40 * SECOND);
            assert!(count.abs_diff(iops * 20) <= 1 + iops / 900, "{count} at {iops}");
        }
    }

    #[test]
    fn bytes_are_counted_for_payloads_only() {
        let limiter = Limiter::default();
        limiter.set(RateLimits { iops: 0, bytes_per_s: 1 << 20 });
        let mib = request(Op::Read, 1 << 20);
        let count = admitted(&limiter, &mib, 0, 10 * SECOND);
        assert!((10..=11).contains(&count), "{count}");
        // In debt: what has no payload passes all the same, and so does a flush.
        assert!(limiter.admit(&mib, 10 * SECOND).is_err());
        assert_eq!(limiter.admit(&request(Op::Trim, 1 << 30), 10 * SECOND), Ok(()));
        assert_eq!(limiter.admit(&request(Op::Flush, 0), 10 * SECOND), Ok(()));
        // One that is larger than a burst is admitted alone, and paid for.
        let limiter = Limiter::default();
        limiter.set(RateLimits { iops: 0, bytes_per_s: 1 << 20 });
        let large = request(Op::Write, 32 << 20);
        assert_eq!(limiter.admit(&large, 0), Ok(()));
        let wait_ns = limiter.admit(&request(Op::Read, 512), 0).unwrap_err();
        assert_eq!(wait_ns, 32 * SECOND - BURST_NS);
    }

    #[test]
    fn both_limits_hold_and_neither_is_charged_for_what_waits() {
        let limiter = Limiter::default();
        limiter.set(RateLimits { iops: 1000, bytes_per_s: 1 << 20 });
        let count = admitted(&limiter, &request(Op::Write, 8192), 0, 10 * SECOND);
        assert!((1280..=1280 * 102 / 100).contains(&count), "{count}");
        let count = admitted(&limiter, &request(Op::Write, 512), 10 * SECOND, 20 * SECOND);
        assert!((9_900..=10_200).contains(&count), "{count}");
    }

    #[test]
    fn a_change_counts_at_once() {
        let limiter = Limiter::default();
        let read = request(Op::Read, 4096);
        assert_eq!(admitted(&limiter, &read, 0, 0), 0);
        assert!((0..10_000).all(|_| limiter.admit(&read, 0).is_ok()), "there is no limit yet");
        limiter.set(RateLimits { iops: 1, bytes_per_s: 0 });
        assert_eq!(limiter.admit(&read, 0), Ok(()));
        assert!(limiter.admit(&read, 0).is_err());
        // The same again changes nothing; another one does.
        limiter.set(RateLimits { iops: 1, bytes_per_s: 0 });
        assert!(limiter.admit(&read, 0).is_err());
        limiter.set(RateLimits { iops: 2, bytes_per_s: 0 });
        assert_eq!(limiter.admit(&read, 0), Ok(()));
        limiter.set(RateLimits::default());
        assert!((0..10_000).all(|_| limiter.admit(&read, 0).is_ok()));
    }
}
