//! Requests in flight, as the block layer keeps them: sent, answered, and sent again if their connection died.
//! Nothing here waits: a simulation calls [`SimKernel::step`].
//!
//! With one connection, a request is sent again when its dead socket has been replaced. With several, it is
//! sent again when it is [`REQUEUE`] old (nbd_xmit_timeout).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::device::{Config, Connection};
use super::io::{CMD_FLUSH, CMD_READ, CMD_WRITE, request_message};
use super::replies::{REPLY_BYTES, parse_reply};
use super::{SimKernel, State, lock};
use crate::DeviceIndex;

/// The number of a request.
pub type Ticket = u64;

/// A request to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Io {
    /// Reads `length` bytes at `offset`.
    Read { offset: u64, length: u32 },
    /// Writes `data` at `offset`.
    Write { offset: u64, data: Vec<u8> },
    /// Flushes the volatile cache of the device.
    Flush,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The number of the request.
    pub ticket: Ticket,
    /// The bytes that were read (none for other requests), or the error.
    pub result: io::Result<Vec<u8>>,
}

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Request {
    ticket: Ticket,
    index: DeviceIndex,
    /// The configuration that the request was made for. It is never sent to another one.
    instance: u64,
    io: Io,
    sent: Option<(Arc<Connection>, Instant)>,
}

/// Runs one step of the program that serves the other ends, if everything runs on one thread. Returns
/// whether the step did anything.
pub type PeerStep = Arc<dyn Fn() -> bool + Send + Sync>;

/// The age at which the driver sends a request again on another connection.
const REQUEUE: Duration = Duration::from_secs(30);

impl SimKernel {
    /// Sets the function that calls which wait for the peer run instead. Must not be combined with `read`
    /// and `write`.
    pub fn set_peer_step(&self, peer_step: PeerStep) {
        self.state().peer_step = Some(peer_step);
    }

    /// Starts a request. Does not wait.
    ///
    /// # Errors
    /// Returns ENXIO if the device is not connected.
    pub fn submit(&self, index: DeviceIndex, io: Io) -> io::Result<Ticket> {
        let mut state = self.state();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        let instance = config.filter(|config| !config.disconnected).ok_or(Errno::ENXIO)?.instance;
        state.tickets += 1;
        let ticket = state.tickets;
        state.requests.push(Request { ticket, index, instance, io, sent: None });
        Ok(ticket)
    }

    /// Returns whether requests are in flight.
    pub fn has_requests(&self) -> bool {
        !self.state().requests.is_empty()
    }

    /// Advances every request as far as possible without waiting. Returns whether anything changed.
    pub fn step(&self) -> bool {
        let mut state = self.state();
        let before = state.progress;
        state.check_connections();
        state.dispatch();
        state.collect();
        state.progress != before
    }

    /// Returns the requests that have ended since the last call.
    pub fn completions(&self) -> Vec<Completion> {
        std::mem::take(&mut self.state().completions)
    }

    /// Flushes by steps of the kernel and of the peer.
    pub(super) fn flush_stepwise(
        &self,
        index: DeviceIndex,
        peer_step: &PeerStep,
    ) -> io::Result<()> {
        let ticket = self.submit(index, Io::Flush)?;
        loop {
            let moved = self.step();
            let mut state = self.state();
            if let Some(at) = state.completions.iter().position(|done| done.ticket == ticket) {
                return state.completions.swap_remove(at).result.map(drop);
            }
            drop(state);
            if !peer_step() && !moved {
                // Nothing changes any more, so only the deadline would end the request.
                self.state().requests.retain(|request| request.ticket != ticket);
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl State {
    /// Returns the number of reads and writes of a device that have not ended, of those that advance by steps.
    pub(super) fn in_flight_by_steps(&self, index: DeviceIndex) -> u64 {
        let is_meant =
            |request: &&Request| request.index == index && !matches!(request.io, Io::Flush);
        self.requests.iter().filter(is_meant).count() as u64
    }

    /// Sends the requests that can be sent, and fails those that never can be.
    fn dispatch(&mut self) {
        let now = (self.script.now)();
        for mut request in std::mem::take(&mut self.requests) {
            let config = self.devices.get_mut(&request.index).and_then(|d| d.config.as_mut());
            let config = config.filter(|c| !c.disconnected && c.instance == request.instance);
            let Some(config) = config else {
                self.end(request.ticket, Err(Errno::EIO.into()));
                continue;
            };
            if request.may_be_repeated(config, now) {
                request.sent = None;
            }
            if request.sent.is_none() {
                if let Some((connection, _)) = config.live_connection() {
                    if connection.send_now(&request.message()) {
                        request.sent = Some((connection, now));
                        self.progress += 1;
                    }
                } else if config.dead_since.is_some_and(|since| {
                    now.saturating_duration_since(since) >= config.dead_connection_timeout
                }) {
                    self.end(request.ticket, Err(Errno::EIO.into()));
                    continue;
                }
            }
            self.requests.push(request);
        }
    }

    /// Receives replies.
    fn collect(&mut self) {
        let configs = self.devices.values().filter_map(|device| device.config.as_ref());
        let connections: Vec<Arc<Connection>> = configs
            .flat_map(|config| &config.connections)
            .filter(|c| c.is_alive())
            .cloned()
            .collect();
        for connection in connections {
            connection.receive_now();
            while let Some((ticket, result)) = connection.take_reply(&self.requests) {
                if let Some(at) = self.requests.iter().position(|r| r.ticket == ticket) {
                    self.requests.remove(at);
                    self.end(ticket, result);
                }
            }
        }
    }

    fn end(&mut self, ticket: Ticket, result: io::Result<Vec<u8>>) {
        self.progress += 1;
        self.completions.push(Completion { ticket, result });
    }
}

impl Request {
    /// Returns whether the connection is dead and the driver would send the request again.
    fn may_be_repeated(&self, config: &Config, now: Instant) -> bool {
        let Some((connection, at)) = &self.sent else { return false };
        let old = now.saturating_duration_since(*at) >= REQUEUE;
        !connection.is_alive() && (config.connections.len() == 1 || old)
    }

    fn message(&self) -> Vec<u8> {
        match &self.io {
            Io::Read { offset, length } => {
                request_message(CMD_READ, self.ticket, *offset, *length, &[])
            }
            Io::Write { offset, data } => {
                let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
                request_message(CMD_WRITE, self.ticket, *offset, length, data)
            }
            Io::Flush => request_message(CMD_FLUSH, self.ticket, 0, 0, &[]),
        }
    }

    fn reply_bytes(&self) -> usize {
        match &self.io {
            Io::Read { length, .. } => *length as usize,
            Io::Write { .. } | Io::Flush => 0,
        }
    }
}

impl Connection {
    /// Sends a message if the socket has room for all of it. Returns whether it did.
    fn send_now(&self, message: &[u8]) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        match send(self.socket.as_raw_fd(), message, flags) {
            Ok(sent) if sent == message.len() => true,
            // Only a part of the message was sent. The driver would send the rest; the simulation kills the
            // connection.
            Ok(_) => {
                self.kill();
                false
            }
            Err(_) => false,
        }
    }

    fn receive_now(&self) {
        let mut inbox = lock(&self.inbox);
        let mut bytes = [0; 4096];
        while let Ok(received) = recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            if received == 0 {
                return;
            }
            inbox.extend_from_slice(&bytes[..received]);
        }
    }

    /// Takes the first reply out of the inbox, if it is complete. Its request may have ended already.
    fn take_reply(&self, requests: &[Request]) -> Option<(Ticket, io::Result<Vec<u8>>)> {
        let mut inbox = lock(&self.inbox);
        let (ticket, error) = parse_reply(inbox.first_chunk()?)?;
        let request = requests.iter().find(|request| request.ticket == ticket);
        let payload = request.filter(|_| error == 0).map_or(0, Request::reply_bytes);
        if inbox.len() < REPLY_BYTES + payload {
            return None;
        }
        let data = inbox.drain(..REPLY_BYTES + payload).skip(REPLY_BYTES).collect();
        Some((ticket, if error == 0 { Ok(data) } else { Err(Errno::EIO.into()) }))
    }
}
