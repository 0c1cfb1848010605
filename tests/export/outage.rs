//! The data path during backend outages and under rate limits.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cleat_backend::{Completer, Image, ImageQueue, Outcome, RequestId, Started, Waker};
use cleat_core::error::Result;
use cleat_core::policy::{OnOutage, Policy, RateLimits};
use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::End;
use cleat_export::server::{Event, ExportName, Limits, Server};
use cleat_statistics::Page;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use crossbeam_channel::Receiver;
use proptest::prelude::*;
use test_kit::nbd::client::{self, Client};
use test_kit::nbd::wire;
use test_kit::stopwatch::Stopwatch;

const SIZE: usize = 1 << 20;
const QUEUE: Policy = policy(OnOutage::Queue, 0, 0);

const fn policy(outage: OnOutage, iops: u64, bytes_per_s: u64) -> Policy {
    Policy { outage, limits: RateLimits { iops, bytes_per_s } }
}

#[test]
fn requests_wait_for_the_backend_and_then_succeed() {
    let fixture = Fixture::new(QUEUE, 1);
    let mut client = fixture.connect();
    client.write(1, 0, &[3; 4096]);
    client.expect(1, Ok(()));
    fixture.flaky.down.store(true, Ordering::SeqCst);
    client.write(2, 0, &[4; 4096]);
    client.send(wire::READ, 3, 8192, 4096);
    client.send(wire::FLUSH, 4, 0, 0);
    fixture.wait_for("three requests wait", |page| page.snapshot().queued == 3);
    let during = fixture.page.snapshot();
    assert!(during.outage_since_ns > 0 && during.in_flight == 3);
    // The requests are retried with backoff, and none is answered during the outage.
    std::thread::sleep(Duration::from_millis(800));
    assert!(client.is_silent());
    let attempts = || fixture.flaky.attempts.load(Ordering::SeqCst);
    assert!(attempts() <= 16, "{} attempts at 3 requests in 0.8 s", attempts());
    fixture.wait_for("the requests are retried", |_| attempts() >= 7);
    assert_eq!(fixture.flaky.content()[..1], [3], "no write has reached the backend");

    fixture.flaky.down.store(false, Ordering::SeqCst);
    let mut replies = HashMap::new();
    for _ in 0..3 {
        let (cookie, result) = client.reply();
        replies.insert(cookie, result);
        if cookie == 3 {
            client.take(4096);
        }
    }
    assert_eq!(replies, HashMap::from([(2, Ok(())), (3, Ok(())), (4, Ok(()))]));
    fixture.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    let after = fixture.page.snapshot();
    assert_eq!((after.queued, after.errors_of(IoError::Retry)), (0, 0));
    assert!(after.stalled_ns > 800_000_000, "{}", after.stalled_ns);
    assert!(after.op(Op::Write).total_ns > 800_000_000, "the latency includes the wait");
    assert_eq!(fixture.flaky.content()[..1], [4]);
}

#[test]
fn the_policy_fail_fails_requests_at_once_and_the_end_of_an_outage_is_noticed_without_requests() {
    let fixture = Fixture::new(policy(OnOutage::Fail, 0, 0), 1);
    let mut client = fixture.connect();
    fixture.flaky.down.store(true, Ordering::SeqCst);
    let begun = Stopwatch::start();
    client.write(1, 0, &[1; 512]);
    client.expect(1, Err(IoError::Broken));
    assert!(begun.elapsed() < Duration::from_millis(500));
    assert!(fixture.page.snapshot().outage_since_ns > 0);
    assert_eq!(fixture.page.snapshot().errors_of(IoError::Retry), 1);
    fixture.flaky.down.store(false, Ordering::SeqCst);
    // No client sends a request: the connection probes the backend itself.
    fixture.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    client.write(2, 0, &[1; 512]);
    client.expect(2, Ok(()));
}

#[test]
fn a_paused_connection_does_not_probe_its_backend() {
    let fixture = Fixture::new(policy(OnOutage::Fail, 0, 0), 1);
    let mut client = fixture.connect();
    fixture.flaky.down.store(true, Ordering::SeqCst);
    client.write(1, 0, &[1; 512]);
    client.expect(1, Err(IoError::Broken));
    fixture.server.pause(Duration::from_secs(5)).unwrap();
    let attempts = fixture.flaky.attempts.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(fixture.flaky.attempts.load(Ordering::SeqCst), attempts);
    fixture.flaky.down.store(false, Ordering::SeqCst);
    fixture.server.resume();
    fixture.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
}

#[test]
fn the_outage_timeout_fails_waiting_and_later_requests() {
    let limit = Duration::from_millis(700);
    let fixture = Fixture::new(policy(OnOutage::QueueFor(limit), 0, 0), 1);
    let mut client = fixture.connect();
    fixture.flaky.down.store(true, Ordering::SeqCst);
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    client.write(1, 0, &[1; 512]);
    client.send(wire::READ, 2, 0, 512);
    client.expect(1, Err(IoError::Broken));
    client.expect(2, Err(IoError::Broken));
    assert!(begun.elapsed() >= limit, "{:?}", begun.elapsed());
    assert!(watch.elapsed() < limit + Duration::from_millis(500), "{:?}", watch.elapsed());
    let begun = Stopwatch::start();
    client.write(3, 0, &[1; 512]);
    client.expect(3, Err(IoError::Broken));
    assert!(
        begun.elapsed() < Duration::from_millis(500),
        "a request after the timeout fails at once"
    );
    fixture.flaky.down.store(false, Ordering::SeqCst);
    client.write(4, 0, &[1; 512]);
    client.expect(4, Ok(()));
    fixture.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    // The next outage has a timeout of its own.
    fixture.flaky.down.store(true, Ordering::SeqCst);
    client.write(5, 0, &[1; 512]);
    std::thread::sleep(Duration::from_millis(200));
    assert!(client.is_silent());
    fixture.flaky.down.store(false, Ordering::SeqCst);
    client.expect(5, Ok(()));
}

#[test]
fn a_policy_change_applies_to_waiting_requests() {
    let fixture = Fixture::new(QUEUE, 1);
    let mut client = fixture.connect();
    fixture.flaky.down.store(true, Ordering::SeqCst);
    client.write(1, 0, &[1; 512]);
    fixture.wait_for("the request waits", |page| page.snapshot().queued == 1);
    fixture.server.set_policy(policy(OnOutage::Fail, 0, 0));
    client.expect(1, Err(IoError::Broken));
    fixture.server.set_policy(QUEUE);
    client.write(2, 0, &[1; 512]);
    fixture.wait_for("the request waits", |page| page.snapshot().queued == 1);
    fixture.server.set_fail_io(true);
    client.expect(2, Err(IoError::Broken));
    fixture.server.set_fail_io(false);
    let attempts = fixture.flaky.attempts.load(Ordering::SeqCst);
    client.write(3, 0, &[1; 512]);
    fixture.wait_for("the request waits", |page| page.snapshot().queued == 1);
    assert!(fixture.flaky.attempts.load(Ordering::SeqCst) > attempts);
    // A stop does not wait for a backend that does not answer.
    let begun = Stopwatch::start();
    fixture.server.stop(Duration::from_secs(10)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2));
    client.expect(3, Err(IoError::Broken));
    assert!(matches!(fixture.end(), End::Stopped));
}

#[test]
fn waiting_requests_of_a_closed_connection_are_not_retried() {
    let fixture = Fixture::new(QUEUE, 1);
    let mut client = fixture.connect();
    fixture.flaky.down.store(true, Ordering::SeqCst);
    // Fill the queue: the connection does not read then, so reading does not show the end to it.
    for cookie in 0..DEPTH {
        client.write(u64::from(cookie), 0, &[9; 512]);
    }
    fixture.wait_for("all requests wait", |page| page.snapshot().queued == u64::from(DEPTH));
    drop(client);
    fixture.flaky.down.store(false, Ordering::SeqCst);
    assert!(matches!(fixture.end(), End::Closed));
    assert!(
        fixture.flaky.content().iter().all(|byte| *byte == 0),
        "a write was executed after the end"
    );
    assert_eq!(fixture.page.snapshot().outage_since_ns, 0);
}

#[test]
fn watchers_are_woken_when_an_outage_begins_and_ends() {
    let fixture = Fixture::new(QUEUE, 2);
    let waker = Waker::new().unwrap();
    fixture.server.watch_outages(waker.clone());
    let noticed = || {
        let mut set = [nix::poll::PollFd::new(waker.descriptor(), nix::poll::PollFlags::POLLIN)];
        let ready = nix::poll::poll(&mut set, 10_000_u16).unwrap();
        waker.take();
        ready == 1
    };
    let mut clients = [fixture.connect(), fixture.connect()];
    fixture.flaky.down.store(true, Ordering::SeqCst);
    clients[0].write(1, 0, &[1; 512]);
    assert!(noticed());
    clients[1].write(1, 512, &[1; 512]);
    assert!(noticed());
    assert_eq!(fixture.page.snapshot().queued, 2);
    fixture.flaky.down.store(false, Ordering::SeqCst);
    clients.iter_mut().for_each(|client| client.expect(1, Ok(())));
    fixture.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    assert!(noticed());
}

/// Successful requests must not reset the backoff of requests that fail.
#[test]
fn a_partial_outage_is_retried_at_most_ten_times_per_second() {
    let fixture = Fixture::new(QUEUE, 1);
    let mut client = fixture.connect();
    fixture.flaky.bad_block.store(1, Ordering::SeqCst);
    client.write(99, 512, &[5; 512]);
    let begun = Instant::now();
    let (mut good, mut attempts) = (0, 0);
    while begun.elapsed() < Duration::from_secs(1) || attempts < 5 {
        client.write(1, 0, &[5; 512]);
        client.expect(1, Ok(()));
        good += 1;
        attempts = fixture.flaky.attempts.load(Ordering::SeqCst) - good;
        assert!(begun.elapsed() < Duration::from_secs(20), "{attempts} attempts");
    }
    // Ten attempts per second, and the first one.
    let most = 2 + begun.elapsed().as_millis() / 100;
    assert!(u128::from(attempts) <= most, "{attempts} attempts beside {good} good requests");
    fixture.flaky.bad_block.store(u64::MAX, Ordering::SeqCst);
    client.expect(99, Ok(()));
}

#[test]
fn average_rates_keep_the_limits_and_0_is_no_limit() {
    let fixture = Fixture::new(policy(OnOutage::Queue, 2000, 0), 2);
    let mut clients = [fixture.connect(), fixture.connect()];
    let rate = measure(&mut clients, Duration::from_secs(2), 512);
    // The burst is a tenth of a second's worth: 5 % of two seconds.
    assert!(rate.is_within(1800.0, 2250.0), "{rate:?} requests/s at a limit of 2000");
    assert!(fixture.page.snapshot().limited_ns > 1_000_000_000);
    fixture.server.set_policy(policy(OnOutage::Queue, 0, 1 << 20));
    let rate = measure(&mut clients, Duration::from_secs(2), 4096);
    // 256 requests are 1 MiB.
    assert!(rate.is_within(256.0 * 0.9, 256.0 * 1.125), "{rate:?} blocks/s at a limit of 1 MiB/s");
    fixture.server.set_policy(QUEUE);
    let limited = fixture.page.snapshot().limited_ns;
    let rate = measure(&mut clients, Duration::from_millis(500), 512);
    assert!(rate.is_within(5000.0, f64::MAX), "{rate:?} requests/s without a limit");
    assert_eq!(fixture.page.snapshot().limited_ns, limited);
}

#[test]
fn a_stop_a_policy_change_and_fail_io_do_not_wait_for_a_limit() {
    let fixture = Fixture::new(policy(OnOutage::Queue, 1, 0), 1);
    let mut client = fixture.connect();
    client.write(1, 0, &[1; 512]);
    client.write(2, 0, &[1; 512]);
    client.expect(1, Ok(()));
    std::thread::sleep(Duration::from_millis(50));
    assert!(client.is_silent());
    let begun = Stopwatch::start();
    fixture.server.set_policy(policy(OnOutage::Queue, 1000, 0));
    client.expect(2, Ok(()));
    fixture.server.set_policy(policy(OnOutage::Queue, 1, 0));
    client.write(3, 0, &[1; 512]);
    client.write(4, 0, &[1; 512]);
    client.expect(3, Ok(()));
    fixture.server.set_fail_io(true);
    client.expect(4, Err(IoError::Broken));
    fixture.server.set_fail_io(false);
    client.write(5, 0, &[1; 512]);
    fixture.server.stop(Duration::from_secs(10)).unwrap();
    assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// With any pattern of refusals, each request is answered exactly once, and the content is that of
    /// the writes that succeeded.
    #[test]
    fn each_request_is_executed_and_answered_once(
        seed: u64, share in 0_u64..=90, writes in 1_usize..120, later: bool,
    ) {
        let fixture = Fixture::new(QUEUE, 1);
        fixture.flaky.later.store(later, Ordering::SeqCst);
        fixture.flaky.seed.store(seed, Ordering::SeqCst);
        fixture.flaky.share.store(share, Ordering::SeqCst);
        let mut client = fixture.connect();
        for index in 0..writes {
            client.write(index as u64, (index * 512) as u64, &[index as u8 + 1; 512]);
        }
        // A refused request is queued behind the others; all succeed within a few rounds.
        let heal = Arc::clone(&fixture.flaky);
        let healer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(250));
            heal.share.store(0, Ordering::SeqCst);
        });
        let mut seen = vec![false; writes];
        for _ in 0..writes {
            let (cookie, result) = client.reply();
            prop_assert_eq!(result, Ok(()));
            prop_assert!(!std::mem::replace(&mut seen[cookie as usize], true), "{} was answered twice", cookie);
        }
        healer.join().unwrap();
        prop_assert!(client.is_silent());
        prop_assert!(seen.iter().all(|seen| *seen));
        let content = fixture.flaky.content();
        for index in 0..writes {
            prop_assert!(content[index * 512..][..512].iter().all(|b| *b == index as u8 + 1));
        }
        fixture.wait_for("all requests are counted", |page| {
            let seen = page.snapshot();
            seen.op(Op::Write).count == writes as u64 && seen.in_flight == 0
        });
        // Each write took effect once.
        prop_assert_eq!(fixture.flaky.effects.load(Ordering::SeqCst), writes as u64);
    }
}

/// Requests per second.
#[derive(Debug)]
struct Rate {
    /// The rate over the whole time.
    whole: f64,
    /// The rate over the time in which the host did not stall.
    running: f64,
}

impl Rate {
    fn is_within(&self, least: f64, most: f64) -> bool {
        self.running >= least && self.whole <= most
    }
}

/// Measures the rate of clients that always have eight requests in flight.
fn measure(clients: &mut [Client], time: Duration, length: usize) -> Rate {
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    let ended: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                scope.spawn(move || {
                    let data = vec![7; length];
                    (0..8).for_each(|cookie| client.write(cookie, 0, &data));
                    let mut count = 0;
                    while begun.elapsed() < time {
                        let (cookie, result) = client.reply();
                        assert_eq!(result, Ok(()));
                        client.write(cookie, 0, &data);
                        count += 1;
                    }
                    (0..8).for_each(|_| assert_eq!(client.reply().1, Ok(())));
                    count
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    let per_s = |time: Duration| ended as f64 / time.as_secs_f64();
    Rate { whole: per_s(time), running: per_s(watch.elapsed().min(time)) }
}

const DEPTH: u32 = 128;

struct Fixture {
    server: Server,
    events: Receiver<Event>,
    page: Page,
    flaky: Arc<Flaky>,
}

impl Fixture {
    fn new(policy: Policy, connections: usize) -> Self {
        let flaky = Arc::new(Flaky::new());
        let (page, _) = Page::create().unwrap();
        let limits = Limits { connections, depth: DEPTH, ..Limits::default() };
        let image = Arc::new(FlakyImage(Arc::clone(&flaky)));
        let (server, events) =
            Server::new(image, ExportName::default(), page.clone(), limits).unwrap();
        server.set_policy(policy);
        Self { server, events, page, flaky }
    }

    fn connect(&self) -> Client {
        Client::connect(&self.server)
    }

    fn end(&self) -> End {
        client::end(&self.events)
    }

    #[track_caller]
    fn wait_for(&self, what: &str, done: impl Fn(&Page) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !done(&self.page) {
            assert!(Instant::now() < until, "{what}: {:?}", self.page.snapshot());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A backend in memory that refuses all requests, those to one block, or a share of them.
struct Flaky {
    content: Mutex<Vec<u8>>,
    down: AtomicBool,
    /// The index of the refused block, in units of 512 bytes.
    bad_block: AtomicU64,
    /// The percentage of refused attempts.
    share: AtomicU64,
    seed: AtomicU64,
    /// Requests complete after `start`, through the completer.
    later: AtomicBool,
    attempts: AtomicU64,
    /// The number of executed writes.
    effects: AtomicU64,
}

impl Flaky {
    fn new() -> Self {
        Self {
            content: Mutex::new(vec![0; SIZE]),
            down: AtomicBool::new(false),
            bad_block: AtomicU64::new(u64::MAX),
            share: AtomicU64::new(0),
            seed: AtomicU64::new(0),
            later: AtomicBool::new(false),
            attempts: AtomicU64::new(0),
            effects: AtomicU64::new(0),
        }
    }

    fn content(&self) -> Vec<u8> {
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
    fn queue(&self, _: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let (flaky, completer) = (Arc::clone(&self.0), completer.clone());
        Ok(Box::new(FlakyQueue { flaky, completer }))
    }
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

struct FlakyQueue {
    flaky: Arc<Flaky>,
    completer: Completer,
}

impl ImageQueue for FlakyQueue {
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        mut buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let result = self.flaky.run(&request, buffer.as_mut());
        let outcome = Outcome { result, buffer };
        if !self.flaky.later.load(Ordering::SeqCst) {
            return Started::Done(outcome);
        }
        self.completer.complete(id, outcome);
        Started::Pending
    }
    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}
