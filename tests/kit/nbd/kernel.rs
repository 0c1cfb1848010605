//! The kernel driver's side of a connection: requests and simple replies, no handshake.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Sends a request header of 28 bytes, and the payload `data`.
pub fn send(socket: &UnixStream, command: u16, cookie: u64, offset: u64, length: u32, data: &[u8]) {
    let mut request = Vec::with_capacity(28 + data.len());
    request.extend(REQUEST_MAGIC.to_be_bytes());
    request.extend(0_u16.to_be_bytes());
    request.extend(command.to_be_bytes());
    request.extend(cookie.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend(length.to_be_bytes());
    request.extend(data);
    let mut socket = socket;
    socket.write_all(&request).unwrap();
}

/// Reads a reply's header, and returns its cookie and error.
pub fn reply(mut socket: &UnixStream) -> (u64, u32) {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut header = [0; 16];
    socket.read_exact(&mut header).unwrap();
    assert_eq!(u32::from_be_bytes(header[..4].try_into().unwrap()), REPLY_MAGIC);
    let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
    (u64::from_be_bytes(header[8..].try_into().unwrap()), error)
}

pub fn write(socket: &UnixStream, offset: u64, data: &[u8]) -> u32 {
    send(socket, WRITE, 1, offset, u32::try_from(data.len()).unwrap(), data);
    reply(socket).1
}

pub fn read(mut socket: &UnixStream, offset: u64, length: u32) -> Vec<u8> {
    send(socket, READ, 2, offset, length, &[]);
    assert_eq!(reply(socket), (2, 0));
    let mut data = vec![0; length as usize];
    socket.read_exact(&mut data).unwrap();
    data
}

pub fn simple(socket: &UnixStream, command: u16, offset: u64, length: u32) -> u32 {
    send(socket, command, 3, offset, length, &[]);
    reply(socket).1
}

/// Sends `NBD_CMD_DISC`, as the driver does before it shuts a socket down.
pub fn disconnect(socket: &UnixStream) {
    send(socket, DISCONNECT, 4, 0, 0, &[]);
}

/// Waits for at most 60 s and returns whether the peer has closed the connection.
pub fn is_closed(mut socket: &UnixStream) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    !matches!(socket.read(&mut [0]), Ok(1..))
}
