//! `cargo bench --bench runtime`: compares raw io_uring with tokio-uring, first with a volume in memory, then with a
//! file in the page cache. Two servers with the same structure (one receive, parse all requests, read them from the
//! file at the same time, copy the replies into one buffer, one send) differ only in the library that drives the
//! ring. The third server is the complete data path of `cleat serve`. The file is in the directory for temporary files
//! (`TMPDIR`). `ROUNDS` (5) and `SECONDS` (0.7) change the number of rounds and the length of a measurement. The report
//! (Markdown, JSON, and a plot as SVG) is below `target/bench/runtime`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

mod common;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, FileSlot, Ring, Token};
use cleat_sys::send_list::SendList;
use common::client::{Client, READS, UNIT, fill_file};
use common::report::{CLEAT, Measurement, Report};
use common::{Server, cpu_seconds, in_rounds, number};
use futures::future::join_all;
use test_kit::nbd::wire::{READ, REQUEST_LEN, Request, encode_reply};

const SIZE: usize = 256 << 20;
const INPUT: usize = 2 << 20;

/// The token of the first read of a batch.
const FIRST_READ: u64 = 16;

/// The highest depth that is measured, and so the most reads in a batch.
const MOST_READS: u32 = 128;

/// The rows and their depths.
const MEMORY: [(&str, usize); 3] = [
    ("mem: 4K random read, depth 1", 1),
    ("mem: 4K random read, depth 32", 32),
    ("mem: 4K random read, depth 128", MOST_READS as usize),
];
const FILE: [(&str, usize); 3] = [
    ("file: 4K random read, depth 1", 1),
    ("file: 4K random read, depth 32", 32),
    ("file: 4K random read, depth 128", MOST_READS as usize),
];

/// How the figures are measured, for the report.
const CONDITIONS: &str = "Unix sockets. CPU is that of the server.";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let server = arguments.get(1).map(String::as_str);
    if let Some(mode @ ("serve-raw" | "serve-tokio")) = server {
        let mut volume = Volume::open(arguments.get(3).map(Path::new));
        return match mode {
            "serve-raw" => serve_raw(Path::new(&arguments[2]), &mut volume),
            _ => serve_tokio(Path::new(&arguments[2]), &mut volume),
        };
    }
    let (rounds, time) = (number("ROUNDS", 5.0) as usize, number("SECONDS", 0.7));
    let time = Duration::from_secs_f64(time);
    let mut report = Report::new(CONDITIONS, rounds, time);
    let dir = tempfile::tempdir().unwrap();
    let volumes = [("memory", None, MEMORY), ("file", Some(dir.path().join("volume")), FILE)];
    for (name, file, rows) in volumes {
        let dir = dir.path().join(name);
        let start = || start(&dir, file.as_deref());
        let measured = in_rounds(rounds, &rows, start, |(_, depth), (server, client)| {
            let before = cpu_seconds(server.id());
            let figures = client.run(READS, *depth, time);
            Measurement::of_clients(&[figures], cpu_seconds(server.id()) - before)
        });
        for ((row, _), measured) in rows.into_iter().zip(measured) {
            report.add(row, &[], measured);
        }
    }
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("bench/runtime");
    std::fs::create_dir_all(&directory).unwrap();
    report.write(&directory);
    println!("the report: {}", directory.join("report.md").display());
}

/// Starts the three servers, with their sockets in `dir`; with `file` as the volume, or with memory. Each volume is
/// full.
fn start(dir: &Path, file: Option<&Path>) -> Vec<(String, (Server, Client))> {
    let _ = std::fs::remove_dir_all(dir);
    std::fs::create_dir(dir).unwrap();
    file.iter().for_each(|file| fill_file(file, SIZE as u64));
    let server = |name: &str, command: &mut Command, socket: &Path| {
        let server = Server::Child(command.spawn().unwrap());
        let mut client = Client::connect(socket);
        match file {
            Some(_) => client.learn(UNIT),
            None => client.fill(),
        }
        (name.to_owned(), (server, client))
    };
    let small = |name, mode: &str| {
        let (socket, this) = (dir.join(mode), std::env::current_exe().unwrap());
        server(name, Command::new(this).arg(mode).arg(&socket).args(file), &socket)
    };
    let spec = file.map_or("mem:256M".to_owned(), |file| format!("file:{}", file.display()));
    let (socket, mut whole) = (dir.join("cleat"), Command::new(env!("CARGO_BIN_EXE_cleat")));
    whole.args(["serve", &spec, "--socket"]).arg(&socket).stdout(Stdio::null());
    vec![
        server(CLEAT, &mut whole, &socket),
        small("io_uring, small loop", "serve-raw"),
        small("tokio-uring, small loop", "serve-tokio"),
    ]
}

/// What the two small servers serve.
enum Volume {
    Memory(Vec<u8>),
    File(File),
}

impl Volume {
    fn open(file: Option<&Path>) -> Self {
        match file {
            None => Self::Memory(vec![0; SIZE]),
            Some(path) => Self::File(File::options().read(true).write(true).open(path).unwrap()),
        }
    }

    /// Parses all complete requests in `input`, and writes the payloads. Returns the requests and the number of bytes
    /// that were consumed.
    fn take(&mut self, input: &[u8]) -> (Vec<Request>, usize) {
        let (mut batch, mut pos) = (Vec::new(), 0);
        while let Some(header) = input[pos..].first_chunk::<REQUEST_LEN>() {
            let request = Request::parse(header);
            let length = request.length as usize;
            let mut end = pos + REQUEST_LEN;
            if request.command != READ {
                let Some(payload) = input.get(end..end + length) else { break };
                end += length;
                match self {
                    Self::Memory(memory) => {
                        memory[request.offset as usize..][..length].copy_from_slice(payload);
                    }
                    Self::File(file) => file.write_all_at(payload, request.offset).unwrap(),
                }
            }
            pos = end;
            batch.push(request);
        }
        (batch, pos)
    }

    /// Passes the replies to `put`. `pages` has the data of all reads in their order, if the volume is a file.
    fn answer<'a>(
        &'a self,
        batch: &[Request],
        mut pages: impl Iterator<Item = &'a [u8]>,
        mut put: impl FnMut(&[u8]),
    ) {
        for request in batch {
            put(&encode_reply(request.cookie, 0));
            if request.command == READ {
                put(match self {
                    Self::Memory(memory) => {
                        &memory[request.offset as usize..][..request.length as usize]
                    }
                    Self::File(_) => pages.next().unwrap(),
                });
            }
        }
    }
}

/// The offsets that are to be read from a file.
fn reads(batch: &[Request]) -> impl Iterator<Item = u64> + '_ {
    let reads = batch.iter().filter(|request| request.command == READ);
    reads.map(|request| {
        assert_eq!(request.length as usize, UNIT);
        request.offset
    })
}

/// Accepts a client and completes the handshake (greeting, EXPORT_NAME and its reply) with blocking calls.
fn accept(socket: &Path) -> OwnedFd {
    use std::io::{Read, Write};
    let (mut stream, _) = UnixListener::bind(socket).unwrap().accept().unwrap();
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    stream.write_all(&[&(SIZE as u64).to_be_bytes()[..], &[0, 1]].concat()).unwrap();
    stream.into()
}

fn serve_raw(socket: &Path, volume: &mut Volume) {
    let stream = accept(socket);
    let mut ring = Ring::new(MOST_READS).unwrap();
    let slot = ring.register(stream.as_fd()).unwrap();
    let file = match &volume {
        Volume::Memory(_) => None,
        Volume::File(file) => Some(ring.register(file.as_fd()).unwrap()),
    };
    let (mut input, mut end) = (Buffer::zeroed(INPUT), 0);
    let (mut send_list, mut spare) = (Box::new(SendList::new(4)), Some(Buffer::zeroed(INPUT)));
    let mut pages: Vec<Option<Buffer>> = Vec::new();
    loop {
        ring.receive(slot, input, end, false, Token(1)).unwrap();
        let done = wait(&mut ring);
        input = done.buffer.unwrap();
        if done.result <= 0 {
            return;
        }
        end += usize::try_from(done.result).unwrap();
        let mut output = spare.take().unwrap();
        output.set_len(0);
        let (batch, taken) = volume.take(&input.payload()[..end]);
        if let Some(file) = file {
            read_raw(&mut ring, file, &batch, &mut pages);
        }
        let data = pages.iter().map(|page| page.as_ref().unwrap().payload());
        volume.answer(&batch, data, |bytes| {
            let at = output.len();
            output.set_len(at + bytes.len());
            output.payload_mut()[at..].copy_from_slice(bytes);
        });
        input.payload_mut().copy_within(taken..end, 0);
        end -= taken;
        if output.is_empty() {
            spare = Some(output);
            continue;
        }
        send_list.push_buffer(output);
        while send_list.unsent() > 0 {
            ring.send(slot, send_list, Token(2)).unwrap();
            let done = wait(&mut ring);
            send_list = done.send_list.unwrap();
            send_list.advance(usize::try_from(done.result).unwrap());
        }
        spare = send_list.take_buffers().next();
    }
}

/// Waits for the next completion.
fn wait(ring: &mut Ring) -> Completion {
    loop {
        if let Some(done) = ring.next() {
            return done;
        }
        ring.submit_and_wait().unwrap();
    }
}

/// Reads all blocks of the batch at the same time into `pages`.
fn read_raw(ring: &mut Ring, file: FileSlot, batch: &[Request], pages: &mut Vec<Option<Buffer>>) {
    let mut started = 0;
    for (index, offset) in reads(batch).enumerate() {
        if pages.len() == index {
            pages.push(Some(Buffer::zeroed(UNIT)));
        }
        let page = pages[index].take().unwrap();
        ring.read(file, page, 0, offset, Token(FIRST_READ + index as u64)).unwrap();
        started += 1;
    }
    for _ in 0..started {
        let done = wait(ring);
        assert_eq!(usize::try_from(done.result).unwrap(), UNIT);
        pages[(done.token.0 - FIRST_READ) as usize] = done.buffer;
    }
}

fn serve_tokio(socket: &Path, volume: &mut Volume) {
    let stream = accept(socket);
    tokio_uring::start(async {
        let stream = tokio_uring::net::UnixStream::from_std(stream.into());
        let file = match &volume {
            Volume::Memory(_) => None,
            Volume::File(file) => Some(tokio_uring::fs::File::from_std(file.try_clone().unwrap())),
        };
        let (mut input, mut end, mut output) = (vec![0; INPUT], 0, Vec::new());
        let mut pages = Vec::new();
        loop {
            use tokio_uring::buf::BoundedBuf;
            let (received, slice) = stream.read(input.slice(end..)).await;
            input = slice.into_inner();
            match received {
                Ok(0) | Err(_) => return,
                Ok(received) => end += received,
            }
            output.clear();
            let (batch, taken) = volume.take(&input[..end]);
            if let Some(file) = &file {
                read_tokio(file, &batch, &mut pages).await;
            }
            let data = pages.iter().map(Vec::as_slice);
            volume.answer(&batch, data, |bytes| output.extend_from_slice(bytes));
            input.copy_within(taken..end, 0);
            end -= taken;
            if !output.is_empty() {
                let (sent, back) = stream.write_all(output).await;
                sent.unwrap();
                output = back;
            }
        }
    });
}

/// Reads all blocks of the batch at the same time into `pages`.
async fn read_tokio(file: &tokio_uring::fs::File, batch: &[Request], pages: &mut Vec<Vec<u8>>) {
    let offsets: Vec<u64> = reads(batch).collect();
    while pages.len() < offsets.len() {
        pages.push(vec![0; UNIT]);
    }
    // The pages of this batch are the first ones; those behind them stay for a larger batch.
    let mut unused = pages.split_off(offsets.len());
    let buffers = pages.drain(..).zip(offsets);
    let done = join_all(buffers.map(|(page, offset)| file.read_at(page, offset))).await;
    pages.extend(done.into_iter().map(|(result, page)| {
        assert_eq!(result.unwrap(), UNIT);
        page
    }));
    pages.append(&mut unused);
}
