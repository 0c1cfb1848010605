//! Asynchronous I/O on a real cluster: every operation ends once, also if its submitter was dropped, and
//! all memory is freed.
//!
//! The last test runs some of the others again under valgrind.
#![allow(
    unsafe_code,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test of unsafe code fails by panicking, and waits in real time"
)]

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use librbd::{Cluster, Completion, Config, Image, Io, NewImage, Open, Submitter};
use stable_deref_trait::StableDeref;
use test_kit::ceph::{
    Cluster as TestCluster, ID, POOL, is_under_valgrind, run_under_valgrind, shared,
};
use test_kit::wait::wait_until;

const MIB: u64 = 1 << 20;

fn open(cluster: &TestCluster, name: &str, size: u64) -> Arc<Image> {
    let config = Config {
        conf: Some(cluster.conf()),
        id: Some(ID.to_owned()),
        keyring: Some(cluster.keyring(ID)),
        overrides: vec![("rbd_cache".to_owned(), "false".to_owned())],
        ..Config::default()
    };
    let pool = Cluster::connect(&config).unwrap().pool(POOL, None).unwrap();
    pool.create(name, size, &NewImage::default()).unwrap();
    pool.open(name, None, Open::Write).unwrap()
}

/// A buffer that counts how many of its kind exist.
struct Counted {
    bytes: Vec<u8>,
    live: Arc<AtomicUsize>,
}

impl Counted {
    fn new(bytes: Vec<u8>, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Ordering::SeqCst);
        Self { bytes, live: Arc::clone(live) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Deref for Counted {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

// SAFETY: the bytes are in the vector's allocation, which does not move with the vector.
unsafe impl StableDeref for Counted {}

type Completed = Receiver<Completion<u64, Counted>>;

fn submitter(image: &Arc<Image>, capacity: usize) -> (Submitter<u64, Counted>, Completed) {
    let (sender, receiver) = channel();
    // The receiver may have been dropped when the operations of a dropped submitter end.
    (image.submitter(capacity, move |completion| _ = sender.send(completion)), receiver)
}

fn rounds(many: usize) -> usize {
    if is_under_valgrind() { many / 20 } else { many }
}

#[test]
fn each_operation_ends_once_and_returns_its_buffer() {
    let image = open(shared(), "stream", 16 * MIB);
    let live = Arc::new(AtomicUsize::new(0));
    let (mut submitter, completed) = submitter(&image, 32);
    let mut running: HashMap<u64, (usize, usize)> = HashMap::new();
    let (mut started, mut ended) = (0, 0);
    let total = rounds(4000);
    while ended < total {
        while started < total && submitter.running() < 32 {
            let token = started as u64;
            let length = 512 * (1 + started % 9);
            let offset = token * 4608 % (16 * MIB - 8192);
            let buffer = Counted::new(vec![token as u8; length], &live);
            running.insert(token, (buffer.as_ptr() as usize, length));
            let io = if started % 2 == 0 { Io::Write { offset } } else { Io::Read { offset } };
            submitter.start(token, io, Some(buffer)).unwrap_or_else(|r| panic!("{}", r.errno));
            started += 1;
        }
        let first = completed.recv_timeout(Duration::from_secs(60)).unwrap();
        for done in std::iter::once(first).chain(completed.try_iter()) {
            let buffer = done.buffer.unwrap();
            let (address, length) = running.remove(&done.token).expect("it was running");
            assert_eq!((buffer.as_ptr() as usize, buffer.len()), (address, length));
            let read = done.token % 2 == 1;
            assert_eq!(done.result, if read { length as i64 } else { 0 });
            ended += 1;
        }
    }
    assert_eq!((live.load(Ordering::SeqCst), submitter.running()), (0, 0));
    assert!(completed.try_recv().is_err(), "each operation ends once");
    // The last callback may not have returned yet.
    wait_until("all requests end", || image.in_flight() == 0);
}

#[test]
fn reads_return_the_written_data() {
    let image = open(shared(), "content", 16 * MIB);
    let live = Arc::new(AtomicUsize::new(0));
    let (mut submitter, completed) = submitter(&image, 4);
    let mut run = |io: Io, bytes: Option<Vec<u8>>| {
        submitter.start(9, io, bytes.map(|bytes| Counted::new(bytes, &live))).ok().unwrap();
        let done = completed.recv_timeout(Duration::from_secs(60)).unwrap();
        (done.result, done.buffer.map(|buffer| buffer.bytes.clone()))
    };
    // Across objects, and at unaligned offsets.
    let data: Vec<u8> = (0..9 * MIB).map(|n| (n % 251) as u8).collect();
    assert_eq!(run(Io::Write { offset: 3 * MIB + 7 }, Some(data.clone())).0, 0);
    assert_eq!(run(Io::Flush, None).0, 0);
    let read = run(Io::Read { offset: 3 * MIB + 7 }, Some(vec![0; data.len()]));
    assert!(read == (9 << 20, Some(data.clone())));
    let zeroes = Io::WriteZeroes { offset: 4 * MIB + 1, length: 1000, allocate: false };
    assert_eq!(run(zeroes, None).0, 0);
    let keep = Io::WriteZeroes { offset: 5 * MIB + 1, length: 5 << 20, allocate: true };
    assert_eq!(run(keep, None).0, 0);
    let read = run(Io::Read { offset: 4 * MIB }, Some(vec![9; 1002])).1.unwrap();
    assert!(read[0] != 0 && read[1..1001].iter().all(|byte| *byte == 0));
    let read = run(Io::Read { offset: 5 * MIB + 1 }, Some(vec![9; 5 << 20])).1.unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    assert_eq!(run(Io::Discard { offset: 0, length: 16 * MIB }, None).0, 0);
    // Beyond the end of the image.
    assert_eq!(run(Io::Read { offset: 16 * MIB - 100 }, Some(vec![0; 512])).0, 100);
    assert_eq!(run(Io::Read { offset: 20 * MIB }, Some(vec![0; 512])).0, -i64::from(libc::EINVAL));
    assert_eq!(run(Io::Write { offset: 20 * MIB }, Some(vec![0; 512])).0, -i64::from(libc::EINVAL));
}

#[test]
fn reads_and_writes_need_a_buffer() {
    let image = open(shared(), "bare", MIB);
    let (mut submitter, _completed) = submitter(&image, 4);
    for io in [Io::Read { offset: 0 }, Io::Write { offset: 0 }] {
        assert_eq!(submitter.start(0, io, None).unwrap_err().errno, libc::EINVAL);
    }
    assert_eq!((submitter.running(), image.in_flight()), (0, 0));
}

/// The submitter is dropped while the OSD does not answer and the library has the buffers.
#[test]
fn operations_of_a_dropped_submitter_end() {
    let cluster = TestCluster::start();
    let image = open(&cluster, "orphans", 16 * MIB);
    let live = Arc::new(AtomicUsize::new(0));
    let (mut submitter, completed) = submitter(&image, 8);
    cluster.tell("pause osd");
    for token in 0..8_u64 {
        let buffer = Counted::new(vec![token as u8 + 1; 4096], &live);
        let offset = token * 4096;
        submitter.start(token, Io::Write { offset }, Some(buffer)).ok().unwrap();
    }
    let early = completed.recv_timeout(Duration::from_millis(300));
    assert!(early.is_err(), "{:?}", early.map(|done| done.result));
    // The capacity is used up while they run.
    assert_eq!(submitter.start(0, Io::Flush, None).unwrap_err().errno, libc::EAGAIN);
    drop(completed);
    drop(submitter);
    assert_eq!((live.load(Ordering::SeqCst), image.in_flight()), (8, 8), "nothing was freed");
    cluster.tell("resume osd");
    wait_until("all requests end and their buffers are freed", || {
        live.load(Ordering::SeqCst) == 0 && image.in_flight() == 0
    });
    let (sender, receiver) = channel();
    let mut again = image.submitter(1, move |completion| sender.send(completion).unwrap());
    again.start((), Io::Read { offset: 0 }, Some(vec![0_u8; 8 * 4096])).ok().unwrap();
    let read = receiver.recv_timeout(Duration::from_secs(60)).unwrap().buffer.unwrap();
    assert!(read.chunks(4096).zip(1_u8..).all(|(chunk, n)| chunk.iter().all(|byte| *byte == n)));
}

/// Closing waits for operations in flight, and then all buffers are freed.
#[test]
fn an_image_is_closed_after_its_operations() {
    let cluster = TestCluster::start();
    let image = open(&cluster, "closing", 16 * MIB);
    let live = Arc::new(AtomicUsize::new(0));
    let (mut submitter, completed) = submitter(&image, 8);
    cluster.tell("pause osd");
    for token in 0..8 {
        let buffer = Counted::new(vec![1; 4096], &live);
        submitter.start(token, Io::Write { offset: token * 4096 }, Some(buffer)).ok().unwrap();
    }
    drop(submitter);
    let closing = std::thread::spawn(move || Arc::into_inner(image).unwrap().close());
    std::thread::sleep(Duration::from_millis(300));
    assert!(!closing.is_finished());
    assert_eq!(live.load(Ordering::SeqCst), 8);
    cluster.tell("resume osd");
    closing.join().unwrap().unwrap();
    assert_eq!(completed.iter().count(), 8);
    assert_eq!(live.load(Ordering::SeqCst), 0);
}

/// Checks operations with a submitter and of a dropped one.
#[test]
fn valgrind_finds_nothing() {
    if !is_under_valgrind() {
        run_under_valgrind(&["each_operation_ends", "operations_of_a_dropped"]);
    }
}
