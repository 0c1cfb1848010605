//! The writes that connections have in flight, so that a request which was sent twice cannot undo newer data.
//!
//! The kernel's driver gives up a socket of several whose request takes 30 s, and sends the request again
//! over another one (drivers/block/nbd.c, `nbd_xmit_timeout`). The first copy may still be at the backend. If
//! it ended after the second one, it would overwrite what was written since. So a request that changes the
//! volume is held back while it overlaps one of another connection that is stalled or whose connection is
//! ending.
//!
//! While all I/O fails, a client gets the replies to its requests before the backend has ended them; see `requests`. For the
//! client such a request is over, so it may write the range again as soon as I/O is accepted, over the same connection,
//! too. The later request is held back in the same way, whatever the age of the earlier one is.
//!
//! Invariants:
//! - A request that changes the volume is listed from its start until the backend has ended it. Only the
//!   thread of its connection changes the list.
//! - A listed request counts as stalled when a copy of it arrives: the driver sends a copy only of a request
//!   older than [`STALLED_NS`], or after the connection has ended.
//! - A request that waited in the connection is not started after the peer has closed the socket; see
//!   `connection`.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cleat_backend::RequestId;
use cleat_core::request::Request;

/// The age from which a request may be sent twice, and some more: cleat sets no request timer below 30 s for
/// a device with several connections.
const STALLED_NS: u64 = 1_000_000_000;

/// The lists of all connections of a volume.
#[derive(Debug, Default)]
pub(super) struct Registry {
    lists: Mutex<Vec<Arc<Listed>>>,
    /// Changed with `lists`.
    version: AtomicU64,
}

/// What one connection has in flight, for the other ones to read.
#[derive(Debug)]
struct Listed {
    /// When its oldest request was received; 0: it has none; [`ENDING`]: the connection is ending.
    oldest_ns: AtomicU64,
    /// The number of ranges whose requests were answered before their end. It lets the others skip the ranges.
    answered: AtomicUsize,
    /// A place for each request number.
    ranges: Box<[Range]>,
}

const ENDING: u64 = 1;

#[derive(Debug, Default)]
struct Range {
    offset: AtomicU64,
    /// 0: the place is free.
    end: AtomicU64,
    /// The client has its reply already.
    is_answered: AtomicBool,
}

/// One connection's list, and its view of the other ones. After its drop the listed requests count as
/// stalled, until the [`Listing`] is dropped.
#[derive(Debug)]
pub(super) struct Modifications {
    registry: Arc<Registry>,
    own: Arc<Listed>,
    others: Vec<Arc<Listed>>,
    /// The version of the registry that `others` was read from.
    version: u64,
}

/// Removes the list of a connection when it is dropped, which must be after the end of the connection's ring:
/// until then the ring may write.
#[derive(Debug)]
pub(super) struct Listing {
    registry: Arc<Registry>,
    list: Arc<Listed>,
}

impl Modifications {
    /// Adds the list of a connection with at most `depth` requests in flight.
    pub(super) fn new(registry: Arc<Registry>, depth: usize) -> (Self, Listing) {
        let ranges = (0..depth).map(|_| Range::default()).collect();
        let (oldest_ns, answered) = Default::default();
        let own = Arc::new(Listed { oldest_ns, answered, ranges });
        registry.change(|lists| lists.push(Arc::clone(&own)));
        let listing = Listing { registry: Arc::clone(&registry), list: Arc::clone(&own) };
        (Self { registry, own, others: Vec::new(), version: 0 }, listing)
    }

    /// Lists the request `id`, if it changes the volume.
    pub(super) fn started(&self, id: RequestId, request: &Request, now_ns: u64) {
        if request.op.modifies() {
            // The backend may block this thread before it can publish.
            if self.own.oldest_ns.load(Ordering::Relaxed) == 0 {
                self.own.oldest_ns.store(now_ns, Ordering::Release);
            }
            let range = &self.own.ranges[id as usize];
            range.offset.store(request.offset, Ordering::Relaxed);
            range.end.store(request.offset.saturating_add(request.length), Ordering::Release);
        }
    }

    /// Records that the client gets the reply to the request `id` now, and that the backend has not ended it. Later
    /// requests of all connections wait for its end, if it changes the volume.
    pub(super) fn answered(&self, id: RequestId, request: &Request) {
        if request.op.modifies()
            && !self.own.ranges[id as usize].is_answered.swap(true, Ordering::Release)
        {
            self.own.answered.fetch_add(1, Ordering::Release);
        }
    }

    /// Removes the request `id` from the list, if it changes the volume.
    pub(super) fn ended(&self, id: RequestId, request: &Request) {
        if request.op.modifies() {
            let range = &self.own.ranges[id as usize];
            range.end.store(0, Ordering::Release);
            // Only this thread changes it. An exchange would wait until the processor has stored what was just written.
            if range.is_answered.load(Ordering::Relaxed) {
                range.is_answered.store(false, Ordering::Release);
                self.own.answered.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Publishes when the oldest request in flight was received. `ending`: the peer may send the requests
    /// again at any time.
    pub(super) fn publish(&self, oldest_ns: Option<u64>, ending: bool) {
        let oldest_ns = match oldest_ns {
            Some(_) if ending => ENDING,
            other => other.unwrap_or(0),
        };
        self.own.oldest_ns.store(oldest_ns, Ordering::Release);
    }

    /// Returns whether `request` changes a range that a stalled request of another connection, or a request of any
    /// connection that was answered before its end, may still change.
    pub(super) fn must_wait(&mut self, request: &Request, now_ns: u64) -> bool {
        if !request.op.modifies() {
            return false;
        }
        self.own.overlaps_answered(request)
            || self.has_others()
                && self.others.iter().any(|other| {
                    other.is_stalled(now_ns) && other.overlaps(request)
                        || other.overlaps_answered(request)
                })
    }

    /// Returns whether there are other connections, over which the peer may send requests again.
    pub(super) fn has_others(&mut self) -> bool {
        if self.registry.version.load(Ordering::Acquire) != self.version {
            self.refresh();
        }
        !self.others.is_empty()
    }

    fn refresh(&mut self) {
        let lists = self.registry.lists.lock().unwrap_or_else(PoisonError::into_inner);
        self.version = self.registry.version.load(Ordering::Acquire);
        self.others.clear();
        let others = lists.iter().filter(|list| !Arc::ptr_eq(list, &self.own));
        self.others.extend(others.cloned());
    }
}

impl Drop for Modifications {
    fn drop(&mut self) {
        self.own.oldest_ns.store(ENDING, Ordering::Release);
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        self.registry.change(|lists| lists.retain(|list| !Arc::ptr_eq(list, &self.list)));
    }
}

impl Registry {
    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Listed>>)) {
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut lists);
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl Listed {
    fn is_stalled(&self, now_ns: u64) -> bool {
        let oldest_ns = self.oldest_ns.load(Ordering::Acquire);
        oldest_ns != 0 && now_ns.saturating_sub(oldest_ns) >= STALLED_NS
    }

    /// A place that changes meanwhile belongs to a request that ends or begins now, so it has no copy.
    fn overlaps(&self, request: &Request) -> bool {
        self.ranges.iter().any(|range| range.overlaps(request))
    }

    /// Whether a request that was answered before its end may still change the range of `request`.
    fn overlaps_answered(&self, request: &Request) -> bool {
        let is_answered = |range: &&Range| range.is_answered.load(Ordering::Acquire);
        self.answered.load(Ordering::Acquire) > 0
            && self.ranges.iter().filter(is_answered).any(|range| range.overlaps(request))
    }
}

impl Range {
    fn overlaps(&self, request: &Request) -> bool {
        let request_end = request.offset.saturating_add(request.length);
        let end = self.end.load(Ordering::Acquire);
        end > request.offset && self.offset.load(Ordering::Relaxed) < request_end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::request::{Flags, Op};

    const NOW_NS: u64 = 100 * STALLED_NS;

    fn request(op: Op, offset: u64, length: u64) -> Request {
        Request { op, flags: Flags::default(), offset, length }
    }

    #[test]
    fn only_overlapping_changes_wait_and_only_for_stalled_requests_of_others() {
        let registry = Arc::new(Registry::default());
        let (mut one, _listing) = Modifications::new(Arc::clone(&registry), 2);
        let (mut two, _listing_of_two) = Modifications::new(registry, 2);
        let stalled = request(Op::Write, 4096, 4096);
        one.started(1, &stalled, NOW_NS - STALLED_NS);
        assert!(two.must_wait(&stalled, NOW_NS), "its thread has not published it");
        one.publish(Some(NOW_NS), false);
        assert!(!two.must_wait(&stalled, NOW_NS), "it is not old");
        one.publish(Some(NOW_NS - STALLED_NS), false);
        for (op, offset, length, waits) in [
            (Op::Write, 4096, 4096, true),
            (Op::Write, 0, 4097, true),
            (Op::Trim, 8191, 1, true),
            (Op::WriteZeroes, 0, u64::MAX, true),
            (Op::Write, 0, 4096, false),
            (Op::Write, 8192, 4096, false),
            (Op::Read, 4096, 4096, false),
            (Op::Flush, 0, 0, false),
        ] {
            let request = request(op, offset, length);
            assert_eq!(two.must_wait(&request, NOW_NS), waits, "{request:?}");
            assert!(!one.must_wait(&request, NOW_NS), "its own requests do not hold it");
        }
        one.ended(1, &stalled);
        assert!(!two.must_wait(&stalled, NOW_NS));
    }

    #[test]
    fn requests_of_an_ending_connection_count_at_once_and_until_it_is_gone() {
        let registry = Arc::new(Registry::default());
        let (one, listing) = Modifications::new(Arc::clone(&registry), 2);
        let (mut two, _listing_of_two) = Modifications::new(registry, 2);
        let write = request(Op::Write, 0, 512);
        one.started(0, &write, NOW_NS);
        one.publish(Some(NOW_NS), true);
        assert!(two.must_wait(&write, NOW_NS));
        drop(one);
        assert!(two.must_wait(&write, NOW_NS), "the ring may still write");
        drop(listing);
        assert!(!two.must_wait(&write, NOW_NS));
    }

    /// The client may send a later write to the range as soon as I/O is accepted again.
    #[test]
    fn a_request_that_was_answered_before_its_end_holds_back_every_connection_until_it_ends() {
        let registry = Arc::new(Registry::default());
        let (mut one, _listing) = Modifications::new(Arc::clone(&registry), 2);
        let write = request(Op::Write, 4096, 4096);
        one.started(1, &write, NOW_NS);
        one.answered(1, &write);
        one.publish(Some(NOW_NS), false);
        // A connection that is added later finds it, too.
        let (mut two, _listing_of_two) = Modifications::new(registry, 2);
        for (op, offset, length, waits) in [
            (Op::Write, 0, 4097, true),
            (Op::Trim, 8191, 1, true),
            (Op::Write, 8192, 4096, false),
            (Op::Read, 4096, 4096, false),
        ] {
            let request = request(op, offset, length);
            assert_eq!(one.must_wait(&request, NOW_NS), waits, "{request:?}");
            assert_eq!(two.must_wait(&request, NOW_NS), waits, "{request:?}");
        }
        // The reply is sent once, whatever happens to the connection; the next request in the place was not answered.
        one.answered(1, &write);
        one.ended(1, &write);
        assert!(!one.must_wait(&write, NOW_NS) && !two.must_wait(&write, NOW_NS));
        one.started(1, &write, NOW_NS);
        assert!(!one.must_wait(&write, NOW_NS) && !two.must_wait(&write, NOW_NS));
    }

    /// Its thread may have published nothing for a while.
    #[test]
    fn requests_of_a_connection_that_has_ended_count_without_a_last_word() {
        let registry = Arc::new(Registry::default());
        let (one, _listing) = Modifications::new(Arc::clone(&registry), 2);
        let (mut two, _listing_of_two) = Modifications::new(registry, 2);
        let write = request(Op::Write, 0, 512);
        one.started(0, &write, NOW_NS);
        one.publish(Some(NOW_NS), false);
        assert!(!two.must_wait(&write, NOW_NS));
        drop(one);
        assert!(two.must_wait(&write, NOW_NS));
    }
}
