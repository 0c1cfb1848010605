//! The data half of a volume with faults: delays requests, fails them, or passes them to the wrapped volume.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::{Completer, ImageQueue, Outcome, RequestId, Started};
use super::plan::Plan;
use super::timer::Timer;
use super::{Shared, lock};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::request::{IoError, Request};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

pub(super) struct FaultQueue {
    inner: Box<dyn ImageQueue>,
    shared: Arc<Shared>,
    timer: Arc<Timer>,
    completer: Completer,
    plan: Arc<Plan>,
    plan_number: u64,
    /// Delayed requests. The connection's limit of requests in flight bounds them.
    delayed: Vec<Delayed>,
}

struct Delayed {
    id: RequestId,
    request: Request,
    buffer: Option<Buffer>,
    error: Option<IoError>,
}

impl FaultQueue {
    pub(super) fn new(
        inner: Box<dyn ImageQueue>,
        shared: Arc<Shared>,
        timer: Arc<Timer>,
        completer: Completer,
    ) -> Self {
        let plan_number = shared.plan_number.load(Ordering::Acquire);
        let plan = Arc::clone(&lock(&shared.plan));
        Self { inner, shared, timer, completer, plan, plan_number, delayed: Vec::new() }
    }

    fn take_plan(&mut self) {
        let number = self.shared.plan_number.load(Ordering::Acquire);
        if number != self.plan_number {
            self.plan = Arc::clone(&lock(&self.shared.plan));
            self.plan_number = number;
        }
    }

    /// Fails a request, or starts it in the wrapped volume.
    fn proceed(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        error: Option<IoError>,
        ring: &mut Ring,
    ) -> Started {
        if error == Some(IoError::Fenced) {
            let before = self.shared.fenced.swap(true, Ordering::AcqRel);
            if let Some(watcher) = self.shared.watcher.get().filter(|_| !before) {
                watcher.wake();
            }
        }
        let fenced = self.shared.fenced.load(Ordering::Acquire).then_some(IoError::Fenced);
        match fenced.or(error) {
            Some(error) => Started::Done(Outcome { result: Err(error), buffer }),
            None => self.inner.start(id, request, buffer, ring),
        }
    }
}

impl Drop for FaultQueue {
    fn drop(&mut self) {
        self.shared.forget(&self.completer);
    }
}

impl ImageQueue for FaultQueue {
    /// A delayed request stands for one that hangs at the backend, so it stays in flight.
    fn abandon(&mut self, done: &mut Vec<(RequestId, Outcome)>) {
        self.inner.abandon(done);
    }

    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Started {
        self.take_plan();
        let number = self.shared.requests.fetch_add(1, Ordering::Relaxed);
        let Some(fault) = self.plan.fault_of(number, &request) else {
            return self.proceed(id, request, buffer, None, ring);
        };
        match fault.delay {
            Some(delay) if delay.is_zero() => {
                return self.proceed(id, request, buffer, fault.error, ring);
            }
            Some(delay) => self.timer.complete_at(SystemClock.now() + delay, &self.completer, id),
            None => self.shared.complete_with_next_plan(self.plan_number, &self.completer, id),
        }
        self.delayed.push(Delayed { id, request, buffer, error: fault.error });
        Started::Pending
    }

    fn end_batch(&mut self, ring: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        self.inner.end_batch(ring, done);
    }

    fn on_ring(&mut self, completion: Completion, ring: &mut Ring) -> Option<(RequestId, Outcome)> {
        // This queue submits nothing to the ring by itself, so the completion belongs to the wrapped volume.
        self.inner.on_ring(completion, ring)
    }

    /// Takes the end of a delay, or passes the completion to the wrapped volume.
    fn on_completion(
        &mut self,
        id: RequestId,
        outcome: Outcome,
        ring: &mut Ring,
        done: &mut Vec<(RequestId, Outcome)>,
    ) {
        let Some(index) = self.delayed.iter().position(|delayed| delayed.id == id) else {
            return self.inner.on_completion(id, outcome, ring, done);
        };
        let Delayed { id, request, buffer, error } = self.delayed.swap_remove(index);
        if let Started::Done(outcome) = self.proceed(id, request, buffer, error, ring) {
            done.push((id, outcome));
        }
    }
}
