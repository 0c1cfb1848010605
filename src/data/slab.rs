//! The requests of one connection that are running at the backend.

use crate::backend::RequestId;
use crate::request::Request;

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

/// A fixed number of places.
#[derive(Debug)]
pub(super) struct Slab {
    places: Vec<Option<Running>>,
    free: Vec<RequestId>,
}

impl Slab {
    /// Room for `depth` requests.
    pub(super) fn new(depth: u32) -> Self {
        Self { places: vec![None; depth as usize], free: (0..depth).rev().collect() }
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
        id
    }

    /// Takes a request out that has ended.
    ///
    /// # Panics
    /// When no such request is running: a backend ended one twice.
    pub(super) fn remove(&mut self, id: RequestId) -> Running {
        let running = self.places[id as usize].take().expect("each request ends once");
        self.free.push(id);
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
    use crate::request::{Flags, Op};

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
        let mut slab = Slab::new(2);
        let first = slab.insert(READ);
        let second = slab.insert(Running { cookie: 8, ..READ });
        assert!(!slab.has_room());
        assert_ne!(first, second);
        assert_eq!(slab.remove(first).cookie, 7);
        assert_eq!((slab.len(), slab.iter_mut().count()), (1, 1));
        assert_eq!(slab.insert(READ), first);
    }

    #[test]
    #[should_panic(expected = "each request ends once")]
    fn ending_twice_is_a_defect() {
        let mut slab = Slab::new(1);
        let id = slab.insert(READ);
        slab.remove(id);
        slab.remove(id);
    }
}
