//! The data path during backend outages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cleat_backend::Waker;
use cleat_core::policy::OnOutage;
use cleat_core::request::{IoError, Op};
use cleat_export::End;
use proptest::prelude::*;
use test_kit::nbd::wire;
use test_kit::stopwatch::Stopwatch;

use super::flaky::{DEPTH, Ends, Fixture, QUEUE, policy};

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
        seed: u64, share in 0_u64..=90, writes in 1_usize..120,
        ends in prop_oneof![Just(Ends::AtStart), Just(Ends::WithBatch), Just(Ends::Later)],
    ) {
        let fixture = Fixture::new(QUEUE, 1);
        *fixture.flaky.ends.lock().unwrap() = ends;
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
