//! Counts the instructions that the data path executes for a request outside of system calls and of the backend: to
//! parse the request, to give it a place and a buffer, to free both, to count the request, and to encode its reply.
//!
//! valgrind executes the same instructions each time, so the count depends on the compiler, not on the machine or its
//! load. A test fails where a change makes a request much more expensive, for example by a search through all requests
//! in flight, or by a new buffer for each request.

use std::hint::black_box;
use std::process::Command;

use cleat_core::request::Op;
use cleat_core::volume::{BlockSizes, Features};
use cleat_nbd::transmission::{Event, Transmission};
use cleat_nbd::wire::{REQUEST_LEN, RequestHeader, command, simple_reply};
use cleat_statistics::Page;

use crate::buffer_pool::BufferPool;
use crate::in_flight::{InFlight, Running};

/// Set in the process that valgrind executes: how many requests it executes.
const REQUESTS: &str = "CLEAT_TEST_INSTRUCTIONS_OF";

/// The requests in flight.
const DEPTH: u32 = 128;

/// The length of a request, in bytes.
const LENGTH: u32 = 4096;

/// The size of the volume, in bytes.
const SIZE: u64 = 1 << 30;

/// The limit for one request. Rust 1.95 needs 1147 on x86_64, in the profile of the tests (opt-level 1).
const MOST: u64 = 1500;

#[test]
fn a_request_takes_few_instructions() {
    if let Ok(requests) = std::env::var(REQUESTS) {
        return execute(requests.parse().unwrap());
    }
    let (few, many) = (10_000, 20_000);
    // The start and the end of the process are the same in both.
    let instructions = (instructions_of(many) - instructions_of(few)) / (many - few);
    assert!(instructions <= MOST, "{instructions} instructions for each request");
    assert!(instructions > 50, "the loop was optimized away: {instructions} instructions");
}

/// Executes `requests` with [`DEPTH`] of them in flight, of which the oldest but one ends first.
fn execute(requests: u64) {
    let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 };
    let mut parser = Transmission::new(Features::ALL, blocks);
    let mut table = InFlight::new(DEPTH);
    let mut pool = BufferPool::new(64 << 20);
    let (page, _) = Page::create().unwrap();
    let recorder = page.any_recorder().unwrap();
    let mut running = std::collections::VecDeque::with_capacity(DEPTH as usize);
    for cookie in 0..requests {
        if !table.has_room() {
            running.swap(0, 1);
            let (id, buffer) = running.pop_front().unwrap();
            let ended: Running = table.remove(id);
            pool.give(buffer);
            recorder.ended(Op::Read, LENGTH.into(), cookie - ended.started_ns, Ok(()));
            black_box(simple_reply(ended.cookie, Ok(())));
        }
        let offset = cookie * u64::from(LENGTH) % SIZE;
        let header =
            RequestHeader { flags: 0, command: command::READ, cookie, offset, length: LENGTH };
        let (consumed, event) = parser.next(black_box(&header.encode()), SIZE);
        assert_eq!(consumed, REQUEST_LEN);
        let Event::Request { cookie, request } = event else { panic!("{event:?}") };
        let started =
            Running { cookie, request, started_ns: cookie, answered: false, retried: false };
        running.push_back((table.insert(started), pool.take(LENGTH as usize).unwrap()));
        black_box(table.oldest());
    }
}

/// Returns how many instructions a process executes that executes `requests`.
fn instructions_of(requests: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "instructions::a_request_takes_few_instructions", "--test-threads=1"])
        .env(REQUESTS, requests.to_string())
        .output()
        .expect("valgrind runs (apt install valgrind)");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    // "==7== I   refs:      1,234,567", in newer versions "==7== I refs:        1,234,567".
    let line = printed.lines().find(|line| line.contains("refs:"));
    let number = line.and_then(|line| line.rsplit(':').next()).unwrap_or_default();
    number.trim().replace(',', "").parse().unwrap_or_else(|_| panic!("no count: {printed}"))
}
