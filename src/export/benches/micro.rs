//! `cargo bench -p cleat-export --bench micro`: what the parts of the data path cost that run for each request and make
//! no system call: the codec of NBD, the table of requests in flight, and the pool of buffers.
//!
//! Criterion measures them, each for a second and a half. Its options select and compare: `-- --save-baseline before`, and later
//! `-- --baseline before buffers`.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::bench::{Buffers, RequestTable};
use cleat_nbd::structured::read_header;
use cleat_nbd::transmission::{Event, Transmission};
use cleat_nbd::wire::{REQUEST_LEN, RequestHeader, command, simple_reply};

/// The size of the volume, in bytes.
const SIZE: u64 = 1 << 30;

/// The length of a request, in bytes.
const LENGTH: u32 = 4096;

/// The memory of a pool of buffers, in bytes.
const BUDGET: usize = 64 << 20;

fn parser() -> Transmission {
    let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 };
    Transmission::new(Features::ALL, blocks)
}

/// The requests of a client, as it sends them.
fn stream(command: u16, requests: u64) -> Vec<u8> {
    let header = |cookie| {
        let offset = cookie * 7919 * u64::from(LENGTH) % SIZE;
        RequestHeader { flags: 0, command, cookie, offset, length: LENGTH }
    };
    (0..requests).flat_map(|cookie| header(cookie).encode()).collect()
}

fn codec(criterion: &mut Criterion) {
    const REQUESTS: u64 = 32;
    let mut group = criterion.benchmark_group("codec");
    group.throughput(Throughput::Elements(REQUESTS));
    let reads = stream(command::READ, REQUESTS);
    group.bench_function("parse 32 reads", |bencher| {
        let mut parser = parser();
        bencher.iter(|| {
            for request in black_box(&reads).chunks_exact(REQUEST_LEN) {
                let (consumed, event) = parser.next(request, SIZE);
                assert!(consumed == REQUEST_LEN && matches!(event, Event::Request { .. }));
                black_box(event);
            }
        });
    });
    let writes = stream(command::WRITE, REQUESTS);
    group.bench_function("parse 32 writes", |bencher| {
        let mut parser = parser();
        bencher.iter(|| {
            for request in black_box(&writes).chunks_exact(REQUEST_LEN) {
                let (_, event) = parser.next(request, SIZE);
                let Event::Write { request, .. } = black_box(event) else { unreachable!() };
                parser.payload_taken(request.length);
            }
        });
    });
    group.bench_function("32 simple replies", |bencher| {
        bencher.iter(|| {
            for cookie in 0..black_box(REQUESTS) {
                black_box(simple_reply(cookie, Ok(())));
            }
        });
    });
    group.bench_function("32 error replies", |bencher| {
        bencher.iter(|| {
            for cookie in 0..black_box(REQUESTS) {
                black_box(simple_reply(cookie, Err(IoError::NoSpace)));
            }
        });
    });
    group.bench_function("32 structured headers of reads", |bencher| {
        bencher.iter(|| {
            for cookie in 0..black_box(REQUESTS) {
                black_box(read_header(cookie, cookie * u64::from(LENGTH), LENGTH));
            }
        });
    });
    group.finish();
}

fn request_table(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("requests in flight");
    group.throughput(Throughput::Elements(1));
    let request =
        Request { op: Op::Read, flags: Flags::default(), offset: 0, length: LENGTH.into() };
    for depth in [1_u32, 32, 256] {
        group.bench_function(BenchmarkId::new("replace one of", depth), |bencher| {
            let mut table = RequestTable::new(depth);
            let mut running: Vec<_> =
                (0..depth).map(|n| table.insert(n.into(), request, n.into())).collect();
            let mut next = 0;
            bencher.iter(|| {
                // Requests end in another order than they came in.
                let at = next * 7 % running.len();
                black_box(table.remove(running[at]));
                running[at] = table.insert(next as u64, black_box(request), next as u64);
                next += 1;
                black_box(table.oldest())
            });
        });
    }
    group.finish();
}

fn buffers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("buffers");
    group.throughput(Throughput::Elements(1));
    for kib in [4, 64, 1024] {
        group.bench_function(BenchmarkId::new("take and give a kept one, KiB", kib), |bencher| {
            let mut pool = Buffers::new(BUDGET);
            bencher.iter(|| {
                let buffer = pool.take(black_box(kib << 10)).unwrap();
                pool.give(black_box(buffer));
            });
        });
    }
    group.bench_function("take a new one of 4 KiB", |bencher| {
        bencher.iter_batched_ref(
            || Buffers::new(BUDGET),
            |pool| pool.take(black_box(4 << 10)).unwrap(),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

/// Each measurement takes a second and a half: the figures are of nanoseconds, and there are a dozen.
fn short() -> Criterion {
    let criterion = Criterion::default().warm_up_time(Duration::from_millis(500));
    criterion.measurement_time(Duration::from_secs(1))
}

criterion_group!(name = benches; config = short(); targets = codec, request_table, buffers);
criterion_main!(benches);
