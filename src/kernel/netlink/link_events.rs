//! The events that the driver sends by itself: dead connections.

use neli::socket::synchronous::NlSocketHandle;
use neli::utils::Groups;

use super::attributes::{ATTR_INDEX, Message, number, unexpected};
use super::socket::{Command, open, resolve, socket_error};
use crate::DeviceIndex;
use cleat_core::error::Result;

/// A subscription to the driver's events. The socket is public so that its owner can poll it.
pub(crate) struct LinkEvents(pub(crate) NlSocketHandle);

impl LinkEvents {
    /// Subscribes to the driver's multicast group. The driver sends only to the initial network namespace.
    ///
    /// # Errors
    /// Returns `Unsupported` without the driver; otherwise the errors of netlink.
    pub(crate) fn subscribe() -> Result<Self> {
        let socket = open()?;
        let family = resolve(&socket)?;
        let group = family
            .group
            .ok_or_else(|| unexpected("the netlink family nbd has no multicast group"))?;
        let groups = Groups::new_groups(&[group]);
        socket.add_mcast_membership(groups).map_err(|error| socket_error(&error))?;
        Ok(Self(socket))
    }

    /// Receives one packet and returns the devices with a dead connection. Blocks unless the socket is
    /// readable.
    pub(crate) fn receive(&self) -> Vec<DeviceIndex> {
        // An overflow (ENOBUFS) loses events, which subscribers allow for.
        let Ok((messages, _)) = self.0.recv::<u16, Message>() else { return Vec::new() };
        messages
            .filter_map(|message| {
                let message = message.ok()?;
                let payload = message.get_payload()?;
                let dead = *payload.cmd() == Command::LinkDead as u8;
                dead.then(|| number(payload, ATTR_INDEX)).flatten()
            })
            .collect()
    }
}
