//! Requests on a ring that is smaller than their number.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use cleat_sys::page_cache::is_cached;
use cleat_sys::page_pipe::PagePipe;

use super::*;
use crate::Completions;

const NONE: Flags = Flags { fua: false, no_hole: false, fast_zero: false };
const SIZE: u64 = 8 << 20;

/// A queue with its ring, and how its requests have ended.
struct Bench {
    file: Arc<File>,
    syncer: Arc<Syncer>,
    completer: Completer,
    completions: Completions,
    queue: FileQueue,
    ring: Ring,
    /// The number of requests that have not ended.
    running: usize,
    ended: Vec<(RequestId, Outcome)>,
}

impl Bench {
    /// Makes a file of bytes that are not zero, and a ring with `entries`.
    fn new(entries: u32, abilities: Abilities) -> Self {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.write_all_at(&vec![0xff; index(SIZE)], 0).unwrap();
        let syncer = Arc::new(Syncer::new(Arc::clone(&file), "test".to_owned()));
        let mut ring = Ring::new(entries).unwrap();
        let slot = ring.register(file.as_fd()).unwrap();
        let (completer, completions) = channel(Waker::new().unwrap(), 64);
        let (abilities, sync) = (Arc::new(abilities), Arc::clone(&syncer));
        let queue = FileQueue::new(slot, 1, abilities, sync, completer.clone());
        let (running, ended) = (0, Vec::new());
        Self { file, syncer, completer, completions, queue, ring, running, ended }
    }

    fn start(&mut self, id: RequestId, op: Op, flags: Flags, offset: u64, length: u64) {
        let request = Request { op, flags, offset, length };
        let buffer = matches!(op, Op::Read | Op::Write).then(|| {
            let mut buffer = Buffer::zeroed(index(length));
            buffer.payload_mut().fill(mark(id));
            buffer
        });
        match self.queue.start(id, request, buffer, &mut self.ring) {
            Started::Pending => self.running += 1,
            Started::Done(outcome) => self.ended.push((id, outcome)),
        }
    }

    /// Takes what has completed until every request has ended. Returns their numbers in the order of their ends.
    fn run(&mut self) -> Vec<RequestId> {
        for _ in 0..1000 {
            if self.running == 0 {
                return self.ended.iter().map(|(id, _)| *id).collect();
            }
            self.ring.submit_and_wait_for(Duration::from_millis(10)).unwrap();
            while let Some(completion) = self.ring.next() {
                if let Some(end) = self.queue.on_ring(completion, &mut self.ring) {
                    self.ended.push(end);
                    self.running -= 1;
                }
            }
            self.completions.accept();
            while let Some((id, outcome)) = self.completions.next() {
                self.queue.on_completion(id, outcome, &mut self.ring, &mut self.ended);
                self.running -= 1;
            }
        }
        panic!("{} requests do not end", self.running);
    }

    fn result(&self, id: RequestId) -> Result<(), IoError> {
        let mut own = self.ended.iter().filter(|(ended, _)| *ended == id);
        let (_, outcome) = own.next().expect("it has ended");
        assert!(own.next().is_none(), "{id} has ended twice");
        outcome.result
    }

    /// Returns the bytes of the file.
    fn bytes(&self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; index(length)];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

/// The content of the buffer of a request.
fn mark(id: RequestId) -> u8 {
    u8::try_from(id).unwrap() + 1
}

/// Abilities of a file whose file system can only write zeroes.
fn plain() -> Abilities {
    let abilities = Abilities::new(false, false, false);
    abilities.punch.store(false, Ordering::Relaxed);
    abilities.zero_range.store(false, Ordering::Relaxed);
    abilities
}

#[test]
fn more_requests_than_entries_end_each_with_its_own_data() {
    let mut bench = Bench::new(2, Abilities::new(false, false, false));
    for id in 0..8 {
        bench.start(id, Op::Write, NONE, u64::from(id) * 4096, 4096);
    }
    assert_eq!(bench.run().len(), 8);
    for id in 0..8 {
        assert_eq!(bench.result(id), Ok(()));
        assert!(bench.bytes(u64::from(id) * 4096, 4096).iter().all(|byte| *byte == mark(id)));
    }
    bench.ended.clear();
    for id in 0..8 {
        bench.start(id, Op::Read, NONE, u64::from(7 - id) * 4096, 4096);
    }
    bench.start(8, Op::Cache, NONE, 0, SIZE);
    bench.run();
    assert_eq!(bench.result(8), Ok(()));
    for (id, outcome) in bench.ended.iter().filter(|(id, _)| *id < 8) {
        let buffer = outcome.buffer.as_ref().expect("the buffer of a read");
        assert!(buffer.payload().iter().all(|byte| *byte == mark(7 - id)), "{id}");
    }
}

#[test]
fn ranges_are_zeroed_to_the_byte_whatever_the_file_system_supports() {
    for abilities in [Abilities::new(false, false, false), plain()] {
        let mut bench = Bench::new(2, abilities);
        // Two ranges of several pieces, and one with FUA.
        let ranges = [(1000, 700_000), (1 << 20, 1), (2_000_001, 300_000)];
        bench.syncer.start().unwrap();
        for (id, (offset, length)) in (0..).zip(ranges) {
            bench.start(id, Op::WriteZeroes, Flags { fua: id == 2, ..NONE }, offset, length);
        }
        bench.run();
        for (id, (offset, length)) in (0..).zip(ranges) {
            assert_eq!(bench.result(id), Ok(()));
            let bytes = bench.bytes(offset - 1, length + 2);
            let (first, last) = (bytes[0], bytes[index(length) + 1]);
            assert_eq!((first, last), (0xff, 0xff), "{offset}");
            assert!(bytes[1..=index(length)].iter().all(|byte| *byte == 0), "{offset}");
        }
    }
}

/// The pieces of a long range alternate with those of other requests.
#[test]
fn zeroes_of_a_long_range_do_not_delay_those_of_a_short_one() {
    let mut bench = Bench::new(4, plain());
    bench.start(0, Op::WriteZeroes, NONE, 0, SIZE);
    bench.start(1, Op::WriteZeroes, NONE, 0, 512);
    bench.start(2, Op::WriteZeroes, NONE, 512, 512);
    assert_eq!(bench.run(), [1, 2, 0]);
    assert!(bench.bytes(0, SIZE).iter().all(|byte| *byte == 0));
}

#[test]
fn requests_that_need_a_sync_wait_for_it_and_keep_their_buffers() {
    let mut bench = Bench::new(4, Abilities::new(false, false, false));
    let fua = Flags { fua: true, ..NONE };
    bench.start(0, Op::Write, fua, 0, 512);
    bench.start(1, Op::Flush, NONE, 0, 0);
    bench.start(2, Op::Write, NONE, 512, 512);
    while bench.ended.is_empty() {
        bench.ring.submit_and_wait().unwrap();
        while let Some(completion) = bench.ring.next() {
            bench.ended.extend(bench.queue.on_ring(completion, &mut bench.ring));
        }
    }
    // The thread of the syncer does not run yet.
    assert_eq!(bench.ended.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2]);
    bench.running = 2;
    bench.syncer.start().unwrap();
    bench.run();
    assert_eq!((bench.result(0), bench.result(1)), (Ok(()), Ok(())));
    let durable = bench.ended.iter().find(|(id, _)| *id == 0).unwrap();
    assert!(durable.1.buffer.is_some());
}

#[test]
fn abandoned_requests_end_once_and_start_nothing_more() {
    let mut bench = Bench::new(2, plain());
    let fua = Flags { fua: true, ..NONE };
    // In the ring: the first piece of a long range, and a write with FUA.
    bench.start(0, Op::WriteZeroes, NONE, 0, SIZE);
    bench.start(1, Op::Write, fua, 0, 512);
    // They wait for the buffer of zeroes, for an entry, and for a sync that does not run.
    bench.start(2, Op::WriteZeroes, NONE, 0, 512);
    bench.start(3, Op::Write, NONE, 0, 512);
    bench.start(4, Op::Flush, NONE, 0, 0);
    let mut done = Vec::new();
    bench.queue.abandon(&mut done);
    let mut ids: Vec<_> = done.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [2, 3, 4]);
    assert!(done.iter().all(|(_, outcome)| outcome.result == Err(IoError::Broken)));
    assert!(done.iter().all(|(id, outcome)| outcome.buffer.is_some() == (*id == 3)));
    bench.running -= done.len();
    bench.run();
    assert_eq!((bench.result(0), bench.result(1)), (Err(IoError::Broken), Err(IoError::Broken)));
    assert_eq!(bench.bytes(SIZE - 1, 1), [0xff]);
}

#[test]
fn a_queue_that_ends_leaves_no_request_for_the_next_sync() {
    let mut bench = Bench::new(2, Abilities::new(false, false, false));
    bench.start(0, Op::Flush, NONE, 0, 0);
    drop(bench.queue);
    assert!(bench.syncer.forget(&bench.completer).is_empty());
}

/// A pipe that has no room for the whole payload stands for every failure of splice(2).
#[test]
fn a_read_that_a_pipe_does_not_take_is_read_into_memory() {
    let mut bench = Bench::new(4, Abilities::new(false, false, false));
    let mut full = Buffer::zeroed(1 << 20);
    full.attach_pipe(PagePipe::new(1 << 20).unwrap());
    let file = bench.queue.file;
    bench.ring.splice(file, full, 8192, 0, Token(1)).unwrap();
    bench.ring.submit_and_wait().unwrap();
    let completion = bench.ring.next().unwrap();
    let mut pipe = completion.buffer.unwrap().take_pipe().unwrap();
    pipe.filled(usize::try_from(completion.result).unwrap());

    let mut buffer = Buffer::zeroed(128 << 10);
    buffer.attach_pipe(pipe);
    let request = Request { op: Op::Read, flags: NONE, offset: 4096, length: 128 << 10 };
    bench.queue.start(7, request, Some(buffer), &mut bench.ring);
    bench.running = 1;
    bench.run();
    assert_eq!(bench.result(7), Ok(()));
    let buffer = bench.ended[0].1.buffer.as_ref().unwrap();
    assert!(!buffer.is_in_pipe() && buffer.payload().iter().all(|byte| *byte == 0xff));
    assert!(bench.queue.fills_pipes());
}

#[test]
fn pages_of_a_file_go_into_the_pipe_of_a_read() {
    for (direct, op) in [(false, Op::Read), (true, Op::Read), (false, Op::Write)] {
        let mut bench = Bench::new(4, Abilities::new(false, direct, false));
        let mut buffer = Buffer::zeroed(128 << 10);
        buffer.attach_pipe(PagePipe::new(1 << 20).unwrap());
        let request = Request { op, flags: NONE, offset: 1 << 20, length: 128 << 10 };
        bench.queue.start(7, request, Some(buffer), &mut bench.ring);
        bench.running = 1;
        bench.run();
        assert_eq!(bench.result(7), Ok(()));
        let buffer = bench.ended[0].1.buffer.as_ref().unwrap();
        assert_eq!(buffer.is_in_pipe(), !direct && op == Op::Read);
        assert_eq!(bench.queue.fills_pipes(), !direct);
    }
}

/// From 128 KiB on, a thread of the kernel does it.
#[test]
fn pages_of_a_short_read_go_into_the_pipe_at_once_if_the_page_cache_has_them() {
    let mut bench = Bench::new(4, Abilities::new(false, false, false));
    bench.file.set_len(SIZE + (64 << 10)).unwrap();
    bench.queue.pages_at_once = Some(PagesAtOnce::new(Arc::clone(&bench.file), false));
    // Not before Linux 6.5, and not on overlayfs.
    let are_known = is_cached(&bench.file, 0, 64 << 10);
    for (offset, is_there) in [(0, are_known), (4095, are_known), (SIZE, false)] {
        let mut buffer = Buffer::zeroed(64 << 10);
        buffer.attach_pipe(PagePipe::new(1 << 20).unwrap());
        let request = Request { op: Op::Read, flags: NONE, offset, length: 64 << 10 };
        let buffer = match bench.queue.start(7, request, Some(buffer), &mut bench.ring) {
            Started::Done(outcome) => {
                assert!(is_there && outcome.result == Ok(()));
                outcome.buffer.unwrap()
            }
            Started::Pending => {
                assert!(!is_there);
                bench.running = 1;
                bench.run();
                bench.ended.pop().unwrap().1.buffer.unwrap()
            }
        };
        assert_eq!(buffer.is_in_pipe(), is_there);
    }
}

#[test]
fn a_short_write_at_once_ends_as_one_on_the_ring_does() {
    let mut bench = Bench::new(8, Abilities::new(false, false, false));
    bench.syncer.start().unwrap();
    bench.queue.writes_at_once = Some(WritesAtOnce::new(Arc::clone(&bench.file)));
    bench.start(0, Op::Write, NONE, 4096, 4096);
    assert_eq!((bench.running, bench.result(0)), (0, Ok(())));
    bench.start(1, Op::Write, FUA, 8192, 4096);
    assert_eq!(bench.running, 1, "it waits for the sync");
    bench.start(2, Op::Write, NONE, 1 << 20, 65537);
    assert_eq!(bench.running, 2, "it is long");
    bench.run();
    assert_eq!([1, 2].map(|id| bench.result(id)), [Ok(()), Ok(())]);
    let mut written = vec![0; 8192];
    bench.file.read_exact_at(&mut written, 4096).unwrap();
    assert!(written[..4096].iter().all(|byte| *byte == mark(0)));
    assert!(written[4096..].iter().all(|byte| *byte == mark(1)));
    // An error has the same meaning.
    let full = Arc::new(File::options().write(true).open("/dev/full").unwrap());
    bench.queue.writes_at_once = Some(WritesAtOnce::new(full));
    bench.start(3, Op::Write, NONE, 0, 4096);
    assert_eq!((bench.running, bench.result(3)), (0, Err(IoError::NoSpace)));
}
