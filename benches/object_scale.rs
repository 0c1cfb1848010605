//! `cargo bench --bench object_scale [-- EXTENTS…]`: what a volume of objects in a directory costs as its map grows. By
//! default with 1,000 and 1,000,000 extents: scattered writes all over a volume of 16 GiB.
//!
//! Counted are the requests to the store that put something: of a flush, a snapshot and a clone. Measured are the time of
//! an open after a crash, and the largest memory of the process while it wrote, beside the memory that the volume may use
//! for its map. Each write has 512 bytes of data.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use cleat_object::codec::Description;
use cleat_object::name::{Nonce, VolumeId};
use cleat_object::store::directory::Directory;
use cleat_object::store::{Pending, Store, StoreError};
use cleat_object::volume::{Config, NewClone, Place, Volume};

#[path = "common/engine.rs"]
mod engine;
#[path = "common/random.rs"]
mod random;

use engine::block_on;
use random::Random;

const SIZE: u64 = 16 << 30;
const BLOCK: u64 = 4096;
const EXTENTS: [u64; 2] = [1_000, 1_000_000];

/// A store that counts what is put and read.
struct Counted {
    inner: Directory,
    puts: AtomicU64,
    reads: AtomicU64,
}

impl Counted {
    fn open(directory: &Path, token: u64) -> Arc<Self> {
        let inner = Directory::open(directory, token).unwrap();
        Arc::new(Self { inner, puts: AtomicU64::new(0), reads: AtomicU64::new(0) })
    }

    /// Returns the puts since the last call.
    fn puts(&self) -> u64 {
        self.puts.swap(0, Ordering::Relaxed)
    }
}

impl Store for Counted {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.puts.fetch_add(1, Ordering::Relaxed);
        self.inner.create(name, bytes)
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read(name, range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.inner.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.inner.delete(name)
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.inner.back_off(attempt)
    }
}

fn main() {
    let given: Vec<u64> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let all = if given.is_empty() { EXTENTS.to_vec() } else { given };
    for extents in all {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        round(directory.path(), extents);
    }
}

fn round(directory: &Path, extents: u64) {
    let [volume_at, clone_at] = ["volume", "clone"].map(|name| directory.join(name));
    [&volume_at, &clone_at].iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let store = Counted::open(&volume_at, 1);
    let description = Description::new(VolumeId([1; 16]), Nonce([2; 16]), SIZE, 1 << 20);
    block_on(Volume::create(store.clone(), &description)).unwrap();
    let volume = open(&store, 3);
    let running = volume.clone();
    thread::spawn(move || block_on(running.run()));

    forget_peak();
    let before = memory("VmRSS:");
    let (began, mut random) = (Instant::now(), Random(7));
    for _ in 0..extents {
        block_on(volume.write(random.next() % (SIZE / BLOCK) * BLOCK, &[7; 512])).unwrap();
    }
    block_on(volume.flush()).unwrap();
    let written = began.elapsed();
    let peak = memory("VmHWM:") - before;
    println!("{extents} extents: written in {written:.1?}, {} puts", store.puts());
    println!(
        "  memory while writing: {} MiB more than before; {} MiB are for the map, {} MiB for the tail",
        peak >> 10,
        Config::default().map_bytes >> 20,
        Config::default().tail_bytes >> 20
    );

    block_on(volume.pause()).unwrap();
    volume.resume();
    store.puts();
    block_on(volume.write(0, &[8; 4096])).unwrap();
    block_on(volume.flush()).unwrap();
    let flush = store.puts();
    let snapshot = block_on(volume.take_snapshot("s", 0)).unwrap();
    let of_snapshot = store.puts();
    let clone_store = Counted::open(&clone_at, 2);
    let new = NewClone {
        volume: VolumeId([9; 16]),
        store: clone_store.clone(),
        location: "../volume".to_owned(),
        compression: None,
        key: None,
    };
    let place = block_on(Place::find(store.clone(), Nonce([4; 16]))).unwrap();
    block_on(place.create_clone(snapshot, &new)).unwrap();
    let of_clone = store.puts() + clone_store.puts();
    println!("  puts: flush of a write {flush}, snapshot {of_snapshot}, clone {of_clone}");

    block_on(volume.pause()).unwrap();
    // Another process, whose caches are empty.
    let store = Counted::open(&volume_at, 5);
    let began = Instant::now();
    let opened = open(&store, 6);
    let time = began.elapsed();
    let reads = store.reads.load(Ordering::Relaxed);
    println!("  open after a crash: {time:.2?}, {reads} reads, {} puts", store.puts());
    println!("  {:?}", opened.status());
}

fn open(store: &Arc<Counted>, nonce: u8) -> Volume {
    block_on(Volume::open(store.clone(), Nonce([nonce; 16]), "bench", Config::default())).unwrap()
}

/// Returns a line of /proc/self/status, in KiB.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Sets the largest memory of this process to the present one.
fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}
