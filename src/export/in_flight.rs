//! The requests of one connection that are running at the backend.

use cleat_backend::RequestId;
use cleat_core::request::Request;

/// What has to be remembered of a running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    /// Of the client; goes back with the reply.
    pub(super) cookie: u64,
    /// What was asked for.
    pub(super) request: Request,
    /// When it was received, on the connection's clock, in nanoseconds.
    pub(super) started_ns: u64,
    /// The client has had its reply (an error) before the backend was done.
    pub(super) answered: bool,
    /// It has waited for a backend that could not be reached.
    pub(super) retried: bool,
}

/// A fixed number of places, and the order in which those that are taken were.
#[derive(Debug)]
pub(super) struct InFlight {
    places: Vec<Option<Running>>,
    free: Vec<RequestId>,
    /// A ring of neighbours by age; the last one stands between the youngest and the oldest.
    ages: Vec<Neighbours>,
}

#[derive(Debug, Clone, Copy)]
struct Neighbours {
    older: RequestId,
    younger: RequestId,
}

impl InFlight {
    /// Room for `depth` requests.
    pub(super) fn new(depth: u32) -> Self {
        Self {
            places: vec![None; depth as usize],
            free: (0..depth).rev().collect(),
            ages: vec![Neighbours { older: depth, younger: depth }; depth as usize + 1],
        }
    }

    /// When the oldest running request was received.
    pub(super) fn oldest(&self) -> Option<u64> {
        let ends = self.ages[self.places.len()];
        // Without requests, the ends are their own neighbours, which is no place.
        self.places.get(ends.younger as usize)?.map(|running| running.started_ns)
    }

    /// Requests that are running.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether another one fits.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Notes a request that is about to start.
    ///
    /// # Panics
    /// Without room.
    pub(super) fn insert(&mut self, running: Running) -> RequestId {
        let id = self.free.pop().expect("the caller has checked for room");
        self.places[id as usize] = Some(running);
        let ends = self.ages.len() - 1;
        let youngest = self.ages[ends].older;
        self.ages[id as usize] =
            Neighbours { older: youngest, younger: self.ages[youngest as usize].younger };
        self.ages[youngest as usize].younger = id;
        self.ages[ends].older = id;
        id
    }

    /// Takes a request out that has ended.
    ///
    /// # Panics
    /// When no such request is running: a backend ended one twice.
    pub(super) fn remove(&mut self, id: RequestId) -> Running {
        let running = self.places[id as usize].take().expect("each request ends once");
        self.free.push(id);
        let Neighbours { older, younger } = self.ages[id as usize];
        self.ages[older as usize].younger = younger;
        self.ages[younger as usize].older = older;
        running
    }

    /// A request that is running.
    ///
    /// # Panics
    /// When no such request is running: a backend ended one twice.
    pub(super) fn get_mut(&mut self, id: RequestId) -> &mut Running {
        self.places[id as usize].as_mut().expect("each request ends once")
    }

    /// Every request that is running.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Running> {
        self.places.iter_mut().flatten()
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
        let first = in_flight.insert(READ);
        let second = in_flight.insert(Running { cookie: 8, ..READ });
        assert!(!in_flight.has_room());
        assert_ne!(first, second);
        assert_eq!(in_flight.remove(first).cookie, 7);
        assert_eq!((in_flight.len(), in_flight.iter_mut().count()), (1, 1));
        assert_eq!(in_flight.insert(READ), first);
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
