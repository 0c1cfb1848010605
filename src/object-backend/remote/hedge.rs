//! Hedged reads: one that takes long is sent a second time, and the first answer is used.
//!
//! A few reads of a store take much longer than the others, mostly because of one slow server behind its address. The
//! second request often reaches another server. It is limited to one read in [`READS_PER_HEDGE`]: a store that is slow as
//! a whole is not asked for twice as much.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cleat_backend::uri::{invalid, shown};
use cleat_core::error::Result;
use futures::future::{Either, select};

/// The name of the option with the time after which a read is repeated.
pub(super) const HEDGE: &str = "hedge";

/// The longest time, which is less than the timeout of a read.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// The reads after which one more may be repeated.
const READS_PER_HEDGE: u32 = 10;

/// The repeated reads that reads of the past allow at most.
const MAX_SAVED: u32 = 16;

/// Parses the value of the option.
///
/// # Errors
/// Returns `InvalidArgument` unless it is a time from 1 ms to 5 s.
pub(super) fn parse(text: &str) -> Result<Duration> {
    let wrong = || {
        invalid(format!("{HEDGE} is a time from 1ms to 5s, not {:?}", shown(text)))
            .with_repair("write for example hedge=50ms, longer than most reads take")
    };
    let delay = humantime::parse_duration(text).map_err(|error| wrong().with_source(error))?;
    // Rounded to milliseconds, the resolution of the canonical text and of the timers.
    let delay = Duration::from_millis(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
    match (Duration::from_millis(1)..=MAX_DELAY).contains(&delay) {
        true => Ok(delay),
        false => Err(wrong()),
    }
}

/// How many reads may be repeated.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// [`READS_PER_HEDGE`] for each repeated read that is allowed.
    saved: AtomicU32,
}

impl Budget {
    /// Counts a read.
    pub(super) fn count(&self) {
        let more = |saved: u32| (saved < MAX_SAVED * READS_PER_HEDGE).then_some(saved + 1);
        let _ = self.saved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Returns whether a read may be repeated, and takes that from the budget.
    pub(super) fn take(&self) -> bool {
        let less = |saved: u32| saved.checked_sub(READS_PER_HEDGE);
        self.saved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// Reads, and reads once more if that takes longer than `delay` and `may_repeat` allows it. Returns the first result that
/// is no error; the other read is dropped.
pub(super) async fn hedged<T, E, F>(
    delay: impl Future<Output = ()>,
    may_repeat: impl FnOnce() -> bool,
    read: impl Fn() -> F,
) -> std::result::Result<T, E>
where
    F: Future<Output = std::result::Result<T, E>>,
{
    let first = pin!(read());
    let first = match select(first, pin!(delay)).await {
        Either::Left((result, _)) => return result,
        Either::Right(((), first)) => first,
    };
    if !may_repeat() {
        return first.await;
    }
    match select(first, pin!(read())).await {
        Either::Left((Err(_), other)) | Either::Right((Err(_), other)) => other.await,
        Either::Left((found, _)) | Either::Right((found, _)) => found,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::{pending, ready};

    use futures::FutureExt;
    use futures::channel::oneshot::{Receiver, Sender, channel};

    use super::*;

    /// Two reads whose answers the test gives.
    fn reads() -> ([Sender<std::result::Result<u8, u8>>; 2], impl Fn() -> Answer) {
        let ((first, one), (second, two)) = (channel(), channel());
        let answers = RefCell::new(vec![two, one]);
        let read = move || {
            let answer: Receiver<_> = answers.borrow_mut().pop().expect("at most two reads");
            answer.map(|answer| answer.expect("the test answers")).boxed()
        };
        ([first, second], read)
    }

    type Answer = futures::future::BoxFuture<'static, std::result::Result<u8, u8>>;

    #[test]
    fn the_first_answer_of_two_reads_is_used() {
        let ([_first, second], read) = reads();
        second.send(Ok(2)).unwrap();
        assert_eq!(hedged(ready(()), || true, read).now_or_never(), Some(Ok(2)));
        let ([first, second], read) = reads();
        first.send(Ok(1)).unwrap();
        assert_eq!(hedged(pending(), || true, read).now_or_never(), Some(Ok(1)));
        assert!(second.is_canceled(), "it was not sent");
    }

    #[test]
    fn an_error_is_returned_if_no_read_succeeds() {
        for order in [[0, 1], [1, 0]] {
            let (answers, read) = reads();
            let mut senders = answers.map(Some);
            let mut waiting = pin!(hedged(ready(()), || true, read));
            assert!(waiting.as_mut().now_or_never().is_none());
            let mut send = |number: usize, answer| senders[number].take().unwrap().send(answer);
            send(order[0], Err(1)).unwrap();
            assert!(waiting.as_mut().now_or_never().is_none(), "the other read may succeed");
            send(order[1], Err(2)).unwrap();
            assert_eq!(waiting.now_or_never(), Some(Err(2)));
        }
    }

    #[test]
    fn one_read_in_ten_is_repeated_at_most() {
        let budget = Budget::default();
        assert!(!budget.take());
        (0..25).for_each(|_| budget.count());
        assert!(budget.take() && budget.take() && !budget.take());
        (0..10_000).for_each(|_| budget.count());
        assert_eq!((0..100).filter(|_| budget.take()).count(), MAX_SAVED as usize);
    }

    #[test]
    fn times_are_checked() {
        assert_eq!(parse("50ms").unwrap(), Duration::from_millis(50));
        assert_eq!(parse("5s").unwrap(), MAX_DELAY);
        for text in ["", "50", "0ms", "999us", "5001ms", "fast"] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("1ms to 5s"), "{error}");
        }
    }
}
