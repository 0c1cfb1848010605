//! Busy polling: a connection looks for completions for a short time before it sleeps.
//!
//! To put a thread to sleep and to wake it costs more than most waits last: with polling, a client with one
//! request at a time gets 39k instead of 23k reads/s from memory. Three rules bound the cost. A poll ends after
//! [`POLL_NS`]. Each look yields the processor, and a poll ends if another thread has used it for long. Polls become
//! rarer, to one in [`MAX_SKIPPED`] waits, if they find nothing, or only after another thread has used the
//! processor: that one would have woken this thread on the same processor, which costs little. A connection
//! without requests sleeps: there is at most one poll for each time that it woke up.

/// How long one poll lasts at most, in nanoseconds.
const POLL_NS: u64 = 50_000;

/// A yield that takes longer than this has run another thread for long, and ends the poll; in nanoseconds.
const YIELD_NS: u64 = 30_000;

/// A yield that takes longer than this has run another thread, in nanoseconds; one that has not takes about 500.
const USED_NS: u64 = 1_500;

/// The highest number of waits without a poll after a poll that found nothing.
const MAX_SKIPPED: u32 = 128;

/// What a connection waits for. Polls for one say nothing about polls for the other.
#[derive(Debug, Clone, Copy)]
pub(super) enum Awaited {
    /// Requests from the client.
    Client,
    /// Requests in flight at the backend, or the client.
    Backend,
}

/// Decides when a connection polls.
#[derive(Debug, Default)]
pub(super) struct Polling {
    client: Record,
    backend: Record,
}

/// The results of the last polls.
#[derive(Debug, Default)]
struct Record {
    /// The number of waits after a poll that finds nothing.
    penalty: u32,
    /// The number of waits until the next poll.
    skip: u32,
}

impl Polling {
    /// Returns whether to poll before this wait. Called once for each wait.
    pub(super) fn is_due(&mut self, awaited: Awaited) -> bool {
        let record = self.record(awaited);
        let is_due = record.skip == 0;
        record.skip = record.skip.saturating_sub(1);
        is_due
    }

    /// Looks for completions with `is_ready` until there is one or the poll has to end. `now_ns` is a monotonic
    /// clock; `pause` yields the processor.
    pub(super) fn poll(
        &mut self,
        awaited: Awaited,
        mut is_ready: impl FnMut() -> bool,
        now_ns: impl Fn() -> u64,
        pause: impl Fn(),
    ) {
        // What is ready at once would not have let the thread sleep, so it says nothing about polls.
        if is_ready() {
            return;
        }
        let record = self.record(awaited);
        let began_ns = now_ns();
        let mut before_ns = began_ns;
        loop {
            pause();
            let (is_ready, after_ns) = (is_ready(), now_ns());
            let yield_ns = after_ns - before_ns;
            if is_ready && yield_ns <= USED_NS {
                record.penalty = 0;
                return;
            }
            if is_ready || after_ns - began_ns >= POLL_NS || yield_ns > YIELD_NS {
                record.penalty = (record.penalty * 2).clamp(1, MAX_SKIPPED);
                record.skip = record.penalty;
                return;
            }
            before_ns = after_ns;
        }
    }

    fn record(&mut self, awaited: Awaited) -> &mut Record {
        match awaited {
            Awaited::Client => &mut self.client,
            Awaited::Backend => &mut self.backend,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Waits once, with looks that take `step_ns`, where a completion arrives at `ready_ns`. Returns how long the
    /// poll has lasted; `None` without a poll.
    fn wait(polling: &mut Polling, step_ns: u64, ready_ns: u64) -> Option<u64> {
        if !polling.is_due(Awaited::Client) {
            return None;
        }
        let now_ns = Cell::new(0);
        let is_ready = || now_ns.get() >= ready_ns;
        let pause = || now_ns.set(now_ns.get() + step_ns);
        polling.poll(Awaited::Client, is_ready, || now_ns.get(), pause);
        Some(now_ns.get())
    }

    #[test]
    fn a_poll_ends_with_a_completion_or_after_its_limit() {
        let mut polling = Polling::default();
        assert_eq!(wait(&mut polling, 1_000, 0), Some(0));
        assert_eq!(wait(&mut polling, 1_000, 20_000), Some(20_000));
        assert_eq!(wait(&mut polling, 1_000, u64::MAX), Some(POLL_NS));
    }

    #[test]
    fn a_poll_ends_when_another_thread_has_used_the_processor() {
        let mut polling = Polling::default();
        assert_eq!(wait(&mut polling, 100_000, u64::MAX), Some(100_000));
        assert_eq!(wait(&mut polling, 100_000, u64::MAX), None, "the processor is wanted");
    }

    #[test]
    fn what_is_ready_after_another_thread_has_run_makes_polls_rarer() {
        let mut polling = Polling::default();
        let polls = |polling: &mut Polling, step_ns| {
            (0..1_000).filter(|_| wait(polling, step_ns, step_ns).is_some()).count()
        };
        assert_eq!(polls(&mut polling, USED_NS), 1_000);
        assert!(polls(&mut polling, USED_NS + 1) < 20);
    }

    #[test]
    fn polls_that_find_nothing_become_rarer_and_a_find_makes_them_frequent_again() {
        let mut polling = Polling::default();
        let polls = |polling: &mut Polling, waits| {
            (0..waits).filter(|_| wait(polling, 1_000, u64::MAX).is_some()).count()
        };
        let many = polls(&mut polling, 10_000);
        assert!((70..100).contains(&many), "{many}");
        while wait(&mut polling, 1_000, 5_000).is_none() {}
        assert_eq!(wait(&mut polling, 1_000, 5_000), Some(5_000));
        assert_eq!(polls(&mut polling, 2), 1, "the penalty begins anew");
    }

    #[test]
    fn a_completion_that_is_ready_at_once_is_no_find() {
        let mut polling = Polling::default();
        // Waits until the polls are as rare as they get.
        let polls = (0..10_000).filter(|_| wait(&mut polling, 1_000, u64::MAX).is_some()).count();
        assert!(polls < 100, "{polls}");
        while wait(&mut polling, 1_000, 0).is_none() {}
        let skipped = |polling: &mut Polling| {
            while wait(polling, 1_000, u64::MAX).is_none() {}
            (0..).take_while(|_| wait(polling, 1_000, u64::MAX).is_none()).count()
        };
        assert_eq!(skipped(&mut polling), MAX_SKIPPED as usize);
    }

    #[test]
    fn a_slow_backend_does_not_stop_the_polls_for_the_client() {
        let mut polling = Polling::default();
        let now_ns = Cell::new(0);
        let tick = || now_ns.set(now_ns.get() + 1_000);
        for _ in 0..10 {
            if polling.is_due(Awaited::Backend) {
                polling.poll(Awaited::Backend, || false, || now_ns.get(), tick);
            }
            assert_eq!(wait(&mut polling, 1_000, 5_000), Some(5_000));
        }
    }
}
