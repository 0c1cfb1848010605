//! Long reads of a file, whose pages go to the socket without a copy.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleat::backends::volume;
use cleat_backend::OpenOptions;
use cleat_core::request::Op;
use cleat_export::End;
use cleat_export::server::Limits;
use proptest::prelude::*;
use tempfile::NamedTempFile;
use test_kit::nbd::client::Client;
use test_kit::nbd::wire;
use test_kit::wait::wait_until;

use super::fixture::{Fixture, MIB};

const SIZE: usize = 16 * MIB;

/// Serves a file in which each group of 8 bytes has its own number.
fn serve() -> (Fixture, NamedTempFile) {
    serve_with(Limits::default())
}

fn serve_with(limits: Limits) -> (Fixture, NamedTempFile) {
    let file = NamedTempFile::new().unwrap();
    file.as_file().write_all_at(&content(0, SIZE), 0).unwrap();
    let uri = volume(&format!("file:{}", file.path().display())).unwrap();
    (Fixture::new(uri.open(&OpenOptions::default()).unwrap(), limits), file)
}

fn content(offset: usize, length: usize) -> Vec<u8> {
    assert!(offset.is_multiple_of(8) && length.is_multiple_of(8));
    (offset / 8..(offset + length) / 8).flat_map(usize::to_le_bytes).collect()
}

#[test]
fn the_peer_gets_what_the_page_contains_when_it_receives() {
    let (fixture, file) = serve();
    let mut client = fixture.connect();
    let length = 128 << 10;
    client.send(wire::READ, 1, 0, length);
    client.expect(1, Ok(()));
    // The reply has begun, so the pages are in the socket or on their way: nothing has copied them.
    file.as_file().write_all_at(&[0xee; 4096], 64 << 10).unwrap();
    let payload = client.take(length as usize);
    assert!(payload[..64 << 10] == content(0, 64 << 10));
    assert!(payload[64 << 10..68 << 10] == [0xee; 4096]);
    assert!(payload[68 << 10..] == content(68 << 10, 60 << 10));
}

#[test]
fn a_client_that_does_not_receive_holds_up_nobody_else() {
    let (fixture, _file) = serve();
    let (mut slow, mut other) = (fixture.connect(), fixture.connect());
    // More than there are pipes, and more than the socket has room for.
    let reads: Vec<usize> = (0..12).map(|number| number * MIB).collect();
    for offset in &reads {
        slow.send(wire::READ, *offset as u64, *offset as u64, MIB as u32);
    }
    slow.send(wire::FLUSH, 99, 0, 0);
    for _ in 0..10 {
        other.send(wire::READ, 7, 0, 256 << 10);
        other.expect(7, Ok(()));
        assert!(other.take(256 << 10) == content(0, 256 << 10));
    }
    let mut left = reads.clone();
    for _ in 0..=reads.len() {
        match slow.reply() {
            (99, result) => assert_eq!(result, Ok(())),
            (cookie, result) => {
                assert_eq!(result, Ok(()));
                left.retain(|offset| *offset != cookie as usize);
                assert!(slow.take(MIB) == content(cookie as usize, MIB), "{cookie}");
            }
        }
    }
    assert!(left.is_empty());
}

#[test]
fn replies_that_leave_make_room_for_the_next_requests() {
    let (fixture, _file) = serve_with(Limits { depth: 1, ..Limits::default() });
    let mut client = fixture.connect();
    (0..9).for_each(|cookie| client.send(wire::READ, cookie, 0, 128 << 10));
    for _ in 0..9 {
        assert_eq!(client.reply().1, Ok(()));
        assert!(client.take(128 << 10) == content(0, 128 << 10));
    }
}

/// Reads of 32 to 64 KiB have pipes of their own, of which there are fewer than requests here.
#[test]
fn many_reads_of_any_length_are_answered_in_full() {
    let (fixture, _file) = serve();
    let mut client = fixture.connect();
    let reads: Vec<(usize, usize)> =
        (0..100).map(|number| (number * 40_008, (16 << 10) + number * 1000)).collect();
    for (cookie, (offset, length)) in (0..).zip(&reads) {
        client.send(wire::READ, cookie, *offset as u64, *length as u32);
    }
    for _ in &reads {
        let (cookie, result) = client.reply();
        assert_eq!(result, Ok(()));
        let (offset, length) = reads[cookie as usize];
        assert!(client.take(length) == content(offset, length), "{cookie}");
    }
}

#[test]
fn a_stop_and_a_lost_client_end_a_connection_with_unsent_pages() {
    let (fixture, _file) = serve();
    let mut client = fixture.connect();
    read_without_receiving(&fixture, &mut client, 12);
    drop(client);
    let end = fixture.end();
    assert!(matches!(end, End::Closed | End::Socket(_)), "{end}");
    let mut client = fixture.connect();
    read_without_receiving(&fixture, &mut client, 12);
    fixture.server.stop(Duration::from_millis(200)).unwrap();
    let end = fixture.end();
    assert!(matches!(end, End::Aborted), "{end}");
    assert_eq!(fixture.server.connections(), 0);
    // What was sent is right.
    let mut bytes = Vec::new();
    client.stream.read_to_end(&mut bytes).unwrap();
    assert!(bytes[wire::REPLY_LEN..][..64 << 10] == content(0, 64 << 10));
}

/// Sends reads of 1 MiB, and waits until the volume has executed them. Their replies exceed the room in the socket.
fn read_without_receiving(fixture: &Fixture, client: &mut Client, count: u64) {
    let reads = || fixture.page.snapshot().op(Op::Read).count;
    let before = reads();
    (0..count).for_each(|cookie| client.send(wire::READ, cookie, 0, MIB as u32));
    wait_until("all reads are executed", || reads() == before + count);
}

#[test]
fn a_pause_waits_until_all_pages_have_left() {
    let (fixture, _file) = serve();
    let mut client = fixture.connect();
    read_without_receiving(&fixture, &mut client, 8);
    let is_received = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let pausing = scope.spawn(|| {
            let rests = fixture.server.pause(Duration::from_secs(20)).unwrap();
            assert!(is_received.load(Ordering::SeqCst), "the client has not received all");
            rests
        });
        std::thread::sleep(Duration::from_millis(100));
        is_received.store(true, Ordering::SeqCst);
        for _ in 0..8 {
            assert_eq!(client.reply().1, Ok(()));
            assert!(client.take(MIB) == content(0, MIB));
        }
        assert!(pausing.join().unwrap()[0].unread.is_empty());
    });
}

#[test]
fn a_file_that_has_become_shorter_gives_an_error_and_keeps_the_stream() {
    let (fixture, file) = serve();
    let mut client = fixture.connect();
    file.as_file().set_len(8 * MIB as u64).unwrap();
    client.send(wire::READ, 1, 8 * MIB as u64 - 4096, 256 << 10);
    assert!(client.reply().1.is_err());
    client.send(wire::READ, 2, 0, 256 << 10);
    client.expect(2, Ok(()));
    assert!(client.take(256 << 10) == content(0, 256 << 10));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn reads_of_all_lengths_between_writes_are_right(
        requests in prop::collection::vec((any::<bool>(), 0..7_u32, 0..4000_usize, 0..8_usize), 1..60),
        pause in 0..20_usize,
    ) {
        let (fixture, _file) = serve();
        let mut client = fixture.connect();
        let mut sent = BTreeMap::new();
        std::thread::scope(|scope| {
            let mut sender = Client { stream: client.stream.try_clone().unwrap() };
            for (cookie, (is_write, exponent, block, more)) in requests.iter().enumerate() {
                // Writes repeat what is there.
                let length = (8 << 10 << exponent) + more * 512;
                let offset = (block * 4096 + more * 512).min(SIZE - length);
                sent.insert(cookie as u64, (*is_write, offset, length));
            }
            let plan = sent.clone();
            scope.spawn(move || {
                for (cookie, (is_write, offset, length)) in plan {
                    match is_write {
                        true => sender.write(cookie, offset as u64, &content(offset, length)),
                        false => sender.send(wire::READ, cookie, offset as u64, length as u32),
                    }
                }
            });
            while !sent.is_empty() {
                if sent.len() % 20 == pause {
                    std::thread::sleep(Duration::from_millis(5));
                }
                let (cookie, result) = client.reply();
                assert_eq!(result, Ok(()));
                let (is_write, offset, length) = sent.remove(&cookie).unwrap();
                assert!(is_write || client.take(length) == content(offset, length), "{cookie}");
            }
        });
    }
}
