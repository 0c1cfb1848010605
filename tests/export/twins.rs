//! Requests that the kernel's driver sends twice, over two connections of a device, and writes that were answered with an
//! error while they are at the backend.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::request::IoError;
use cleat_export::End;
use cleat_export::server::Limits;
use test_kit::nbd::wire;

use super::fixture::{Fixture, Slow, SlowImage};

/// Longer than a request must be stalled to hold back others.
const STALL: Duration = Duration::from_millis(1200);

#[test]
fn a_write_waits_for_the_stalled_write_of_another_connection_to_the_same_range() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let (mut first, mut second) = (fixture.connect(), fixture.connect());
    first.write(1, 4096, &[1; 4096]);
    slow.wait_for(1);
    std::thread::sleep(STALL);
    // The driver gives up the first socket, and sends the write again, and newer data after its reply.
    drop(first);
    second.write(2, 0, &[1; 4096]);
    second.write(3, 4096, &[1; 4096]);
    slow.wait_for(2);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        slow.waiting(),
        2,
        "the copy must not reach the backend before the first one has ended"
    );
    slow.release(1);
    second.send(wire::FLUSH, 4, 0, 0);
    slow.release(3);
    let mut replies = [(); 3].map(|()| second.reply());
    replies.sort_unstable_by_key(|(cookie, _)| *cookie);
    assert_eq!(replies, [(2, Ok(())), (3, Ok(())), (4, Ok(()))]);
}

#[test]
fn a_request_that_waited_for_a_buffer_does_not_start_after_its_socket_was_given_up() {
    // Over TCP, a server sees the end of what the peer sends only, whatever the peer has closed.
    for is_half in [false, true] {
        let slow = Slow::new();
        let limits = Limits { buffer_bytes: 4096, ..Limits::default() };
        let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), limits);
        let (mut first, mut second) = (fixture.connect(), fixture.connect());
        first.write(1, 0, &[1; 4096]);
        slow.wait_for(1);
        first.write(2, 4096, &[1; 4096]);
        std::thread::sleep(Duration::from_millis(300));
        first.stream.shutdown(if is_half { Shutdown::Write } else { Shutdown::Both }).unwrap();
        slow.release(1);
        assert!(matches!(fixture.end(), End::Closed));
        second.write(2, 4096, &[1; 4096]);
        slow.release(1);
        second.expect(2, Ok(()));
        assert_eq!(slow.waiting(), 0, "only the copy reached the backend");
    }
}

/// Without the wait, the first write could end after the second one, which was acknowledged later.
#[test]
fn a_write_waits_for_one_that_was_failed_while_it_is_at_the_backend() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let (mut first, mut second) = (fixture.connect(), fixture.connect());
    first.write(1, 4096, &[1; 4096]);
    slow.wait_for(1);
    fixture.server.set_fail_io(true);
    first.expect(1, Err(IoError::Broken));
    fixture.server.set_fail_io(false);
    // Over the same connection, and over another one, at once.
    first.write(2, 4096, &[2; 4096]);
    second.write(3, 4096, &[2; 4096]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(slow.waiting(), 1, "the later writes must not reach the backend");
    slow.release(1);
    slow.wait_for(2);
    slow.release(2);
    first.expect(2, Ok(()));
    second.expect(3, Ok(()));
}

#[test]
fn a_stalled_write_does_not_hold_back_other_ranges_or_reads() {
    let slow = Slow::new();
    let fixture = Fixture::new(Arc::new(SlowImage(slow.clone())), Limits::default());
    let (mut first, mut second) = (fixture.connect(), fixture.connect());
    first.write(1, 0, &[1; 4096]);
    slow.wait_for(1);
    std::thread::sleep(STALL);
    second.write(2, 4096, &[1; 4096]);
    second.send(wire::READ, 3, 0, 4096);
    slow.wait_for(3);
    // All requests fail at once, the one that is held back, too.
    second.write(4, 0, &[1; 4096]);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(slow.waiting(), 3);
    fixture.server.set_fail_io(true);
    let mut replies = [(); 3].map(|()| second.reply());
    replies.sort_unstable_by_key(|(cookie, _)| *cookie);
    assert_eq!(replies, [2, 3, 4].map(|cookie| (cookie, Err(IoError::Broken))));
    slow.release(3);
}
