//! What one connection writes to the statistics page.
//!
//! Invariant: values that only hold while the connection lives (requests in flight, the oldest one, the
//! outage) are written when they change, not per request; ended requests are counted in batches, with one
//! reading of the clock each.

use std::sync::Arc;

use cleat_core::clock::Clock;
use cleat_core::request::{IoError, Op};
use cleat_statistics::Recorder;

/// See the file's comment.
pub(super) struct Statistics {
    recorder: Recorder,
    clock: Arc<dyn Clock>,
    ended: Vec<Ended>,
    in_flight: usize,
    oldest_ns: u64,
    /// When the outage began, in nanoseconds of CLOCK_BOOTTIME; 0 without an outage.
    outage_since_boot_ns: u64,
}

/// A request that has ended and is not counted yet.
struct Ended {
    op: Op,
    bytes: u64,
    started_ns: u64,
    result: Result<(), IoError>,
}

impl Statistics {
    /// Starts to count; room is made for `depth` requests in flight.
    pub(super) fn new(recorder: Recorder, clock: Arc<dyn Clock>, depth: usize) -> Self {
        let ended = Vec::with_capacity(depth * 2);
        Self { recorder, clock, ended, in_flight: 0, oldest_ns: 0, outage_since_boot_ns: 0 }
    }

    /// Shows the connection as served. Does nothing the second time.
    pub(super) fn begin(&mut self) {
        self.recorder.begin();
    }

    /// Writes no more: another process has the connection.
    pub(super) fn leave(&mut self) {
        self.recorder.leave();
    }

    /// Notes that a request of `bytes` has ended, which was received at `started_ns`.
    pub(super) fn ended(
        &mut self,
        op: Op,
        bytes: u64,
        started_ns: u64,
        result: Result<(), IoError>,
    ) {
        if self.ended.len() == self.ended.capacity() {
            self.count();
        }
        self.ended.push(Ended { op, bytes, started_ns, result });
    }

    /// Writes what has changed: `in_flight` requests run, the oldest one since `oldest_ns`.
    pub(super) fn show(&mut self, in_flight: usize, oldest_ns: Option<u64>) {
        if in_flight != self.in_flight {
            self.in_flight = in_flight;
            self.recorder.set_in_flight(in_flight as u64);
        }
        let oldest_ns = oldest_ns.unwrap_or(0);
        if oldest_ns != self.oldest_ns {
            self.oldest_ns = oldest_ns;
            self.recorder.set_oldest(oldest_ns);
        }
        if !self.ended.is_empty() {
            self.count();
        }
    }

    /// Shows that an outage has begun, in which `waiting` requests wait.
    pub(super) fn outage_began(&mut self, waiting: usize) {
        // 0 would mean that there is none.
        self.outage_since_boot_ns = self.clock.boot_ns().max(1);
        self.show_waiting(waiting);
    }

    /// Shows that the outage is over, and counts its time.
    pub(super) fn outage_ended(&mut self, lasted_ns: u64) {
        self.outage_since_boot_ns = 0;
        self.recorder.stalled(lasted_ns);
        self.show_waiting(0);
    }

    /// Shows how many requests wait for the backend.
    pub(super) fn show_waiting(&self, waiting: usize) {
        self.recorder.set_outage(waiting as u64, self.outage_since_boot_ns);
    }

    /// Counts time in which the limits held requests back.
    pub(super) fn limited(&self, time_ns: u64) {
        self.recorder.limited(time_ns);
    }

    fn count(&mut self) {
        let now_ns = self.clock.monotonic_ns();
        for Ended { op, bytes, started_ns, result } in self.ended.drain(..) {
            self.recorder.ended(op, bytes, now_ns.saturating_sub(started_ns), result);
        }
    }
}
