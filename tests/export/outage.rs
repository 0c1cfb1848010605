//! The data path while the backend cannot be reached, and under limits.

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
use cleat_nbd::wire::command;
use cleat_statistics::Page;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use crossbeam_channel::Receiver;
use proptest::prelude::*;
use test_kit::nbd::client::{self, Client};
use test_kit::stopwatch::Stopwatch;

const SIZE: usize = 1 << 20;
const QUEUE: Policy = policy(OnOutage::Queue, 0, 0);

const fn policy(outage: OnOutage, iops: u64, bytes_per_s: u64) -> Policy {
    Policy { outage, limits: RateLimits { iops, bytes_per_s } }
}

#[test]
fn requests_wait_for_the_backend_and_end_well() {
    let bench = Bench::new(QUEUE, 1);
    let mut client = bench.connect();
    client.write(1, 0, &[3; 4096]);
    client.expect(1, Ok(()));
    bench.flaky.down.store(true, Ordering::SeqCst);
    client.write(2, 0, &[4; 4096]);
    client.send(command::READ, 3, 8192, 4096);
    client.send(command::FLUSH, 4, 0, 0);
    bench.wait_for("three requests wait", |page| page.snapshot().queued == 3);
    let during = bench.page.snapshot();
    assert!(during.outage_since_ns > 0 && during.in_flight == 3);
    // It is asked again, ever less often, and nothing is answered meanwhile.
    std::thread::sleep(Duration::from_millis(800));
    assert!(client.is_silent());
    let attempts = || bench.flaky.attempts.load(Ordering::SeqCst);
    assert!(attempts() <= 16, "{} attempts at 3 requests in 0.8 s", attempts());
    bench.wait_for("it is asked again", |_| attempts() >= 7);
    assert_eq!(bench.flaky.content()[..1], [3], "nothing has reached the backend");

    bench.flaky.down.store(false, Ordering::SeqCst);
    let mut replies = HashMap::new();
    for _ in 0..3 {
        let (cookie, result) = client.reply();
        replies.insert(cookie, result);
        if cookie == 3 {
            client.take(4096);
        }
    }
    assert_eq!(replies, HashMap::from([(2, Ok(())), (3, Ok(())), (4, Ok(()))]));
    bench.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    let after = bench.page.snapshot();
    assert_eq!((after.queued, after.errors_of(IoError::Retry)), (0, 0));
    assert!(after.stalled_ns > 800_000_000, "{}", after.stalled_ns);
    assert!(after.op(Op::Write).total_ns > 800_000_000, "the wait counts");
    assert_eq!(bench.flaky.content()[..1], [4]);
}

#[test]
fn a_policy_of_failing_answers_at_once_and_the_end_is_noticed_without_requests() {
    let bench = Bench::new(policy(OnOutage::Fail, 0, 0), 1);
    let mut client = bench.connect();
    bench.flaky.down.store(true, Ordering::SeqCst);
    let begun = Stopwatch::start();
    client.write(1, 0, &[1; 512]);
    client.expect(1, Err(IoError::Broken));
    assert!(begun.elapsed() < Duration::from_millis(500));
    assert!(bench.page.snapshot().outage_since_ns > 0);
    assert_eq!(bench.page.snapshot().errors_of(IoError::Retry), 1);
    bench.flaky.down.store(false, Ordering::SeqCst);
    // Nobody asks for anything: the connection finds out by itself.
    bench.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    client.write(2, 0, &[1; 512]);
    client.expect(2, Ok(()));
}

#[test]
fn a_connection_at_rest_asks_its_backend_for_nothing() {
    let bench = Bench::new(policy(OnOutage::Fail, 0, 0), 1);
    let mut client = bench.connect();
    bench.flaky.down.store(true, Ordering::SeqCst);
    client.write(1, 0, &[1; 512]);
    client.expect(1, Err(IoError::Broken));
    bench.server.hand_over(Duration::from_secs(5)).unwrap();
    let attempts = bench.flaky.attempts.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(bench.flaky.attempts.load(Ordering::SeqCst), attempts);
    bench.flaky.down.store(false, Ordering::SeqCst);
    bench.server.resume();
    bench.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
}

#[test]
fn patience_ends_for_what_waits_and_what_comes_later() {
    let limit = Duration::from_millis(700);
    let bench = Bench::new(policy(OnOutage::QueueFor(limit), 0, 0), 1);
    let mut client = bench.connect();
    bench.flaky.down.store(true, Ordering::SeqCst);
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    client.write(1, 0, &[1; 512]);
    client.send(command::READ, 2, 0, 512);
    client.expect(1, Err(IoError::Broken));
    client.expect(2, Err(IoError::Broken));
    assert!(begun.elapsed() >= limit, "{:?}", begun.elapsed());
    assert!(watch.elapsed() < limit + Duration::from_millis(500), "{:?}", watch.elapsed());
    let begun = Stopwatch::start();
    client.write(3, 0, &[1; 512]);
    client.expect(3, Err(IoError::Broken));
    assert!(begun.elapsed() < Duration::from_millis(500), "the outage is older than the patience");
    bench.flaky.down.store(false, Ordering::SeqCst);
    client.write(4, 0, &[1; 512]);
    client.expect(4, Ok(()));
    bench.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    // The next one has its own time.
    bench.flaky.down.store(true, Ordering::SeqCst);
    client.write(5, 0, &[1; 512]);
    std::thread::sleep(Duration::from_millis(200));
    assert!(client.is_silent());
    bench.flaky.down.store(false, Ordering::SeqCst);
    client.expect(5, Ok(()));
}

#[test]
fn a_change_of_policy_counts_for_what_waits() {
    let bench = Bench::new(QUEUE, 1);
    let mut client = bench.connect();
    bench.flaky.down.store(true, Ordering::SeqCst);
    client.write(1, 0, &[1; 512]);
    bench.wait_for("it waits", |page| page.snapshot().queued == 1);
    bench.server.set_policy(policy(OnOutage::Fail, 0, 0));
    client.expect(1, Err(IoError::Broken));
    bench.server.set_policy(QUEUE);
    client.write(2, 0, &[1; 512]);
    bench.wait_for("it waits", |page| page.snapshot().queued == 1);
    bench.server.set_fail_io(true);
    client.expect(2, Err(IoError::Broken));
    bench.server.set_fail_io(false);
    let attempts = bench.flaky.attempts.load(Ordering::SeqCst);
    client.write(3, 0, &[1; 512]);
    bench.wait_for("it waits", |page| page.snapshot().queued == 1);
    assert!(bench.flaky.attempts.load(Ordering::SeqCst) > attempts);
    // A stop does not wait for a backend that does not answer.
    let begun = Stopwatch::start();
    bench.server.stop(Duration::from_secs(10)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2));
    client.expect(3, Err(IoError::Broken));
    assert!(matches!(bench.end(), End::Stopped));
}

#[test]
fn what_waits_for_a_peer_that_has_left_is_never_started_again() {
    let bench = Bench::new(QUEUE, 1);
    let mut client = bench.connect();
    bench.flaky.down.store(true, Ordering::SeqCst);
    // As many as the bounds allow: the connection does not read, and cannot see the end by that.
    for cookie in 0..DEPTH {
        client.write(u64::from(cookie), 0, &[9; 512]);
    }
    bench.wait_for("all wait", |page| page.snapshot().queued == u64::from(DEPTH));
    drop(client);
    bench.flaky.down.store(false, Ordering::SeqCst);
    assert!(matches!(bench.end(), End::Closed));
    assert!(bench.flaky.content().iter().all(|byte| *byte == 0), "a write came after the end");
    assert_eq!(bench.page.snapshot().outage_since_ns, 0);
}

#[test]
fn outages_are_announced_as_they_begin_and_end() {
    let bench = Bench::new(QUEUE, 2);
    let waker = Waker::new().unwrap();
    bench.server.watch_outages(waker.clone());
    let noticed = || {
        let mut set = [nix::poll::PollFd::new(waker.descriptor(), nix::poll::PollFlags::POLLIN)];
        let ready = nix::poll::poll(&mut set, 10_000_u16).unwrap();
        waker.take();
        ready == 1
    };
    let mut clients = [bench.connect(), bench.connect()];
    bench.flaky.down.store(true, Ordering::SeqCst);
    clients[0].write(1, 0, &[1; 512]);
    assert!(noticed());
    clients[1].write(1, 512, &[1; 512]);
    assert!(noticed());
    assert_eq!(bench.page.snapshot().queued, 2);
    bench.flaky.down.store(false, Ordering::SeqCst);
    clients.iter_mut().for_each(|client| client.expect(1, Ok(())));
    bench.wait_for("the outage is over", |page| page.snapshot().outage_since_ns == 0);
    assert!(noticed());
}

/// A part that serves must not make the part that does not be asked in a loop.
#[test]
fn half_an_outage_is_no_busy_loop() {
    let bench = Bench::new(QUEUE, 1);
    let mut client = bench.connect();
    bench.flaky.bad_block.store(1, Ordering::SeqCst);
    client.write(99, 512, &[5; 512]);
    let begun = Instant::now();
    let (mut good, mut attempts) = (0, 0);
    while begun.elapsed() < Duration::from_secs(1) || attempts < 5 {
        client.write(1, 0, &[5; 512]);
        client.expect(1, Ok(()));
        good += 1;
        attempts = bench.flaky.attempts.load(Ordering::SeqCst) - good;
        assert!(begun.elapsed() < Duration::from_secs(20), "{attempts} attempts");
    }
    // Ten a second, and the first.
    let most = 2 + begun.elapsed().as_millis() / 100;
    assert!(u128::from(attempts) <= most, "{attempts} attempts beside {good} good requests");
    bench.flaky.bad_block.store(u64::MAX, Ordering::SeqCst);
    client.expect(99, Ok(()));
}

#[test]
fn limits_are_kept_in_the_long_run_and_none_is_none() {
    let bench = Bench::new(policy(OnOutage::Queue, 2000, 0), 2);
    let mut clients = [bench.connect(), bench.connect()];
    let rate = measure(&mut clients, Duration::from_secs(2), 512);
    // A tenth of a second's worth may come at once: 5 % of two seconds.
    assert!(rate.is_within(1800.0, 2250.0), "{rate:?} requests/s at a limit of 2000");
    assert!(bench.page.snapshot().limited_ns > 1_000_000_000);
    bench.server.set_policy(policy(OnOutage::Queue, 0, 1 << 20));
    let rate = measure(&mut clients, Duration::from_secs(2), 4096);
    // 256 of these are a mebibyte.
    assert!(rate.is_within(256.0 * 0.9, 256.0 * 1.125), "{rate:?} blocks/s at a limit of 1 MiB/s");
    bench.server.set_policy(QUEUE);
    let limited = bench.page.snapshot().limited_ns;
    let rate = measure(&mut clients, Duration::from_millis(500), 512);
    assert!(rate.is_within(5000.0, f64::MAX), "{rate:?} requests/s without a limit");
    assert_eq!(bench.page.snapshot().limited_ns, limited);
}

#[test]
fn neither_a_stop_nor_failing_nor_a_change_waits_for_a_limit() {
    let bench = Bench::new(policy(OnOutage::Queue, 1, 0), 1);
    let mut client = bench.connect();
    client.write(1, 0, &[1; 512]);
    client.write(2, 0, &[1; 512]);
    client.expect(1, Ok(()));
    std::thread::sleep(Duration::from_millis(50));
    assert!(client.is_silent());
    let begun = Stopwatch::start();
    bench.server.set_policy(policy(OnOutage::Queue, 1000, 0));
    client.expect(2, Ok(()));
    bench.server.set_policy(policy(OnOutage::Queue, 1, 0));
    client.write(3, 0, &[1; 512]);
    client.write(4, 0, &[1; 512]);
    client.expect(3, Ok(()));
    bench.server.set_fail_io(true);
    client.expect(4, Err(IoError::Broken));
    bench.server.set_fail_io(false);
    client.write(5, 0, &[1; 512]);
    bench.server.stop(Duration::from_secs(10)).unwrap();
    assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever pattern of refusals: each request is answered exactly once, and the content is that of
    /// the writes that were answered well.
    #[test]
    fn no_request_is_lost_doubled_or_answered_twice(
        seed: u64, share in 0_u64..=90, writes in 1_usize..120, later: bool,
    ) {
        let bench = Bench::new(QUEUE, 1);
        bench.flaky.later.store(later, Ordering::SeqCst);
        bench.flaky.seed.store(seed, Ordering::SeqCst);
        bench.flaky.share.store(share, Ordering::SeqCst);
        let mut client = bench.connect();
        for index in 0..writes {
            client.write(index as u64, (index * 512) as u64, &[index as u8 + 1; 512]);
        }
        // One that is kept is at the back of the line; all are done within a few rounds.
        let heal = Arc::clone(&bench.flaky);
        let healer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(250));
            heal.share.store(0, Ordering::SeqCst);
        });
        let mut seen = vec![false; writes];
        for _ in 0..writes {
            let (cookie, result) = client.reply();
            prop_assert_eq!(result, Ok(()));
            prop_assert!(!std::mem::replace(&mut seen[cookie as usize], true), "{} twice", cookie);
        }
        healer.join().unwrap();
        prop_assert!(client.is_silent());
        prop_assert!(seen.iter().all(|seen| *seen));
        let content = bench.flaky.content();
        for index in 0..writes {
            prop_assert!(content[index * 512..][..512].iter().all(|b| *b == index as u8 + 1));
        }
        bench.wait_for("all is counted", |page| {
            let seen = page.snapshot();
            seen.op(Op::Write).count == writes as u64 && seen.in_flight == 0
        });
        // Each write took effect once.
        prop_assert_eq!(bench.flaky.effects.load(Ordering::SeqCst), writes as u64);
    }
}

/// Requests per second.
#[derive(Debug)]
struct Rate {
    /// Of all the time.
    whole: f64,
    /// Of the time in which the machine ran: what it lost, no request could have used.
    running: f64,
}

impl Rate {
    fn is_within(&self, least: f64, most: f64) -> bool {
        self.running >= least && self.whole <= most
    }
}

/// The rate of clients that always have eight under way.
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

struct Bench {
    server: Server,
    events: Receiver<Event>,
    page: Page,
    flaky: Arc<Flaky>,
}

impl Bench {
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

/// A backend in memory that can be away: wholly, for one block, or for a share of the requests.
struct Flaky {
    content: Mutex<Vec<u8>>,
    down: AtomicBool,
    /// Of 512 bytes.
    bad_block: AtomicU64,
    /// Of 100 attempts, how many are refused.
    share: AtomicU64,
    seed: AtomicU64,
    /// Requests end after `start`, on a wake.
    later: AtomicBool,
    attempts: AtomicU64,
    /// Writes that took place.
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
        // Steele and Vigna's mixer, for a draw per attempt.
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
