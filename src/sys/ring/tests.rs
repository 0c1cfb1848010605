//! Tests of the ring on files and sockets.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use io_uring::opcode;

use super::*;
use crate::page_pipe::{PagePipe, unread_by_peer};

#[test]
fn file_operations_return_their_buffers_and_tokens() {
    let file = tempfile::tempfile().unwrap();
    let mut ring = Ring::new(8).unwrap();
    let slot = ring.register(file.as_fd()).unwrap();
    let mut buffer = Buffer::zeroed(5);
    buffer.payload_mut().copy_from_slice(b"abcde");
    ring.write(slot, buffer, 1, 100, true, Token(1)).unwrap();
    let done = wait(&mut ring);
    assert_eq!((done.token, done.result), (Token(1), 4));
    ring.read(slot, done.buffer.unwrap(), 0, 99, Token(2)).unwrap();
    let done = wait(&mut ring);
    assert_eq!(done.result, 5);
    assert_eq!(done.buffer.unwrap().payload(), b"\0bcde");
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    assert!(ring.fallocate(slot, mode, 0, 102, Token(4)));
    assert_eq!(wait(&mut ring).result, 0);
    assert_eq!(ring.free_slots(), 8);
}

#[test]
fn a_receive_takes_the_available_bytes_or_waits_for_all() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(4).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    ring.receive(socket, Buffer::zeroed(100), 10, false, Token(1)).unwrap();
    theirs.write_all(b"some").unwrap();
    let done = wait(&mut ring);
    assert_eq!(done.result, 4);
    assert_eq!(&done.buffer.as_ref().unwrap().payload()[10..14], b"some");
    ring.receive(socket, Buffer::zeroed(6), 0, true, Token(2)).unwrap();
    theirs.write_all(b"who").unwrap();
    let writer = std::thread::spawn(move || {
        theirs.write_all(b"le.").unwrap();
        theirs
    });
    let done = wait(&mut ring);
    assert_eq!((done.result, done.buffer.unwrap().payload()), (6, &b"whole."[..]));
    drop(writer.join().unwrap());
    ring.receive(socket, Buffer::zeroed(6), 0, false, Token(3)).unwrap();
    assert_eq!(wait(&mut ring).result, 0, "the end of the stream");
}

#[test]
fn a_send_list_is_sent_completely_and_in_order() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(4).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    let mut send_list = Box::new(SendList::new(8));
    send_list.push_small(b"first ");
    send_list.push_small(b"second ");
    let mut large = Buffer::zeroed(1 << 20);
    large.payload_mut().fill(7);
    large.set_header(b"third ");
    send_list.push_buffer(large);
    send_list.push_small(b"end");
    let total = send_list.unsent();
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; total];
        theirs.read_exact(&mut all).unwrap();
        all
    });
    while send_list.unsent() > 0 {
        ring.send(socket, send_list, Token(9)).unwrap();
        let done = wait(&mut ring);
        send_list = done.send_list.unwrap();
        send_list.advance(usize::try_from(done.result).unwrap());
    }
    let all = reader.join().unwrap();
    assert!(all.starts_with(b"first second third \x07"));
    assert!(all.ends_with(b"\x07end"));
    assert_eq!(send_list.take_buffers().count(), 1);
}

#[test]
fn a_full_ring_returns_the_buffer() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(2).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    for token in 0..2 {
        ring.receive(socket, Buffer::zeroed(9), 0, false, Token(token)).unwrap();
    }
    let back = ring.receive(socket, Buffer::zeroed(9), 0, false, Token(2)).unwrap_err();
    assert_eq!((back.len(), ring.free_slots()), (9, 0));
    assert!(!ring.poll_readable(socket, Token(3)));
}

#[test]
fn dropping_the_ring_cancels_operations_in_flight() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(8).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    for token in 0..3 {
        ring.receive(socket, Buffer::zeroed(64), 0, false, Token(token)).unwrap();
    }
    assert!(ring.poll_readable(socket, Token(3)));
    assert!(ring.timeout(Duration::from_millis(1), Token(4)));
    assert_eq!(wait(&mut ring).token, Token(4));
    ring.receive(socket, Buffer::zeroed(64), 0, false, Token(5)).unwrap();
    drop(ring);
}

#[test]
fn timers_end_with_etime_and_cancelled_operations_with_ecanceled() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(8).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    assert!(ring.timeout(Duration::from_millis(5), Token(1)));
    let done = wait(&mut ring);
    assert_eq!((done.token, done.result), (Token(1), -libc::ETIME));
    ring.receive(socket, Buffer::zeroed(64), 0, false, Token(2)).unwrap();
    assert!(ring.cancel(Token(2), Token(3)));
    assert!(!ring.cancel(Token(77), Token(3)));
    let mut done = [wait(&mut ring), wait(&mut ring)];
    done.sort_by_key(|done| done.token.0);
    assert_eq!((done[0].token, done[0].result), (Token(2), -libc::ECANCELED));
    assert!(done[0].buffer.is_some());
    assert_eq!((done[1].token, done[1].result), (Token(3), 0));
}

#[test]
fn a_limited_wait_returns_without_a_completion() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut ring = Ring::new(8).unwrap();
    let socket = ring.register(ours.as_fd()).unwrap();
    ring.receive(socket, Buffer::zeroed(64), 0, false, Token(1)).unwrap();
    ring.submit_and_wait_for(Duration::from_millis(5)).unwrap();
    assert!(ring.next().is_none());
    // The timeout does not lose a later completion.
    theirs.write_all(b"x").unwrap();
    ring.submit_and_wait_for(Duration::from_secs(60)).unwrap();
    assert_eq!(ring.next().unwrap().token, Token(1));
}

#[test]
fn the_kernel_refuses_operations_that_the_ring_does_not_offer() {
    let mut ring = Ring::new(4).unwrap();
    assert!(ring.is_restricted(), "restrictions are in every kernel since 5.10");
    let entry = opcode::Nop::new().build();
    ring.push(entry, Owned::Nothing, Token(1)).ok().unwrap();
    assert_eq!(wait(&mut ring).result, -libc::EACCES);
}

#[test]
fn slots_of_the_ring_are_reused() {
    let file = tempfile::tempfile().unwrap();
    let mut ring = Ring::new(3).unwrap();
    let slot = ring.register(file.as_fd()).unwrap();
    let (mut started, mut ended) = (0, 0);
    while ended < 1000 {
        while started < 1000 && ring.free_slots() > 0 {
            let buffer = Buffer::zeroed(8);
            ring.write(slot, buffer, 0, started * 8, false, Token(started)).unwrap();
            started += 1;
        }
        ring.submit_and_wait().unwrap();
        while let Some(done) = ring.next() {
            assert_eq!(done.result, 8);
            ended += 1;
        }
    }
    assert_eq!(file.metadata().unwrap().len(), 8000);
}

fn wait(ring: &mut Ring) -> Completion {
    loop {
        if let Some(done) = ring.next() {
            return done;
        }
        ring.submit_and_wait().unwrap();
    }
}

/// Puts a range of `file` into the pipe of a buffer.
fn fill(
    ring: &mut Ring,
    file: &std::fs::File,
    pipe: PagePipe,
    offset: u64,
    len: usize,
) -> (i32, Buffer) {
    let slot = ring.register(file.as_fd()).unwrap();
    let mut buffer = Buffer::zeroed(len);
    buffer.attach_pipe(pipe);
    ring.splice(slot, buffer, 0, offset, Token(7)).unwrap();
    let done = wait(ring);
    (done.result, done.buffer.unwrap())
}

#[test]
fn pages_go_from_a_file_to_a_socket() {
    let content: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&content).unwrap();
    let mut ring = Ring::new(8).unwrap();
    let (offset, len) = (4096 + 512, 300_000);
    let pipe = PagePipe::new(1 << 20).unwrap();
    let (result, mut buffer) = fill(&mut ring, &file, pipe, offset, len);
    assert_eq!(usize::try_from(result), Ok(len));
    let pipe = buffer.pipe_mut().unwrap();
    pipe.filled(len);
    let (socket, mut peer) = UnixStream::pair().unwrap();
    let mut received = vec![0; len];
    assert_eq!(unread_by_peer(&socket).unwrap(), 0);
    for part in received.chunks_mut(60_000) {
        assert_eq!(pipe.send(&socket, part.len()).unwrap(), part.len());
        assert!(unread_by_peer(&socket).unwrap() >= part.len());
        peer.read_exact(part).unwrap();
    }
    assert!(pipe.is_empty());
    let at = usize::try_from(offset).unwrap();
    assert!(received == content[at..at + len]);
}

#[test]
fn a_pipe_is_empty_after_a_drain() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 4096]).unwrap();
    file.write_all(&vec![2; 200_000]).unwrap();
    let mut ring = Ring::new(8).unwrap();
    // It ends with the file.
    let (result, mut buffer) =
        fill(&mut ring, &file, PagePipe::new(1 << 20).unwrap(), 4096, 300_000);
    assert_eq!(result, 200_000);
    let mut pipe = buffer.take_pipe().unwrap();
    pipe.filled(200_000);
    pipe.drain().unwrap();
    assert!(pipe.is_empty());
    let (result, mut buffer) = fill(&mut ring, &file, pipe, 0, 4096);
    let pipe = buffer.pipe_mut().unwrap();
    pipe.filled(usize::try_from(result).unwrap());
    let (socket, mut peer) = UnixStream::pair().unwrap();
    pipe.send(&socket, usize::MAX).unwrap();
    drop(socket);
    let mut received = Vec::new();
    peer.read_to_end(&mut received).unwrap();
    assert!(received == [1; 4096]);
}
