//! Events that the driver sends by itself: dead connections.

use neli::socket::synchronous::NlSocketHandle;
use neli::utils::Groups;

use super::attributes::{ATTR_INDEX, Message, number, unexpected};
use super::socket::{Command, open, resolve, socket_error};
use crate::DeviceIndex;
use cleat_core::error::Result;

/// Receives what the driver tells by itself.
pub(crate) struct LinkEvents(pub(crate) NlSocketHandle);

impl LinkEvents {
    /// Subscribes to the driver's multicast group, which reaches the initial network namespace.
    pub(crate) fn subscribe() -> Result<Self> {
        let socket = open()?;
        let family = resolve(&socket)?;
        let group = family.group.ok_or_else(|| unexpected("the nbd family has no events"))?;
        let groups = Groups::new_groups(&[group]);
        socket.add_mcast_membership(groups).map_err(|error| socket_error(&error))?;
        Ok(Self(socket))
    }

    /// Takes one packet: the devices with a dead connection. Call when the socket is readable.
    pub(crate) fn receive(&self) -> Vec<DeviceIndex> {
        // An overflow (ENOBUFS) loses events; that is what they may do.
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
