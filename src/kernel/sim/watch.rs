//! The thread that marks connections as dead when their peer closes.

use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::device::{Connection, PEER_CLOSED};
use super::{Shared, SimKernel};

/// Waits for connections to hang up, until the kernel is dropped.
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
        // A wait that a signal interrupts ends early, which is harmless.
        let _ = poll(&mut fds, PollTimeout::NONE);
        drop(fds);
        drop(connections);
        let _ = wake.read();
    }
}
