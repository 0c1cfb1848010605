//! The data half: holds requests back, fails them, or hands them on.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::{ImageQueue, Outcome, RequestId, Started, Waker};
use super::plan::Plan;
use super::timer::Timer;
use super::{Shared, lock};
use cleat_core::request::{IoError, Request};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

pub(super) struct FaultQueue {
    inner: Box<dyn ImageQueue>,
    shared: Arc<Shared>,
    timer: Arc<Timer>,
    waker: Waker,
    plan: Arc<Plan>,
    plan_number: u64,
    /// Bounded by the connection's in-flight limit.
    held: Vec<Held>,
}

struct Held {
    id: RequestId,
    request: Request,
    buffer: Option<Buffer>,
    /// `None`: until the plan is no longer number `plan_number`.
    until: Option<Instant>,
    plan_number: u64,
    error: Option<IoError>,
}

impl FaultQueue {
    pub(super) fn new(
        inner: Box<dyn ImageQueue>,
        shared: Arc<Shared>,
        timer: Arc<Timer>,
        waker: Waker,
    ) -> Self {
        let plan_number = shared.plan_number.load(Ordering::Acquire);
        let plan = Arc::clone(&lock(&shared.plan));
        Self { inner, shared, timer, waker, plan, plan_number, held: Vec::new() }
    }

    fn take_plan(&mut self) {
        let number = self.shared.plan_number.load(Ordering::Acquire);
        if number != self.plan_number {
            self.plan = Arc::clone(&lock(&self.shared.plan));
            self.plan_number = number;
        }
    }

    /// Fails a request, or lets the inner volume serve it.
    fn proceed(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        error: Option<IoError>,
        ring: &mut Ring,
    ) -> Started {
        if error == Some(IoError::Fenced) {
            self.shared.fenced.store(true, Ordering::Release);
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
        let own = self.waker.descriptor().as_raw_fd();
        lock(&self.shared.wakers).retain(|waker| waker.descriptor().as_raw_fd() != own);
    }
}

impl ImageQueue for FaultQueue {
    /// What is held is with the backend, as far as anybody can tell.
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
        let Some(fate) = self.plan.fate(number, &request) else {
            return self.proceed(id, request, buffer, None, ring);
        };
        let until = match fate.delay {
            Some(delay) if delay.is_zero() => {
                return self.proceed(id, request, buffer, fate.error, ring);
            }
            Some(delay) => Some(Instant::now() + delay),
            None => None,
        };
        if let Some(until) = until {
            self.timer.wake_at(until, &self.waker);
        }
        let plan_number = self.plan_number;
        self.held.push(Held { id, request, buffer, until, plan_number, error: fate.error });
        Started::Pending
    }

    fn on_ring(&mut self, completion: Completion, ring: &mut Ring) -> Option<(RequestId, Outcome)> {
        // Nothing here submits to the ring by itself, so the completion is the inner volume's.
        self.inner.on_ring(completion, ring)
    }

    fn on_wake(&mut self, ring: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        self.inner.on_wake(ring, done);
        self.take_plan();
        let now = Instant::now();
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            let over = match held.until {
                Some(until) => until <= now,
                None => held.plan_number != self.plan_number,
            };
            if !over {
                index += 1;
                continue;
            }
            let Held { id, request, buffer, error, .. } = self.held.remove(index);
            if let Started::Done(outcome) = self.proceed(id, request, buffer, error, ring) {
                done.push((id, outcome));
            }
        }
    }
}
