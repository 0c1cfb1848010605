//! A server in this process, and volumes that are slow, wait or panic.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cleat::backends::volume;
use cleat_backend::uri::VolumeUri;
use cleat_backend::{
    Completer, Image, ImageQueue, OpenOptions, Outcome, RequestId, Started, VolumeIdentity,
};
use cleat_core::error::Result;
use cleat_core::request::{Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::End;
use cleat_export::server::{Event, ExportName, Limits, Server};
use cleat_statistics::Page;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use crossbeam_channel::Receiver;
use test_kit::nbd::client::{self, Client};

pub(super) const MIB: usize = 1 << 20;

/// A server over a volume, its events and its statistics.
pub(super) struct Fixture {
    pub(super) server: Server,
    pub(super) events: Receiver<Event>,
    pub(super) page: Page,
    pub(super) size: u64,
}

impl Fixture {
    pub(super) fn memory(limits: Limits) -> Self {
        let uri: VolumeUri = volume("mem:64M").unwrap();
        Self::new(uri.open(&OpenOptions::default()).unwrap(), limits)
    }

    pub(super) fn new(image: Arc<dyn Image>, limits: Limits) -> Self {
        let size = image.size();
        let (page, _) = Page::create().unwrap();
        let (server, events) =
            Server::new(image, ExportName::default(), page.clone(), limits).unwrap();
        Self { server, events, page, size }
    }

    /// Opens a connection that starts in the transmission phase.
    pub(super) fn connect(&self) -> Client {
        Client::connect(&self.server)
    }

    pub(super) fn end(&self) -> End {
        client::end(&self.events)
    }
}

/// A volume whose requests complete when the test releases them, on the test's thread.
pub(super) struct Slow {
    pub(super) state: Mutex<SlowState>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct SlowState {
    waiting: VecDeque<(Completer, RequestId, Option<Buffer>)>,
    released: usize,
    /// How often the connection abandoned its requests.
    pub(super) abandoned: usize,
}

impl Slow {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new() })
    }

    pub(super) fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting.len()
    }

    pub(super) fn wait_for(&self, requests: usize) {
        let state = self.state.lock().unwrap();
        let limit = Duration::from_secs(10);
        let few = |state: &mut SlowState| state.waiting.len() < requests;
        let (state, _) = self.changed.wait_timeout_while(state, limit, few).unwrap();
        assert!(state.waiting.len() >= requests);
    }

    pub(super) fn wait_until_abandoned(&self) {
        let state = self.state.lock().unwrap();
        let limit = Duration::from_secs(10);
        let not_yet = |state: &mut SlowState| state.abandoned == 0;
        let (state, _) = self.changed.wait_timeout_while(state, limit, not_yet).unwrap();
        assert!(state.abandoned > 0);
    }

    /// Completes the next `requests` requests, including future ones.
    pub(super) fn release(&self, requests: usize) {
        let mut state = self.state.lock().unwrap();
        state.released += requests;
        state.finish_held();
    }
}

impl SlowState {
    fn finish_held(&mut self) {
        while self.released > 0
            && let Some((completer, id, buffer)) = self.waiting.pop_front()
        {
            self.released -= 1;
            let outcome = Outcome { result: Ok(()), buffer };
            completer.complete(id, outcome);
        }
    }
}

pub(super) struct SlowImage(pub(super) Arc<Slow>);

impl Image for SlowImage {
    fn size(&self) -> u64 {
        MIB as u64
    }
    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }
    fn features(&self) -> Features {
        Features { flush: true, trim: true, ..Features::default() }
    }
    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("a volume of a test")
    }
    fn queue(&self, _ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(SlowQueue(Arc::clone(&self.0), completer.clone())))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

struct SlowQueue(Arc<Slow>, Completer);

impl ImageQueue for SlowQueue {
    fn start(
        &mut self,
        id: RequestId,
        _request: Request,
        buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let mut state = self.0.state.lock().unwrap();
        state.waiting.push_back((self.1.clone(), id, buffer));
        state.finish_held();
        self.0.changed.notify_all();
        Started::Pending
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
    fn abandon(&mut self, _: &mut Vec<(RequestId, Outcome)>) {
        self.0.state.lock().unwrap().abandoned += 1;
        self.0.changed.notify_all();
    }
}

/// A volume with a defect in TRIM.
pub(super) struct Panicking;

impl Image for Panicking {
    fn size(&self) -> u64 {
        MIB as u64
    }
    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }
    fn features(&self) -> Features {
        Features { flush: true, trim: true, ..Features::default() }
    }
    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("a volume of a test")
    }
    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(Self))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

impl ImageQueue for Panicking {
    fn start(
        &mut self,
        _id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        assert!(request.op != Op::Trim, "a defect");
        Started::Done(Outcome { result: Ok(()), buffer })
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}

/// A volume that executes a request within its start, as memory does. A flush waits there
/// until the test releases it, 100 ms at most.
pub(super) struct Waiting(pub(super) Receiver<()>);

impl Image for Waiting {
    fn size(&self) -> u64 {
        MIB as u64
    }
    fn block_sizes(&self) -> BlockSizes {
        Panicking.block_sizes()
    }
    fn features(&self) -> Features {
        Panicking.features()
    }
    fn identity(&self) -> VolumeIdentity {
        Panicking.identity()
    }
    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(Self(self.0.clone())))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

impl ImageQueue for Waiting {
    fn start(
        &mut self,
        _id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        if request.op == Op::Flush {
            let _ = self.0.recv_timeout(Duration::from_millis(100));
        }
        Started::Done(Outcome { result: Ok(()), buffer })
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}
