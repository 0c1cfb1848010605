//! Two workers fight for one image while both write. What the image holds decides: from the moment that
//! the second is ready, nothing of the first lands.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::worker::rbd::fresh;
use test_kit::nbd::kernel as nbd;
use test_kit::wait::wait_until;
use test_kit::worker::{Worker, start_message};

const BLOCK: u64 = 4096;

/// Blocks that each writer goes round.
const BLOCKS: u64 = 64;

/// Writers of a worker, each with its connection and its blocks.
const WRITERS: u64 = 2;

/// Writes that a loser is seen to try in vain.
const TRIED: u64 = 200;

/// Of a block: who wrote it, and which of its writes that was.
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

/// What a writer has done to one block.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    sent: u64,
    answered: u64,
}

/// One connection's writer: goes round its blocks, whatever the answers are.
struct Writer {
    round: u64,
    /// Every so many blocks it writes one.
    step: u64,
    blocks: Mutex<Vec<Done>>,
    written: AtomicU64,
    refused: AtomicU64,
    /// Written although it was begun after `cut`.
    late: AtomicU64,
    cut: AtomicBool,
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
            cut: AtomicBool::new(false),
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
            let late = self.cut.load(Ordering::SeqCst);
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

/// The worker of a mapping that is told to take the image over, on a node of its own.
fn challenger(uri: &str, round: u64) -> (Worker, Duration) {
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

/// Every block's stamp, as the worker behind `socket` reads it.
fn stamps(socket: &UnixStream) -> Vec<Stamp> {
    let bytes = nbd::read(socket, 0, u32::try_from(WRITERS * BLOCKS * BLOCK).unwrap());
    let blocks = bytes.chunks_exact(usize::try_from(BLOCK).unwrap());
    blocks.zip(0..).map(|(block, at)| Stamp::of(block, at)).collect()
}

/// What was answered is there, what is there was sent, and what was not written is as it was.
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

/// `CLEAT_TEST_FIGHTS=100`: the campaign.
#[test]
fn nothing_of_the_loser_lands_after_the_cut() {
    let asked = std::env::var("CLEAT_TEST_FIGHTS").ok().and_then(|text| text.parse().ok());
    let fights: u64 = asked.unwrap_or(6);
    let uri = fresh("fought-over");
    let (mut holder, _) = challenger(&uri, 0);
    let mut before = vec![Stamp { round: 0, turn: 0 }; usize::try_from(WRITERS * BLOCKS).unwrap()];
    let (mut took, mut refused, mut landed) = (Vec::new(), 0, 0);
    for round in 1..=fights {
        let (winner, fight) = fight(&uri, &mut holder, round, before);
        took.push(fight.took);
        (refused, landed) = (refused + fight.refused, landed + fight.landed);
        before = fight.after;
        let loser = std::mem::replace(&mut holder, winner);
        end(loser);
    }
    took.sort_unstable();
    println!(
        "{fights} take-overs, {:?} in the median and {:?} at most from the start of the process; {refused} \
         writes of losers were refused after the cut, {landed} landed",
        took[took.len() / 2],
        took[took.len() - 1],
    );
    assert_eq!(landed, 0);
}

struct Fight {
    took: Duration,
    refused: u64,
    landed: u64,
    after: Vec<Stamp>,
}

/// `holder` writes, is challenged, and writes on; then the winner writes, too.
fn fight(uri: &str, holder: &mut Worker, round: u64, before: Vec<Stamp>) -> (Worker, Fight) {
    let old: Vec<Writer> = (0..WRITERS).map(|_| Writer::new(2 * round, 1)).collect();
    // Every other block, so that the rest shows what the loser does.
    let new: Vec<Writer> = (0..WRITERS).map(|_| Writer::new(2 * round + 1, 2)).collect();
    let total = |writers: &[Writer], count: fn(&Writer) -> &AtomicU64| -> u64 {
        writers.iter().map(|writer| count(writer).load(Ordering::SeqCst)).sum()
    };
    let (their, winner_sockets) = (holder.serve(WRITERS.try_into().unwrap()), OnceLock::new());
    let (winner, took, reader, cut) = std::thread::scope(|scope| {
        for ((writer, socket), n) in old.iter().zip(&their).zip(0..) {
            scope.spawn(move || writer.run(socket, n * BLOCKS));
        }
        wait_until("the holder writes", || total(&old, |w| &w.written) > BLOCKS);
        // Frozen until after the cut, frozen for the beginning, or not at all.
        if !round.is_multiple_of(3) {
            signal(holder, Signal::SIGSTOP);
        }
        let (mut winner, took) = std::thread::scope(|inner| {
            if round % 3 == 2 {
                inner.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50 + round * 37 % 300));
                    signal(holder, Signal::SIGCONT);
                });
            }
            challenger(uri, round)
        });
        old.iter().for_each(|writer| writer.cut.store(true, Ordering::SeqCst));
        let mut sockets = winner.serve(usize::try_from(WRITERS + 1).unwrap());
        let reader = sockets.pop().unwrap();
        let cut = stamps(&reader);
        if round % 3 == 1 {
            signal(holder, Signal::SIGCONT);
        }
        let sockets = winner_sockets.get_or_init(|| sockets);
        for ((writer, socket), n) in new.iter().zip(sockets).zip(0..) {
            scope.spawn(move || writer.run(socket, n * BLOCKS));
        }
        wait_until("the loser is refused", || total(&old, |w| &w.refused) > TRIED);
        // Every one of its blocks.
        let round_done = |w: &Writer| w.written.load(Ordering::SeqCst) > BLOCKS;
        wait_until("the winner writes", || new.iter().all(round_done));
        old.iter().chain(&new).for_each(|writer| writer.end.store(true, Ordering::SeqCst));
        (winner, took, reader, cut)
    });
    let after = stamps(&reader);
    assert_written(&cut, &before, &old);
    let alien = after.iter().step_by(2).find(|stamp| stamp.round != 2 * round + 1);
    assert_eq!(alien, None, "a block of the winner's is the loser's: {after:?}");
    let changed = (1..cut.len()).step_by(2).filter(|n| cut[*n] != after[*n]).count() as u64;
    let landed = changed + total(&old, |w| &w.late);
    let refused = total(&old, |w| &w.refused);
    (winner, Fight { took, refused, landed, after })
}

/// A loser has noticed, and ends without touching anything.
fn end(mut loser: Worker) {
    assert_eq!(loser.receive(), FromWorker::Fenced);
    loser.send(&ToWorker::Stop, &[]);
    assert!(loser.exit().success(), "{}", loser.log());
}
