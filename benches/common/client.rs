//! A load generator that batches requests: one thread, one connection, blocking socket calls, and as many
//! requests in one send as replies arrived in one receive. fio's nbd engine reaches at most about 160
//! thousand requests per second, far less than the servers here.
//!
//! Every 4 KiB of the volume have a stamp at their begin and at their end: their offset, and the number of the
//! write that wrote them. Each read is compared with the stamps of the last write that was acknowledged, so a
//! block at a wrong place, a lost write, a torn block and swapped replies are found. No two requests in flight
//! overlap unless both are reads, so the expected stamps are exact. Each cookie is used once.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use test_kit::nbd::wire::{READ, REPLY_LEN, REQUEST_LEN, Request, WRITE, parse_reply, read_reply};

use super::histogram::Histogram;

/// The requests of a load.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// The share of writes in percent; the other requests are reads.
    pub writes_percent: u64,
    /// Blocks in ascending order instead of random ones.
    pub sequential: bool,
    /// The length of each request in bytes, a multiple of [`UNIT`].
    pub block: usize,
}

/// 4 KiB random reads.
pub const READS: Load = Load { writes_percent: 0, sequential: false, block: UNIT };

/// The length of the pieces with stamps, in bytes.
pub const UNIT: usize = 4096;

/// The length from which on replies are received one at a time, in bytes, so that none has to be moved.
const LONG: usize = 256 << 10;

/// The place of the last stamp in a unit.
const END: usize = UNIT - 8;

/// What a run has measured.
#[derive(Debug, Clone)]
pub struct Figures {
    /// Completed requests per second.
    pub rate: f64,
    /// The number of completed requests.
    pub count: u64,
    /// From the moment at which a request could be sent until its reply was received.
    pub latency: Histogram,
}

/// One connection, which has a part of the volume for itself.
pub struct Client {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The number of bytes in `output` that are to be sent.
    queued: usize,
    random: u64,
    /// The number of requests so far.
    count: u64,
    /// The part of the volume, in bytes.
    part: Range<u64>,
    /// For each unit of the part, the number of its last write.
    written: Vec<u32>,
    /// For each block of the part, the number of reads in flight, or [`WRITING`].
    busy: Vec<u16>,
    places: Vec<Pending>,
    free: Vec<usize>,
}

const WRITING: u16 = u16::MAX;

/// A request in flight.
#[derive(Debug, Clone, Copy)]
struct Pending {
    cookie: u64,
    block: u64,
    is_write: bool,
    sent: Instant,
}

impl Client {
    /// Waits until the server listens, connects, and completes the handshake. The client uses the whole volume.
    pub fn connect(socket: &Path) -> Self {
        Self::connect_part(socket, "", 0, 1)
    }

    /// As [`Client::connect`], to the export `name`. The client uses the part number `part` of `parts` equal
    /// parts of the volume.
    pub fn connect_part(socket: &Path, name: &str, part: u64, parts: u64) -> Self {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "no server: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let length = handshake(&mut stream, name) / parts;
        let random = 0x9e37_79b9_7f4a_7c15 ^ part;
        let part = part * length..(part + 1) * length;
        let written = vec![0; length as usize / UNIT];
        let (input, output, busy, places, free) = Default::default();
        let (queued, count) = (0, 0);
        Self { stream, input, output, queued, random, count, part, written, busy, places, free }
    }

    /// Fills the client's part with stamped data, so that no server answers from a hole. The requests are as short as
    /// possible: after long ones, ext4 has pages of 1 MiB in its cache, and a write of 4 KiB to one of them takes 50 µs.
    pub fn fill(&mut self) {
        self.visit(WRITE, UNIT, |_, _| ());
        self.written.fill(1);
    }

    /// Reads the stamps of the client's part, which is filled already, in blocks of this length.
    pub fn learn(&mut self, block: usize) {
        let (mut bytes, mut written) = (vec![0; block], std::mem::take(&mut self.written));
        let first = self.part.start;
        self.visit(READ, block, |stream, offset| {
            stream.read_exact(&mut bytes).unwrap();
            for (offset, unit) in (offset..).step_by(UNIT).zip(bytes.chunks_exact(UNIT)) {
                let number = u64::from_le_bytes(*unit[8..].first_chunk().unwrap());
                check_stamps(unit, offset, number);
                written[(offset - first) as usize / UNIT] = u32::try_from(number).unwrap();
            }
        });
        self.written = written;
    }

    /// Sends a request for each block of the part. `take` takes the payload of the reply about the block at an offset.
    fn visit(&mut self, command: u16, block: usize, mut take: impl FnMut(&mut UnixStream, u64)) {
        const BATCH: usize = 64;
        let blocks: Vec<u64> = self.part.clone().step_by(block).collect();
        for batch in blocks.chunks(BATCH) {
            let mut output = Vec::new();
            for offset in batch {
                output.extend(Request::new(command, *offset, *offset, block as u32).encode());
                if command == WRITE {
                    output.extend(stamped(*offset, block));
                }
            }
            self.stream.write_all(&output).unwrap();
            for _ in batch {
                // The cookie is the offset. Servers may answer in another order.
                let (offset, error) = read_reply(&mut self.stream);
                assert_eq!(error, 0, "the reply for the block at {offset}");
                take(&mut self.stream, offset);
            }
        }
    }

    /// Closes the connection, if the server has not.
    pub fn disconnect(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Keeps `depth` requests in flight for `time`, and checks every reply.
    pub fn run(&mut self, load: Load, depth: usize, time: Duration) -> Figures {
        self.prepare(load, depth);
        let longest = REPLY_LEN + if load.writes_percent < 100 { load.block } else { 0 };
        let capacity = if longest > LONG { longest } else { LONG };
        self.input.resize(capacity.max(self.input.len()), 0);
        let begin = Instant::now();
        let (mut now, mut latency) = (begin, Histogram::new());
        (0..depth).for_each(|_| self.queue(load, now));
        self.send();
        let (mut filled, mut count, mut running) = (0, 0, depth);
        while running > 0 {
            let received = self.stream.read(&mut self.input[filled..capacity]).unwrap();
            assert!(received > 0, "the server closed the connection");
            now = Instant::now();
            filled += received;
            let (bytes, replies) = self.take_replies(filled, load.block, now, &mut latency);
            self.input.copy_within(bytes..filled, 0);
            filled -= bytes;
            count += replies as u64;
            running -= replies;
            if now - begin < time {
                (0..replies).for_each(|_| self.queue(load, now));
                running += replies;
                self.send();
            }
        }
        Figures { rate: count as f64 / (now - begin).as_secs_f64(), count, latency }
    }

    fn prepare(&mut self, load: Load, depth: usize) {
        assert!(load.block.is_multiple_of(UNIT) && depth <= SLOTS);
        let sent = Instant::now();
        let blocks = (self.part.end - self.part.start) as usize / load.block;
        assert!(blocks > 2 * depth, "a part of {blocks} blocks is too small for depth {depth}");
        self.busy.clear();
        self.busy.resize(blocks, 0);
        self.places = vec![Pending { cookie: 0, block: 0, is_write: false, sent }; depth];
        self.free = (0..depth).collect();
        self.output.resize((depth * (REQUEST_LEN + load.block)).max(self.output.len()), FILL);
    }

    fn queue(&mut self, load: Load, sent: Instant) {
        let is_write = load.writes_percent > self.random() % 100;
        let block = self.choose(load, is_write);
        let slot = self.free.pop().unwrap();
        self.count += 1;
        let cookie = self.count * SLOTS as u64 + slot as u64;
        self.places[slot] = Pending { cookie, block, is_write, sent };
        let offset = self.part.start + block * load.block as u64;
        let command = if is_write { WRITE } else { READ };
        let request = Request::new(command, cookie, offset, load.block as u32);
        self.put(&request.encode());
        if is_write {
            // Only the stamps are written anew: what is between them does not matter.
            let payload = &mut self.output[self.queued..][..load.block];
            let first = block as usize * (load.block / UNIT);
            for (index, unit) in payload.chunks_exact_mut(UNIT).enumerate() {
                let number = u64::from(self.written[first + index]) + 1;
                put_stamps(unit, offset + (index * UNIT) as u64, number);
            }
            self.queued += load.block;
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.output[self.queued..][..bytes.len()].copy_from_slice(bytes);
        self.queued += bytes.len();
    }

    /// Returns a block that no request in flight uses, except other reads for a read.
    fn choose(&mut self, load: Load, is_write: bool) -> u64 {
        let blocks = self.busy.len() as u64;
        let mut block = if load.sequential { self.count } else { self.random() } % blocks;
        loop {
            let busy = &mut self.busy[block as usize];
            match (is_write, *busy) {
                (true, 0) => *busy = WRITING,
                (false, readers) if readers != WRITING => *busy += 1,
                _ => {
                    block = (block + 1) % blocks;
                    continue;
                }
            }
            return block;
        }
    }

    /// xorshift64
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn send(&mut self) {
        self.stream.write_all(&self.output[..self.queued]).unwrap();
        self.queued = 0;
    }

    /// Takes the complete replies in the first `filled` bytes of the input. Returns the number of their bytes,
    /// and their number.
    fn take_replies(
        &mut self,
        filled: usize,
        block: usize,
        now: Instant,
        latency: &mut Histogram,
    ) -> (usize, usize) {
        let (mut at, mut replies) = (0, 0);
        while let Some(header) = self.input[at..filled].first_chunk() {
            let (cookie, error) = parse_reply(header);
            let slot = cookie as usize % SLOTS;
            let pending = self.places[slot];
            assert_eq!((cookie, error), (pending.cookie, 0), "the reply's cookie and error");
            let payload_len = if pending.is_write { 0 } else { block };
            let Some(payload) = self.input[at + REPLY_LEN..filled].get(..payload_len) else {
                break;
            };
            let first = pending.block as usize * (block / UNIT);
            let units = &mut self.written[first..][..block / UNIT];
            if pending.is_write {
                units.iter_mut().for_each(|number| *number += 1);
                self.busy[pending.block as usize] = 0;
            } else {
                let offset = self.part.start + pending.block * block as u64;
                for (index, (unit, number)) in payload.chunks_exact(UNIT).zip(units).enumerate() {
                    check_stamps(unit, offset + (index * UNIT) as u64, u64::from(*number));
                }
                self.busy[pending.block as usize] -= 1;
            }
            // No second reply to it is valid.
            self.places[slot].cookie = 0;
            self.free.push(slot);
            latency.add((now - pending.sent).as_nanos() as u64);
            at += REPLY_LEN + payload_len;
            replies += 1;
        }
        (at, replies)
    }
}

/// The highest depth.
const SLOTS: usize = 1024;

/// The byte between the stamps.
const FILL: u8 = 0x5a;

/// Returns `length` bytes of a volume from `offset` on, as [`Client::fill`] writes them.
pub fn stamped(offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![FILL; length];
    for (index, unit) in bytes.chunks_exact_mut(UNIT).enumerate() {
        put_stamps(unit, offset + (index * UNIT) as u64, 1);
    }
    bytes
}

/// Fills the file at `path` as [`Client::fill`] fills a volume, if it is not full yet. Afterwards nothing of it waits to be
/// written to the disk, which would load the disk during a measurement.
pub fn fill_file(path: &Path, size: u64) {
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    let filled = file.metadata().unwrap().len();
    for offset in (filled..size).step_by(UNIT) {
        file.write_all(&stamped(offset, UNIT)).unwrap();
    }
    file.sync_all().unwrap();
}

fn put_stamps(unit: &mut [u8], offset: u64, number: u64) {
    unit[..8].copy_from_slice(&offset.to_le_bytes());
    unit[8..16].copy_from_slice(&number.to_le_bytes());
    unit[END..].copy_from_slice(&(offset ^ number).to_le_bytes());
}

fn check_stamps(unit: &[u8], offset: u64, number: u64) {
    let word = |at: usize| u64::from_le_bytes(*unit[at..].first_chunk().unwrap());
    let found = (word(0), word(8), word(END));
    assert_eq!(found, (offset, number, offset ^ number), "the stamps of the unit at {offset}");
}

/// Carries out the shortest handshake, NBD_OPT_EXPORT_NAME without padding. Returns the size of the export.
fn handshake(stream: &mut UnixStream, name: &str) -> u64 {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT", "the greeting of a server");
    // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES.
    stream.write_all(&[0, 0, 0, 3]).unwrap();
    let option = [b"IHAVEOPT\0\0\0\x01", &(name.len() as u32).to_be_bytes()[..], name.as_bytes()];
    stream.write_all(&option.concat()).unwrap();
    let mut export = [0; 10];
    stream.read_exact(&mut export).unwrap();
    u64::from_be_bytes(*export.first_chunk().unwrap())
}
