//! A server over a backend that refuses requests when the test says so.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cleat_backend::{Completer, Image, ImageQueue, Outcome, RequestId, Started, VolumeIdentity};
use cleat_core::error::Result;
use cleat_core::policy::{BusyPoll, OnOutage, Policy, RateLimits};
use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::End;
use cleat_export::server::{Event, ExportName, Limits, Server};
use cleat_statistics::Page;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use crossbeam_channel::Receiver;
use test_kit::nbd::client::{self, Client};

pub(super) const SIZE: usize = 1 << 20;
pub(super) const QUEUE: Policy = policy(OnOutage::Queue, 0, 0);

pub(super) const fn policy(outage: OnOutage, iops: u64, bytes_per_s: u64) -> Policy {
    Policy { outage, limits: RateLimits { iops, bytes_per_s }, busy_poll: BusyPoll::Auto }
}

pub(super) const DEPTH: u32 = 128;

pub(super) struct Fixture {
    pub(super) server: Server,
    pub(super) events: Receiver<Event>,
    pub(super) page: Page,
    pub(super) flaky: Arc<Flaky>,
}

impl Fixture {
    pub(super) fn new(policy: Policy, connections: usize) -> Self {
        let flaky = Arc::new(Flaky::new());
        let (page, _) = Page::create().unwrap();
        let limits = Limits { connections, depth: DEPTH, ..Limits::default() };
        let image = Arc::new(FlakyImage(Arc::clone(&flaky)));
        let (server, events) =
            Server::new(image, ExportName::default(), page.clone(), limits).unwrap();
        server.set_policy(policy);
        Self { server, events, page, flaky }
    }

    pub(super) fn connect(&self) -> Client {
        Client::connect(&self.server)
    }

    pub(super) fn end(&self) -> End {
        client::end(&self.events)
    }

    #[track_caller]
    pub(super) fn wait_for(&self, what: &str, done: impl Fn(&Page) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !done(&self.page) {
            assert!(Instant::now() < until, "{what}: {:?}", self.page.snapshot());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// When a request ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ends {
    AtStart,
    /// In `end_batch`.
    WithBatch,
    /// Through the completer.
    Later,
}

/// A backend in memory that refuses all requests, those to one block, or a share of them.
pub(super) struct Flaky {
    pub(super) content: Mutex<Vec<u8>>,
    pub(super) down: AtomicBool,
    /// The index of the refused block, in units of 512 bytes.
    pub(super) bad_block: AtomicU64,
    /// The percentage of refused attempts.
    pub(super) share: AtomicU64,
    pub(super) seed: AtomicU64,
    pub(super) ends: Mutex<Ends>,
    /// The most requests that have ended with one batch.
    pub(super) longest_batch: AtomicU64,
    pub(super) attempts: AtomicU64,
    /// The number of executed writes.
    pub(super) effects: AtomicU64,
}

impl Flaky {
    pub(super) fn new() -> Self {
        Self {
            content: Mutex::new(vec![0; SIZE]),
            down: AtomicBool::new(false),
            bad_block: AtomicU64::new(u64::MAX),
            share: AtomicU64::new(0),
            seed: AtomicU64::new(0),
            ends: Mutex::new(Ends::AtStart),
            longest_batch: AtomicU64::new(0),
            attempts: AtomicU64::new(0),
            effects: AtomicU64::new(0),
        }
    }

    pub(super) fn content(&self) -> Vec<u8> {
        self.content.lock().unwrap().clone()
    }

    fn run(&self, request: &Request, buffer: Option<&mut Buffer>) -> Result<(), IoError> {
        let number = self.attempts.fetch_add(1, Ordering::SeqCst);
        let seed = self.seed.load(Ordering::SeqCst);
        // The SplitMix64 mixer (Steele, Vigna): one random number per attempt.
        let mut draw = (seed ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        draw = (draw ^ draw >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let refused = (draw >> 32) % 100 < self.share.load(Ordering::SeqCst);
        let bad = self.bad_block.load(Ordering::SeqCst) == request.offset / 512;
        if self.down.load(Ordering::SeqCst) || refused || bad {
            return Err(IoError::Retry);
        }
        let mut content = self.content.lock().unwrap();
        let (from, to) = (request.offset as usize, (request.offset + request.length) as usize);
        match (request.op, buffer) {
            (Op::Read, Some(buffer)) => buffer.payload_mut().copy_from_slice(&content[from..to]),
            (Op::Write, Some(buffer)) => {
                self.effects.fetch_add(1, Ordering::SeqCst);
                content[from..to].copy_from_slice(buffer.payload());
            }
            _ => {}
        }
        Ok(())
    }
}

struct FlakyImage(Arc<Flaky>);

impl Image for FlakyImage {
    fn size(&self) -> u64 {
        SIZE as u64
    }
    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 }
    }
    fn features(&self) -> Features {
        Features { flush: true, ..Features::default() }
    }
    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("a volume of a test")
    }
    fn queue(&self, _: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let (flaky, completer) = (Arc::clone(&self.0), completer.clone());
        Ok(Box::new(FlakyQueue { flaky, completer, batch: Vec::new() }))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

struct FlakyQueue {
    flaky: Arc<Flaky>,
    completer: Completer,
    batch: Vec<(RequestId, Request, Option<Buffer>)>,
}

impl ImageQueue for FlakyQueue {
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        mut buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let ends = *self.flaky.ends.lock().unwrap();
        if let Ends::WithBatch = ends {
            self.batch.push((id, request, buffer));
            return Started::Pending;
        }
        let result = self.flaky.run(&request, buffer.as_mut());
        let outcome = Outcome { result, buffer };
        if let Ends::AtStart = ends {
            return Started::Done(outcome);
        }
        self.completer.complete(id, outcome);
        Started::Pending
    }
    fn end_batch(&mut self, _: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        self.flaky.longest_batch.fetch_max(self.batch.len() as u64, Ordering::SeqCst);
        for (id, request, mut buffer) in self.batch.drain(..) {
            let result = self.flaky.run(&request, buffer.as_mut());
            done.push((id, Outcome { result, buffer }));
        }
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}
