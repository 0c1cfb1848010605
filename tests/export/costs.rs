//! What requests cost that no clock can measure on a busy machine: system calls of `cleat serve` for each batch, and
//! wake-ups while no request comes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;
use test_kit::nbd::wire::{self, Request};
use test_kit::process::{self, threads, voluntary_switches};

const BLOCK: u32 = 4096;
const SIZE: u64 = 16 << 20;

/// The bounds of the turns of the loop: a send with the next receive, and a wait. From four replies on, the first half
/// of a batch has a send of its own. A file adds the submission of the reads, for each half.
#[test]
fn a_batch_of_requests_needs_few_system_calls() {
    const BATCHES: usize = 1000;
    // What the start and the end of a connection need.
    const OTHERS: f64 = 20.0;
    for (volume, polling, command, depth, bound) in [
        ("mem", "auto", wire::READ, 1, 2.0),
        ("mem", "off", wire::READ, 1, 2.0),
        ("mem", "auto", wire::WRITE, 1, 2.0),
        ("mem", "auto", wire::READ, 32, 3.0),
        ("mem", "off", wire::READ, 32, 3.0),
        ("mem", "auto", wire::WRITE, 16, 3.0),
        ("file", "auto", wire::READ, 1, 3.0),
        ("file", "off", wire::READ, 1, 3.0),
        ("file", "auto", wire::READ, 32, 5.0),
        ("file", "off", wire::READ, 32, 5.0),
    ] {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, volume, polling, true);
        let mut stream = server.connect();
        (0..BATCHES).for_each(|_| batch(&mut stream, command, depth));
        drop(stream);
        let calls = server.system_calls();
        let per_batch = (calls as f64 - OTHERS) / BATCHES as f64;
        let row = format!("{volume}, polling {polling}, command {command}, depth {depth}");
        println!("{row}: {per_batch:.2} calls for each batch");
        // A batch may arrive in two parts, rarely.
        assert!(per_batch <= bound * 1.05, "{row}: {per_batch:.2} calls, and not {bound}");
    }
}

#[test]
fn an_idle_volume_causes_no_wake_ups() {
    for volume in ["mem", "file"] {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, volume, "auto", false);
        let mut stream = server.connect();
        for depth in [1, 32, 128] {
            (0..200).for_each(|_| batch(&mut stream, wire::READ, depth));
        }
        // The buffers of the load are freed within two seconds, by a timer.
        std::thread::sleep(Duration::from_secs(3));
        let before = server.switches();
        assert!(before.values().all(|count| *count > 0), "each thread has slept: {before:?}");
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(server.switches(), before, "a thread of an idle {volume} volume has woken up");
    }
}

/// Sends `depth` requests at once, and takes their replies.
fn batch(stream: &mut UnixStream, command: u16, depth: u64) {
    let is_write = command == wire::WRITE;
    let mut bytes = Vec::new();
    for cookie in 0..depth {
        let offset = cookie * u64::from(BLOCK);
        bytes.extend_from_slice(&Request::new(command, cookie, offset, BLOCK).encode());
        bytes.resize(bytes.len() + if is_write { BLOCK as usize } else { 0 }, 7);
    }
    stream.write_all(&bytes).unwrap();
    let payload = if is_write { 0 } else { BLOCK as usize };
    let mut replies = vec![0; depth as usize * (wire::REPLY_LEN + payload)];
    stream.read_exact(&mut replies).unwrap();
    for reply in replies.chunks_exact(wire::REPLY_LEN + payload) {
        assert_eq!(wire::parse_reply(reply.first_chunk().unwrap()).1, 0);
    }
}

/// `cleat serve`, or strace with it.
struct Server {
    child: Child,
    socket: PathBuf,
    counts: PathBuf,
}

impl Server {
    fn start(dir: &TempDir, volume: &str, polling: &str, traced: bool) -> Self {
        let [socket, image, counts] = ["s", "image", "counts"].map(|name| dir.path().join(name));
        let uri = match volume {
            "file" => format!("file:{}?create=16M", image.display()),
            _ => "mem:16M".to_owned(),
        };
        let cleat = env!("CARGO_BIN_EXE_cleat");
        let mut command = Command::new(if traced { "strace" } else { cleat });
        if traced {
            command.args(["-f", "--seccomp-bpf", "-c", "-e", "trace=io_uring_enter", "-o"]);
            command.arg(&counts).arg(cleat);
        }
        command.args(["serve", &uri, "--busy-poll", polling, "--socket"]).arg(&socket);
        let child = command.stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("apt install strace: {error}"));
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the server did not start");
        Self { child, socket, counts }
    }

    fn connect(&self) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        assert_eq!(wire::handshake(&mut stream), SIZE);
        stream
    }

    /// Ends the server, and returns how often it has called io_uring_enter(2).
    fn system_calls(mut self) -> u64 {
        let strace = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{strace}/task/{strace}/children"));
        let children = children.unwrap();
        let server = children.split_whitespace().next().expect("strace has started the server");
        process::kill(server.parse().unwrap(), Signal::SIGTERM);
        self.child.wait().unwrap();
        let table = std::fs::read_to_string(&self.counts).unwrap();
        let line = table.lines().find(|line| line.ends_with(" io_uring_enter"));
        // % time, seconds, µs per call, calls, errors if there are any
        let calls = line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
        calls.unwrap_or_else(|| panic!("no calls in {table}"))
    }

    /// Returns how often each thread has slept.
    fn switches(&self) -> BTreeMap<String, u64> {
        threads(self.child.id(), "status").iter().map(|status| thread_switches(status)).collect()
    }
}

fn thread_switches(status: &str) -> (String, u64) {
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim();
    (format!("{} {}", field("Name:"), field("Pid:")), voluntary_switches(status))
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
