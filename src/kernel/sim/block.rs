//! Requests in flight, as the block layer keeps them: sent, answered, sent again where their
//! connection died. Nothing here waits; a simulation gives turns.
//!
//! With one connection a request is repeated once its dead socket has been replaced; with several,
//! when it is [`REQUEUE`] old (nbd_xmit_timeout).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::device::{Config, Connection};
use super::io::{CMD_FLUSH, CMD_READ, CMD_WRITE, REPLY_BYTES, parse_reply, request_message};
use super::{SimKernel, State, lock};
use crate::DeviceIndex;

/// A request's number.
pub type Ticket = u64;

/// What is asked of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Io {
    /// Reads so many bytes.
    Read { offset: u64, length: u32 },
    /// Writes.
    Write { offset: u64, data: Vec<u8> },
    /// Flushes.
    Flush,
}

/// How a request ended.
#[derive(Debug)]
pub struct Completion {
    /// Which.
    pub ticket: Ticket,
    /// What was read, or why it failed.
    pub result: io::Result<Vec<u8>>,
}

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Request {
    ticket: Ticket,
    index: DeviceIndex,
    /// The configuration that it was made on: no other one ever gets it.
    instance: u64,
    io: Io,
    sent: Option<(Arc<Connection>, Instant)>,
}

/// Gives whoever serves the other ends a turn, where everything runs on one thread. Says whether
/// that did anything.
pub type PeerStep = Arc<dyn Fn() -> bool + Send + Sync>;

/// When the driver repeats a request on another connection.
const REQUEUE: Duration = Duration::from_secs(30);

impl SimKernel {
    /// Has the far end take its turns in calls that wait for it. Not mixed with `read` and `write`.
    pub fn set_peer_step(&self, peer_step: PeerStep) {
        self.state().peer_step = Some(peer_step);
    }

    /// Begins a request.
    ///
    /// # Errors
    /// ENXIO when the device is not connected.
    pub fn submit(&self, index: DeviceIndex, io: Io) -> io::Result<Ticket> {
        let mut state = self.state();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        let instance = config.filter(|config| !config.disconnected).ok_or(Errno::ENXIO)?.instance;
        state.tickets += 1;
        let ticket = state.tickets;
        state.requests.push(Request { ticket, index, instance, io, sent: None });
        Ok(ticket)
    }

    /// Whether requests are under way.
    pub fn has_requests(&self) -> bool {
        !self.state().requests.is_empty()
    }

    /// Moves every request on as far as it goes. Says whether anything moved.
    pub fn step(&self) -> bool {
        let mut state = self.state();
        let before = state.progress;
        state.check_connections();
        state.dispatch();
        state.collect();
        state.progress != before
    }

    /// What has ended since the last call.
    pub fn completions(&self) -> Vec<Completion> {
        std::mem::take(&mut self.state().completions)
    }

    /// A flush that nothing but turns carries on.
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
                // Only its deadline would end it.
                self.state().requests.retain(|request| request.ticket != ticket);
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl State {
    /// Sends what can be sent, and ends what never will be.
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

    /// Takes the replies that have arrived.
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
    /// Whether its connection is dead and the driver would send it again.
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
    /// Sends a message if there is room for all of it.
    fn send_now(&self, message: &[u8]) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        match send(self.socket.as_raw_fd(), message, flags) {
            Ok(sent) if sent == message.len() => true,
            // Half a message: the driver would go on; here the stream is lost.
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

    /// The reply at the head of the inbox, once it is complete. Nobody may wait for it any more.
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
