//! The table of a connection's requests that are in flight: started at the backend, or waiting there to be
//! started again.
//!
//! Invariant: a request has a place from its start to its end; its place is its [`RequestId`]. `answered`
//! counts the places whose client has its reply already. The places are linked in the order in which the
//! requests were received, so that the oldest is known at once.

use cleat_backend::RequestId;
use cleat_core::request::Request;

/// What the connection remembers of a request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    /// The client's number for the request, for the reply.
    pub(super) cookie: u64,
    pub(super) request: Request,
    /// When it was received, in nanoseconds on the connections' clock.
    pub(super) started_ns: u64,
    /// The client has a reply already, an error, or there is no client: the end is not answered.
    pub(super) answered: bool,
    /// It has waited for a backend that could not be reached.
    pub(super) retried: bool,
}

/// See the file's comment.
#[derive(Debug)]
pub(super) struct InFlight {
    places: Vec<Option<Running>>,
    free: Vec<RequestId>,
    answered: usize,
    /// A ring of neighbours by age; the last one stands between the youngest and the oldest.
    ages: Vec<Neighbours>,
}

#[derive(Debug, Clone, Copy)]
struct Neighbours {
    older: RequestId,
    younger: RequestId,
}

impl InFlight {
    /// Makes a table for at most `depth` requests.
    pub(super) fn new(depth: u32) -> Self {
        Self {
            places: vec![None; depth as usize],
            free: (0..depth).rev().collect(),
            answered: 0,
            ages: vec![Neighbours { older: depth, younger: depth }; depth as usize + 1],
        }
    }

    /// The number of places.
    pub(super) fn depth(&self) -> usize {
        self.places.len()
    }

    /// Returns when the oldest request was received.
    pub(super) fn oldest(&self) -> Option<u64> {
        let ends = self.ages[self.places.len()];
        // Without requests, the ends are their own neighbours, which is no place.
        self.places.get(ends.younger as usize)?.map(|running| running.started_ns)
    }

    /// The number of requests in flight.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// The number of requests in flight whose client waits for a reply.
    pub(super) fn unanswered(&self) -> usize {
        self.len() - self.answered
    }

    /// Whether there is a free place.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Gives a request that is about to start a place.
    ///
    /// # Panics
    /// Without a free place.
    pub(super) fn insert(&mut self, running: Running) -> RequestId {
        let id = self.free.pop().expect("the caller has checked for room");
        self.answered += usize::from(running.answered);
        self.places[id as usize] = Some(running);
        let ends = self.ages.len() - 1;
        let youngest = self.ages[ends].older;
        self.ages[id as usize] =
            Neighbours { older: youngest, younger: self.ages[youngest as usize].younger };
        self.ages[youngest as usize].younger = id;
        self.ages[ends].older = id;
        id
    }

    /// Frees the place of a request that has ended.
    ///
    /// # Panics
    /// When no request has this number: a backend ended one twice.
    pub(super) fn remove(&mut self, id: RequestId) -> Running {
        let running = self.places[id as usize].take().expect("each request ends once");
        self.answered -= usize::from(running.answered);
        self.free.push(id);
        let Neighbours { older, younger } = self.ages[id as usize];
        self.ages[older as usize].younger = younger;
        self.ages[younger as usize].older = older;
        running
    }

    /// Returns a request in flight. The caller does not change `answered`.
    ///
    /// # Panics
    /// When no request has this number: a backend ended one twice.
    pub(super) fn get_mut(&mut self, id: RequestId) -> &mut Running {
        self.places[id as usize].as_mut().expect("each request ends once")
    }

    /// Calls `answer` with every request whose client waits for a reply, which then counts as answered.
    pub(super) fn answer_all(&mut self, mut answer: impl FnMut(RequestId, &Running)) {
        for (id, place) in (0..).zip(&mut self.places) {
            if let Some(running) = place.as_mut().filter(|running| !running.answered) {
                answer(id, running);
                running.answered = true;
                self.answered += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::request::{Flags, Op};

    const READ: Running = Running {
        cookie: 7,
        request: Request {
            op: Op::Read,
            flags: Flags { fua: false, no_hole: false, fast_zero: false },
            offset: 0,
            length: 1,
        },
        started_ns: 0,
        answered: false,
        retried: false,
    };

    #[test]
    fn places_are_bounded_and_used_again() {
        let mut in_flight = InFlight::new(2);
        assert!(in_flight.has_room());
        assert_eq!((in_flight.depth(), in_flight.len()), (2, 0));
        let first = in_flight.insert(READ);
        let second = in_flight.insert(Running { cookie: 8, ..READ });
        assert!(!in_flight.has_room());
        assert_ne!(first, second);
        assert_eq!(in_flight.remove(first).cookie, 7);
        assert_eq!((in_flight.len(), in_flight.unanswered()), (1, 1));
        in_flight.answer_all(|id, running| assert_eq!((id, running.cookie), (second, 8)));
        in_flight.answer_all(|_, _| panic!("each is answered once"));
        assert_eq!((in_flight.len(), in_flight.unanswered()), (1, 0));
        assert_eq!(in_flight.insert(READ), first);
    }

    /// A request of the worker itself has no client that waits.
    #[test]
    fn answered_requests_count_until_they_end() {
        let mut in_flight = InFlight::new(4);
        let [own, other, _] =
            [true, true, false].map(|answered| in_flight.insert(Running { answered, ..READ }));
        assert_eq!((in_flight.len(), in_flight.unanswered()), (3, 1));
        in_flight.remove(own);
        assert_eq!((in_flight.len(), in_flight.unanswered()), (2, 1));
        in_flight.answer_all(|_, _| {});
        in_flight.remove(other);
        assert_eq!((in_flight.len(), in_flight.unanswered()), (1, 0));
    }

    #[test]
    fn the_oldest_is_known_in_whatever_order_they_end() {
        let mut in_flight = InFlight::new(8);
        let mut running: Vec<(u64, RequestId)> = Vec::new();
        let mut state = 1_u64;
        for started_ns in 0..5000 {
            // A linear congruential generator: any order will do, the same one each time.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let chosen = usize::try_from(state >> 33).unwrap();
            if running.len() == 8 || chosen % 2 == 0 && !running.is_empty() {
                let (started_ns, id) = running.remove(chosen / 2 % running.len());
                assert_eq!(in_flight.remove(id).started_ns, started_ns);
            } else {
                running.push((started_ns, in_flight.insert(Running { started_ns, ..READ })));
            }
            assert_eq!(in_flight.oldest(), running.iter().map(|(started_ns, _)| *started_ns).min());
        }
        assert!(in_flight.places.iter().any(Option::is_some));
    }

    #[test]
    #[should_panic(expected = "each request ends once")]
    fn ending_twice_is_a_defect() {
        let mut in_flight = InFlight::new(1);
        let id = in_flight.insert(READ);
        in_flight.remove(id);
        in_flight.remove(id);
    }
}
