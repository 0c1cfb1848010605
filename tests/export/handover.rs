//! Handover of a connection in the middle of its stream: at any position, the client receives the same
//! replies as from one server, each once.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::backends::volume;
use cleat_backend::{Image, OpenOptions};
use cleat_core::error::{Error, ErrorKind};
use cleat_export::End;
use cleat_export::handover::PausedConnection;
use cleat_export::server::{Event, ExportName, Limits, Server};
use cleat_statistics::Page;
use crossbeam_channel::Receiver;
use proptest::prelude::*;
use test_kit::nbd::wire::{self, Request};

const LIMIT: Duration = Duration::from_secs(20);
const SIZE: u64 = 4 << 20;

/// The length of [`stream`].
const STREAM: usize = 9 * 28 + 1000 + 40_000 + 3000 + 200_000;

/// Consecutive servers over one volume, as in different processes, and the current one.
struct Relay {
    image: Arc<dyn Image>,
    page: Page,
    serving: (Server, Receiver<Event>),
}

impl Relay {
    fn new() -> Self {
        Self::over("mem:4M")
    }

    fn over(uri: &str) -> Self {
        let image = volume(uri).unwrap().open(&OpenOptions::default()).unwrap();
        let (page, _) = Page::create().unwrap();
        let serving = server(&image, &page);
        Self { image, page, serving }
    }

    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        self.serving.0.add_kernel_connection(theirs.into()).unwrap();
        ours
    }

    /// Quiesces the connections. If `handed_over` is set, the next server takes them over; otherwise
    /// the same server resumes them.
    fn change(&mut self, handed_over: bool) -> Vec<PausedConnection> {
        let rests = self.serving.0.pause(LIMIT).unwrap();
        if !handed_over {
            self.serving.0.resume();
            return rests;
        }
        let file = self.page.file().unwrap();
        let page = Page::from_fd(file).unwrap();
        let next = server(&self.image, &page);
        for PausedConnection { socket, unread } in &rests {
            let rest =
                PausedConnection { socket: socket.try_clone().unwrap(), unread: unread.clone() };
            next.0.add_paused(rest).unwrap();
        }
        page.take_over();
        next.0.resume();
        let before = std::mem::replace(&mut self.serving, next);
        before.0.leave().unwrap();
        for Event::ConnectionEnded { end, .. } in before.1.try_iter() {
            assert!(matches!(end, End::HandedOver), "{end}");
        }
        self.page = page;
        rests
    }
}

fn server(image: &Arc<dyn Image>, page: &Page) -> (Server, Receiver<Event>) {
    Server::new(Arc::clone(image), ExportName::default(), page.clone(), Limits::default()).unwrap()
}

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    Request::new(command, cookie, offset, length).encode().to_vec()
}

/// Receives `count` replies, with the payload of those to reads.
fn replies(stream: &mut UnixStream, reads: &dyn Fn(u64) -> usize, count: usize) -> Vec<Reply> {
    let mut seen: Vec<Reply> = (0..count)
        .map(|_| {
            let (cookie, error) = wire::read_reply(stream);
            let mut data = vec![0; if error == 0 { reads(cookie) } else { 0 }];
            stream.read_exact(&mut data).unwrap();
            (cookie, error == 0, data)
        })
        .collect();
    seen.sort();
    seen
}

/// Cookie, success, data that was read.
type Reply = (u64, bool, Vec<u8>);

/// Returns requests of every kind, back to back: small and large writes, reads, and refused requests
/// with and without a payload. No two requests touch the same bytes.
fn stream() -> (Vec<u8>, impl Fn(u64) -> usize, usize) {
    let mut bytes = Vec::new();
    let mut cookie = 0;
    let mut put = |command: u16, offset: u64, length: u32, payload: bool| {
        cookie += 1;
        bytes.extend(request(command, cookie, offset, length));
        if payload {
            bytes.extend((0..length).map(|at| (at % 251) as u8));
        }
    };
    put(wire::WRITE, 0, 1000, true);
    put(wire::READ, 1 << 20, 512, false);
    put(wire::WRITE, 4096, 40_000, true);
    // A write beyond the end is refused, and its payload is skipped.
    put(wire::WRITE, SIZE, 3000, true);
    put(wire::FLUSH, 0, 0, false);
    put(wire::READ, SIZE, 4096, false);
    put(wire::TRIM, 2 << 20, 4096, false);
    put(wire::WRITE, 3 << 20, 200_000, true);
    put(wire::READ, (1 << 20) + 4096, 70_000, false);
    assert_eq!(bytes.len(), STREAM);
    (bytes, |cookie| [(2, 512), (9, 70_000)].iter().find(|r| r.0 == cookie).map_or(0, |r| r.1), 9)
}

fn expected() -> Vec<Reply> {
    let relay = Relay::new();
    let mut client = relay.connect();
    let (bytes, reads, count) = stream();
    client.write_all(&bytes).unwrap();
    replies(&mut client, &reads, count)
}

/// Writes the stream in pieces. At each cut the connection is quiesced, and then handed over or resumed. A cut
/// in a payload that an earlier change has completed counts as one at the end of that payload.
fn run(cuts: &[(usize, bool)]) -> Vec<Reply> {
    let mut relay = Relay::new();
    let client = relay.connect();
    let (bytes, reads, count) = stream();
    let mut reader = client.try_clone().unwrap();
    let reading = std::thread::spawn(move || replies(&mut reader, &reads, count));
    let mut from = 0;
    for (number, &(cut, handed_over)) in cuts.iter().enumerate() {
        (&client).write_all(&bytes[from..cut.max(from)]).unwrap();
        from = cut.max(from);
        let Some(end) = payload_end(from) else {
            relay.change(handed_over);
            continue;
        };
        // A write whose payload has begun is completed first, so the rest of the payload must arrive. At the
        // last change, the rest of the stream arrives meanwhile, too.
        let end = if number + 1 == cuts.len() { bytes.len() } else { end };
        let (writer, rest) = (client.try_clone().unwrap(), bytes[from..end].to_vec());
        let changed = Instant::now();
        let writing = std::thread::spawn(move || (&writer).write_all(&rest).unwrap());
        relay.change(handed_over);
        writing.join().unwrap();
        assert!(changed.elapsed() < LIMIT);
        from = end;
    }
    (&client).write_all(&bytes[from..]).unwrap();
    let seen = reading.join().unwrap();
    // no other reply arrives: each request was answered once, and the stream is in sync.
    let mut client = client;
    client.write_all(&request(wire::FLUSH, 99, 0, 0)).unwrap();
    assert_eq!(replies(&mut client, &|_| 0, 1), [(99, true, Vec::new())]);
    let snapshot = relay.page.snapshot();
    assert_eq!(snapshot.connections, 1);
    seen
}

/// Returns the end of the payload of a write that a cut lies inside of, behind the header.
fn payload_end(cut: usize) -> Option<usize> {
    let lengths = [1000, 0, 40_000, 3000, 0, 0, 0, 200_000, 0];
    let mut at = 0;
    lengths.iter().find_map(|length| {
        let header_end = at + 28;
        at = header_end + length;
        // The old server starts a write as soon as it has the header.
        (header_end..at).contains(&cut).then_some(at)
    })
}

#[test]
fn a_handover_works_at_every_byte_of_the_first_requests() {
    let expected = expected();
    assert_eq!(expected.len(), 9);
    // All positions from the first write to the header of the second one; then the positions around the
    // start of later requests.
    let near: Vec<usize> =
        (0..40).chain(1020..1100).chain(41_080..41_130).chain(44_100..44_240).collect();
    for cut in near {
        assert_eq!(run(&[(cut, true)]), expected, "cut at {cut}");
    }
}

#[test]
fn a_cancelled_handover_changes_no_reply() {
    let expected = expected();
    for cut in (0..40).chain(1020..1090).step_by(3) {
        assert_eq!(run(&[(cut, false)]), expected, "cut at {cut}");
        assert_eq!(run(&[(cut, false), (cut, true)]), expected, "cut at {cut}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn handovers_at_random_positions_give_the_same_replies(
        cuts in proptest::collection::vec((0..=STREAM, any::<bool>()), 1..6),
    ) {
        let mut cuts = cuts;
        cuts.sort_unstable();
        prop_assert_eq!(run(&cuts), expected());
    }
}

#[test]
fn unparsed_bytes_are_handed_over() {
    let mut relay = Relay::new();
    let mut client = relay.connect();
    let half = request(wire::READ, 7, 0, 512);
    client.write_all(&half[..13]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let rests = relay.change(true);
    assert_eq!(rests.len(), 1);
    assert_eq!(rests[0].unread, half[..13]);
    client.write_all(&half[13..]).unwrap();
    assert_eq!(replies(&mut client, &|_| 512, 1), [(7, true, vec![0; 512])]);
}

/// Retries the handover until it is refused. Before a write's header is read, a handover succeeds.
fn attempt_until_refused(relay: &Relay, limit: Duration, may_come: impl Fn() -> bool) -> Error {
    let until = Instant::now() + LIMIT;
    while may_come() && Instant::now() < until {
        match relay.serving.0.pause(limit) {
            Ok(_) => relay.serving.0.resume(),
            Err(error) => return error,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the header was not read");
}

#[test]
fn a_handover_times_out_while_a_payload_is_incomplete() {
    let relay = Relay::new();
    let mut other = relay.connect();
    let mut client = relay.connect();
    client.write_all(&request(wire::WRITE, 7, 0, 4096)).unwrap();
    client.write_all(&[1; 100]).unwrap();
    let error = attempt_until_refused(&relay, Duration::from_millis(200), || true);
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    // Both connections serve on, also the one that was quiesced.
    client.write_all(&[1; 3996]).unwrap();
    assert_eq!(replies(&mut client, &|_| 0, 1), [(7, true, Vec::new())]);
    other.write_all(&request(wire::READ, 8, 0, 512)).unwrap();
    assert_eq!(replies(&mut other, &|_| 512, 1), [(8, true, vec![1; 512])]);
}

#[test]
fn a_handover_is_aborted_when_a_connection_ends() {
    let relay = Relay::new();
    let mut other = relay.connect();
    let client = relay.connect();
    (&client).write_all(&request(wire::WRITE, 7, 0, 4096)).unwrap();
    let closing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        drop(client);
    });
    let error = attempt_until_refused(&relay, LIMIT, || !closing.is_finished());
    assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
    closing.join().unwrap();
    other.write_all(&request(wire::FLUSH, 8, 0, 0)).unwrap();
    assert_eq!(replies(&mut other, &|_| 0, 1), [(8, true, Vec::new())]);
}

#[test]
fn a_connection_that_was_handed_over_is_not_shut_down() {
    let mut relay = Relay::new();
    let client = relay.connect();
    drop(relay.change(true));
    let rests = relay.serving.0.pause(LIMIT).unwrap();
    relay.serving.0.leave().unwrap();
    drop(relay);
    client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let error = (&client).read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    // These are the last copies of the socket.
    drop(rests);
    assert_eq!((&client).read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn more_unread_bytes_than_a_connection_holds_are_refused() {
    let relay = Relay::new();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let rest = PausedConnection { socket: theirs.into(), unread: vec![0; 1 << 20] };
    let error = relay.serving.0.add_paused(rest).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
