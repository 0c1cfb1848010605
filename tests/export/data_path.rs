//! The data path with misbehaving clients, and with backends that hang, panic or use their own threads.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cleat_core::request::{IoError, Op};
use cleat_export::End;
use cleat_export::server::Limits;
use cleat_nbd::handshake::Refusal;
use cleat_nbd::transmission::Violation;
use proptest::prelude::*;
use test_kit::nbd::wire;
use test_kit::stopwatch::Stopwatch;

use super::fixture::{Fixture, MIB, Panicking, Slow, SlowImage, Waiting};
use super::flaky;

#[test]
fn a_disconnect_request_is_executed_after_all_replies() {
    let fixture = Fixture::memory(Limits::default());
    let mut client = fixture.connect();
    client.write(1, 0, &[7; 4096]);
    for cookie in 0..200 {
        client.send(wire::READ, cookie, 0, 4096);
    }
    client.send(wire::DISCONNECT, 0, 0, 0);
    client.expect(1, Ok(()));
    for cookie in 0..200 {
        client.expect(cookie, Ok(()));
        assert_eq!(client.take(4096), [7; 4096]);
    }
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0);
    assert!(matches!(fixture.end(), End::Disconnected));
    let counted = fixture.page.snapshot();
    assert_eq!(counted.op(Op::Read).count, 200);
    assert_eq!(counted.op(Op::Write).bytes, 4096);
    assert_eq!(counted.in_flight, 0);
}

#[test]
fn a_client_that_disconnects_within_a_request_does_not_affect_others() {
    let fixture = Fixture::memory(Limits::default());
    let mut good = fixture.connect();
    let half_header = fixture.connect();
    (&half_header.stream).write_all(&[0x25, 0x60, 0x95]).unwrap();
    drop(half_header);
    assert!(matches!(fixture.end(), End::Closed));
    for payload in [100, 300 * 1024] {
        let mut half_payload = fixture.connect();
        half_payload.send(wire::WRITE, 1, 0, MIB as u32);
        half_payload.stream.write_all(&vec![9; payload]).unwrap();
        drop(half_payload);
        assert!(matches!(fixture.end(), End::Closed));
    }
    // No part of an incomplete write was executed.
    good.send(wire::READ, 5, 0, 4096);
    good.expect(5, Ok(()));
    assert_eq!(good.take(4096), [0; 4096]);
}

#[test]
fn invalid_protocol_data_ends_the_connection_with_the_reason() {
    let fixture = Fixture::memory(Limits::default());
    let garbage = fixture.connect();
    (&garbage.stream).write_all(&[0xaa; 64]).unwrap();
    assert!(matches!(fixture.end(), End::Violation(Violation::Magic(0xaaaa_aaaa))));
    let mut absurd = fixture.connect();
    absurd.send(wire::WRITE, 1, 0, u32::MAX);
    assert!(matches!(fixture.end(), End::Violation(Violation::Payload(u32::MAX))));
}

#[test]
fn a_client_may_close_after_sending_an_abort_option() {
    let fixture = Fixture::memory(Limits::default());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    fixture.server.add_client(theirs.into(), None).unwrap();
    ours.read_exact(&mut [0; 18]).unwrap();
    ours.shutdown(std::net::Shutdown::Read).unwrap();
    ours.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x02\0\0\0\0").unwrap();
    assert!(matches!(fixture.end(), End::Refused(Refusal::Aborted)));
}

#[test]
fn a_non_blocking_socket_is_set_to_blocking() {
    let fixture = Fixture::memory(Limits::default());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let seen = theirs.try_clone().unwrap();
    fixture.server.add_client(theirs.into(), None).unwrap();
    ours.read_exact(&mut [0; 18]).unwrap();
    let flags = nix::fcntl::fcntl(&seen, nix::fcntl::FcntlArg::F_GETFL).unwrap();
    assert_eq!(flags & nix::fcntl::OFlag::O_NONBLOCK.bits(), 0);
}

#[test]
fn the_stream_stays_in_sync_after_refused_requests() {
    let fixture = Fixture::memory(Limits::default());
    let mut client = fixture.connect();
    client.send(wire::READ, 1, u64::MAX - 5, 4096);
    client.expect(1, Err(IoError::Invalid));
    client.send(wire::WRITE, 2, fixture.size, 3 * MIB as u32);
    client.stream.write_all(&vec![1; 3 * MIB]).unwrap();
    client.expect(2, Err(IoError::NoSpace));
    client.send(wire::BLOCK_STATUS, 3, 0, 4096);
    client.expect(3, Err(IoError::Invalid));
    client.send(wire::FLUSH, 4, 0, 0);
    client.expect(4, Ok(()));
    assert_eq!(fixture.page.snapshot().errors_of(IoError::NoSpace), 1);
}

#[test]
fn large_requests_are_served_with_any_buffer_budget() {
    for buffer_bytes in [64 << 10, 40 * MIB, 200 * MIB] {
        let fixture = Fixture::memory(Limits { buffer_bytes, ..Limits::default() });
        let mut client = fixture.connect();
        let pattern: Vec<u8> = (0..32 * MIB).map(|at| (at % 251) as u8).collect();
        client.write(1, 0, &pattern);
        client.expect(1, Ok(()));
        let mut reader = client.stream.try_clone().unwrap();
        let expected = pattern.clone();
        let reading = std::thread::spawn(move || {
            for _ in 0..6 {
                reader.read_exact(&mut [0; 16]).unwrap();
                let mut all = vec![0; 32 * MIB];
                reader.read_exact(&mut all).unwrap();
                assert!(all == expected);
            }
        });
        for cookie in 0..6 {
            client.send(wire::READ, cookie, 0, 32 * MIB as u32);
        }
        reading.join().unwrap();
    }
}

#[test]
fn writes_of_every_size_arrive_completely() {
    let fixture = Fixture::memory(Limits::default());
    let mut client = fixture.connect();
    let sizes = [1, 511, 4096, 16 << 10, (16 << 10) + 1, 128 << 10, (128 << 10) + 77, 3 * MIB];
    for (index, &size) in sizes.iter().cycle().take(64).enumerate() {
        let content: Vec<u8> = (0..size).map(|at| (at * 7 + index) as u8).collect();
        client.write(1, (index * 13) as u64, &content);
        client.send(wire::READ, 2, (index * 13) as u64, size as u32);
        client.expect(1, Ok(()));
        client.expect(2, Ok(()));
        assert!(client.take(size) == content, "{size} bytes");
    }
}

#[test]
fn requests_that_other_threads_complete_are_answered() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let mut client = fixture.connect();
    (0..100).for_each(|cookie| client.send(wire::FLUSH, cookie, 0, 0));
    slow.wait_for(100);
    // The requests are counted at the end of the loop iteration that started them.
    let limit = Instant::now() + Duration::from_secs(10);
    while fixture.page.snapshot().in_flight < 100 {
        assert!(Instant::now() < limit);
        std::thread::yield_now();
    }
    slow.release(100);
    let mut seen: Vec<u64> = (0..100).map(|_| client.reply().0).collect();
    seen.sort_unstable();
    assert!(seen.iter().copied().eq(0..100));
}

#[test]
fn at_most_depth_requests_reach_the_backend() {
    let slow = Slow::new();
    let fixture =
        Fixture::new(Arc::new(SlowImage(slow.clone())), Limits { depth: 8, ..Limits::default() });
    let mut client = fixture.connect();
    (0..50).for_each(|cookie| client.send(wire::FLUSH, cookie, 0, 0));
    slow.wait_for(8);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(slow.waiting(), 8);
    slow.release(1000);
    (0..50).for_each(|_| assert!(client.reply().1.is_ok()));
}

#[test]
fn a_stop_waits_for_requests_in_flight() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let mut client = fixture.connect();
    client.send(wire::FLUSH, 1, 0, 0);
    slow.wait_for(1);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| fixture.server.stop(Duration::from_secs(10)));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!stopping.is_finished());
        slow.release(1);
        stopping.join().unwrap().unwrap();
    });
    client.expect(1, Ok(()));
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0);
    assert!(matches!(fixture.end(), End::Stopped));
    assert_eq!(fixture.server.connections(), 0);
}

/// Also if a backend ends requests only when it knows that no more follow, and more arrive than may be in flight.
#[test]
fn requests_that_arrive_together_begin_together() {
    let fixture = flaky::Fixture::new(flaky::QUEUE, 1);
    *fixture.flaky.ends.lock().unwrap() = flaky::Ends::WithBatch;
    let mut client = fixture.connect();
    client.write(0, 512, &[7; 512]);
    client.expect(0, Ok(()));
    let count = 3 * u64::from(flaky::DEPTH);
    let reads =
        (1..=count).flat_map(|cookie| wire::Request::new(wire::READ, cookie, 512, 512).encode());
    client.stream.write_all(&reads.collect::<Vec<u8>>()).unwrap();
    for cookie in 1..=count {
        client.expect(cookie, Ok(()));
        assert_eq!(client.take(512), [7; 512]);
    }
    let longest = fixture.flaky.longest_batch.load(Ordering::SeqCst);
    assert!((2..=u64::from(flaky::DEPTH)).contains(&longest), "{longest}");
    fixture.server.stop(Duration::from_secs(10)).unwrap();
    assert!(matches!(fixture.end(), End::Stopped));
}

#[test]
fn a_stop_ends_a_connection_whose_backend_hangs() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let mut client = fixture.connect();
    client.send(wire::FLUSH, 1, 0, 0);
    slow.wait_for(1);
    let begin = Stopwatch::start();
    fixture.server.stop(Duration::from_millis(100)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(3));
    assert!(matches!(fixture.end(), End::Aborted));
}

#[test]
fn fail_io_answers_requests_that_hang_in_the_backend() {
    let slow = Slow::new();
    let fixture =
        Fixture::new(Arc::new(SlowImage(slow.clone())), Limits { depth: 4, ..Limits::default() });
    let mut client = fixture.connect();
    (0..10).for_each(|cookie| client.send(wire::FLUSH, cookie, 0, 0));
    slow.wait_for(4);
    fixture.server.set_fail_io(true);
    for _ in 0..10 {
        assert_eq!(client.reply().1, Err(IoError::Broken));
    }
    client.send(wire::WRITE, 77, 0, 4096);
    client.stream.write_all(&[1; 4096]).unwrap();
    client.expect(77, Err(IoError::Broken));
    slow.wait_until_abandoned();
    // The backend completes the abandoned requests, and no reply is sent for them.
    fixture.server.set_fail_io(false);
    slow.release(1000);
    client.send(wire::FLUSH, 88, 0, 0);
    client.expect(88, Ok(()));
}

#[test]
fn the_backend_abandons_requests_of_a_broken_connection_and_not_of_an_orderly_disconnect() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let mut client = fixture.connect();
    client.send(wire::FLUSH, 1, 0, 0);
    client.send(wire::DISCONNECT, 0, 0, 0);
    slow.wait_for(1);
    slow.release(1);
    client.expect(1, Ok(()));
    assert!(matches!(fixture.end(), End::Disconnected));
    assert_eq!(slow.state.lock().unwrap().abandoned, 0);
    let mut client = fixture.connect();
    client.send(wire::FLUSH, 2, 0, 0);
    slow.wait_for(1);
    drop(client);
    slow.wait_until_abandoned();
    slow.release(1);
    assert!(matches!(fixture.end(), End::Closed));
}

#[test]
fn fail_all_io_returns_the_number_of_requests_in_the_backend() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let mut client = fixture.connect();
    (0..4).for_each(|cookie| client.send(wire::FLUSH, cookie, 0, 0));
    slow.wait_for(4);
    assert_eq!(fixture.server.fail_all_io(Duration::from_millis(50)).unwrap(), 4);
    for _ in 0..4 {
        assert_eq!(client.reply().1, Err(IoError::Broken));
    }
    slow.release(3);
    let still = || fixture.server.fail_all_io(Duration::ZERO).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while still() != 1 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(still(), 1);
    slow.release(1000);
    assert_eq!(fixture.server.fail_all_io(Duration::from_secs(10)).unwrap(), 0);
    client.send(wire::FLUSH, 9, 0, 0);
    client.expect(9, Err(IoError::Broken));
    // After service resumes, requests succeed and the count starts at 0.
    fixture.server.set_fail_io(false);
    client.send(wire::FLUSH, 10, 0, 0);
    client.expect(10, Ok(()));
    assert_eq!(fixture.server.fail_all_io(Duration::from_secs(10)).unwrap(), 0);
}

#[test]
fn fail_io_answers_requests_that_wait_for_a_buffer() {
    let slow = Slow::new();
    let limits = Limits { buffer_bytes: 64 << 10, ..Limits::default() };
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), limits);
    let mut client = fixture.connect();
    // The second request waits for the buffer of the first one.
    client.send(wire::READ, 1, 0, 40 << 10);
    client.send(wire::READ, 2, 0, 40 << 10);
    slow.wait_for(1);
    fixture.server.set_fail_io(true);
    client.expect(1, Err(IoError::Broken));
    client.expect(2, Err(IoError::Broken));
    client.send(wire::WRITE, 3, 0, 40 << 10);
    client.stream.write_all(&vec![1; 40 << 10]).unwrap();
    client.expect(3, Err(IoError::Broken));
    fixture.server.set_fail_io(false);
    slow.release(1000);
    client.send(wire::FLUSH, 4, 0, 0);
    client.expect(4, Ok(()));
}

#[test]
fn fail_io_applies_to_new_connections_until_it_is_reset() {
    let fixture = Fixture::memory(Limits::default());
    let mut first = fixture.connect();
    fixture.server.set_fail_io(true);
    let mut second = fixture.connect();
    for (cookie, client) in [(1, &mut first), (2, &mut second)] {
        client.send(wire::FLUSH, cookie, 0, 0);
        client.expect(cookie, Err(IoError::Broken));
    }
    fixture.server.set_fail_io(false);
    for (cookie, client) in [(3, &mut first), (4, &mut second)] {
        client.send(wire::FLUSH, cookie, 0, 0);
        client.expect(cookie, Ok(()));
    }
}

#[test]
fn the_first_half_of_a_batch_is_answered_before_the_second_half_is_executed() {
    let (release, released) = crossbeam_channel::bounded(0);
    let fixture = Fixture::new(Arc::new(Waiting(released)), Limits::default());
    let mut client = fixture.connect();
    let request = |command, cookie| wire::Request::new(command, cookie, 0, 4096).encode();
    let mut batch: Vec<u8> = (0..16).flat_map(|cookie| request(wire::TRIM, cookie)).collect();
    batch.extend(wire::Request::new(wire::FLUSH, 16, 0, 0).encode());
    // A batch that arrives before the thread of the connection sleeps is answered as a whole.
    let halved = (0..20).any(|_| {
        client.stream.write_all(&batch).unwrap();
        client.expect(0, Ok(()));
        let waits = release.send_timeout((), Duration::from_millis(10)).is_ok();
        (1..=16).for_each(|cookie| client.expect(cookie, Ok(())));
        waits
    });
    assert!(halved, "the flush at the end of the batch has ended before the first reply");
}

/// The flush at the begin of the batch lasts 100 ms, in which the pause arrives.
#[test]
fn a_pause_within_a_batch_is_followed_without_further_requests() {
    let (_release, released) = crossbeam_channel::bounded(0);
    let fixture = Fixture::new(Arc::new(Waiting(released)), Limits::default());
    let mut client = fixture.connect();
    let mut batch = wire::Request::new(wire::FLUSH, 0, 0, 0).encode().to_vec();
    let trim = |cookie| wire::Request::new(wire::TRIM, cookie, 0, 4096).encode();
    batch.extend((1..=16).flat_map(trim));
    for _ in 0..5 {
        client.stream.write_all(&batch).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        fixture.server.pause(Duration::from_secs(5)).unwrap();
        fixture.server.resume();
        (0..=16).for_each(|cookie| client.expect(cookie, Ok(())));
    }
}

#[test]
fn a_panic_ends_one_connection_only() {
    let fixture = Fixture::new(Arc::new(Panicking), Limits::default());
    let (mut bad, mut good) = (fixture.connect(), fixture.connect());
    bad.send(wire::TRIM, 1, 0, 4096);
    assert!(matches!(fixture.end(), End::Panicked(message) if message.contains("defect")));
    assert_eq!(bad.stream.read(&mut [0; 1]).unwrap_or(0), 0);
    good.send(wire::FLUSH, 2, 0, 0);
    good.expect(2, Ok(()));
}

#[test]
fn the_number_of_connections_is_limited_and_closed_ones_free_a_slot() {
    let fixture = Fixture::memory(Limits { connections: 2, ..Limits::default() });
    let (first, _second) = (fixture.connect(), fixture.connect());
    let (_ours, theirs) = UnixStream::pair().unwrap();
    assert!(fixture.server.add_kernel_connection(theirs.into()).is_err());
    drop(first);
    fixture.end();
    // The thread exits a moment after it has reported the end.
    let deadline = Instant::now() + Duration::from_secs(5);
    while fixture.server.connections() > 1 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    fixture.connect().send(wire::FLUSH, 1, 0, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// With any data, split in any way, the connection ends or continues, and the server serves the
    /// next client.
    #[test]
    fn random_streams_do_not_hang_or_crash_the_server(
        pieces in proptest::collection::vec(any_chunk(), 1..12),
        with_handshake: bool,
    ) {
        let fixture = Fixture::memory(Limits { depth: 4, buffer_bytes: MIB, ..Limits::default() });
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        if with_handshake {
            fixture.server.add_client(theirs.into(), None).unwrap();
        } else {
            fixture.server.add_kernel_connection(theirs.into()).unwrap();
        }
        let mut reader = ours.try_clone().unwrap();
        let draining = std::thread::spawn(move || {
            let mut sink = vec![0; 1 << 16];
            while reader.read(&mut sink).is_ok_and(|bytes| bytes > 0) {}
        });
        for piece in pieces {
            if ours.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = ours.shutdown(std::net::Shutdown::Write);
        fixture.end();
        draining.join().unwrap();
        let mut next = fixture.connect();
        next.send(wire::FLUSH, 3, 0, 0);
        next.expect(3, Ok(()));
    }
}

fn any_chunk() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![4 => 0u32..70_000, 1 => any::<u32>()];
    let request = (0u16..8, 0u16..4, 0u64..MIB as u64, length, 0usize..80_000).prop_map(
        |(command, flags, offset, length, payload)| {
            let header = wire::Request { flags, command, cookie: 1, offset, length };
            let mut bytes = header.encode().to_vec();
            if command == wire::WRITE {
                bytes.resize(bytes.len() + payload.min(length as usize), 3);
            }
            bytes
        },
    );
    prop_oneof![
        4 => request,
        1 => proptest::collection::vec(any::<u8>(), 0..100),
        1 => Just(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0".to_vec()),
    ]
}
