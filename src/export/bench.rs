//! Gives the benchmarks access to parts of the data path that are private otherwise.

use cleat_backend::RequestId;
use cleat_core::request::Request;
use cleat_sys::buffer::Buffer;

use crate::buffer_pool::BufferPool;
use crate::in_flight::{InFlight, Running};

/// The table of the requests in flight of a connection.
#[derive(Debug)]
pub struct RequestTable(InFlight);

impl RequestTable {
    /// Makes a table for at most `depth` requests.
    pub fn new(depth: u32) -> Self {
        Self(InFlight::new(depth))
    }

    /// Adds a request that was received at `started_ns`.
    ///
    /// # Panics
    /// Panics if `depth` requests are in flight.
    pub fn insert(&mut self, cookie: u64, request: Request, started_ns: u64) -> RequestId {
        self.0.insert(Running { cookie, request, started_ns, answered: false, retried: false })
    }

    /// Removes a request and returns its cookie.
    ///
    /// # Panics
    /// Panics if no request in flight has this number.
    pub fn remove(&mut self, id: RequestId) -> u64 {
        self.0.remove(id).cookie
    }

    /// Returns when the oldest request was received.
    pub fn oldest(&self) -> Option<u64> {
        self.0.oldest()
    }
}

/// The buffers of a connection.
#[derive(Debug)]
pub struct Buffers(BufferPool);

impl Buffers {
    /// Makes a pool whose buffers take at most `budget` bytes.
    pub fn new(budget: usize) -> Self {
        Self(BufferPool::new(budget))
    }

    /// Takes a buffer of `len` bytes, at most 32 MiB; `None` while the budget is used up.
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        self.0.take(len)
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        self.0.give(buffer);
    }
}
