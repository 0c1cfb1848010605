//! `cargo bench --bench object_reads`: volumes of objects in a directory. A sequential read, against the store's own
//! reads of the same objects; random reads of 4 KiB with a local cache and without, also of an encrypted volume, against a
//! volume in a file.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

use std::fs::{File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::store::Layout;
use cleat_object::store::Store;
use cleat_object::store::directory::Directory;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, start_message};

#[path = "common/engine.rs"]
mod engine;
#[path = "common/random.rs"]
mod random;
#[path = "common/reads.rs"]
mod reads;

use engine::block_on;
use random::Random;
use reads::{answer, read_in_order};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The volume that is read.
const SIZE: u64 = 512 * MIB;
const DEPTH: u64 = 32;
const SECONDS: u64 = 5;
/// The files of the cache, and the length of each: 1 GiB.
const CACHE_FILES: usize = 32;
const CACHE_FILE_BYTES: u64 = 32 * MIB;

fn main() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = REGISTRY.store(&format!("dir:{}", directory.path().display())).unwrap();
    store.connect().unwrap().create("v", SIZE, &Layout::default()).unwrap();
    let uri = store.volume("v", None).unwrap().to_string();
    fill(&uri, MIB);
    for depth in [1, 4] {
        let objects = directory.path().join("v/objects");
        println!("store: {:.0} MiB/s in gets of 8 MiB, {depth} at a time", gets(&objects, depth));
        println!("volume: {:.0} MiB/s in reads of 1 MiB, depth {depth}", sequential(&uri, depth));
    }
    let file = directory.path().join("file");
    File::create(&file).unwrap().set_len(SIZE).unwrap();
    let file = format!("file:{}", file.display());
    fill(&file, MIB);
    let encrypted = encrypted_volume(directory.path());
    for length in [MIB, BLOCK] {
        for (kind, uri) in [("a", &uri), ("an encrypted", &encrypted)] {
            fill(uri, length);
            println!("{kind} volume that was written in writes of {} KiB:", length >> 10);
            for _ in 0..3 {
                compare(directory.path(), &file, uri);
            }
        }
    }
}

/// The name of the key file.
const KEY: &str = "key";

fn encrypted_volume(directory: &Path) -> String {
    let key = directory.join(KEY);
    std::fs::write(&key, [7; 32]).unwrap();
    std::fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    let store = format!("dir:{}?key_file={}", directory.display(), key.display());
    let store = REGISTRY.store(&store).unwrap();
    store.connect().unwrap().create("encrypted", SIZE, &Layout::default()).unwrap();
    store.volume("encrypted", None).unwrap().to_string()
}

/// Random reads of a file, and of a volume of objects without and with a cache.
fn compare(directory: &Path, file: &str, uri: &str) {
    println!("file: {:.0} random reads/s, depth {DEPTH}", random(file, &[]));
    println!("objects: {:.0} random reads/s", random(uri, &[]));
    let new = |_| tempfile::tempfile_in(directory).unwrap();
    let caches: Vec<File> = (0..CACHE_FILES).map(new).collect();
    println!("objects with a cache: {:.0} random reads/s", random(uri, &caches));
}

fn start(uri: &str, cache: &[File]) -> (Worker, Vec<UnixStream>) {
    let mut worker = Worker::launch();
    let key = uri.split_once("key_file=").map(|(_, path)| (path, File::open(path).unwrap()));
    let start = Start {
        cache_files: cache.len(),
        cache_file_bytes: CACHE_FILE_BYTES,
        credentials: key.iter().map(|(path, _)| (*path).to_owned()).collect(),
        ..start_message(uri)
    };
    let keys = key.iter().map(|(_, file)| file.as_fd());
    let descriptors: Vec<_> = cache.iter().map(AsFd::as_fd).chain(keys).collect();
    worker.send_start_with(&start, &descriptors);
    let answer = worker.receive();
    assert!(matches!(answer, FromWorker::Ready(_)), "{answer:?}");
    let sockets = worker.serve(1);
    (worker, sockets)
}

fn stop(mut worker: Worker) {
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
}

/// Writes the whole volume in writes of this length, in a random order.
fn fill(uri: &str, length: u64) {
    let (worker, sockets) = start(uri, &[]);
    let (count, mut random) = (SIZE / length, Random(9));
    let mut order: Vec<u64> = (0..count).collect();
    if length == BLOCK {
        order.sort_by_cached_key(|_| random.next());
    }
    let mut data = vec![0; length as usize];
    for batch in order.chunks(if length == BLOCK { 2048 } else { 8 }) {
        for number in batch {
            data.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
            nbd::send(&sockets[0], nbd::WRITE, 1, number * length, length as u32, &data);
        }
        batch.iter().for_each(|_| assert_eq!(nbd::reply(&sockets[0]).1, 0));
    }
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    stop(worker);
}

/// Reads all log objects from the store itself. Returns MiB per second.
fn gets(objects: &Path, depth: u64) -> f64 {
    let store = Arc::new(Directory::open(objects, 3).unwrap());
    let mut names: Vec<String> = Vec::new();
    loop {
        let after = names.last().cloned().unwrap_or_default();
        let some = block_on(store.list("log/", &after)).unwrap();
        if some.is_empty() {
            break;
        }
        names.extend(some);
    }
    let began = Instant::now();
    let readers: Vec<_> = (0..depth as usize)
        .map(|reader| {
            let (store, names) = (Arc::clone(&store), names.clone());
            thread::spawn(move || -> u64 {
                let own = names.iter().skip(reader).step_by(depth as usize);
                own.map(|name| block_on(store.read(name, 0..16 * MIB)).unwrap().len() as u64).sum()
            })
        })
        .collect();
    let bytes: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
    bytes as f64 / MIB as f64 / began.elapsed().as_secs_f64()
}

fn sequential(uri: &str, depth: u64) -> f64 {
    let (worker, sockets) = start(uri, &[]);
    let rate = read_in_order(&sockets[0], SIZE / MIB, depth);
    stop(worker);
    rate
}

/// The times that everything is read into a cache, which drops what is offered faster than it is written.
const PASSES: u64 = 16;

/// Returns the random reads per second. With a cache, everything is read before.
fn random(uri: &str, cache: &[File]) -> f64 {
    let (worker, sockets) = start(uri, cache);
    let socket = &sockets[0];
    let mut data = vec![0; MIB as usize];
    if !cache.is_empty() {
        for number in (0..PASSES).flat_map(|_| 0..SIZE / MIB) {
            nbd::send(socket, nbd::READ, 1, number * MIB, MIB as u32, &[]);
            answer(socket, &mut data);
        }
    }
    let mut random = Random(11);
    let mut send = || {
        let offset = random.next() % (SIZE / BLOCK) * BLOCK;
        nbd::send(socket, nbd::READ, 1, offset, BLOCK as u32, &[]);
    };
    let (began, mut reads) = (Instant::now(), 0_u64);
    (0..DEPTH).for_each(|_| send());
    while began.elapsed() < Duration::from_secs(SECONDS) {
        answer(socket, &mut data[..BLOCK as usize]);
        send();
        reads += 1;
    }
    let rate = reads as f64 / began.elapsed().as_secs_f64();
    (0..DEPTH).for_each(|_| answer(socket, &mut data[..BLOCK as usize]));
    stop(worker);
    rate
}
