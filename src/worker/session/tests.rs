//! The control thread of a worker, under a clock that the test sets.

mod handover;

use cleat_backend::{OpenOptions, Registry};
use cleat_core::clock::ManualClock;
use cleat_core::policy::Policy;

use super::orphan_timer::ORPHAN_TIMEOUT;
use super::*;
use crate::fake_image::FakeImage;
use crate::protocol::ProtocolVersions;

/// Makes the session of a worker without a supervisor and without connections.
fn session(image: Arc<FakeImage>, clock: Arc<ManualClock>) -> (tempfile::TempDir, Session) {
    let (page, _) = Page::create().unwrap();
    session_of(Start { quiesce: true, ..start() }, image, page, clock)
}

fn session_of(
    start: Start,
    image: Arc<dyn Image>,
    page: Page,
    clock: Arc<ManualClock>,
) -> (tempfile::TempDir, Session) {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
    let session = Session::new(start, image, Vec::new(), page, listener, String::new(), clock);
    (directory, session.unwrap())
}

/// Opens a volume with data.
fn memory() -> Arc<dyn Image> {
    let backends = Registry::new(&[cleat_backend::mem::BACKEND]);
    backends.volume("mem:1M").unwrap().open(&OpenOptions::default()).unwrap()
}

fn start() -> Start {
    Start {
        versions: ProtocolVersions::default(),
        mapping_id: "id".to_owned(),
        name: "name".to_owned(),
        generation: 1,
        uri: "mem:1M".to_owned(),
        connections: 1,
        read_only: false,
        log: String::new(),
        successor: false,
        policy: Policy::default(),
        node: String::new(),
        machine: String::new(),
        boot_id: String::new(),
        take_over: false,
        resumes: false,
        expected: None,
        quiesce: false,
        sync_failed: false,
        credentials: Vec::new(),
        grant: 0,
        tail_bytes: 0,
        cache_files: 0,
        cache_file_bytes: 0,
        claim_only: false,
    }
}

#[test]
fn a_worker_without_supervisor_and_connections_ends_after_its_timeout() {
    let clock = Arc::new(ManualClock::new());
    let (_directory, mut session) = session(Arc::new(FakeImage::with_snapshots()), clock.clone());
    assert_eq!(session.turn(Woken::default()), Next::Continue);
    clock.advance(ORPHAN_TIMEOUT.saturating_sub(Duration::from_millis(1)));
    assert_eq!(session.turn(Woken::default()), Next::Continue);
    clock.advance(Duration::from_millis(1));
    assert_eq!(session.turn(Woken::default()), Next::Exit);
}

#[test]
fn the_reason_of_an_outage_is_read_every_second_while_it_lasts() {
    let clock = Arc::new(ManualClock::new());
    let (_directory, mut session) = session(Arc::new(FakeImage::with_snapshots()), clock.clone());
    let recorder = session.page.any_recorder().unwrap();
    assert_eq!(session.timeout(), PollTimeout::NONE);
    recorder.set_outage(1, 5);
    assert_eq!(session.turn(Woken::default()), Next::Continue);
    assert_eq!(session.timeout(), PollTimeout::from(1001_u16));
}

#[test]
fn a_snapshot_without_a_supervisor_is_refused() {
    let image = Arc::new(FakeImage::with_snapshots());
    let (_directory, mut session) = session(image.clone(), Arc::new(ManualClock::new()));
    *image.waiting.lock().unwrap() = Some(7);
    assert_eq!(session.turn(Woken::default()), Next::Continue);
    assert_eq!(*image.answers.lock().unwrap(), [(7, Err(libc::EAGAIN))]);
}
