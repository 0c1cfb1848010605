//! `cargo bench --bench objects [-- STORE]`: random writes of 4 KiB with a flush each second, through a worker process
//! with a volume of objects: acknowledged when they are durable, and when they are in the tail file, at depth 1, 8, 32
//! and 128. Then what the tail file costs, against a volume that acknowledges from its own memory. STORE is
//! `dir:/DIRECTORY` (the default is a temporary directory) or `s3://…`.
//!
//! `cargo bench --bench objects -- sequential [STORE]`: writes of 1 MiB, four at a time, until a flush covers them. For a
//! directory, beside puts of the same length to its store, four at a time.
//!
//! `cargo bench --bench objects -- packing`: what compression and encryption cost in the engine alone, in processor
//! time, on a directory in memory.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

use std::fs::{self, File};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::store::{Layout, Removal};
use cleat_backend::uri::StoreUri;
use cleat_object::codec::{Compression, Description};
use cleat_object::encryption::KeyFile;
use cleat_object::name::{Nonce, VolumeId};
use cleat_object::store::directory::Directory;
use cleat_object::store::{Store, StoreError};
use cleat_object::tail_memory::Memory;
use cleat_object::volume::{Config, Keep, Parents, Place, Volume};
use cleat_worker::protocol::ToWorker;
use nix::sys::uio::pwritev;

#[path = "common/engine.rs"]
mod engine;
#[path = "common/objects.rs"]
mod objects;
#[path = "common/random.rs"]
mod random;

use engine::block_on;
use objects::{BLOCK, SIZE, fill, load, noise, offset, start, tail_file};
use random::Random;

const DEPTHS: [u64; 4] = [1, 8, 32, 128];

fn main() {
    if std::env::args().any(|argument| argument == "packing") {
        return packing();
    }
    let is_sequential = std::env::args().any(|argument| argument == "sequential");
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = std::env::args().skip(1).find(|argument| argument.contains(':'));
    let store = store.unwrap_or_else(|| format!("dir:{}", directory.path().display()));
    let store = REGISTRY.store(&store).unwrap();
    if is_sequential {
        return sequential(&store, directory.path());
    }
    for depth in DEPTHS {
        for round in 0..2 {
            for (what, has_tail) in [("durable", false), ("tail file", true)] {
                let name = format!("bench-{depth}-{round}-{has_tail}");
                store.connect().unwrap().create(&name, SIZE, &Layout::default()).unwrap();
                let uri = store.volume(&name, None).unwrap().to_string();
                println!("depth {depth:3} {what:10} {}", worker(&uri, has_tail, depth));
            }
        }
    }
    for _ in 0..3 {
        for (what, file) in [("own memory", false), ("tail file", true)] {
            println!("{what:10} {:.2} µs for each write of 4 KiB in the engine", engine(file));
        }
    }
}

/// Writes a volume from its begin to its end, in three rounds.
fn sequential(store: &StoreUri, directory: &Path) {
    for round in 0..3 {
        if store.spec().scheme() == "dir" {
            println!(
                "store: {:.0} MiB/s in puts of 8 MiB",
                puts(&directory.join(format!("own-{round}")))
            );
        }
        for (what, has_tail) in [("durable", false), ("tail file", true)] {
            let name = format!("sequential-{round}-{has_tail}");
            store.connect().unwrap().create(&name, SIZE, &Layout::default()).unwrap();
            let uri = store.volume(&name, None).unwrap().to_string();
            let (mut worker, sockets, _tail) = start(&uri, has_tail);
            println!("volume, {what}: {:.0} MiB/s", fill(&sockets[0]));
            worker.send(&ToWorker::Stop, &[]);
            assert!(worker.exit().success());
            let on = &mut |_, _| ControlFlow::Continue(());
            store.connect().unwrap().remove(&name, Removal::Now, on).unwrap();
        }
    }
}

/// Puts 512 MiB in objects of 8 MiB. Returns MiB per second.
fn puts(directory: &Path) -> f64 {
    fs::create_dir(directory).unwrap();
    let (store, data) = (Arc::new(Directory::open(directory, 1).unwrap()), Arc::new(noise()));
    let began = Instant::now();
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (store, data) = (Arc::clone(&store), Arc::clone(&data));
            std::thread::spawn(move || {
                for number in 0..16 {
                    let name = format!("log/{:016x}/{number:016x}", writer + 1);
                    assert!(block_on(store.create(&name, &data)).is_ok());
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let rate = 512.0 / began.elapsed().as_secs_f64();
    fs::remove_dir_all(directory).unwrap();
    rate
}

/// Loads a worker process.
fn worker(uri: &str, has_tail: bool, depth: u64) -> String {
    let (_worker, sockets, _tail) = start(uri, has_tail);
    load(&sockets[0], depth)
}

/// Memory of the process itself: nothing is written.
struct Own;

impl Memory for Own {
    fn size(&self) -> u64 {
        32 << 20
    }

    fn read_at(&self, _: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: [&[u8]; 2]) -> io::Result<()> {
        Ok(())
    }
}

/// A file in memory, as a worker has it.
struct Shared(File);

impl Memory for Shared {
    fn size(&self) -> u64 {
        32 << 20
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn write_at(&self, offset: u64, parts: [&[u8]; 2]) -> io::Result<()> {
        pwritev(&self.0, &parts.map(IoSlice::new), offset.cast_signed())?;
        Ok(())
    }
}

/// Returns the time of a write in µs: 20 MiB in blocks of 4 KiB, without an upload.
fn engine(is_file: bool) -> f64 {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = Arc::new(Directory::open(directory.path(), 1).unwrap());
    let description = Description::new(VolumeId([1; 16]), Nonce([2; 16]), SIZE, 1 << 20);
    block_on(Volume::create(store.clone(), &description)).unwrap();
    let place = block_on(Place::find(store, Nonce([3; 16]))).unwrap();
    assert!(block_on(place.claim(1, "bench")).unwrap());
    let memory: Arc<dyn Memory> = match is_file {
        true => Arc::new(Shared(tail_file(32 << 20))),
        false => Arc::new(Own),
    };
    let keep = Keep { memory, owner: 1 };
    let config = Config { object_bytes: 8 << 20, object_records: 1 << 16, ..Config::default() };
    let volume = block_on(place.open_with(1, config, Some(&keep))).unwrap();
    let mut random = Random(7);
    let (data, writes) = ([7; BLOCK as usize], (20 << 20) / BLOCK);
    let began = Instant::now();
    for _ in 0..writes {
        block_on(volume.write(offset(&mut random), &data)).unwrap();
    }
    began.elapsed().as_secs_f64() * 1e6 / writes as f64
}

/// The data of one round in bytes.
const ROUND: u64 = 64 << 20;

/// A way in which a volume stores its data.
struct Form {
    name: &'static str,
    compression: Option<Compression>,
    is_encrypted: bool,
}

const FORMS: [Form; 4] = [
    Form { name: "plain", compression: None, is_encrypted: false },
    Form { name: "lz4", compression: Some(Compression::Lz4), is_encrypted: false },
    Form { name: "encrypted", compression: None, is_encrypted: true },
    Form { name: "lz4, encrypted", compression: Some(Compression::Lz4), is_encrypted: true },
];

/// No volume of the benchmark is a clone.
struct NoParents;

impl Parents for NoParents {
    fn store(&self, _: &str) -> Result<Arc<dyn Store>, StoreError> {
        Err(StoreError::NotFound)
    }
}

/// Writes, flushes and reads volumes that store their data in different ways, one after the other.
fn packing() {
    for (what, data) in [("text", text()), ("random", noise())] {
        for block in [4 << 10, 64 << 10] {
            for _ in 0..3 {
                for form in &FORMS {
                    let result = round(form, &data, block);
                    println!("{what:6} {:2} KiB {:14} {result}", block >> 10, form.name);
                }
            }
        }
    }
}

/// Lines of a log, as programs write them.
fn text() -> Vec<u8> {
    let words =
        ["volume", "mapped", "to", "device", "worker", "started", "error:", "timeout", "in"];
    let (mut random, mut text) = (Random(99), String::new());
    while text.len() < 8 << 20 {
        text.push_str(&format!(
            "2026-11-25T03:{:02}:{:02}",
            random.next() % 60,
            random.next() % 60
        ));
        for _ in 0..random.next() % 12 {
            text.push(' ');
            text.push_str(words[random.next() as usize % words.len()]);
        }
        text.push_str(&format!(" id={:x}\n", random.next() >> 32));
    }
    text.into_bytes()
}

/// Writes and reads blocks one after the other, on one thread. Returns the rates in processor time, and the stored bytes.
fn round(form: &Form, data: &[u8], block: usize) -> String {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = Arc::new(Directory::open(directory.path(), 1).unwrap());
    let mut description = Description {
        compression: form.compression,
        ..Description::new(VolumeId([1; 16]), Nonce([2; 16]), SIZE, 1 << 20)
    };
    let key = form.is_encrypted.then(|| KeyFile::new(&[7; 32]).unwrap());
    description.key = key.as_ref().map(|file| file.wrap(&description, &[8; 32]));
    block_on(Volume::create(store.clone(), &description)).unwrap();
    let found = Place::find_clone(store, Nonce([3; 16]), &NoParents, key.as_ref());
    let place = block_on(found).unwrap();
    assert!(block_on(place.claim(1, "bench")).unwrap());
    let volume = block_on(place.open(1, Config::default())).unwrap();
    let blocks = || (0..ROUND).step_by(block);
    let at = |offset: u64| &data[offset as usize % (data.len() - block)..][..block];
    let began = processor_time();
    beside(&volume, async {
        for offset in blocks() {
            volume.write(offset, at(offset)).await.unwrap();
        }
        volume.flush().await.unwrap();
        // Reads do not find the data in memory.
        while volume.status().tail_bytes > 0 {
            yield_once().await;
        }
    });
    let written = processor_time() - began;
    let stored: u64 = log_bytes(&directory.path().join("log"));
    let mut buffer = vec![0; block];
    let began = processor_time();
    beside(&volume, async {
        for offset in blocks() {
            volume.read(offset, &mut buffer).await.unwrap();
            assert!(buffer == at(offset));
        }
    });
    let rate = |time: Duration| ROUND as f64 / f64::from(1 << 20) / time.as_secs_f64();
    let (write, read) = (rate(written), rate(processor_time() - began));
    let share = stored as f64 * 100.0 / ROUND as f64;
    format!("writes {write:5.0} MiB/s, reads {read:5.0} MiB/s, {share:5.1} % stored")
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let statistics = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(statistics.split(' ').next().unwrap().parse().unwrap())
}

/// Returns the length of all files below a directory.
fn log_bytes(path: &Path) -> u64 {
    let entries = fs::read_dir(path).unwrap().map(Result::unwrap);
    let length = |entry: fs::DirEntry| match entry.metadata().unwrap() {
        found if found.is_dir() => log_bytes(&entry.path()),
        found => found.len(),
    };
    entries.map(length).sum()
}

/// Runs a future beside the work of the volume.
fn beside<T>(volume: &Volume, work: impl Future<Output = T>) -> T {
    let (mut run, mut work) = (pin!(volume.run()), pin!(work));
    block_on(poll_fn(|context| {
        assert!(run.as_mut().poll(context).is_pending());
        work.as_mut().poll(context)
    }))
}

async fn yield_once() {
    let mut is_second = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_second, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
