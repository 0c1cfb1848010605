//! `cargo bench --bench runtime`: compares raw io_uring with tokio-uring. Two servers with the same
//! structure (one receive, parse all requests, copy the replies into one buffer, one send) differ only in
//! the library that drives the ring. The third server is the complete data path of `cleat serve`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Ring, Token};
use cleat_sys::send_list::SendList;
use common::{Server, compare};
use test_kit::nbd::wire::{READ, REQUEST_LEN, Request, encode_reply};

const SIZE: usize = 256 << 20;
const INPUT: usize = 2 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("serve-raw") => return serve_raw(Path::new(&arguments[2])),
        Some("serve-tokio") => return serve_tokio(Path::new(&arguments[2])),
        _ => {}
    }
    let dir = tempfile::tempdir().unwrap();
    let start = |mode: &str| {
        let socket = dir.path().join(mode);
        let this = std::env::current_exe().unwrap();
        (Server::Child(Command::new(this).arg(mode).arg(&socket).spawn().unwrap()), socket)
    };
    let ((raw, raw_socket), (tokio, tokio_socket)) = (start("serve-raw"), start("serve-tokio"));
    let whole_socket = dir.path().join("whole");
    let whole = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["serve", "mem:256M", "--socket"])
        .arg(&whole_socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let whole = Server::Child(whole);
    let servers = [
        ("raw io_uring", &raw, &*raw_socket),
        ("tokio-uring", &tokio, &*tokio_socket),
        ("cleat serve", &whole, &*whole_socket),
    ];
    compare(&servers, &[1, 32, 128]);
}

/// Executes all complete requests in `input` and passes the replies to `put`. Returns the number of bytes
/// that were consumed.
fn answer(memory: &mut [u8], input: &[u8], mut put: impl FnMut(&[u8])) -> usize {
    let mut pos = 0;
    while let Some(header) = input[pos..].first_chunk::<REQUEST_LEN>() {
        let header = Request::parse(header);
        let range = header.offset as usize..header.offset as usize + header.length as usize;
        let reply = encode_reply(header.cookie, 0);
        if header.command == READ {
            put(&reply);
            put(&memory[range]);
        } else {
            let Some(payload) = input.get(pos + REQUEST_LEN..pos + REQUEST_LEN + range.len())
            else {
                break;
            };
            memory[range.clone()].copy_from_slice(payload);
            put(&reply);
            pos += range.len();
        }
        pos += REQUEST_LEN;
    }
    pos
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

fn serve_raw(socket: &Path) {
    let stream = accept(socket);
    let mut ring = Ring::new(8).unwrap();
    let slot = ring.register(stream.as_fd()).unwrap();
    let mut memory = vec![0; SIZE];
    let (mut input, mut end) = (Buffer::zeroed(INPUT), 0);
    let (mut send_list, mut spare) = (Box::new(SendList::new(4)), Some(Buffer::zeroed(INPUT)));
    let wait = |ring: &mut Ring| loop {
        if let Some(done) = ring.next() {
            return done;
        }
        ring.submit_and_wait().unwrap();
    };
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
        let taken = answer(&mut memory, &input.payload()[..end], |bytes| {
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

fn serve_tokio(socket: &Path) {
    let stream = accept(socket);
    tokio_uring::start(async {
        let stream = tokio_uring::net::UnixStream::from_std(stream.into());
        let mut memory = vec![0; SIZE];
        let (mut input, mut end, mut output) = (vec![0; INPUT], 0, Vec::new());
        loop {
            use tokio_uring::buf::BoundedBuf;
            let (received, slice) = stream.read(input.slice(end..)).await;
            input = slice.into_inner();
            match received {
                Ok(0) | Err(_) => return,
                Ok(received) => end += received,
            }
            output.clear();
            let taken = answer(&mut memory, &input[..end], |bytes| output.extend_from_slice(bytes));
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
