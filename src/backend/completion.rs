//! Completions from foreign threads: a thread that is not the connection's own (of librbd, of an async
//! runtime, a timer) completes an operation of a request and wakes the connection's loop.
//!
//! A connection makes one [`channel`]. It gives the [`Completer`] to its [`ImageQueue`], which passes
//! clones of it to the threads that carry operations out, and keeps the [`Completions`] for itself. A
//! completion travels through a bounded queue; an eventfd that the connection's ring polls wakes the
//! loop. The loop passes each completion to [`ImageQueue::on_completion`].
//!
//! Invariant: of each request at most one operation runs on a foreign thread, so the queue, which has a
//! place per request number, is never full. [`Completer::complete`] never blocks and never allocates.
//!
//! After the connection has ended, the completions of its operations are dropped with their buffers.
//!
//! [`ImageQueue`]: super::ImageQueue
//! [`ImageQueue::on_completion`]: super::ImageQueue::on_completion

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use crate::waker::Waker;
use crate::{Outcome, RequestId};

/// Makes both ends of the queue for a connection with at most `depth` requests in flight. `waker` wakes the
/// connection's loop.
pub fn channel(waker: Waker, depth: usize) -> (Completer, Completions) {
    let (sender, receiver) = bounded(depth);
    let signal = Arc::new(Signal { pending: AtomicBool::new(false), waker });
    (Completer { sender, signal: Arc::clone(&signal) }, Completions { receiver, signal })
}

/// Finishes operations of one connection's requests, from any thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Completer {
    sender: Sender<(RequestId, Outcome)>,
    signal: Arc<Signal>,
}

/// The connection's end of the queue.
#[derive(Debug)]
pub struct Completions {
    receiver: Receiver<(RequestId, Outcome)>,
    signal: Arc<Signal>,
}

#[derive(Debug)]
struct Signal {
    /// The loop was woken and has not started to take completions since: it needs no other wake-up.
    pending: AtomicBool,
    waker: Waker,
}

impl Completer {
    /// Reports that an operation of the request `id` has ended. The request ends with `outcome` unless
    /// its queue starts another operation for it. Never blocks.
    pub fn complete(&self, id: RequestId, outcome: Outcome) {
        // `Disconnected` means that the connection has ended: nothing waits for the request.
        if let Err(TrySendError::Full(_)) = self.sender.try_send((id, outcome)) {
            tracing::error!(id, "internal: a completion was lost; its request will not end");
            debug_assert!(false, "the queue has a place for each request");
        }
        self.signal.raise();
    }

    /// Returns whether `other` belongs to the same connection.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.signal, &other.signal)
    }
}

impl Completions {
    /// Returns the next completion. After a wake-up, call [`Completions::accept`] first, then this until
    /// it returns `None`.
    pub fn next(&self) -> Option<(RequestId, Outcome)> {
        self.receiver.try_recv().ok()
    }

    /// Resets the signal, so that the next completion wakes the loop again.
    pub fn accept(&self) {
        // An exchange synchronizes with the last `raise`, so that completions sent before it are visible.
        self.signal.pending.swap(false, Ordering::AcqRel);
    }
}

impl Signal {
    /// Wakes the loop, unless a wake-up is already pending.
    fn raise(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_sys::buffer::Buffer;

    const DONE: Outcome = Outcome { result: Ok(()), buffer: None };

    fn is_woken(waker: &Waker) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
        poll(&mut set, PollTimeout::ZERO).unwrap() > 0
    }

    #[test]
    fn completions_cause_one_wake_up_until_they_are_accepted() {
        let waker = Waker::new().unwrap();
        let (completer, completions) = channel(waker.clone(), 4);
        completer.complete(1, DONE);
        assert!(is_woken(&waker));
        waker.take();
        completer.complete(2, DONE);
        assert!(!is_woken(&waker), "the loop was woken already");
        completions.accept();
        let taken: Vec<RequestId> =
            std::iter::from_fn(|| completions.next()).map(|(id, _)| id).collect();
        assert_eq!(taken, [1, 2]);
        completer.complete(3, DONE);
        assert!(is_woken(&waker));
    }

    #[test]
    fn no_completion_is_lost_when_threads_interleave() {
        const EACH: usize = 20_000;
        let waker = Waker::new().unwrap();
        let (completer, completions) = channel(waker.clone(), 2 * EACH);
        let mut taken = 0;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let completer = completer.clone();
                scope.spawn(move || (0..EACH).for_each(|_| completer.complete(0, DONE)));
            }
            while taken < 2 * EACH {
                use nix::poll::{PollFd, PollFlags, poll};
                let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
                assert!(poll(&mut set, 20_000_u16).unwrap() > 0, "{taken}: a wake-up was lost");
                waker.take();
                completions.accept();
                taken += std::iter::from_fn(|| completions.next()).count();
            }
        });
        assert_eq!(taken, 2 * EACH);
    }

    #[test]
    fn completions_after_the_end_of_the_connection_free_their_buffers() {
        let (completer, completions) = channel(Waker::new().unwrap(), 1);
        drop(completions);
        let buffer = Some(Buffer::zeroed(512));
        completer.complete(0, Outcome { result: Ok(()), buffer });
        completer.complete(0, DONE);
    }
}
