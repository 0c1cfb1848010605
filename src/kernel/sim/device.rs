//! The devices of a simulated kernel and their connections.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use super::replies::Replies;
use crate::{ConnectSpec, Holder};

/// The peer has closed its socket, or shut down its writing half, which the driver's receiver sees.
pub(super) const PEER_CLOSED: PollFlags = PollFlags::from_bits_retain(libc::POLLRDHUP);

/// A device `/dev/nbdN`, configured or not.
#[derive(Debug, Default)]
pub(super) struct SimDevice {
    pub(super) config: Option<Config>,
    pub(super) holders: Vec<Holder>,
    /// Users inside the kernel that have claimed the device. They are not among `holders`.
    pub(super) kernel_users: Vec<String>,
    /// Whether the device is open exclusively.
    pub(super) exclusive: bool,
    pub(super) frozen: Vec<super::freeze::Frozen>,
}

/// The configuration of a device, as the kernel's `nbd_config`.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) connections: Vec<Arc<Connection>>,
    pub(super) size: u64,
    pub(super) block_size: u32,
    pub(super) transmission_flags: u16,
    pub(super) backend: Option<String>,
    pub(super) pid: u32,
    /// When the symlink appears. `None`: never.
    pub(super) symlink_at: Option<Instant>,
    pub(super) dead_connection_timeout: Duration,
    /// When the last connection died; `None` while one is alive.
    pub(super) dead_since: Option<Instant>,
    /// DISCONNECT was carried out. The configuration exists while the device is held.
    pub(super) disconnected: bool,
    /// The cookie of the last request.
    pub(super) cookies: u64,
    /// A number that is unique among all configurations.
    pub(super) instance: u64,
}

/// A connection of a device: the kernel's end of a socket.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) state: Mutex<ConnectionState>,
    /// Locked while one message is sent.
    pub(super) sending: Mutex<()>,
    /// The bytes that have arrived and were not consumed, of requests that advance by steps.
    pub(super) inbox: Mutex<Vec<u8>>,
    pub(super) replies: Replies,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionState {
    Alive,
    Dead,
}

impl Config {
    pub(super) fn new(spec: ConnectSpec, symlink_at: Option<Instant>, instance: u64) -> Self {
        Self {
            connections: spec.sockets.into_iter().map(Connection::new).collect(),
            size: spec.size,
            block_size: spec.block_size,
            transmission_flags: spec.transmission_flags,
            backend: Some(spec.identity.as_str().to_owned()),
            pid: std::process::id(),
            symlink_at,
            dead_connection_timeout: spec.dead_connection_timeout,
            dead_since: None,
            disconnected: false,
            cookies: 0,
            instance,
        }
    }

    /// Makes the configuration of a device that another program connected. Its sockets are not simulated.
    pub(super) fn foreign(size: u64, backend: Option<String>, instance: u64) -> Self {
        Self {
            connections: Vec::new(),
            size,
            block_size: 512,
            transmission_flags: 0,
            backend,
            pid: 1,
            symlink_at: None,
            dead_connection_timeout: Duration::ZERO,
            dead_since: None,
            disconnected: false,
            cookies: 0,
            instance,
        }
    }

    /// Returns a live connection for the next request, round-robin, and the request's cookie.
    pub(super) fn live_connection(&mut self) -> Option<(Arc<Connection>, u64)> {
        self.cookies += 1;
        let mut live: VecDeque<_> =
            self.connections.iter().filter(|connection| connection.is_alive()).collect();
        let turn = usize::try_from(self.cookies).unwrap_or(0) % live.len().max(1);
        live.rotate_left(turn);
        Some((Arc::clone(live.front()?), self.cookies))
    }

    /// Marks connections whose peer has closed as dead. Returns how many.
    pub(super) fn mark_dead(&mut self, now: Instant) -> usize {
        let died = self.connections.iter().filter(|connection| {
            connection.is_alive() && connection.hung_up() && connection.kill()
        });
        let died = died.count();
        if !self.connections.is_empty()
            && self.connections.iter().all(|connection| !connection.is_alive())
        {
            self.dead_since.get_or_insert(now);
        } else {
            self.dead_since = None;
        }
        died
    }

    /// Replaces dead connections by new sockets, as `nbd_reconnect_socket`, and drops the other sockets.
    /// Returns how many were replaced.
    pub(super) fn replace_dead(&mut self, sockets: Vec<OwnedFd>) -> u64 {
        let mut replaced = 0;
        let mut sockets = sockets.into_iter();
        for connection in self.connections.iter_mut().filter(|connection| !connection.is_alive()) {
            let Some(socket) = sockets.next() else { break };
            *connection = Connection::new(socket);
            replaced += 1;
        }
        self.dead_since = None;
        replaced
    }

    /// Shuts down every connection.
    pub(super) fn shut_down(&mut self) {
        for connection in &self.connections {
            connection.kill();
        }
    }
}

impl Connection {
    fn new(socket: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            socket,
            state: Mutex::new(ConnectionState::Alive),
            sending: Mutex::new(()),
            inbox: Mutex::new(Vec::new()),
            replies: Replies::default(),
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        *super::lock(&self.state) == ConnectionState::Alive
    }

    /// Marks the connection as dead and shuts it down. Returns whether it was alive.
    pub(super) fn kill(&self) -> bool {
        let before = std::mem::replace(&mut *super::lock(&self.state), ConnectionState::Dead);
        // The peer may have closed it already: ENOTCONN has the same effect.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        before == ConnectionState::Alive
    }

    /// Returns whether the peer has closed or shut down its end.
    fn hung_up(&self) -> bool {
        // POLLHUP and POLLERR are always reported.
        let mut fds = [PollFd::new(self.socket.as_fd(), PEER_CLOSED)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}
