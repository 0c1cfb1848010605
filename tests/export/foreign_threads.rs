//! Requests that backend threads complete while the connection's thread waits. Each must get exactly one
//! complete and correct reply, also when other events happen at the same time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cleat_backend::{Completer, Image, ImageQueue, Outcome, RequestId, Started, VolumeIdentity};
use cleat_core::error::Result;
use cleat_core::random::Random;
use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::server::{ExportName, Limits, Server};
use cleat_statistics::Page;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use crossbeam_channel::{Receiver, Sender, unbounded};
use test_kit::nbd::client::Client;
use test_kit::nbd::wire;

const MIB: usize = 1 << 20;
const BLOCK: u32 = 4096;

#[test]
fn a_single_request_is_answered_and_counted_without_a_later_request() {
    let fixture = Fixture::new();
    let mut client = Client::connect(&fixture.server);
    for cookie in 0..100 {
        client.send(wire::READ, cookie, cookie * u64::from(BLOCK), BLOCK);
        client.expect(cookie, Ok(()));
        assert_eq!(client.take(BLOCK as usize), content(cookie * u64::from(BLOCK), BLOCK));
        client.write(cookie, 0, &[1; 512]);
        client.expect(cookie, Ok(()));
    }
    let limit = Instant::now() + Duration::from_secs(20);
    while fixture.page.snapshot().in_flight > 0 {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(1));
    }
    let seen = fixture.page.snapshot();
    assert_eq!((seen.op(Op::Read).count, seen.op(Op::Write).count), (100, 100));
    assert_eq!(seen.op(Op::Read).bytes, 100 * u64::from(BLOCK));
}

/// One to three requests at a time. The backend fails some of them, and `set_fail_io` others.
#[test]
fn each_request_has_one_reply() {
    let random = Random::from_kernel().unwrap();
    let seed = std::env::var("CLEAT_TEST_SEED").map_or(random.next(), |seed| seed.parse().unwrap());
    println!("CLEAT_TEST_SEED={seed}");
    let random = Random::seeded(seed);
    let fixture = Fixture::failing(true);
    let mut client = Client::connect(&fixture.server);
    let (mut next, mut checked, mut refused) = (0, 0, 0);
    for _ in 0..3000 {
        let mut sent = HashMap::new();
        // Before the requests are sent: the volume may fail one at once.
        let failed_before = fixture.failed();
        for _ in 0..1 + random.next() % 3 {
            next += 1;
            let offset = random.next() % 100 * u64::from(BLOCK);
            let length = BLOCK * (1 + random.next() as u32 % 20);
            match random.next() % 4 {
                0 => client.write(next, offset, &vec![2; length as usize]),
                1 => client.send(wire::FLUSH, next, 0, 0),
                _ => {
                    client.send(wire::READ, next, offset, length);
                    sent.insert(next, Some((offset, length)));
                }
            }
            sent.entry(next).or_insert(None);
        }
        let failing = random.next().is_multiple_of(20);
        let mut failed = 0;
        if failing {
            fixture.server.set_fail_io(true);
        }
        while !sent.is_empty() {
            let (cookie, result) = client.reply();
            let read =
                sent.remove(&cookie).expect("a request of this round that is not answered yet");
            match (result, read) {
                (Ok(()), Some((offset, length))) => {
                    assert!(client.take(length as usize) == content(offset, length));
                    checked += 1;
                }
                (Ok(()), None) => {}
                (Err(error), _) => {
                    assert_eq!(error, IoError::Broken);
                    failed += 1;
                }
            }
        }
        if failing {
            fixture.server.set_fail_io(false);
            refused += failed;
            fixture.wait_until_idle();
        } else {
            assert_eq!(failed, fixture.failed() - failed_before, "only the volume fails requests");
        }
    }
    assert!(checked > 1000 && refused > 10 && fixture.failed() > 20, "{checked} {refused}");
}

/// The socket buffer fills, so the connection's thread must send the rest of a reply later.
#[test]
fn replies_that_do_not_fit_the_socket_are_sent_in_parts() {
    let fixture = Fixture::new();
    let mut client = Client::connect(&fixture.server);
    let length = 15 * BLOCK + 512;
    for cookie in 0..60 {
        let before = fixture.ended();
        client.send(wire::READ, cookie, cookie * 512, length);
        // Until the socket is full, each request completes before the next one is sent.
        let limit = Instant::now() + Duration::from_millis(200);
        while fixture.ended() == before && Instant::now() < limit {
            std::thread::yield_now();
        }
    }
    for cookie in 0..60 {
        client.expect(cookie, Ok(()));
        assert!(client.take(length as usize) == content(cookie * 512, length), "{cookie}");
    }
}

#[test]
fn a_connection_is_paused_between_two_completions_and_resumed() {
    let fixture = Fixture::new();
    let mut client = Client::connect(&fixture.server);
    for cookie in 0..200 {
        client.send(wire::READ, cookie, 0, BLOCK);
        let rests = fixture.server.pause(Duration::from_secs(20)).unwrap();
        assert!(rests.len() == 1);
        fixture.server.resume();
        client.expect(cookie, Ok(()));
        assert_eq!(client.take(BLOCK as usize), content(0, BLOCK));
    }
}

/// The content of the volume, which every read returns.
fn content(offset: u64, length: u32) -> Vec<u8> {
    (offset..offset + u64::from(length)).map(|at| (at / 512 % 251) as u8).collect()
}

/// A server over a volume that completes requests on threads of its own.
struct Fixture {
    server: Server,
    page: Page,
    started: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    failed: Arc<AtomicUsize>,
}

impl Fixture {
    fn new() -> Self {
        Self::failing(false)
    }

    /// Creates a server. If `failing` is set, the volume fails some requests.
    fn failing(failing: bool) -> Self {
        let (page, _) = Page::create().unwrap();
        let image = Arc::new(Threaded { failing, ..Threaded::default() });
        let [started, ended, failed] =
            [&image.started, &image.ended, &image.failed].map(Arc::clone);
        let (server, _) =
            Server::new(image, ExportName::default(), page.clone(), Limits::default()).unwrap();
        Self { server, page, started, ended, failed }
    }

    /// Returns how many requests the volume has failed.
    fn failed(&self) -> usize {
        self.failed.load(Ordering::Relaxed)
    }

    /// Waits until the volume has ended all requests, also those that were answered before.
    fn wait_until_idle(&self) {
        let limit = Instant::now() + Duration::from_secs(20);
        while self.ended() < self.started.load(Ordering::Relaxed) {
            assert!(Instant::now() < limit);
            std::thread::yield_now();
        }
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }
}

/// A volume with two threads per queue that complete requests after a delay.
#[derive(Default)]
struct Threaded {
    failing: bool,
    started: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    failed: Arc<AtomicUsize>,
}

impl Image for Threaded {
    fn size(&self) -> u64 {
        MIB as u64
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
        let (sender, receiver) = unbounded();
        for seed in 0..2 {
            let worker = Worker {
                requests: Receiver::clone(&receiver),
                completer: completer.clone(),
                failing: self.failing,
                ended: Arc::clone(&self.ended),
                failed: Arc::clone(&self.failed),
            };
            std::thread::spawn(move || worker.run(&Random::seeded(seed)));
        }
        Ok(Box::new(ThreadedQueue { sender, started: Arc::clone(&self.started) }))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

struct ThreadedQueue {
    sender: Sender<(RequestId, Request, Option<Buffer>)>,
    started: Arc<AtomicUsize>,
}

/// A thread that completes requests.
struct Worker {
    requests: Receiver<(RequestId, Request, Option<Buffer>)>,
    completer: Completer,
    failing: bool,
    ended: Arc<AtomicUsize>,
    failed: Arc<AtomicUsize>,
}

impl Worker {
    fn run(&self, random: &Random) {
        for (id, request, mut buffer) in &self.requests {
            let pause_us = [0, 0, 20, 100, 300][random.next() as usize % 5];
            std::thread::sleep(Duration::from_micros(pause_us));
            if let (Op::Read, Some(buffer)) = (request.op, &mut buffer) {
                let found = content(request.offset, request.length as u32);
                buffer.payload_mut().copy_from_slice(&found);
            }
            let fails = self.failing && random.next().is_multiple_of(50);
            let result = if fails { Err(IoError::Broken) } else { Ok(()) };
            self.failed.fetch_add(usize::from(fails), Ordering::Relaxed);
            self.completer.complete(id, Outcome { result, buffer });
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl ImageQueue for ThreadedQueue {
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        _: &mut Ring,
    ) -> Started {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.sender.send((id, request, buffer)).unwrap();
        Started::Pending
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}
