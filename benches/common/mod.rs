//! A load generator that batches requests: one thread, one connection, blocking socket calls, and as many
//! requests in one send as replies arrived in one receive. fio's nbd engine reaches at most about 160
//! thousand requests per second, far less than the servers here.

#![allow(dead_code, reason = "each benchmark uses a part of it")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use test_kit::nbd::wire::{
    READ, REPLY_LEN, REQUEST_LEN, Request, WRITE, handshake, parse_reply, read_reply,
};

/// The requests of a load.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub write: bool,
    /// Blocks in ascending order instead of random ones.
    pub sequential: bool,
    /// The length of each request, in bytes.
    pub block: usize,
}

/// 4 KiB random reads.
pub const READS: Load = Load { write: false, sequential: false, block: 4096 };

/// One connection.
pub struct Client {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    payload: Vec<u8>,
    random: u64,
    next: u64,
    size: u64,
}

impl Client {
    /// Waits until the server listens, connects, and completes the handshake with EXPORT_NAME.
    pub fn connect(socket: &Path) -> Self {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "no server: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let size = handshake(&mut stream);
        let (input, output, payload, next) = Default::default();
        Self { stream, input, output, payload, random: 0x9e37_79b9_7f4a_7c15, next, size }
    }

    /// Fills the volume with data, so that no server answers from a hole.
    pub fn fill(&mut self) {
        let payload = vec![FILL; 1 << 20];
        for offset in (0..self.size).step_by(payload.len()) {
            let length = payload.len() as u32;
            let request = Request::new(WRITE, 1, offset, length);
            self.stream.write_all(&request.encode()).unwrap();
            self.stream.write_all(&payload).unwrap();
            assert_eq!(read_reply(&mut self.stream), (1, 0));
        }
    }

    /// Keeps `depth` requests in flight for `time`. Returns the number of completed requests per second.
    pub fn run(&mut self, load: Load, depth: usize, time: Duration) -> f64 {
        let reply_len = REPLY_LEN + if load.write { 0 } else { load.block };
        // Long replies are received one at a time, so that none has to be moved.
        let capacity = if reply_len > LONG { reply_len } else { LONG };
        self.input.resize(capacity.max(self.input.len()), 0);
        self.payload.resize(load.block, FILL);
        let begin = Instant::now();
        (0..depth).for_each(|_| self.queue(load));
        self.send();
        let (mut filled, mut done, mut running) = (0, 0u64, depth);
        while running > 0 {
            let received = self.stream.read(&mut self.input[filled..capacity]).unwrap();
            assert!(received > 0, "the server closed the connection");
            filled += received;
            let replies = filled / reply_len;
            for reply in self.input[..replies * reply_len].chunks_exact(reply_len) {
                assert_eq!(parse_reply(reply.first_chunk().unwrap()), (7, 0));
                assert!(load.write || reply[reply_len - 1] == FILL);
            }
            self.input.copy_within(replies * reply_len..filled, 0);
            filled -= replies * reply_len;
            done += replies as u64;
            running -= replies;
            if begin.elapsed() < time {
                (0..replies).for_each(|_| self.queue(load));
                running += replies;
                self.send();
            }
        }
        done as f64 / begin.elapsed().as_secs_f64()
    }

    fn queue(&mut self, load: Load) {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.next += 1;
        let chosen = if load.sequential { self.next } else { self.random };
        let offset = chosen % (self.size / load.block as u64) * load.block as u64;
        let length = load.block as u32;
        let command = if load.write { WRITE } else { READ };
        let request = Request::new(command, 7, offset, length);
        self.output.extend_from_slice(&request.encode());
        debug_assert!(load.write || self.output.len().is_multiple_of(REQUEST_LEN));
        if load.write && load.block > LONG {
            self.send();
            self.stream.write_all(&self.payload).unwrap();
        } else if load.write {
            self.output.extend_from_slice(&self.payload);
        }
    }

    fn send(&mut self) {
        self.stream.write_all(&self.output).unwrap();
        self.output.clear();
    }
}

/// The byte with which volumes are filled.
const FILL: u8 = 0x5a;

/// The length from which on payloads are not batched, in bytes.
const LONG: usize = 256 << 10;

/// Returns the CPU time that a process has used, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    // USER_HZ is 100 on all supported platforms.
    ticks / 100.0
}

/// Sorts `values` and returns their median.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A server process, which is killed when the value is dropped.
pub struct Server(pub std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures the servers in alternating rounds and prints medians: reads per second, and the server's CPU
/// time per read. Also prints the ratio of the first server's rate to that of each server.
pub fn compare(servers: &[(&str, &Server, &Path)], depths: &[usize]) {
    let rounds: usize = std::env::var("ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    let time = Duration::from_millis(700);
    let mut clients: Vec<Client> =
        servers.iter().map(|(_, _, socket)| Client::connect(socket)).collect();
    clients.iter_mut().for_each(Client::fill);
    println!("4 KiB random reads from memory, unix socket, one connection; medians of {rounds}");
    println!(
        "{:>6} {:<14} {:>12} {:>12} {:>7}",
        "depth", "server", "reads/s", "ns CPU/read", "first/"
    );
    for &depth in depths {
        let mut iops = vec![Vec::new(); servers.len()];
        let mut cpu_ns = vec![Vec::new(); servers.len()];
        for _ in 0..rounds {
            for (index, (_, server, _)) in servers.iter().enumerate() {
                let before = cpu_seconds(server.0.id());
                let figure = clients[index].run(READS, depth, time);
                let used = cpu_seconds(server.0.id()) - before;
                iops[index].push(figure);
                cpu_ns[index].push(used * 1e9 / (figure * time.as_secs_f64()));
            }
        }
        let medians: Vec<f64> = iops.iter_mut().map(|values| median(values)).collect();
        for (index, (name, _, _)) in servers.iter().enumerate() {
            let (iops, cpu) = (medians[index], median(&mut cpu_ns[index]));
            let ratio = medians[0] / iops;
            println!("{depth:>6} {name:<14} {iops:>12.0} {cpu:>12.0} {ratio:>6.2}x");
        }
    }
}
