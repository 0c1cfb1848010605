//! The load of the benchmarks with volumes of objects, on worker processes.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_worker::protocol::{FromWorker, Start};
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, start_message};

use super::random::Random;

/// The volumes that are written.
pub(crate) const SIZE: u64 = 1 << 30;
pub(crate) const BLOCK: u64 = 4096;
/// How long the random writes last.
pub(crate) const SECONDS: u64 = 5;
/// The cookie of a flush.
const FLUSH: u64 = u64::MAX;

/// A random offset of a block.
pub(crate) fn offset(random: &mut Random) -> u64 {
    random.next() % (SIZE / BLOCK) * BLOCK
}

/// Returns the file of a mapping in memory.
pub(crate) fn tail_file(bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// Starts a worker process with a volume. Returns it with its socket and its tail file.
pub(crate) fn start(uri: &str, has_tail: bool) -> (Worker, Vec<UnixStream>, File) {
    let tail_bytes = if has_tail { REGISTRY.volume(uri).unwrap().spec().tail_bytes() } else { 0 };
    let mut worker = Worker::launch();
    let start = Start { tail_bytes, ..start_message(uri) };
    let tail = tail_file(tail_bytes.max(1));
    let descriptors = if has_tail { vec![tail.as_fd()] } else { Vec::new() };
    worker.send_start_with(&start, &descriptors);
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(1);
    (worker, sockets, tail)
}

/// Writes at random for a while, with a flush each second. The rate is that until everything is durable: the last
/// flush and the time that it takes count, too.
pub(crate) fn load(socket: &UnixStream, depth: u64) -> String {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut data = vec![7; BLOCK as usize];
    let began = Instant::now();
    let mut send = |cookie: u64| {
        data[..8].copy_from_slice(&random.next().to_le_bytes());
        nbd::send(socket, nbd::WRITE, cookie, offset(&mut random), BLOCK as u32, &data);
    };
    (0..depth).for_each(&mut send);
    let (mut writes, mut flushes, mut longest) = (0_u64, 0_u64, Duration::ZERO);
    let (mut flushed_at, mut flush_since) = (began, None);
    let mut in_flight = depth;
    while in_flight > 0 || flush_since.is_some() {
        let (cookie, error) = nbd::reply(socket);
        assert_eq!(error, 0);
        if cookie == FLUSH {
            let since: Instant = flush_since.take().unwrap();
            longest = longest.max(since.elapsed());
            flushes += 1;
        } else {
            writes += 1;
            if began.elapsed() < Duration::from_secs(SECONDS) {
                send(cookie);
            } else {
                in_flight -= 1;
            }
        }
        let is_due = in_flight > 0 && flushed_at.elapsed() >= Duration::from_secs(1);
        if flush_since.is_none() && is_due {
            flushed_at = Instant::now();
            flush_since = Some(flushed_at);
            nbd::send(socket, nbd::FLUSH, FLUSH, 0, 0, &[]);
        }
    }
    assert_eq!(nbd::simple(socket, nbd::FLUSH, 0, 0), 0);
    let rate = writes as f64 / began.elapsed().as_secs_f64();
    format!("{rate:.0} writes/s, {flushes} flushes, the longest in {longest:.0?}")
}

/// Writes 512 MiB, and flushes. Returns MiB per second.
pub(crate) fn fill(socket: &UnixStream) -> f64 {
    let (count, data) = (512, noise());
    let send = |number: u64| {
        let at = (number << 12) as usize;
        nbd::send(socket, nbd::WRITE, number, number << 20, 1 << 20, &data[at..at + (1 << 20)]);
    };
    let began = Instant::now();
    (0..4).for_each(send);
    for number in 4..count + 4 {
        assert_eq!(nbd::reply(socket).1, 0);
        if number < count {
            send(number);
        }
    }
    assert_eq!(nbd::simple(socket, nbd::FLUSH, 0, 0), 0);
    count as f64 / began.elapsed().as_secs_f64()
}

/// Data that cannot be compressed: 8 MiB.
pub(crate) fn noise() -> Vec<u8> {
    let mut random = Random(98);
    (0..1 << 20).flat_map(|_| random.next().to_le_bytes()).collect()
}
