//! Counts the instructions that the whole data path executes for a request, outside of the kernel: the loop of the
//! connection, its receives and sends, the ring, the tables, and the volume.
//!
//! valgrind executes the same instructions each time, so the count depends on the compiler, not on the machine or its
//! load. A test fails where a change makes a request much more expensive, for example by a search through all requests
//! in flight, or by a new buffer for each request.

use std::io::{Read, Write, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use cleat::backends::volume;
use cleat_backend::OpenOptions;
use cleat_core::policy::{BusyPoll, Policy};
use cleat_export::server::Limits;
use tempfile::TempDir;
use test_kit::nbd::wire::{READ, REPLY_LEN, Request, WRITE};

use super::fixture::Fixture;

/// Set in the process that valgrind executes: the volume.
const VOLUME: &str = "CLEAT_TEST_INSTRUCTIONS_VOLUME";

/// How long the client waits for a reply.
const LIMIT: Duration = Duration::from_secs(60);

/// The length of a request, in bytes. For the usual one, the count would mainly be that of the copy.
const LENGTH: usize = 512;

/// The limits are for one request. The comments have what Rust 1.95 needs on x86_64 in the profile of the tests
/// (opt-level 1).
#[test]
fn a_request_takes_few_instructions() {
    if let Ok(uri) = std::env::var(VOLUME) {
        return serve(&uri);
    }
    for (volume, command, depth, most) in [
        ("mem", READ, 32, 1500),   // 1164
        ("mem", WRITE, 32, 1900),  // 1501
        ("file", READ, 128, 3300), // 2643 to 2685, on tmpfs 2663
    ] {
        let (few, many) = (50, 150);
        let count = |batches| instructions_of(volume, command, depth, batches);
        // The start and the end of the process are the same in both.
        let each = (count(many) - count(few)) / ((many - few) * depth);
        let row = format!("{volume}, command {command}, depth {depth}");
        println!("{row}: {each} instructions for each request");
        assert!(each <= most, "{row}: {each} instructions for each request, and not {most}");
    }
}

/// Serves one connection, whose socket is the standard input.
fn serve(uri: &str) {
    let image = volume(uri).unwrap().open(&OpenOptions::default()).unwrap();
    let fixture = Fixture::new(image, Limits::default());
    // How often a poll looks depends on the machine.
    fixture.server.set_policy(Policy { busy_poll: BusyPoll::Off, ..Policy::default() });
    let socket = stdin().as_fd().try_clone_to_owned().unwrap();
    fixture.server.add_kernel_connection(socket).unwrap();
    fixture.events.recv().unwrap();
}

/// Returns how many instructions a process executes that serves `batches` of `depth` requests, each of which arrives at
/// once.
fn instructions_of(volume: &str, command: u16, depth: u64, batches: u64) -> u64 {
    let dir = TempDir::new().unwrap();
    let uri = match volume {
        "file" => format!("file:{}?create=1M", dir.path().join("image").display()),
        _ => "mem:1M".to_owned(),
    };
    let (client, socket) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let server = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "instructions::a_request_takes_few_instructions", "--test-threads=1"])
        .env(VOLUME, uri)
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("valgrind runs (apt install valgrind)");
    send(client, command, depth, batches);
    let output = server.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    // "==7== I   refs:      1,234,567", in newer versions "==7== I refs:        1,234,567".
    let line = printed.lines().find(|line| line.contains("refs:"));
    let number = line.and_then(|line| line.rsplit(':').next()).unwrap_or_default();
    number.trim().replace(',', "").parse().unwrap_or_else(|_| panic!("no count: {printed}"))
}

/// Sends the batches, and takes their replies.
fn send(mut client: UnixStream, command: u16, depth: u64, batches: u64) {
    let (mut requests, mut payload) = (Vec::new(), 0);
    for cookie in 0..depth {
        let offset = cookie * LENGTH as u64;
        let request = Request::new(command, cookie, offset, LENGTH as u32);
        requests.extend_from_slice(&request.encode());
        match command {
            WRITE => requests.resize(requests.len() + LENGTH, 7),
            _ => payload = LENGTH,
        }
    }
    let mut replies = vec![0; depth as usize * (REPLY_LEN + payload)];
    for _ in 0..batches {
        client.write_all(&requests).unwrap();
        client.read_exact(&mut replies).unwrap();
    }
}
