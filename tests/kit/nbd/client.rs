//! A client of a server in this process. The connection starts in the transmission phase, as one of
//! the kernel's driver does.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleat_core::request::IoError;
use cleat_export::End;
use cleat_export::server::{Event, Server};
use cleat_nbd::wire::{RequestHeader, command, parse_simple_reply};
use crossbeam_channel::Receiver;

const LIMIT: Duration = Duration::from_secs(20);

pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn connect(server: &Server) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        server.add_kernel_connection(theirs.into()).unwrap();
        Self { stream: ours }
    }

    pub fn send(&mut self, command: u16, cookie: u64, offset: u64, length: u32) {
        let header = RequestHeader { flags: 0, command, cookie, offset, length };
        self.stream.write_all(&header.encode()).unwrap();
    }

    pub fn write(&mut self, cookie: u64, offset: u64, payload: &[u8]) {
        self.send(command::WRITE, cookie, offset, payload.len() as u32);
        self.stream.write_all(payload).unwrap();
    }

    pub fn reply(&mut self) -> (u64, Result<(), IoError>) {
        let mut header = [0; 16];
        self.stream.read_exact(&mut header).unwrap();
        parse_simple_reply(&header).unwrap()
    }

    pub fn expect(&mut self, cookie: u64, result: Result<(), IoError>) {
        assert_eq!(self.reply(), (cookie, result));
    }

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

/// Waits for the end of the next connection to end, and returns how it ended.
pub fn end(events: &Receiver<Event>) -> End {
    let Event::ConnectionEnded { end, .. } = events.recv_timeout(LIMIT).unwrap();
    end
}
