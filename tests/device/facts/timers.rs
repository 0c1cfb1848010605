//! When the kernel sends requests again, lets them wait, or fails them.

use std::time::{Duration, Instant};

use super::peer::{Device, Io, Make, OURS};
use crate::fixture::{TIMEOUT, kernel_is_at_least};

pub(super) fn facts() -> Vec<(&'static str, fn())> {
    vec![
        ("lost_requests_are_sent_again_by_the_timer_of_their_start", lost_requests),
        ("a_request_timeout_drops_a_slow_live_socket", request_timeout),
        ("new_requests_wait_for_a_connection_lost_ones_for_a_replacement", dead_timeout),
        ("without_a_dead_timeout_new_requests_fail_at_once", no_dead_timeout),
        ("several_connections_send_slow_requests_twice", several_connections),
    ]
}

const MOMENT: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

/// Starts four reads that the peer receives and does not answer.
fn four_held(device: &Device) -> Vec<Io> {
    device.peers[0].hold();
    let reads: Vec<Io> = (0..4).map(|n| device.read(OURS + n * 8192)).collect();
    device.peers[0].wait_seen(4);
    reads
}

/// Loses a peer with four requests, replaces it after `pause`, and returns how long after the loss
/// the last of them was answered. `late_ms`: an io_timeout that is set while the requests are in flight.
fn replay_after(io_timeout_ms: Option<u32>, late_ms: Option<u32>, pause: Duration) -> Duration {
    let device = Device::connect(Make { io_timeout_ms, ..Make::default() });
    let reads = four_held(&device);
    let index = device.index;
    let late = late_ms.map(|ms| Io::start(move || super::peer::set_io_timeout(index, ms)));
    if let Some(late) = &late {
        assert_eq!(late.hangs_for(MOMENT), attributes_freeze(), "as observed on this kernel");
    }
    let lost = Instant::now();
    device.peers[0].die();
    assert!(reads.iter().all(|read| read.hangs_for(pause / 4)), "ended without a socket");
    let (replacement, _) = device.replace();
    for read in reads {
        read.finish(TIMEOUT).0.expect("a lost request is answered in the end");
    }
    let took = lost.elapsed();
    assert_eq!(replacement.seen().len(), 4, "each is sent once more: {:?}", replacement.seen());
    took
}

/// From 6.12 on a write to an attribute of the queue waits for all requests in flight (not in 6.1).
fn attributes_freeze() -> bool {
    kernel_is_at_least(6, 12)
}

fn lost_requests() {
    let cases = [
        ("io_timeout 200 ms", Some(200), None, MOMENT),
        ("io_timeout 1000 ms", Some(1000), None, MOMENT),
        ("io_timeout 1000 ms, replaced after 4.5 s", Some(1000), None, Duration::from_millis(4500)),
        ("io_timeout 30 s", None, None, MOMENT),
        ("io_timeout 30 s, 200 ms set after the requests", None, Some(200), MOMENT),
    ];
    let runs = cases.map(|(what, before, late, pause)| {
        (what, Io::start(move || replay_after(before, late, pause)))
    });
    let times = runs.map(|(what, run)| {
        let took = run.finish(2 * TIMEOUT).0;
        println!("figures: lost requests were answered after {took:.1?}: {what}");
        took.as_secs_f64()
    });
    assert!(times[0] < 10.0 && times[1] < 10.0, "a lowered io_timeout counts: {times:?}");
    assert!((4.5..12.0).contains(&times[2]), "soon after the replacement: {times:?}");
    assert!(times[3] > 15.0, "nothing but the timer sends them again: {times:?}");
    assert!(times[4] > 15.0, "a request keeps the timer it was started with: {times:?}");
}

/// One connection with TIMEOUT: the kernel drops the socket of a slow peer, and sends its requests to the
/// next socket.
fn request_timeout() {
    let device = Device::connect(Make { timeout_s: Some(2), ..Make::default() });
    let reads = four_held(&device);
    assert!(!device.peers[0].hangs_up(SECOND), "before its time");
    assert!(device.peers[0].hangs_up(TIMEOUT), "the kernel keeps the socket of a slow peer");
    assert!(reads.iter().all(|read| read.hangs_for(MOMENT)), "they wait for a socket");
    let (replacement, _) = device.replace();
    for read in reads {
        read.finish(TIMEOUT).0.expect("sent again");
    }
    assert_eq!(replacement.seen().len(), 4);
}

/// With every connection dead, a new request waits for DEAD_CONN_TIMEOUT, then it and all later ones
/// fail; lost requests wait without a limit. With a new socket all requests succeed again.
fn dead_timeout() {
    for connections in [1, 3] {
        let make =
            Make { connections, dead_timeout_s: 3, io_timeout_ms: Some(1000), ..Make::default() };
        let device = Device::connect(make);
        // With several connections the timer sends a lost request again, which then counts as new.
        let lost = if connections == 1 { four_held(&device) } else { Vec::new() };
        device.peers.iter().for_each(super::peer::Peer::die);
        std::thread::sleep(MOMENT);
        let (result, took) = device.read(OURS).finish(TIMEOUT);
        println!(
            "figures: {connections} dead connections, DEAD_CONN_TIMEOUT 3 s: a new read waits {took:.1?}"
        );
        assert_eq!(result.expect_err("there is no connection").raw_os_error(), Some(libc::EIO));
        assert!((2.5..15.0).contains(&took.as_secs_f64()), "{took:?}");
        let (result, took) = device.read(OURS).finish(TIMEOUT);
        result.expect_err("there is no connection");
        assert!(took < 2 * SECOND, "after the time, new requests fail at once: {took:?}");
        assert!(lost.iter().all(|read| read.hangs_for(SECOND)), "no timer fails lost requests");
        let (replacement, _) = device.replace();
        device.read(OURS + 65536).finish(TIMEOUT).0.expect("a new socket makes it work again");
        for read in lost {
            read.finish(TIMEOUT).0.expect("lost requests are sent again even then");
        }
        drop(replacement);
    }
}

fn no_dead_timeout() {
    let device = Device::connect(Make { dead_timeout_s: 0, ..Make::default() });
    let lost = four_held(&device);
    device.peers[0].die();
    std::thread::sleep(MOMENT);
    let (result, took) = device.read(OURS).finish(TIMEOUT);
    result.expect_err("there is no connection");
    assert!(took < SECOND, "{took:?}");
    assert!(lost.iter().all(|read| read.hangs_for(MOMENT)), "lost requests stay");
    let _replacement = device.replace();
    device.read(OURS).finish(TIMEOUT).0.expect("a new socket makes it work again");
}

/// Several connections, TIMEOUT=0: a request older than the timer kills its live socket, and is sent
/// again over another: twice to a backend that is only slow. With one connection it just waits.
fn several_connections() {
    let slow = |connections, timeout_s, io_timeout_ms| {
        move || {
            let device =
                Device::connect(Make { connections, timeout_s, io_timeout_ms, ..Make::default() });
            device.peers.iter().for_each(super::peer::Peer::hold);
            let read = device.read(OURS);
            let started = Instant::now();
            let twice = || device.peers.iter().map(|peer| peer.seen().len()).sum::<usize>() > 1;
            while !twice() && started.elapsed() < Duration::from_secs(40) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let after = twice().then(|| started.elapsed());
            let dead = device.peers.iter().filter(|peer| peer.hangs_up(Duration::ZERO)).count();
            device.peers.iter().for_each(super::peer::Peer::release);
            read.finish(TIMEOUT).0.expect("the backend is slow, not dead");
            (after, dead)
        }
    };
    let runs = [
        ("1 connection", slow(1, Some(0), None)),
        ("2 connections", slow(2, Some(0), None)),
        ("4 connections, io_timeout 1000 ms", slow(4, Some(0), Some(1000))),
        ("2 connections, TIMEOUT=3", slow(2, Some(3), None)),
    ]
    .map(|(what, run)| (what, Io::start(run)));
    let results = runs.map(|(what, run)| {
        let (after, dead) = run.finish(3 * TIMEOUT).0;
        println!("figures: a read that is not answered, {what}: sent twice after {after:.1?}, {dead} sockets given up");
        (after.map(|after| after.as_secs()), dead)
    });
    assert_eq!(results[0], (None, 0), "one connection waits");
    assert!(matches!(results[1], (Some(15..), 1..)), "{results:?}");
    assert!(matches!(results[2], (Some(..15), 1..)), "{results:?}");
    assert!(matches!(results[3], (Some(2..15), 1..)), "{results:?}");
}
