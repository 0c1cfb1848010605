//! A client of a server in this process. The connection starts in the transmission phase, as one of
//! the kernel's driver does. Requests and replies are separate calls, so that several requests can be in
//! flight.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleat_core::request::IoError;
use cleat_export::End;
use cleat_export::server::{Event, Server};
use crossbeam_channel::Receiver;

use super::wire::{Request, WRITE, read_reply};

const LIMIT: Duration = Duration::from_secs(20);

/// The client's end of a connection.
pub struct Client {
    /// The socket, for what the methods do not offer.
    pub stream: UnixStream,
}

impl Client {
    /// Adds a connection to `server`.
    pub fn connect(server: &Server) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        server.add_kernel_connection(theirs.into()).unwrap();
        Self { stream: ours }
    }

    /// Sends a request without payload.
    pub fn send(&mut self, command: u16, cookie: u64, offset: u64, length: u32) {
        let request = Request::new(command, cookie, offset, length);
        self.stream.write_all(&request.encode()).unwrap();
    }

    /// Sends a write with its payload.
    pub fn write(&mut self, cookie: u64, offset: u64, payload: &[u8]) {
        self.send(WRITE, cookie, offset, payload.len() as u32);
        self.stream.write_all(payload).unwrap();
    }

    /// Reads a reply's header, and returns its cookie and its result.
    pub fn reply(&mut self) -> (u64, Result<(), IoError>) {
        let (cookie, error) = read_reply(&mut self.stream);
        (cookie, result(error))
    }

    /// Reads a reply's header, and panics if it has another cookie or another result.
    pub fn expect(&mut self, cookie: u64, result: Result<(), IoError>) {
        assert_eq!(self.reply(), (cookie, result));
    }

    /// Reads the payload of a reply.
    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns whether the server has sent nothing.
    pub fn is_silent(&mut self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        let silent = self.stream.read(&mut [0; 1]).is_err();
        self.stream.set_nonblocking(false).unwrap();
        silent
    }
}

/// Returns what an errno number of a reply means ("Error values" in proto.md).
fn result(error: u32) -> Result<(), IoError> {
    match error {
        0 => Ok(()),
        1 => Err(IoError::ReadOnly),
        5 => Err(IoError::Broken),
        12 => Err(IoError::NoMemory),
        22 => Err(IoError::Invalid),
        28 => Err(IoError::NoSpace),
        95 => Err(IoError::Unsupported),
        108 => Err(IoError::Shutdown),
        other => panic!("a server never sends the error {other}"),
    }
}

/// Waits until a connection ends, and returns how it ended.
pub fn end(events: &Receiver<Event>) -> End {
    let Event::ConnectionEnded { end, .. } = events.recv_timeout(LIMIT).unwrap();
    end
}
