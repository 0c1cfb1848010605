//! The kernel driver's side of a connection: requests and simple replies, no handshake. One request
//! at a time, each waited for.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::wire::{self, Request};
use crate::wait;

pub use super::wire::{DISCONNECT, FLUSH, READ, TRIM, WRITE};

/// Sends a request, followed by `data`.
pub fn send(
    mut socket: &UnixStream,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u32,
    data: &[u8],
) {
    let mut request = Request::new(command, cookie, offset, length).encode().to_vec();
    request.extend(data);
    socket.write_all(&request).unwrap();
}

/// Reads a reply's header: its cookie and error.
pub fn reply(mut socket: &UnixStream) -> (u64, u32) {
    socket.set_read_timeout(Some(wait::LIMIT)).unwrap();
    wire::read_reply(&mut socket)
}

/// Writes `data`, and returns the reply's error.
pub fn write(socket: &UnixStream, offset: u64, data: &[u8]) -> u32 {
    send(socket, WRITE, 1, offset, u32::try_from(data.len()).unwrap(), data);
    reply(socket).1
}

/// Reads `length` bytes. Panics if the reply is an error.
pub fn read(mut socket: &UnixStream, offset: u64, length: u32) -> Vec<u8> {
    send(socket, READ, 2, offset, length, &[]);
    assert_eq!(reply(socket), (2, 0));
    let mut data = vec![0; length as usize];
    socket.read_exact(&mut data).unwrap();
    data
}

/// Sends a request without payload, and returns the reply's error.
pub fn simple(socket: &UnixStream, command: u16, offset: u64, length: u32) -> u32 {
    send(socket, command, 3, offset, length, &[]);
    reply(socket).1
}

/// Sends what the driver sends before it shuts a socket down.
pub fn disconnect(socket: &UnixStream) {
    send(socket, DISCONNECT, 4, 0, 0, &[]);
}

/// Returns whether the other side has closed the connection. Blocks until it sends or closes.
pub fn is_closed(mut socket: &UnixStream) -> bool {
    socket.set_read_timeout(Some(wait::LIMIT)).unwrap();
    !matches!(socket.read(&mut [0]), Ok(1..))
}
