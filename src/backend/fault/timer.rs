//! A thread that completes operations at given times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::super::{Completer, Outcome, RequestId};
use super::lock;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, Result};

/// The thread, which the drop of this value ends and joins.
pub(super) struct Timer {
    state: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    /// The operations to complete, the earliest first. Each request in flight has at most one.
    due: BinaryHeap<Reverse<Alarm>>,
    ended: bool,
}

struct Alarm {
    at: Instant,
    completer: Completer,
    id: RequestId,
}

impl Timer {
    pub(super) fn start() -> Result<Self> {
        let state = Arc::<(Mutex<State>, Condvar)>::default();
        let shared = Arc::clone(&state);
        let thread = std::thread::Builder::new()
            .name("fault-timer".to_owned())
            .spawn(move || run(&shared.0, &shared.1))
            .map_err(|e| Error::from_io("cannot start the timer thread of a fault volume", e))?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// Completes an operation of the request `id` at the time `at` or a little later.
    pub(super) fn complete_at(&self, at: Instant, completer: &Completer, id: RequestId) {
        let alarm = Alarm { at, completer: completer.clone(), id };
        lock(&self.state.0).due.push(Reverse(alarm));
        self.state.1.notify_one();
    }
}

fn run(state: &Mutex<State>, changed: &Condvar) {
    let mut guard = lock(state);
    while !guard.ended {
        let now = SystemClock.now();
        while guard.due.peek().is_some_and(|Reverse(alarm)| alarm.at <= now) {
            if let Some(Reverse(alarm)) = guard.due.pop() {
                let delayed = Outcome { result: Ok(()), buffer: None };
                alarm.completer.complete(alarm.id, delayed);
            }
        }
        let next = guard.due.peek().map(|Reverse(alarm)| alarm.at - now);
        guard = match next {
            Some(pause) => {
                changed.wait_timeout(guard, pause).unwrap_or_else(PoisonError::into_inner).0
            }
            None => changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        lock(&self.state.0).ended = true;
        self.state.1.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is its end, too.
            let _ = thread.join();
        }
    }
}

impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Alarm {}
