//! Blocking requests on a simulated device, sent to the program that serves the other ends.

use cleat_core::clock::{Clock, SystemClock};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use super::device::Connection;
use super::{SimKernel, lock};
use crate::DeviceIndex;

/// NBD protocol, "request message".
const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
/// NBD_FLAG_SEND_FLUSH.
const SEND_FLUSH: u16 = 1 << 2;
/// How long a request waits for its reply: longer than any outage in a test.
const REPLY_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a reply may take from its first byte to its last one.
const REST_TIMEOUT: Duration = Duration::from_secs(60);

/// Blocking reads and writes. While every connection is dead, a request waits for the device's
/// dead-connection timeout. It is sent again on a new connection.
impl SimKernel {
    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// Returns an error if the server refuses the request, or every connection stays dead for the
    /// dead-connection timeout.
    pub fn read(&self, index: DeviceIndex, offset: u64, length: u32) -> io::Result<Vec<u8>> {
        self.read_until(index, offset, length, SystemClock.now() + REPLY_TIMEOUT)
    }

    /// As [`SimKernel::read`], with a deadline.
    pub(super) fn read_until(
        &self,
        index: DeviceIndex,
        offset: u64,
        length: u32,
        deadline: Instant,
    ) -> io::Result<Vec<u8>> {
        let mut data = vec![0; length as usize];
        self.request(index, (CMD_READ, offset, length), &[], &mut data, deadline)?;
        Ok(data)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// Returns the errors of [`SimKernel::read`].
    pub fn write(&self, index: DeviceIndex, offset: u64, data: &[u8]) -> io::Result<()> {
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        let deadline = SystemClock.now() + REPLY_TIMEOUT;
        self.request(index, (CMD_WRITE, offset, length), data, &mut [], deadline)
    }

    /// Flushes the device, as `fsync` of the device node does.
    pub(super) fn flush_device(&self, index: DeviceIndex, deadline: Instant) -> io::Result<()> {
        let flags = {
            let state = self.state();
            let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
            config.ok_or(Errno::ENXIO)?.transmission_flags
        };
        if flags & SEND_FLUSH == 0 {
            return Ok(());
        }
        let peer_step = self.state().peer_step.clone();
        if let Some(peer_step) = peer_step {
            return self.flush_stepwise(index, &peer_step);
        }
        self.request(index, (CMD_FLUSH, 0, 0), &[], &mut [], deadline)
    }

    fn request(
        &self,
        index: DeviceIndex,
        (command, offset, length): (u16, u64, u32),
        payload: &[u8],
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        loop {
            let (connection, cookie) = self.wait_for_connection(index, deadline)?;
            let message = request_message(command, cookie, offset, length, payload);
            match round_trip(&connection, &message, cookie, into, deadline) {
                Ok(0) => return Ok(()),
                Ok(code) => return Err(io::Error::other(format!("NBD error {code}"))),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
                // The connection died during the request: it is sent again on another one.
                Err(_) => {
                    connection.kill();
                    self.check_connections();
                }
            }
        }
    }

    /// Returns a live connection. Waits for one for at most the dead-connection timeout.
    fn wait_for_connection(
        &self,
        index: DeviceIndex,
        deadline: Instant,
    ) -> io::Result<(Arc<Connection>, u64)> {
        let mut state = self.state();
        loop {
            state.check_connections();
            let config = state.devices.get_mut(&index).and_then(|device| device.config.as_mut());
            let config = config.filter(|config| !config.disconnected).ok_or(Errno::EIO)?;
            if let Some(found) = config.live_connection() {
                return Ok(found);
            }
            let since = config.dead_since.unwrap_or_else(|| SystemClock.now());
            let left =
                config.dead_connection_timeout.saturating_sub(SystemClock.elapsed_since(since));
            if left.is_zero() {
                return Err(Errno::EIO.into());
            }
            let time_left = deadline.saturating_duration_since(SystemClock.now());
            if time_left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let waited = self.0.changed.wait_timeout(state, left.min(time_left));
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// Sends NBD_CMD_DISC as the driver does: under the connection's lock, and blocking, here until a
/// deadline. Returns false at the deadline. A dead connection needs no message.
pub(super) fn send_disconnect(connection: &Connection, deadline: Instant) -> bool {
    if !connection.is_alive() {
        return true;
    }
    let mut message = [0; 28];
    message[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    message[6..8].copy_from_slice(&CMD_DISC.to_be_bytes());
    let _sending = lock(&connection.sending);
    match send_all(connection, &message, deadline) {
        Ok(()) => true,
        Err(error) => error.kind() != io::ErrorKind::TimedOut,
    }
}

/// Encodes a request.
pub(super) fn request_message(
    command: u16,
    cookie: u64,
    offset: u64,
    length: u32,
    payload: &[u8],
) -> Vec<u8> {
    let mut message = Vec::with_capacity(28 + payload.len());
    message.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
    message.extend_from_slice(&0u16.to_be_bytes());
    message.extend_from_slice(&command.to_be_bytes());
    message.extend_from_slice(&cookie.to_be_bytes());
    message.extend_from_slice(&offset.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(payload);
    message
}

/// Sends a request and receives its reply. Returns the reply's error number. Requests of other threads may be
/// in flight on the connection.
fn round_trip(
    connection: &Connection,
    message: &[u8],
    cookie: u64,
    into: &mut [u8],
    deadline: Instant,
) -> io::Result<u32> {
    connection.replies.expect(cookie, into.len());
    let sent = {
        let _sending = lock(&connection.sending);
        send_all(connection, message, deadline)
    };
    let reply = sent.and_then(|()| {
        let wait = || await_socket(connection, PollFlags::POLLIN, deadline);
        connection.replies.wait(cookie, deadline, wait, |into| {
            receive_exact(connection, into, SystemClock.now() + REST_TIMEOUT)
        })
    });
    connection.replies.forget(cookie);
    let (error, data) = reply?;
    if error == 0 {
        into.copy_from_slice(&data);
    }
    Ok(error)
}

fn send_all(connection: &Connection, mut message: &[u8], deadline: Instant) -> io::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    while !message.is_empty() {
        match send(connection.socket.as_raw_fd(), message, flags) {
            Ok(sent) => message = &message[sent..],
            Err(Errno::EAGAIN) => await_socket(connection, PollFlags::POLLOUT, deadline)?,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive_exact(
    connection: &Connection,
    mut into: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    while !into.is_empty() {
        match recv(connection.socket.as_raw_fd(), into, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => into = &mut into[received..],
            Err(Errno::EAGAIN) => await_socket(connection, PollFlags::POLLIN, deadline)?,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn await_socket(connection: &Connection, event: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(SystemClock.now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut fds = [PollFd::new(connection.socket.as_fd(), event)];
        let left_ms = u16::try_from(left.as_millis()).unwrap_or(u16::MAX).max(1);
        match poll(&mut fds, PollTimeout::from(left_ms)) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
