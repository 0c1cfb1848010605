//! The thread that notices connections whose peer is gone.

use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::device::{Connection, PEER_CLOSED};
use super::{Shared, SimKernel};

/// Waits for connections to hang up, until the kernel is gone.
pub(super) fn watch_connections(shared: &Weak<Shared>, wake: &EventFd) {
    loop {
        let Some(kernel) = shared.upgrade().map(SimKernel) else { return };
        kernel.check_connections();
        let connections: Vec<Arc<Connection>> = {
            let state = kernel.state();
            let configs = state.devices.values().filter_map(|device| device.config.as_ref());
            configs.flat_map(|c| c.connections.iter()).filter(|c| c.is_alive()).cloned().collect()
        };
        drop(kernel);
        let mut fds = vec![PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(connections.iter().map(|c| PollFd::new(c.socket.as_fd(), PEER_CLOSED)));
        // An interrupted wait is looked at as an early end.
        let _ = poll(&mut fds, PollTimeout::NONE);
        drop(fds);
        drop(connections);
        let _ = wake.read();
    }
}
