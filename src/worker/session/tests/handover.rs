//! A handover between two workers, whose volume is in memory, under the requests of a kernel.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use cleat_backend::HandoverState;
use cleat_core::error::ErrorKind;
use cleat_nbd::wire::{RequestHeader, SIMPLE_REPLY_LEN, command, parse_simple_reply};

use super::*;
use crate::protocol::MAX_DESCRIPTORS;
use crate::resize::SizeRequest;

const BLOCK: usize = 512;

/// A worker that serves a connection of the kernel, its successor, and the kernel.
struct Workers {
    old: Session,
    new: Session,
    kernel: UnixStream,
    clock: Arc<ManualClock>,
    _directories: [tempfile::TempDir; 2],
}

impl Workers {
    fn new() -> Self {
        let image = memory();
        let (page, _) = Page::create().unwrap();
        let clock = Arc::new(ManualClock::new());
        let successor = Start { generation: 2, successor: true, ..start() };
        let [(one, mut old), (other, new)] = [start(), successor]
            .map(|start| session_of(start, Arc::clone(&image), page.clone(), clock.clone()));
        let (kernel, socket) = UnixStream::pair().unwrap();
        kernel.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        old.connections.serve(vec![socket.into()]).unwrap();
        Self { old, new, kernel, clock, _directories: [one, other] }
    }

    /// Offers the connection to the successor. Returns the offer.
    fn offer(&mut self) -> (Vec<u32>, HandoverState, Vec<OwnedFd>) {
        match self.old.offer_handover(2, 10_000).unwrap() {
            (FromWorker::HandoverOffered { unread, state }, descriptors) => {
                (unread, state, descriptors)
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    fn take_over(&mut self, offer: (Vec<u32>, HandoverState, Vec<OwnedFd>)) -> Result<()> {
        self.new.take_over(&offer.0, &offer.1, offer.2)
    }

    fn refuses(&mut self, generation: u64, kind: ErrorKind) {
        let error = self.old.offer_handover(generation, 10_000).unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(self.old.offer.is_none());
    }

    /// Sends a read request and receives its reply.
    fn read(&mut self, cookie: u64) {
        self.kernel.write_all(&request(cookie)).unwrap();
        self.receive(cookie);
    }

    fn receive(&mut self, cookie: u64) {
        let mut header = [0; SIMPLE_REPLY_LEN];
        self.kernel.read_exact(&mut header).unwrap();
        assert_eq!(parse_simple_reply(&header), Some((cookie, Ok(()))));
        self.kernel.read_exact(&mut [0; BLOCK]).unwrap();
    }
}

fn request(cookie: u64) -> [u8; 28] {
    let length = u32::try_from(BLOCK).unwrap();
    RequestHeader { flags: 0, command: command::READ, cookie, offset: 0, length }.encode()
}

#[test]
fn a_successor_continues_where_its_predecessor_has_stopped_reading() {
    let mut workers = Workers::new();
    workers.read(1);
    let (first, second) = (request(2), request(3));
    // The rest of the request comes during the handover.
    workers.kernel.write_all(&first[..10]).unwrap();
    let offer = workers.offer();
    workers.kernel.write_all(&first[10..]).unwrap();
    workers.take_over(offer).unwrap();
    workers.receive(2);
    assert_eq!((workers.new.connections.count(), workers.old.end_offer()), (1, Next::Exit));
    workers.kernel.write_all(&second).unwrap();
    workers.receive(3);
    // It serves, so it has no predecessor any more.
    let again = workers.new.take_over(&[], &HandoverState::default(), Vec::new()).unwrap_err();
    assert!(again.message().contains("no predecessor"), "{again:?}");
}

#[test]
fn a_worker_continues_when_its_offer_has_expired_and_its_successor_serves_nothing() {
    let mut workers = Workers::new();
    let offer = workers.offer();
    workers.clock.advance(Duration::from_millis(999));
    assert!(!workers.old.offer_has_expired());
    workers.clock.advance(Duration::from_millis(1));
    assert_eq!(workers.old.turn(Woken::default()), Next::Continue);
    assert!(workers.old.offer.is_none());
    workers.read(1);
    assert_eq!(workers.take_over(offer).unwrap_err().kind(), ErrorKind::Aborted);
    assert_eq!(workers.new.connections.count(), 0);
    workers.read(2);
    assert_eq!(workers.old.end_offer(), Next::Continue, "there is no offer");
    // The next attempt succeeds.
    let offer = workers.offer();
    workers.take_over(offer).unwrap();
    workers.read(3);
}

#[test]
fn a_worker_offers_its_connections_only_to_a_newer_worker_and_while_its_backend_answers() {
    let mut workers = Workers::new();
    let unserved = workers.new.offer_handover(3, 10_000).unwrap_err();
    assert_eq!(unserved.kind(), ErrorKind::InvalidArgument, "there is no connection");
    for generation in [0, 1] {
        workers.refuses(generation, ErrorKind::InvalidArgument);
    }
    let recorder = workers.old.page.any_recorder().unwrap();
    for (queued, since_ns) in [(1, 0), (0, 5)] {
        recorder.set_outage(queued, since_ns);
        workers.refuses(2, ErrorKind::Unavailable);
    }
    recorder.set_outage(0, 0);
    // The storage may execute a resize after the first write of the successor.
    workers.old.resizer.request(SizeRequest::Refresh).unwrap();
    workers.refuses(2, ErrorKind::Unavailable);
    workers.read(1);
    let first = workers.old.take_over(&[0], &HandoverState::default(), Vec::new()).unwrap_err();
    assert!(first.message().contains("no predecessor"), "{first:?}");
}

/// The message that starts the successor also carries the control socket, the statistics page and the tail file.
#[test]
fn the_files_of_a_volume_and_its_secrets_fit_a_message() {
    let mut workers = Workers::new();
    let prepare = |session: &Session| session.prepare_handover().map(|(_, files)| files.len());
    let files = prepare(&workers.old).unwrap();
    assert!(files > 0);
    workers.old.start.credentials = vec![String::new(); MAX_DESCRIPTORS - 3 - files];
    assert_eq!(prepare(&workers.old).unwrap(), files);
    workers.old.start.credentials.push(String::new());
    assert_eq!(prepare(&workers.old).unwrap_err().kind(), ErrorKind::Unsupported);
}
