//! The statistics page: counters in shared memory. Connection threads write them, and every process with the
//! memory file can read them, mainly the supervisor.
//!
//! - Input: the results of requests.
//! - Output: a [`Snapshot`].
//!
//! Each connection has its own slot with a single writer, so a count is a load and a store, without a lock
//! prefix or a system call. A slot keeps its counts when a connection ends, and the next connection continues
//! from them. The counters of a snapshot are not read at the same instant, so they may differ by a few
//! requests.
//!
//! Never allowed here: a wait.
//!
//! The page consists of 64-bit words in the byte order of the machine: a header of [`HEADER_WORDS`] (magic,
//! version, numbers of operations, error kinds, buckets and slots), then [`SLOTS`] slots of [`SLOT_WORDS`].
//! The version is incremented when a word changes its meaning. New words use places that were zero. Builds may
//! have different numbers of operations and error kinds, within the reserved places.

mod handover;
mod stored;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cleat_core::clock::{Clock as _, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{IoError, Op};
use cleat_core::space::SpaceUse;
use cleat_sys::shared::SharedMemory;

/// The maximum number of connections at the same time that have their own counters.
pub const SLOTS: usize = 64;

/// The number of latency buckets per operation. Bucket `i` counts the requests that took less than
/// `FIRST_BUCKET_NS << i` and are in no earlier bucket. The last bucket also counts all slower requests.
pub const BUCKETS: usize = 32;

/// The upper bound of the first latency bucket, in nanoseconds.
pub const FIRST_BUCKET_NS: u64 = 1024;

/// A statistics page, created by [`Page::create`] or received from the process that created it.
#[derive(Debug, Clone)]
pub struct Page {
    memory: Arc<SharedMemory>,
    /// One bit for each slot that has a recorder in this process.
    taken: Arc<AtomicU64>,
}

/// The single writer of one slot. Dropping it frees the slot, whose counts remain.
#[derive(Debug)]
pub struct Recorder {
    memory: Arc<SharedMemory>,
    taken: Arc<AtomicU64>,
    slot: usize,
    /// Whether it has started to write.
    started: bool,
}

/// The values of a page at one moment, as sums over its connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The counts per operation, in the order of [`Op::ALL`].
    pub ops: [OpSnapshot; Op::ALL.len()],
    /// Failed requests by kind, in the order of [`IoError::ALL`].
    pub errors: [u64; IoError::ALL.len()],
    /// The number of requests in flight.
    pub in_flight: u64,
    /// The number of connections that are served.
    pub connections: u64,
    /// The arrival of the oldest request in flight, on the clock of [`now_ns`]; 0 if there is none.
    pub oldest_ns: u64,
    /// The number of requests that wait for an unreachable backend. They also count as in flight.
    pub queued: u64,
    /// The start of the outage, on the clock of [`boot_now_ns`]; 0 if there is no outage.
    pub outage_since_ns: u64,
    /// The total time of the outages that are over, in nanoseconds, as a sum over the connections.
    pub stalled_ns: u64,
    /// The total time in which a limit delayed requests, in nanoseconds, as a sum over the connections.
    pub limited_ns: u64,
    /// See [`Page::unsaved`].
    pub unsaved: u64,
    /// See [`Page::space`].
    pub space: SpaceUse,
}

/// The counts of one operation since the page was created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpSnapshot {
    /// The number of requests that completed, failed ones included.
    pub count: u64,
    /// The number of bytes of the successful requests.
    pub bytes: u64,
    /// The number of requests that failed.
    pub errors: u64,
    /// The total time from receipt to completion, in nanoseconds.
    pub total_ns: u64,
    /// The number of requests by latency: see [`BUCKETS`].
    pub latency: [u64; BUCKETS],
}

/// Returns the time on the clock of [`Snapshot::oldest_ns`], CLOCK_MONOTONIC in nanoseconds. It is the same in
/// every process of the machine.
pub fn now_ns() -> u64 {
    SystemClock.monotonic_ns()
}

/// Returns the time on the clock of [`Snapshot::outage_since_ns`], CLOCK_BOOTTIME in nanoseconds. It is the
/// same in every process of the machine.
pub fn boot_now_ns() -> u64 {
    SystemClock.boot_ns()
}

impl Page {
    /// Creates an empty page, and a descriptor of it for another process.
    ///
    /// # Errors
    /// Returns an error if the process has no memory or descriptor left.
    pub fn create() -> Result<(Self, OwnedFd)> {
        let failed = |error| Error::from_io("cannot create the statistics page", error);
        let memory = SharedMemory::create("cleat-statistics", PAGE_BYTES).map_err(failed)?;
        for (word, value) in memory.words().iter().zip(HEADER) {
            word.store(value, Relaxed);
        }
        let file = memory.file().try_clone_to_owned().map_err(failed)?;
        Ok((Self::new(memory), file))
    }

    /// Maps a page that another process has created.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the file is not a statistics page or has another version.
    pub fn from_fd(file: OwnedFd) -> Result<Self> {
        let memory = SharedMemory::from_fd(file, PAGE_BYTES).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "not a statistics page").with_source(error)
        })?;
        let fits = memory.words().iter().zip(HEADER).zip(MOST).all(|((word, own), most)| {
            let word = word.load(Relaxed);
            word == own || (1..=most).contains(&word)
        });
        if !fits {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("the statistics page does not have version {VERSION}"),
            ));
        }
        Ok(Self::new(memory))
    }

    /// Returns a descriptor of the page, for another process.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.memory.file().as_fd().try_clone_to_owned()
    }

    /// Returns the writer of `slot`, or `None` if there is no such slot or it has a writer in this process.
    pub fn recorder(&self, slot: usize) -> Option<Recorder> {
        let mut recorder = self.reserve(slot)?;
        recorder.begin();
        Some(recorder)
    }

    /// Returns a writer that writes nothing before [`Recorder::begin`], because another process may still write
    /// to its slot. Returns `None` if every slot has a writer in this process.
    pub fn silent_recorder(&self) -> Option<Recorder> {
        (0..SLOTS).find_map(|slot| self.reserve(slot))
    }

    fn reserve(&self, slot: usize) -> Option<Recorder> {
        if slot >= SLOTS || self.taken.fetch_or(1 << slot, Relaxed) & 1 << slot != 0 {
            return None;
        }
        let (memory, taken) = (Arc::clone(&self.memory), Arc::clone(&self.taken));
        Some(Recorder { memory, taken, slot, started: false })
    }

    /// Returns the writer of any free slot, or `None` if every slot has a writer in this process.
    pub fn any_recorder(&self) -> Option<Recorder> {
        (0..SLOTS).find_map(|slot| self.recorder(slot))
    }

    /// Clears the connections and requests in flight of a process that has died. The process that replaces it
    /// must call this before it serves.
    pub fn take_over(&self) {
        for slot in 0..self.used() {
            disconnect(slot_words(&self.memory, slot));
        }
    }

    /// Counts a reconnect: the supervisor has replaced the device's dead connections. Only the supervisor may
    /// call this.
    pub fn count_reconnect(&self) {
        self.memory.words()[RECONNECTS].fetch_add(1, Relaxed);
    }

    /// Returns the number of reconnects: see [`Page::count_reconnect`].
    pub fn reconnects(&self) -> u64 {
        self.memory.words()[RECONNECTS].load(Relaxed)
    }

    /// Records that a sync of the volume has failed. The supervisor can read this also after the worker has died.
    pub fn set_sync_failed(&self) {
        self.memory.words()[SYNC_FAILED].store(1, Relaxed);
    }

    /// Returns whether a worker has recorded a failed sync.
    pub fn sync_failed(&self) -> bool {
        self.memory.words()[SYNC_FAILED].load(Relaxed) != 0
    }

    /// Returns the current values of the page. It never blocks.
    pub fn snapshot(&self) -> Snapshot {
        let (unsaved, space) = (self.unsaved(), self.space());
        let mut sum = Snapshot { unsaved, space, ..Snapshot::default() };
        for slot in 0..self.used() {
            sum.add(slot_words(&self.memory, slot));
        }
        sum
    }

    /// Returns the number of slots that may have been written. Reading the other slots would only allocate
    /// their memory.
    fn used(&self) -> usize {
        let used = self.memory.words()[USED].load(Relaxed);
        usize::try_from(used).map_or(SLOTS, |used| used.min(SLOTS))
    }

    fn new(memory: SharedMemory) -> Self {
        Self { memory: Arc::new(memory), taken: Arc::new(AtomicU64::new(0)) }
    }
}

impl Recorder {
    /// Starts to write: the connection counts as served. A second call does nothing.
    pub fn begin(&mut self) {
        if !self.started {
            self.started = true;
            self.memory.words()[USED].fetch_max(self.slot as u64 + 1, Relaxed);
            disconnect(slot_words(&self.memory, self.slot));
            self.word(CONNECTED).store(1, Relaxed);
        }
    }

    /// Stops writing because another process writes to this slot now. Dropping the recorder then does not
    /// change the slot.
    pub fn leave(&mut self) {
        self.started = false;
    }

    /// Counts a completed request. `bytes` is its length, which is not counted if the request failed.
    pub fn ended(&self, op: Op, bytes: u64, latency_ns: u64, result: Result<(), IoError>) {
        let words = slot_words(&self.memory, self.slot);
        let op = &words[OPS + op as usize * OP_WORDS..][..OP_WORDS];
        add(&op[COUNT], 1);
        add(&op[TOTAL_NS], latency_ns);
        add(&op[LATENCY + bucket(latency_ns)], 1);
        match result {
            Ok(()) => add(&op[BYTES], bytes),
            Err(error) => {
                add(&op[ERRORS], 1);
                add(&words[KINDS + error as usize], 1);
            }
        }
    }

    /// Sets the number of requests in flight.
    pub fn set_in_flight(&self, requests: u64) {
        self.word(IN_FLIGHT).store(requests, Relaxed);
    }

    /// Sets the arrival of the oldest request in flight, on the clock of [`now_ns`]; 0 if there is none.
    pub fn set_oldest(&self, oldest_ns: u64) {
        self.word(OLDEST_NS).store(oldest_ns, Relaxed);
    }

    /// Sets the number of requests that wait for an unreachable backend, and the start of the outage on the
    /// clock of [`boot_now_ns`], 0 if there is no outage.
    pub fn set_outage(&self, queued: u64, since_ns: u64) {
        self.word(QUEUED).store(queued, Relaxed);
        self.word(OUTAGE_SINCE_NS).store(since_ns, Relaxed);
    }

    /// Adds the duration of an outage that is over.
    pub fn stalled(&self, time_ns: u64) {
        add(self.word(STALLED_NS), time_ns);
    }

    /// Adds time in which a limit delayed requests.
    pub fn limited(&self, time_ns: u64) {
        add(self.word(LIMITED_NS), time_ns);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &slot_words(&self.memory, self.slot)[index]
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.started {
            disconnect(slot_words(&self.memory, self.slot));
        }
        self.taken.fetch_and(!(1 << self.slot), Relaxed);
    }
}

impl Snapshot {
    /// Returns the counts of one operation.
    pub fn op(&self, op: Op) -> &OpSnapshot {
        &self.ops[op as usize]
    }

    /// Returns the number of requests that failed with this kind of error.
    pub fn errors_of(&self, kind: IoError) -> u64 {
        self.errors[kind as usize]
    }

    /// Adds the values of one slot. A process with the page may have written any values, so the sums saturate.
    fn add(&mut self, words: &[AtomicU64]) {
        let add = |sum: &mut u64, index: usize| {
            *sum = sum.saturating_add(words[index].load(Relaxed));
        };
        add(&mut self.connections, CONNECTED);
        add(&mut self.in_flight, IN_FLIGHT);
        let oldest = words[OLDEST_NS].load(Relaxed);
        if oldest != 0 && (self.oldest_ns == 0 || oldest < self.oldest_ns) {
            self.oldest_ns = oldest;
        }
        add(&mut self.queued, QUEUED);
        add(&mut self.stalled_ns, STALLED_NS);
        add(&mut self.limited_ns, LIMITED_NS);
        self.outage_since_ns = match (self.outage_since_ns, words[OUTAGE_SINCE_NS].load(Relaxed)) {
            (0, since_ns) | (since_ns, 0) => since_ns,
            (one, other) => one.min(other),
        };
        for (kind, errors) in self.errors.iter_mut().enumerate() {
            add(errors, KINDS + kind);
        }
        for (index, op) in self.ops.iter_mut().enumerate() {
            let at = OPS + index * OP_WORDS;
            add(&mut op.count, at + COUNT);
            add(&mut op.bytes, at + BYTES);
            add(&mut op.errors, at + ERRORS);
            add(&mut op.total_ns, at + TOTAL_NS);
            for (index, bucket) in op.latency.iter_mut().enumerate() {
                add(bucket, at + LATENCY + index);
            }
        }
    }
}

impl OpSnapshot {
    /// Returns the latency in nanoseconds that `share` (0 to 1) of the requests stayed below, rounded up to the
    /// bound of its bucket. Returns `None` if no request was counted.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        quantile(&self.latency, share).map(|index| FIRST_BUCKET_NS << index)
    }
}

/// Returns the first bucket that, together with those before it, has `share` (0 to 1) of all counts. Returns
/// `None` if all buckets are zero.
pub fn quantile(buckets: &[u64], share: f64) -> Option<usize> {
    let total = buckets.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let wanted = (total as f64 * share).ceil().max(1.0);
    let mut sum = 0_u64;
    buckets.iter().position(|count| {
        sum = sum.saturating_add(*count);
        total > 0 && sum as f64 >= wanted
    })
}

const MAGIC: u64 = u64::from_le_bytes(*b"cleatst\0");
const VERSION: u64 = 1;
const HEADER: [u64; 6] =
    [MAGIC, VERSION, Op::ALL.len() as u64, IoError::ALL.len() as u64, BUCKETS as u64, SLOTS as u64];
/// The maximum of the header words that may differ from [`HEADER`]: the numbers of operations and error kinds
/// that have a reserved place. Zero for a word that may not differ.
const MOST: [u64; 6] = [0, 0, ((SLOT_WORDS - OPS) / OP_WORDS) as u64, (OPS - KINDS) as u64, 0, 0];
/// Word of the header: one more than the highest slot that ever had a writer.
const USED: usize = HEADER.len();
/// Word of the header: see `handover`.
const HANDOVER: usize = USED + 1;
/// Word of the header: see [`Page::count_reconnect`].
const RECONNECTS: usize = HANDOVER + 1;
/// Word of the header: see [`Page::set_sync_failed`].
const SYNC_FAILED: usize = RECONNECTS + 1;
/// Word of the header: see [`Page::set_unsaved`].
const UNSAVED: usize = SYNC_FAILED + 1;
/// First of six words of the header: see [`Page::set_space`].
const SPACE: usize = UNSAVED + 1;
/// The number of words before the first slot. Unused words are zero.
const HEADER_WORDS: usize = 512;
/// The number of words of one slot: a whole number of cache lines, with places for more counters.
const SLOT_WORDS: usize = 512;
const PAGE_BYTES: u64 = ((HEADER_WORDS + SLOTS * SLOT_WORDS) * 8) as u64;

// Indices of words in a slot.
const CONNECTED: usize = 0;
const IN_FLIGHT: usize = 1;
const QUEUED: usize = 2;
const OUTAGE_SINCE_NS: usize = 3;
const STALLED_NS: usize = 4;
const LIMITED_NS: usize = 5;
const OLDEST_NS: usize = 6;
const KINDS: usize = 16;
const OPS: usize = 64;
const OP_WORDS: usize = 64;
// Indices of words in the part of a slot for one operation.
const COUNT: usize = 0;
const BYTES: usize = 1;
const ERRORS: usize = 2;
const TOTAL_NS: usize = 3;
const LATENCY: usize = 16;

const _: () = assert!(KINDS + IoError::ALL.len() <= OPS);
const _: () = assert!(LATENCY + BUCKETS <= OP_WORDS);
const _: () = assert!(OPS + Op::ALL.len() * OP_WORDS <= SLOT_WORDS);
const _: () = assert!(SLOTS <= 64, "`taken` has 64 bits");

fn slot_words(memory: &SharedMemory, slot: usize) -> &[AtomicU64] {
    &memory.words()[HEADER_WORDS + slot * SLOT_WORDS..][..SLOT_WORDS]
}

/// Clears the words that are valid only while the connection is served.
fn disconnect(words: &[AtomicU64]) {
    for index in [CONNECTED, IN_FLIGHT, QUEUED, OUTAGE_SINCE_NS, OLDEST_NS] {
        words[index].store(0, Relaxed);
    }
}

/// Adds to a word that only the caller writes.
fn add(word: &AtomicU64, value: u64) {
    word.store(word.load(Relaxed).wrapping_add(value), Relaxed);
}

fn bucket(latency_ns: u64) -> usize {
    let significant_bits = u64::BITS - (latency_ns / FIRST_BUCKET_NS).leading_zeros();
    (significant_bits as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_of_the_file_sees_what_is_recorded() {
        let (page, file) = Page::create().unwrap();
        let reader = Page::from_fd(file).unwrap();
        let (first, second) = (page.recorder(0).unwrap(), page.recorder(5).unwrap());
        first.ended(Op::Read, 4096, 500, Ok(()));
        second.ended(Op::Read, 512, 5000, Ok(()));
        second.ended(Op::Write, 8192, 2_000_000, Err(IoError::NoSpace));
        second.set_in_flight(3);
        let seen = reader.snapshot();
        assert_eq!((seen.connections, seen.in_flight), (2, 3));
        let read = seen.op(Op::Read);
        assert_eq!((read.count, read.bytes, read.errors, read.total_ns), (2, 4608, 0, 5500));
        assert_eq!((read.latency[0], read.latency[3]), (1, 1));
        let write = seen.op(Op::Write);
        assert_eq!((write.count, write.bytes, write.errors), (1, 0, 1));
        assert_eq!(seen.errors_of(IoError::NoSpace), 1);
        drop(second);
        let later = reader.snapshot();
        assert_eq!((later.connections, later.in_flight), (1, 0));
        assert_eq!(later.op(Op::Write).count, 1);
    }

    #[test]
    fn a_slot_has_one_writer_at_a_time() {
        let (page, _file) = Page::create().unwrap();
        let writer = page.recorder(SLOTS - 1).unwrap();
        assert!(page.recorder(SLOTS - 1).is_none());
        assert!(page.recorder(SLOTS).is_none());
        drop(writer);
        assert!(page.recorder(SLOTS - 1).is_some());
        let all: Vec<_> = std::iter::from_fn(|| page.any_recorder()).collect();
        assert_eq!(all.len(), SLOTS);
    }

    #[test]
    fn take_over_clears_the_connections_of_a_dead_process() {
        let (page, file) = Page::create().unwrap();
        let dead = page.recorder(2).unwrap();
        dead.ended(Op::Flush, 0, 9, Ok(()));
        dead.set_in_flight(7);
        dead.set_outage(3, 4711);
        dead.stalled(5);
        let successor = Page::from_fd(file).unwrap();
        successor.take_over();
        let seen = successor.snapshot();
        assert_eq!((seen.connections, seen.in_flight, seen.op(Op::Flush).count), (0, 0, 1));
        assert_eq!((seen.queued, seen.outage_since_ns, seen.stalled_ns), (0, 0, 5));
    }

    #[test]
    fn a_page_with_arbitrary_values_can_be_read() {
        let (page, file) = Page::create().unwrap();
        let both = [page.recorder(0).unwrap(), page.recorder(1).unwrap()];
        let words = page.memory.words();
        words[HEADER_WORDS..].iter().for_each(|word| word.store(u64::MAX, Relaxed));
        let seen = Page::from_fd(file).unwrap().snapshot();
        assert_eq!(seen.op(Op::Read).bytes, u64::MAX);
        assert!(seen.op(Op::Read).quantile_ns(0.99).is_some());
        drop(both);
    }

    #[test]
    fn a_silent_recorder_does_not_change_the_slot_before_it_starts() {
        let (page, file) = Page::create().unwrap();
        let old = page.recorder(0).unwrap();
        old.set_in_flight(7);
        let successor = Page::from_fd(file).unwrap();
        let connected = || successor.snapshot().connections;
        drop(successor.silent_recorder().unwrap());
        assert_eq!((connected(), successor.snapshot().in_flight), (1, 7));
        let mut new = successor.silent_recorder().unwrap();
        let mut old = old;
        old.leave();
        new.begin();
        drop(old);
        assert_eq!((connected(), successor.snapshot().in_flight), (1, 0));
        drop(new);
        assert_eq!(connected(), 0);
    }

    #[test]
    fn a_page_of_a_build_with_more_or_fewer_kinds_can_be_read() {
        let (page, file) = Page::create().unwrap();
        let words = page.memory.words();
        let read = |file: &OwnedFd| Page::from_fd(file.try_clone().unwrap());
        for (word, fits, not) in [(2, 7, 8), (3, 48, 49)] {
            let own = words[word].load(Relaxed);
            for (count, good) in [(fits, true), (own - 1, true), (not, false)] {
                words[word].store(count, Relaxed);
                assert_eq!(read(&file).is_ok(), good, "{count} in word {word}");
            }
            words[word].store(own, Relaxed);
        }
        words[5].store(1, Relaxed);
        assert!(read(&file).is_err());
    }

    #[test]
    fn an_outage_starts_with_the_first_connection_that_reports_it() {
        let (page, _file) = Page::create().unwrap();
        let all = [0, 1, 2].map(|slot| page.recorder(slot).unwrap());
        assert_eq!(page.snapshot().outage_since_ns, 0);
        all[1].set_outage(2, 900);
        all[2].set_outage(3, 700);
        all[0].limited(8);
        let seen = page.snapshot();
        assert_eq!((seen.queued, seen.outage_since_ns, seen.limited_ns), (5, 700, 8));
        all[2].set_outage(0, 0);
        assert_eq!(page.snapshot().outage_since_ns, 900);
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let other = SharedMemory::create("other", PAGE_BYTES).unwrap();
        let error = Page::from_fd(other.file().try_clone_to_owned().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let short = SharedMemory::create("other", 4096).unwrap();
        assert!(Page::from_fd(short.file().try_clone_to_owned().unwrap()).is_err());
    }

    #[test]
    fn bucket_bounds_double_and_quantiles_return_the_bound() {
        assert_eq!([0, 1023, 1024, 2047, 2048].map(bucket), [0, 0, 1, 1, 2]);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        let mut op = OpSnapshot::default();
        assert_eq!(op.quantile_ns(0.5), None);
        (op.latency[0], op.latency[4]) = (99, 1);
        assert_eq!(op.quantile_ns(0.5), Some(1024));
        assert_eq!(op.quantile_ns(0.999), Some(1024 << 4));
    }
}
