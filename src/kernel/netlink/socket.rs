//! Sends one message over generic netlink and receives its reply.

use std::io;
use std::path::Path;

use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;
use neli::err::SocketError;
use neli::genl::GenlmsghdrBuilder;
use neli::nl::{NlPayload, NlmsghdrBuilder};
use neli::socket::synchronous::NlSocketHandle;
use neli::utils::Groups;

use super::attributes::{Attributes, Message, attribute, encoding, unexpected};
use crate::{module_missing, permission_missing};
use cleat_core::error::{Error, ErrorKind, Result};

const FAMILY: &str = "nbd";
const FAMILY_VERSION: u8 = 1;
const MULTICAST_GROUP: &str = "nbd_mc_group";

// include/uapi/linux/genetlink.h
const CTRL_FAMILY: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;

/// The commands of `NBD_CMD_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::netlink) enum Command {
    Connect = 1,
    Disconnect = 2,
    Reconfigure = 3,
    LinkDead = 4,
    Status = 5,
}

/// Sends one command and returns its reply. Blocks until the driver has executed the command.
pub(super) fn execute(command: Command, attributes: Attributes) -> Result<Option<Message>> {
    let socket = open()?;
    let family = resolve(&socket)?;
    exchange(&socket, family.id, command as u8, attributes).map_err(|error| match error {
        Refusal::Errno(errno) => refused(command, errno),
        Refusal::Socket(error) => error,
    })
}

pub(super) struct Family {
    pub(super) id: u16,
    pub(super) group: Option<u32>,
}

/// Returns the number of the family, which changes when the module is reloaded, and of its multicast
/// group.
pub(super) fn resolve(socket: &NlSocketHandle) -> Result<Family> {
    let name = attribute(CTRL_ATTR_FAMILY_NAME, FAMILY).map_err(encoding)?;
    let attributes = std::iter::once(name).collect();
    let reply = exchange(socket, CTRL_FAMILY, CTRL_CMD_GETFAMILY, attributes);
    let reply = reply.map_err(|error| match error {
        // Before Linux 6.12 (observed on 6.1) the family exists in the initial network namespace only.
        Refusal::Errno(libc::ENOENT) if Path::new("/sys/module/nbd").exists() => Error::new(
            ErrorKind::Unsupported,
            "the nbd driver is loaded, but not visible in this network namespace",
        )
        .with_repair(
            "run cleat node in the host's network namespace (in a pod: hostNetwork: true)",
        ),
        Refusal::Errno(libc::ENOENT) => module_missing(),
        Refusal::Errno(errno) => {
            Error::new(ErrorKind::Internal, "cannot resolve the netlink family nbd")
                .with_source(io::Error::from_raw_os_error(errno))
        }
        Refusal::Socket(error) => error,
    })?;
    let reply = reply.ok_or_else(module_missing)?;
    let handle = reply.attrs().get_attr_handle();
    let id = handle.get_attr_payload_as::<u16>(CTRL_ATTR_FAMILY_ID);
    let id = id.map_err(|_| unexpected("the netlink family nbd has no number"))?;
    let groups = handle.get_nested_attributes::<u16>(CTRL_ATTR_MCAST_GROUPS).ok();
    let group = groups.and_then(|groups| {
        groups.iter().find_map(|group| {
            let group = group.get_attr_handle::<u16>().ok()?;
            let name =
                group.get_attr_payload_as_with_len::<String>(CTRL_ATTR_MCAST_GRP_NAME).ok()?;
            let ours = name.trim_end_matches('\0') == MULTICAST_GROUP;
            ours.then(|| group.get_attr_payload_as::<u32>(CTRL_ATTR_MCAST_GRP_ID).ok()).flatten()
        })
    });
    Ok(Family { id, group })
}

pub(super) enum Refusal {
    Errno(i32),
    Socket(Error),
}

/// Sends a request and receives messages until its acknowledgement. Returns the last message before it.
pub(super) fn exchange(
    socket: &NlSocketHandle,
    family: u16,
    command: u8,
    attributes: Attributes,
) -> Result<Option<Message>, Refusal> {
    let failed = |error: SocketError| Refusal::Socket(socket_error(&error));
    let version = FAMILY_VERSION;
    let payload = GenlmsghdrBuilder::default().cmd(command).version(version).attrs(attributes);
    let payload = payload.build().map_err(|error| {
        Refusal::Socket(unexpected("cannot build a netlink message").with_source(error))
    })?;
    let message = NlmsghdrBuilder::default()
        .nl_type(family)
        .nl_flags(NlmF::REQUEST | NlmF::ACK)
        .nl_payload(NlPayload::Payload(payload))
        .build()
        .map_err(|error| {
            Refusal::Socket(unexpected("cannot build a netlink message").with_source(error))
        })?;
    socket.send(&message).map_err(failed)?;
    let mut reply = None;
    loop {
        let (messages, _) = socket.recv::<u16, Message>().map_err(failed)?;
        for message in messages {
            match message.map_err(failed)?.nl_payload() {
                NlPayload::Ack(_) => return Ok(reply),
                NlPayload::Err(error) => return Err(Refusal::Errno(-error.error())),
                NlPayload::Payload(payload) => reply = Some(payload.clone()),
                _ => {}
            }
        }
    }
}

pub(super) fn open() -> Result<NlSocketHandle> {
    NlSocketHandle::connect(NlFamily::Generic, None, Groups::empty())
        .map_err(|error| socket_error(&error))
}

/// Translates the driver's error number for a command (drivers/block/nbd.c, `nbd_genl_*`).
fn refused(command: Command, errno: i32) -> Error {
    let error = match (command, errno) {
        (_, libc::EPERM | libc::EACCES) => return permission_missing(),
        (_, libc::EBUSY) => Error::new(ErrorKind::InUse, "the nbd device is in use"),
        (_, libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE) => {
            Error::new(ErrorKind::NoSpace, "the kernel cannot create another nbd device")
        }
        (Command::Connect, libc::EINVAL) => Error::new(
            ErrorKind::InvalidArgument,
            "the nbd driver refuses the size, the block size or the kind of socket",
        ),
        (Command::Reconfigure, libc::EINVAL | libc::ENODEV | libc::ENXIO) => Error::new(
            ErrorKind::NotFound,
            "the nbd device is not connected, or has another backend identifier",
        ),
        (Command::Disconnect, libc::EINVAL | libc::ENODEV | libc::ENXIO) => {
            Error::new(ErrorKind::NotFound, "the nbd device does not exist")
        }
        _ => Error::new(ErrorKind::Internal, format!("the nbd driver refused {command:?}"))
            .with_repair("see `dmesg` for the messages of the driver"),
    };
    error.with_source(io::Error::from_raw_os_error(errno))
}

pub(super) fn socket_error(error: &SocketError) -> Error {
    let kind = match error {
        SocketError::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            ErrorKind::PermissionDenied
        }
        _ => ErrorKind::Internal,
    };
    Error::new(kind, "generic netlink does not work").with_source(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_kind_of_their_reaction() {
        let kind = |command, errno| refused(command, errno).kind();
        assert_eq!(kind(Command::Connect, libc::EPERM), ErrorKind::PermissionDenied);
        assert_eq!(kind(Command::Connect, libc::EBUSY), ErrorKind::InUse);
        assert_eq!(kind(Command::Connect, libc::EINVAL), ErrorKind::InvalidArgument);
        assert_eq!(kind(Command::Reconfigure, libc::EINVAL), ErrorKind::NotFound);
        assert_eq!(kind(Command::Disconnect, libc::EIO), ErrorKind::Internal);
        assert!(refused(Command::Connect, libc::EPERM).repair().is_some());
    }
}
