//! Two workers write to one volume, an image or objects, and the second takes it over. The tests check the content of
//! the volume: once the second worker is ready, no write of the first may be executed.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::worker::objects::ObjectVolume;
use crate::worker::rbd::fresh;
use test_kit::nbd::kernel as nbd;
use test_kit::wait::wait_until;
use test_kit::worker::{Worker, start_message};

const BLOCK: u64 = 4096;

/// The number of blocks that each writer writes in turn.
const BLOCKS: u64 = 64;

/// The number of writers per worker; each has its own connection and blocks.
const WRITERS: u64 = 2;

/// The number of refused writes of the fenced worker that a test waits for.
const TRIED: u64 = 200;

/// The content of a block: the writer (`round`) and the number of its write (`turn`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stamp {
    round: u64,
    turn: u64,
}

impl Stamp {
    fn block(self) -> Vec<u8> {
        let words = [self.round, self.turn].map(u64::to_le_bytes).concat();
        words.repeat(usize::try_from(BLOCK).unwrap() / words.len())
    }

    fn of(block: &[u8], at: u64) -> Self {
        let word = |n: usize| u64::from_le_bytes(block[n * 8..][..8].try_into().unwrap());
        let stamp = Self { round: word(0), turn: word(1) };
        assert!(stamp.block() == block, "block {at} is torn");
        stamp
    }
}

/// The last write of a writer to one block.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    sent: u64,
    answered: u64,
}

/// The writer of one connection. It writes its blocks in turn, and ignores errors.
struct Writer {
    round: u64,
    /// The writer writes every `step`th block.
    step: u64,
    blocks: Mutex<Vec<Done>>,
    written: AtomicU64,
    refused: AtomicU64,
    /// The number of writes that succeeded although they were started after `taken_over`.
    late: AtomicU64,
    taken_over: AtomicBool,
    end: AtomicBool,
}

impl Writer {
    fn new(round: u64, step: u64) -> Self {
        Self {
            round,
            step,
            blocks: Mutex::new(vec![Done::default(); usize::try_from(BLOCKS).unwrap()]),
            written: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            late: AtomicU64::new(0),
            taken_over: AtomicBool::new(false),
            end: AtomicBool::new(false),
        }
    }

    fn run(&self, socket: &UnixStream, first: u64) {
        let blocks = (0..BLOCKS).step_by(usize::try_from(self.step).unwrap()).cycle();
        for (block, turn) in blocks.zip(1..) {
            if self.end.load(Ordering::SeqCst) {
                return;
            }
            let index = usize::try_from(block).unwrap();
            let late = self.taken_over.load(Ordering::SeqCst);
            self.blocks.lock().unwrap()[index].sent = turn;
            let data = Stamp { round: self.round, turn }.block();
            if nbd::write(socket, (first + block) * BLOCK, &data) == 0 {
                self.blocks.lock().unwrap()[index].answered = turn;
                self.written.fetch_add(1, Ordering::SeqCst);
                self.late.fetch_add(u64::from(late), Ordering::SeqCst);
            } else {
                self.refused.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

fn signal(worker: &Worker, signal: Signal) {
    let pid = i32::try_from(worker.child.id()).unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Starts a worker that takes the volume over, as from another node. Returns how long it took.
fn start_with_take_over(uri: &str, round: u64) -> (Worker, Duration) {
    let begun = Instant::now();
    let worker = Worker::launch();
    worker.send_start(&Start {
        node: format!("node-{round}"),
        boot_id: format!("boot-{round}"),
        mapping_id: format!("mapping-{round}"),
        take_over: true,
        ..start_message(uri)
    });
    match worker.receive() {
        FromWorker::Ready(_) => (worker, begun.elapsed()),
        other => panic!("round {round}: {other:?}"),
    }
}

/// Reads the stamps of all blocks through `socket`.
fn stamps(socket: &UnixStream) -> Vec<Stamp> {
    let bytes = nbd::read(socket, 0, u32::try_from(WRITERS * BLOCKS * BLOCK).unwrap());
    let blocks = bytes.chunks_exact(usize::try_from(BLOCK).unwrap());
    blocks.zip(0..).map(|(block, at)| Stamp::of(block, at)).collect()
}

/// Checks that each block has the last completed write or a later sent one, or is unchanged if none was.
fn assert_written(now: &[Stamp], before: &[Stamp], writers: &[Writer]) {
    let done = writers.iter().flat_map(|writer| {
        let blocks = writer.blocks.lock().unwrap().clone();
        blocks.into_iter().map(|done| (writer.round, done))
    });
    for ((now, before), (round, done)) in now.iter().zip(before).zip(done) {
        let own = now.round == round && (done.answered..=done.sent).contains(&now.turn);
        assert!(own || (done.answered == 0 && now == before), "{now:?} {before:?} {done:?}");
    }
}

#[test]
fn no_write_of_a_fenced_worker_is_executed_after_a_take_over() {
    fight("an image", &fresh("fought-over"));
}

#[test]
fn no_write_of_a_fenced_worker_is_executed_after_a_take_over_of_objects() {
    fight("objects in a directory", &ObjectVolume::in_directory().uri);
}

/// `CLEAT_TEST_FIGHTS` sets the number of rounds (default 6).
fn fight(what: &str, uri: &str) {
    let asked = std::env::var("CLEAT_TEST_FIGHTS").ok().and_then(|text| text.parse().ok());
    let rounds: u64 = asked.unwrap_or(6);
    let (mut holder, _) = start_with_take_over(uri, 0);
    let mut before = vec![Stamp { round: 0, turn: 0 }; usize::try_from(WRITERS * BLOCKS).unwrap()];
    let (mut took, mut refused, mut executed) = (Vec::new(), 0, 0);
    for round in 1..=rounds {
        let (successor, outcome) = run_round(uri, &mut holder, round, before);
        took.push(outcome.took);
        (refused, executed) = (refused + outcome.refused, executed + outcome.executed);
        before = outcome.after;
        let fenced = std::mem::replace(&mut holder, successor);
        end(fenced);
    }
    took.sort_unstable();
    println!(
        "{what}: {rounds} take-overs, {:?} in the median and {:?} at most from the start of the process; {refused} \
         writes of fenced workers were refused after the take-over, {executed} were executed",
        took[took.len() / 2],
        took[took.len() - 1],
    );
    assert_eq!(executed, 0);
}

struct Round {
    took: Duration,
    refused: u64,
    executed: u64,
    after: Vec<Stamp>,
}

/// `holder` writes, a new worker takes the volume over, and then both write.
fn run_round(uri: &str, holder: &mut Worker, round: u64, before: Vec<Stamp>) -> (Worker, Round) {
    let old: Vec<Writer> = (0..WRITERS).map(|_| Writer::new(2 * round, 1)).collect();
    // The new worker writes every other block; the rest shows writes of the fenced worker.
    let new: Vec<Writer> = (0..WRITERS).map(|_| Writer::new(2 * round + 1, 2)).collect();
    let total = |writers: &[Writer], count: fn(&Writer) -> &AtomicU64| -> u64 {
        writers.iter().map(|writer| count(writer).load(Ordering::SeqCst)).sum()
    };
    let (holder_sockets, successor_sockets) =
        (holder.serve(WRITERS.try_into().unwrap()), OnceLock::new());
    let (successor, took, reader, content) = std::thread::scope(|scope| {
        for ((writer, socket), n) in old.iter().zip(&holder_sockets).zip(0..) {
            scope.spawn(move || writer.run(socket, n * BLOCKS));
        }
        wait_until("the holder has written all blocks", || total(&old, |w| &w.written) > BLOCKS);
        // The holder is stopped until after the take-over, or during its first part, or not at all.
        if !round.is_multiple_of(3) {
            signal(holder, Signal::SIGSTOP);
        }
        let (mut successor, took) = std::thread::scope(|inner| {
            if round % 3 == 2 {
                inner.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50 + round * 37 % 300));
                    signal(holder, Signal::SIGCONT);
                });
            }
            start_with_take_over(uri, round)
        });
        old.iter().for_each(|writer| writer.taken_over.store(true, Ordering::SeqCst));
        let mut sockets = successor.serve(usize::try_from(WRITERS + 1).unwrap());
        let reader = sockets.pop().unwrap();
        let content = stamps(&reader);
        if round % 3 == 1 {
            signal(holder, Signal::SIGCONT);
        }
        let sockets = successor_sockets.get_or_init(|| sockets);
        for ((writer, socket), n) in new.iter().zip(sockets).zip(0..) {
            scope.spawn(move || writer.run(socket, n * BLOCKS));
        }
        wait_until("writes of the fenced worker are refused", || {
            total(&old, |w| &w.refused) > TRIED
        });
        // The new worker has written all of its blocks.
        let round_done = |w: &Writer| w.written.load(Ordering::SeqCst) > BLOCKS;
        wait_until("the new worker has written all blocks", || new.iter().all(round_done));
        old.iter().chain(&new).for_each(|writer| writer.end.store(true, Ordering::SeqCst));
        (successor, took, reader, content)
    });
    let after = stamps(&reader);
    assert_written(&content, &before, &old);
    let alien = after.iter().step_by(2).find(|stamp| stamp.round != 2 * round + 1);
    assert_eq!(alien, None, "a block has a write of the fenced worker: {after:?}");
    let changed = (1..content.len()).step_by(2).filter(|n| content[*n] != after[*n]).count() as u64;
    let executed = changed + total(&old, |w| &w.late);
    let refused = total(&old, |w| &w.refused);
    (successor, Round { took, refused, executed, after })
}

/// Waits until the worker reports that it is fenced, and stops it.
fn end(mut fenced: Worker) {
    assert_eq!(fenced.receive(), FromWorker::Fenced);
    fenced.send(&ToWorker::Stop, &[]);
    assert!(fenced.exit().success(), "{}", fenced.log());
}
