//! The generic netlink family of the nbd driver (include/uapi/linux/nbd-netlink.h, kernel 6.12).
//!
//! The driver carries a command out inside `sendmsg`, under a lock that all commands share (`genl_mutex`; the
//! family has no parallel operations). So each command has its own socket, its own thread, which may be left
//! behind, and a deadline.
//!
//! CONNECT does not ask for DESTROY_ON_DISCONNECT: the kernel could delete the device while another CONNECT
//! selects it again, and it reuses a free device faster than it creates a new one. CONNECT does not ask for
//! DISCONNECT_ON_CLOSE either: the device would end when udev closes it after its first probe.

mod attributes;
mod link_events;
mod socket;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::attributes::{
    ATTR_BACKEND_IDENTIFIER, ATTR_DEAD_CONN_TIMEOUT, ATTR_INDEX, ATTR_SIZE_BYTES, Attributes,
    EncodeError, attribute, connect_attributes, device_attributes, device_list, encoding, number,
    socket_attributes, unexpected, whole_seconds,
};
pub(super) use self::link_events::LinkEvents;
use self::socket::{Command, execute, open, resolve};
use super::bounded_call::BoundedCalls;
use super::{ConnectSpec, DeviceIndex, Identity};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of connections of one device. More connections are not faster, and the list must fit
/// one attribute (64 KiB).
const CONNECTIONS_MAX: usize = 128;

/// Sends commands one at a time; the driver executes one at a time, too. So no CONNECT of this process
/// happens between the check of a device and its DISCONNECT. A command whose caller has timed out never runs
/// after a later one, and does not start once its deadline has passed.
#[derive(Debug, Clone)]
pub(super) struct Netlink {
    threads: BoundedCalls,
    turn: Arc<Mutex<()>>,
}

impl Netlink {
    pub(super) fn new(threads: BoundedCalls) -> Self {
        Self { threads, turn: Arc::default() }
    }

    fn run<T: Send + 'static>(
        &self,
        what: &str,
        deadline: Instant,
        call: impl FnOnce() -> Result<T> + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T> {
        let turn = Arc::clone(&self.turn);
        let call = move || {
            // The lock protects an order and no data, so a panic leaves it valid.
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            if SystemClock.now() >= deadline {
                let message = "the deadline passed while an earlier netlink command ran";
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
            call()
        };
        let late = |result: Result<T>| result.map_or((), late);
        self.threads.run(what, deadline, call, late)?
    }

    /// Sends CONNECT with an index of the kernel's choice, and returns the index. If the device appears
    /// only after the deadline, its index goes to `late`.
    pub(super) fn connect(
        &self,
        spec: ConnectSpec,
        deadline: Instant,
        late: impl FnOnce(DeviceIndex) + Send + 'static,
    ) -> Result<DeviceIndex> {
        check_sockets(&spec.sockets)?;
        if spec.size == 0 || !matches!(spec.block_size, 512 | 1024 | 2048 | 4096) {
            let message =
                format!("invalid device: size {}, block size {}", spec.size, spec.block_size);
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let attributes = connect_attributes(&spec).map_err(encoding)?;
        let sockets = spec.sockets;
        let call = move || {
            let reply = execute(Command::Connect, attributes);
            // The kernel has its own references now. An end that stays open here would hide that the
            // kernel dropped a connection.
            drop(sockets);
            reply.and_then(|reply| {
                let index = reply.and_then(|reply| number(&reply, ATTR_INDEX));
                index.ok_or_else(|| unexpected("the reply to CONNECT has no device number"))
            })
        };
        self.run("connect an nbd device", deadline, call, late)
    }

    /// Sends DISCONNECT if `is_meant` still returns true when no other command runs: the command names the
    /// device by its number alone. The device is free when its last opener has closed it.
    pub(super) fn disconnect(
        &self,
        index: DeviceIndex,
        deadline: Instant,
        is_meant: impl FnOnce() -> Result<bool> + Send + 'static,
    ) -> Result<()> {
        let attributes = device_attributes(index)?;
        let call = move || match is_meant()? {
            true => execute(Command::Disconnect, attributes).map(drop),
            false => Ok(()),
        };
        self.run(&format!("disconnect /dev/nbd{index}"), deadline, call, drop)
    }

    /// Sends RECONFIGURE with new sockets, a new size, or both.
    pub(super) fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
        size: Option<u64>,
        deadline: Instant,
    ) -> Result<()> {
        if size.is_none() {
            check_sockets(&sockets)?;
        }
        let encode = || -> Result<Attributes, EncodeError> {
            let mut attributes = Attributes::new();
            attributes.push(attribute(ATTR_INDEX, index)?);
            attributes.push(attribute(ATTR_BACKEND_IDENTIFIER, identity.as_str())?);
            if let Some(size) = size {
                attributes.push(attribute(ATTR_SIZE_BYTES, size)?);
            }
            if !sockets.is_empty() {
                attributes.push(socket_attributes(&sockets)?);
            }
            Ok(attributes)
        };
        let attributes = encode().map_err(encoding)?;
        let call = move || {
            let result = execute(Command::Reconfigure, attributes);
            drop(sockets);
            result.map(drop)
        };
        self.run(&format!("reconfigure /dev/nbd{index}"), deadline, call, drop)
    }

    /// Sends RECONFIGURE with another dead connection timeout; 0 lets requests fail at once if no connection is alive
    /// (`wait_for_reconnect` in drivers/block/nbd.c).
    pub(super) fn set_dead_connection_timeout(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        timeout: Duration,
        deadline: Instant,
    ) -> Result<()> {
        let encode = || -> Result<Attributes, EncodeError> {
            let mut attributes = Attributes::new();
            attributes.push(attribute(ATTR_INDEX, index)?);
            attributes.push(attribute(ATTR_BACKEND_IDENTIFIER, identity.as_str())?);
            attributes.push(attribute(ATTR_DEAD_CONN_TIMEOUT, whole_seconds(timeout))?);
            Ok(attributes)
        };
        let attributes = encode().map_err(encoding)?;
        let call = move || execute(Command::Reconfigure, attributes).map(drop);
        self.run(&format!("reconfigure /dev/nbd{index}"), deadline, call, drop)
    }

    /// Sends STATUS and returns, for every device, its index and whether it is configured. A configured
    /// device may have no live socket.
    pub(super) fn status(&self, deadline: Instant) -> Result<Vec<(DeviceIndex, bool)>> {
        let call = || execute(Command::Status, Attributes::new());
        let reply = self.run("list nbd devices", deadline, call, drop)?;
        let reply = reply.ok_or_else(|| unexpected("the reply to STATUS has no list"))?;
        Ok(device_list(&reply))
    }
}

/// Checks that the kernel has the netlink family of the driver.
///
/// # Errors
/// Returns `Unsupported` if it is missing; otherwise the errors of netlink.
pub(super) fn probe() -> Result<()> {
    resolve(&open()?).map(drop)
}

fn check_sockets(sockets: &[OwnedFd]) -> Result<()> {
    if (1..=CONNECTIONS_MAX).contains(&sockets.len()) {
        return Ok(());
    }
    let message =
        format!("invalid number of connections: {}; use 1 to {CONNECTIONS_MAX}", sockets.len());
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_command_does_not_start_after_its_deadline() {
        let netlink = Netlink::new(BoundedCalls::new(8));
        let turn = netlink.turn.lock().unwrap();
        let (begun, was_begun) = crossbeam_channel::bounded(1);
        let call = move || begun.send(()).map_err(|_| unexpected("the receiver is gone"));
        let deadline = Instant::now() + Duration::from_millis(20);
        let error = netlink.run("wait", deadline, call, drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(turn);
        // The sender is dropped with the call, unused.
        assert!(was_begun.recv().is_err());
        let later = Instant::now() + Duration::from_secs(10);
        assert_eq!(netlink.run("answer", later, || Ok(7), drop).unwrap(), 7);
    }

    #[test]
    fn a_device_with_another_identity_is_not_disconnected() {
        let netlink = Netlink::new(BoundedCalls::new(8));
        let later = Instant::now() + Duration::from_secs(10);
        // No socket is opened: without nbd, opening one would fail.
        netlink.disconnect(0, later, || Ok(false)).unwrap();
    }
}
