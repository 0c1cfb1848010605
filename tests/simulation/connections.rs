//! A worker's end of a connection to the kernel: it receives requests, executes them at the backend, and
//! sends replies.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cleat_core::request::IoError;
use cleat_nbd::wire::{REQUEST_LEN, RequestHeader, command, simple_reply};
use cleat_statistics::Recorder;
use nix::sys::stat::fstat;

use crate::disks::SECTOR;
use crate::workers::set_nonblocking;
use crate::world::Surroundings;

/// One connection.
pub(crate) struct Connection {
    /// `None` once the process has ended.
    socket: Option<UnixStream>,
    inbox: Vec<u8>,
    /// The requests at the backend, in order.
    running: VecDeque<Running>,
    /// Whether the stream has ended.
    at_end: bool,
    /// Whether every request is answered with an error.
    fails: bool,
    /// Whether the kernel has sent a disconnect.
    pub(crate) said_goodbye: bool,
    /// Counts the connection as long as it lives.
    recorder: Option<Recorder>,
    /// Whether the connection is paused: another worker may read from it.
    resting: bool,
    /// The inode of the socket, which is the same in every process that has it.
    inode: u64,
}

/// The process that has a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) pid: u32,
    pub(crate) epoch: u64,
    pub(crate) latency: Duration,
    pub(crate) fenced: bool,
    pub(crate) alive: bool,
}

/// The maximum number of bytes that a cancelled receive has read: more than the header of a request.
const CANCELLED_BYTES: usize = 40;

struct Running {
    /// The request has been answered with an error while it was at the backend.
    is_answered: bool,
    due: Instant,
    header: RequestHeader,
    payload: Vec<u8>,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, recorder: Option<Recorder>) -> Self {
        set_nonblocking(&socket);
        let inode = fstat(&socket).map_or(0, |stat| stat.st_ino);
        Self {
            resting: false,
            inode,
            socket: Some(socket.into()),
            inbox: Vec::new(),
            running: VecDeque::new(),
            at_end: false,
            fails: false,
            said_goodbye: false,
            recorder,
        }
    }

    /// Makes a connection that another process has paused, with the bytes that it had received.
    pub(crate) fn taken(socket: OwnedFd, unread: Vec<u8>, recorder: Option<Recorder>) -> Self {
        Self { inbox: unread, ..Self::new(socket, recorder) }
    }

    /// Pauses the connection: it reads nothing until `continue_workers`.
    pub(crate) fn rest(&mut self, around: &mut Surroundings<'_>, pid: u32) {
        self.resting = true;
        around.reads_no_more(self.inode, pid);
    }

    /// Whether no request is at the backend.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// The socket and the unread bytes, for the process that takes over; `None` when the connection has
    /// ended.
    pub(crate) fn offered(&mut self) -> Option<(OwnedFd, Vec<u8>)> {
        let socket = self.socket.as_mut().filter(|_| !self.at_end)?;
        let mut bytes = [0; CANCELLED_BYTES];
        match socket.read(&mut bytes) {
            Ok(0) => return None,
            Ok(received) => self.inbox.extend_from_slice(&bytes[..received]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
        Some((socket.as_fd().try_clone_to_owned().ok()?, self.inbox.clone()))
    }

    /// Resumes the connection.
    pub(crate) fn continue_workers(&mut self) {
        self.resting = false;
    }

    /// Leaves the connection to the process that has taken it over.
    pub(crate) fn leave(&mut self) {
        self.recorder.iter_mut().for_each(Recorder::leave);
    }

    /// Records that the connection has ended.
    pub(crate) fn ended(&self, around: &mut Surroundings<'_>, pid: u32) {
        around.reads_no_more(self.inode, pid);
    }

    /// Whether the stream has ended and no request is at the backend.
    pub(crate) fn has_ended(&self) -> bool {
        self.at_end && self.running.is_empty()
    }

    /// Starts or stops answering every request with an error. Returns the number of requests that are still at
    /// the backend.
    pub(crate) fn fail_all(&mut self, fail: bool) -> u32 {
        self.fails = fail;
        let waiting = self.running.iter_mut().filter(|running| fail && !running.is_answered);
        let cookies: Vec<u64> = waiting
            .map(|running| {
                running.is_answered = true;
                running.header.cookie
            })
            .collect();
        cookies.into_iter().for_each(|cookie| self.refuse(cookie));
        u32::try_from(self.running.len()).unwrap_or(u32::MAX)
    }

    fn refuse(&mut self, cookie: u64) {
        let reply = simple_reply(cookie, Err(IoError::Shutdown));
        // A kernel that has gone gets no reply.
        let _ = self.socket.as_mut().map(|socket| socket.write_all(&reply));
    }

    pub(crate) fn close(&mut self) {
        self.socket = None;
        self.running.clear();
    }

    /// The socket, while the connection reads from it.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().filter(|_| !self.at_end && !self.resting).map(AsFd::as_fd)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.running.front().map(|running| running.due)
    }

    /// Does all work that is due. The connection of a dying process neither reads nor answers, but its
    /// requests at the backend are still executed.
    pub(crate) fn turn(
        &mut self,
        around: &mut Surroundings<'_>,
        disk: &str,
        Side { pid, epoch, latency, fenced, alive }: Side,
    ) -> bool {
        let mut moved = alive && !self.resting && self.receive(around, pid, latency);
        while !around.is_hung(disk) && self.next_due().is_some_and(|due| due <= around.now) {
            let Some(running) = self.running.pop_front() else { break };
            moved = true;
            let (result, data) =
                around.execute(disk, epoch, fenced, &running.header, &running.payload);
            if alive && !running.is_answered {
                let mut reply = simple_reply(running.header.cookie, result).to_vec();
                reply.extend(data);
                // A kernel that has gone gets no reply.
                let _ = self.socket.as_mut().map(|socket| socket.write_all(&reply));
            }
        }
        if moved && let Some(recorder) = &self.recorder {
            // The exact time does not matter here: there is an old request or none.
            recorder.set_oldest(u64::from(!self.running.is_empty()));
        }
        moved
    }

    fn receive(&mut self, around: &mut Surroundings<'_>, pid: u32, latency: Duration) -> bool {
        if self.at_end {
            return false;
        }
        let mut bytes = [0; 4096];
        let Some(socket) = &mut self.socket else { return false };
        around.reads(self.inode, pid);
        let mut moved = true;
        match socket.read(&mut bytes) {
            Ok(0) => self.at_end = true,
            Ok(received) => self.inbox.extend_from_slice(&bytes[..received]),
            // Bytes that were received before a pause may still have to be parsed.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => moved = false,
            Err(_) => self.at_end = true,
        }
        while let Some(header) = self.inbox.first_chunk::<REQUEST_LEN>() {
            let Ok(header) = RequestHeader::parse(header) else {
                around.violation("the kernel's stream is out of step".into());
                self.at_end = true;
                break;
            };
            let writes = header.command == command::WRITE;
            let payload = if writes { header.length as usize } else { 0 };
            if self.inbox.len() < REQUEST_LEN + payload {
                break;
            }
            moved = true;
            let payload = self.inbox.drain(..REQUEST_LEN + payload).skip(REQUEST_LEN).collect();
            if header.command == command::DISC {
                (self.at_end, self.said_goodbye) = (true, true);
                break;
            }
            let due = around.now + latency;
            if self.fails {
                self.refuse(header.cookie);
            } else {
                self.running.push_back(Running { is_answered: false, due, header, payload });
            }
        }
        moved
    }
}

impl Surroundings<'_> {
    /// Whether the backend answers no request.
    fn is_hung(&self, disk: &str) -> bool {
        self.disks.get(disk).is_some_and(|disk| disk.hung)
    }

    /// Executes a request at the backend.
    fn execute(
        &mut self,
        name: &str,
        epoch: u64,
        fenced: bool,
        header: &RequestHeader,
        payload: &[u8],
    ) -> (Result<(), IoError>, Vec<u8>) {
        let Some(disk) = self.disks.get_mut(name) else {
            return (Err(IoError::Broken), Vec::new());
        };
        if fenced {
            return (Err(IoError::Fenced), Vec::new());
        }
        if header.offset + u64::from(header.length) > disk.size {
            return (Err(IoError::Broken), Vec::new());
        }
        let sector = header.offset / SECTOR;
        match header.command {
            command::READ => {
                let stamp = disk.sectors.get(&sector).copied().unwrap_or(0);
                let mut data = stamp.to_le_bytes().to_vec();
                data.resize(header.length as usize, 0);
                (Ok(()), data)
            }
            command::WRITE => {
                let stamp = payload.first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk));
                if let Err(error) = disk.write(sector, stamp, epoch) {
                    self.violation(format!("{name}: {error}"));
                }
                (Ok(()), Vec::new())
            }
            _ => (Ok(()), Vec::new()),
        }
    }
}
