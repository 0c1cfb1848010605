//! Snapshots that wait until the volume is quiesced.
//!
//! Invariants: at most one snapshot waits or is being taken; each has its own number. A snapshot ends when its [`Taking`]
//! is dropped, also if the future that takes it is cancelled.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{self, Poll};

use cleat_backend::Waker;
use futures::future::{Either, select};
use rustix::io::Errno;

/// What the owner of an image and the future that takes a snapshot share.
#[derive(Default)]
pub(crate) struct Quiesce(Mutex<State>);

#[derive(Default)]
struct State {
    /// Woken when a snapshot begins to wait and when it has ended. Without it, no snapshot waits.
    owner: Option<Waker>,
    /// The number of the present or the last snapshot.
    number: u64,
    is_pending: bool,
    /// The answer of the owner: an errno refuses the snapshot.
    answer: Option<Result<(), i32>>,
    waiting: Option<task::Waker>,
}

/// A snapshot that is being taken, of a volume that is quiesced until this is dropped.
pub(crate) struct Taking<'a> {
    quiesce: &'a Quiesce,
    number: u64,
}

impl Quiesce {
    /// Makes all further snapshots wait for an answer, and wakes `owner` for each.
    pub(crate) fn watch(&self, owner: Waker) {
        self.lock().owner = Some(owner);
    }

    /// The number of the snapshot that waits or is being taken.
    pub(crate) fn pending(&self) -> Option<u64> {
        let state = self.lock();
        state.is_pending.then_some(state.number)
    }

    /// Lets snapshot `number` proceed, or refuses it with an errno. Returns whether it was waiting.
    pub(crate) fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        let mut state = self.lock();
        if !state.is_pending || state.number != number || state.answer.is_some() {
            return false;
        }
        state.answer = Some(result);
        state.waiting.take().into_iter().for_each(task::Waker::wake);
        true
    }

    /// Waits until the volume is quiesced, or until `limit` has ended. Returns `None` if nobody wants to quiesce it.
    ///
    /// # Errors
    /// Returns the errno with which the owner has refused the snapshot, and `EAGAIN` after the limit.
    pub(crate) async fn begin(
        &self,
        limit: impl Future<Output = ()> + Unpin,
    ) -> Result<Option<Taking<'_>>, i32> {
        let Some(taking) = self.announce() else { return Ok(None) };
        let answer = poll_fn(|context| {
            let mut state = self.lock();
            match state.answer {
                Some(answer) => Poll::Ready(answer),
                None => {
                    state.waiting = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        match select(answer, limit).await {
            Either::Left((answer, _)) => answer.map(|()| Some(taking)),
            Either::Right(_) => Err(Errno::AGAIN.raw_os_error()),
        }
    }

    fn announce(&self) -> Option<Taking<'_>> {
        let mut state = self.lock();
        let owner = state.owner.clone()?;
        state.number += 1;
        state.is_pending = true;
        state.answer = None;
        owner.wake();
        Some(Taking { quiesce: self, number: state.number })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        let mut state = self.quiesce.lock();
        // A future that is cancelled may end after the next snapshot has begun.
        if state.number != self.number {
            return;
        }
        state.is_pending = false;
        state.owner.iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    const EIO: i32 = 5;
    const EAGAIN: i32 = 11;
    const EBUSY: i32 = 16;

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(task::Waker::noop()))
    }

    fn watched() -> Quiesce {
        let quiesce = Quiesce::default();
        quiesce.watch(Waker::new().unwrap());
        quiesce
    }

    #[test]
    fn a_snapshot_waits_for_its_answer_and_lasts_until_it_is_dropped() {
        let quiesce = watched();
        let mut begin = pin!(quiesce.begin(pending()));
        assert!(poll(begin.as_mut()).is_pending());
        assert_eq!(quiesce.pending(), Some(1));
        assert!(!quiesce.answer(2, Ok(())) && quiesce.answer(1, Ok(())));
        assert!(!quiesce.answer(1, Err(EIO)), "it has its answer");
        let Poll::Ready(Ok(Some(taking))) = poll(begin.as_mut()) else { panic!("no answer") };
        assert_eq!(quiesce.pending(), Some(1));
        drop(taking);
        assert_eq!(quiesce.pending(), None);
    }

    #[test]
    fn a_refused_or_late_or_cancelled_snapshot_has_ended() {
        let quiesce = watched();
        let mut refused = pin!(quiesce.begin(pending()));
        assert!(poll(refused.as_mut()).is_pending());
        assert!(quiesce.answer(1, Err(EBUSY)));
        assert!(matches!(poll(refused.as_mut()), Poll::Ready(Err(EBUSY))));
        assert_eq!(quiesce.pending(), None);
        let mut late = pin!(quiesce.begin(ready(())));
        assert!(matches!(poll(late.as_mut()), Poll::Ready(Err(EAGAIN))));
        assert!(quiesce.pending().is_none() && !quiesce.answer(2, Ok(())));
        let mut cancelled = Box::pin(quiesce.begin(pending()));
        assert!(poll(cancelled.as_mut()).is_pending());
        assert_eq!(quiesce.pending(), Some(3));
        drop(cancelled);
        assert_eq!(quiesce.pending(), None);
        let (earlier, _later) = (quiesce.announce(), quiesce.announce());
        drop(earlier);
        assert_eq!(quiesce.pending(), Some(5), "the later one has not ended");
    }

    #[test]
    fn without_an_owner_no_snapshot_waits() {
        let quiesce = Quiesce::default();
        assert!(matches!(poll(pin!(quiesce.begin(pending()))), Poll::Ready(Ok(None))));
        assert_eq!(quiesce.pending(), None);
    }
}
