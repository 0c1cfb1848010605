//! The suite's access to a volume: requests run in batches, on any number of clients.

use std::cell::RefCell;
use std::sync::Arc;

use cleat_backend::uri::VolumeUri;
use cleat_backend::{
    Completions, Image, ImageQueue, OpenOptions, Outcome, RequestId, Started, Waker, channel,
};
use cleat_core::error::Result;
use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{FileSlot, Ring, Token};

/// An open volume, by any transport.
pub trait Volume {
    fn size(&self) -> u64;
    fn blocks(&self) -> BlockSizes;
    fn features(&self) -> Features;
    /// Opens another connection to the volume.
    fn client(&self) -> Box<dyn Client>;
    fn resize(&self, size: u64) -> Result<()>;
    fn set_fault(&self, plan: &str) -> Result<()>;
}

/// A connection to a volume.
pub trait Client {
    /// Runs all `jobs` at the same time and returns their results in the same order.
    fn run(&mut self, jobs: Vec<Job>) -> Vec<Done>;
}

/// A request, with the data that it writes.
#[derive(Debug, Clone)]
pub struct Job {
    pub request: Request,
    pub data: Option<Vec<u8>>,
}

/// The result of a request, with the data that it read.
#[derive(Debug)]
pub struct Done {
    pub result: std::result::Result<(), IoError>,
    pub data: Option<Vec<u8>>,
}

/// Returns a request without data.
pub fn job(op: Op, offset: u64, length: u64) -> Job {
    Job { request: Request { op, flags: Flags::default(), offset, length }, data: None }
}

/// Returns a request to write `data`.
pub fn write(offset: u64, data: &[u8]) -> Job {
    Job { data: Some(data.to_vec()), ..job(Op::Write, offset, data.len() as u64) }
}

impl Job {
    /// Sets the flags of the request.
    pub fn with(mut self, flags: Flags) -> Self {
        self.request.flags = flags;
        self
    }
}

impl dyn Client + '_ {
    /// Runs one job, checks that it succeeds, and returns the data that it read.
    pub fn one(&mut self, job: Job) -> Vec<u8> {
        let shown = job.request;
        let done = self.run(vec![job]).pop().unwrap();
        assert_eq!(done.result, Ok(()), "{shown:?}");
        done.data.unwrap_or_default()
    }

    /// Runs one job and returns its result.
    pub fn try_one(&mut self, job: Job) -> std::result::Result<(), IoError> {
        self.run(vec![job]).pop().unwrap().result
    }

    /// Reads a range and returns its content.
    pub fn read(&mut self, offset: u64, length: u64) -> Vec<u8> {
        self.one(job(Op::Read, offset, length))
    }
}

/// A volume opened in this process.
pub struct Local(Arc<dyn Image>);

impl Local {
    /// Shrinks the volume to `size` bytes.
    pub fn shrink(&self, size: u64) -> Result<()> {
        self.0.shrink().expect("the volume can shrink").shrink_to(size)
    }

    pub fn of(image: Arc<dyn Image>) -> Self {
        Self(image)
    }

    /// Opens a volume, or panics.
    pub fn open(uri: &VolumeUri, options: OpenOptions) -> Self {
        Self(uri.open(&options).unwrap_or_else(|error| panic!("{uri}: {}", error.report())))
    }

    /// Starts all `jobs` on a client and drops it at once, as when a connection breaks.
    pub fn cut_off(&self, jobs: Vec<Job>) {
        let (mut client, mut ended) = (LocalClient::new(&*self.0, 64), Vec::new());
        for (index, job) in jobs.into_iter().enumerate() {
            client.start(index, job, &mut ended);
        }
    }

    /// Starts all `jobs`, abandons them, and returns their results.
    pub fn abandon(&self, jobs: Vec<Job>) -> Vec<std::result::Result<(), IoError>> {
        let (mut client, mut ended, count) =
            (LocalClient::new(&*self.0, 64), Vec::new(), jobs.len());
        for (index, job) in jobs.into_iter().enumerate() {
            client.start(index, job, &mut ended);
        }
        let mut done = Vec::new();
        client.queue.abandon(&mut done);
        done.into_iter().for_each(|(id, outcome)| client.end(id, outcome, &mut ended));
        while ended.len() < count {
            client.turn(&mut ended);
        }
        ended.into_iter().map(|(_, done)| done.result).collect()
    }

    pub fn watch_changes(&self, waker: Waker) {
        self.0.watch_changes(waker);
    }

    /// Lists at most `limit` extents of a range, as data if the backend cannot list extents.
    pub fn extents(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        match self.0.extents() {
            Some(extents) => extents.list(offset, length, limit),
            None => Ok(vec![Extent { length, hole: false }]),
        }
    }
}

impl Volume for Local {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn blocks(&self) -> BlockSizes {
        self.0.block_sizes()
    }

    fn features(&self) -> Features {
        self.0.features()
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(LocalClient::new(&*self.0, 64))
    }

    fn resize(&self, size: u64) -> Result<()> {
        self.0.resize().expect("the volume can grow").grow(size)
    }

    fn set_fault(&self, plan: &str) -> Result<()> {
        self.0.set_fault().expect("the volume injects faults").set_fault(plan)
    }
}

/// A ring, a queue and an event loop, as a connection thread has them.
pub struct LocalClient {
    // The queue is dropped before the ring, as in a connection thread.
    queue: Box<dyn ImageQueue>,
    ring: Ring,
    waker: Waker,
    completions: Completions,
    wakes: FileSlot,
    polling: bool,
    in_flight: RefCell<Vec<Option<Flight>>>,
}

/// A request in flight.
struct Flight {
    index: usize,
    length: Option<usize>,
    address: Option<*mut u8>,
}

/// The maximum number of requests in flight.
const LIMIT: usize = 32;

const WAKE: Token = Token(1);

impl LocalClient {
    /// Creates a client whose ring has `entries` entries. With fewer entries than
    /// requests, the queue waits.
    pub fn new(image: &dyn Image, entries: u32) -> Self {
        let mut ring = Ring::new(entries).unwrap();
        let waker = Waker::new().unwrap();
        let wakes = ring.register(waker.descriptor()).unwrap();
        let (completer, completions) = channel(waker.clone(), LIMIT);
        let queue = image.queue(&mut ring, &completer).unwrap();
        let in_flight = RefCell::new((0..LIMIT).map(|_| None).collect());
        Self { queue, ring, waker, completions, wakes, polling: false, in_flight }
    }

    fn start(&mut self, index: usize, job: Job, ended: &mut Vec<(usize, Done)>) {
        let buffer = match job.request.op {
            Op::Read => Some(Buffer::zeroed(job.request.length as usize)),
            Op::Write => {
                let data = job.data.unwrap();
                assert_eq!(data.len() as u64, job.request.length);
                let mut buffer = Buffer::zeroed(data.len());
                buffer.payload_mut().copy_from_slice(&data);
                Some(buffer)
            }
            _ => None,
        };
        let id = self.in_flight.borrow().iter().position(Option::is_none).unwrap();
        self.in_flight.borrow_mut()[id] = Some(Flight {
            index,
            length: buffer.as_ref().map(Buffer::len),
            address: buffer.as_ref().map(Buffer::payload_ptr),
        });
        let id = id as RequestId;
        if let Started::Done(outcome) = self.queue.start(id, job.request, buffer, &mut self.ring) {
            self.end(id, outcome, ended);
        }
    }

    /// Records the result of a request, and checks that it ends once and with its own buffer.
    fn end(&self, id: RequestId, outcome: Outcome, ended: &mut Vec<(usize, Done)>) {
        let flight = self.in_flight.borrow_mut()[id as usize].take();
        let flight = flight.unwrap_or_else(|| panic!("request {id} ended but was not in flight"));
        assert_eq!(outcome.buffer.as_ref().map(Buffer::len), flight.length);
        assert_eq!(outcome.buffer.as_ref().map(Buffer::payload_ptr), flight.address);
        let data = outcome.buffer.map(|buffer| buffer.payload().to_vec());
        ended.push((flight.index, Done { result: outcome.result, data }));
    }

    fn turn(&mut self, ended: &mut Vec<(usize, Done)>) {
        let mut done = Vec::new();
        self.queue.end_batch(&mut self.ring, &mut done);
        if !done.is_empty() {
            return done.into_iter().for_each(|(id, outcome)| self.end(id, outcome, ended));
        }
        if !self.polling {
            self.polling = self.ring.poll_readable(self.wakes, WAKE);
        }
        self.ring.submit_and_wait().unwrap();
        while let Some(completion) = self.ring.next() {
            if completion.token == WAKE {
                self.polling = false;
                self.waker.take();
                self.completions.accept();
                let mut done = Vec::new();
                while let Some((id, outcome)) = self.completions.next() {
                    self.queue.on_completion(id, outcome, &mut self.ring, &mut done);
                }
                for (id, outcome) in done {
                    self.end(id, outcome, ended);
                }
            } else {
                assert!(completion.token.is_backend(), "{:?}", completion.token);
                if let Some((id, outcome)) = self.queue.on_ring(completion, &mut self.ring) {
                    self.end(id, outcome, ended);
                }
            }
        }
    }
}

impl Client for LocalClient {
    fn run(&mut self, jobs: Vec<Job>) -> Vec<Done> {
        let count = jobs.len();
        let mut ended = Vec::with_capacity(count);
        for (index, job) in jobs.into_iter().enumerate() {
            while self.in_flight.borrow().iter().all(Option::is_some) {
                self.turn(&mut ended);
            }
            self.start(index, job, &mut ended);
        }
        while ended.len() < count {
            self.turn(&mut ended);
        }
        ended.sort_by_key(|(index, _)| *index);
        assert!(ended.iter().map(|(index, _)| *index).eq(0..count));
        ended.into_iter().map(|(_, done)| done).collect()
    }
}
