//! The driver's commands, encoded by hand (include/uapi/linux/nbd-netlink.h, genetlink.h). Each command
//! has only the attributes that a test needs, and returns the kernel's error number. The module is
//! deliberately independent of the netlink code of cleat.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const FAMILY_GROUPS: u16 = 7;
const GROUP_ID: u16 = 2;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const LINK_DEAD: u8 = 4;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const BACKEND_IDENTIFIER: u16 = 10;

const NESTED: u16 = 1 << 15;
const ERROR: u16 = 2;
const REQUEST_AND_ACK: u16 = 1 | 4;
/// The size of nlmsghdr, and of nlmsghdr with genlmsghdr.
const HEADER: usize = 16;
const HEADERS: usize = 20;

/// The attributes of a CONNECT command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) size: u64,
    pub(crate) flags: u64,
    pub(crate) identifier: &'a str,
    /// `None` omits the attribute.
    pub(crate) timeout_s: Option<u64>,
    pub(crate) dead_timeout_s: u64,
}

/// Sends CONNECT. The kernel chooses the device; returns its number.
pub(crate) fn connect(setup: Setup<'_>, sockets: &[OwnedFd]) -> Result<u32, Errno> {
    let mut attributes = number(SIZE_BYTES, setup.size);
    attributes.extend(number(BLOCK_SIZE_BYTES, 4096));
    attributes.extend(number(SERVER_FLAGS, setup.flags));
    attributes.extend(number(DEAD_CONN_TIMEOUT, setup.dead_timeout_s));
    attributes.extend(setup.timeout_s.map(|s| number(TIMEOUT, s)).unwrap_or_default());
    attributes.extend(text(BACKEND_IDENTIFIER, setup.identifier));
    attributes.extend(socket_list(sockets));
    let reply = Family::find()?.call(CONNECT, &attributes)?;
    find(&reply, INDEX).map(read_u32).ok_or(Errno::EPROTO)
}

/// Sends RECONFIGURE with new sockets, a new size, or both.
pub(crate) fn reconfigure(
    index: u32,
    identifier: Option<&str>,
    sockets: &[OwnedFd],
    size: Option<u64>,
) -> Result<(), Errno> {
    let mut attributes = attribute(INDEX, &index.to_ne_bytes());
    attributes.extend(identifier.map(|id| text(BACKEND_IDENTIFIER, id)).unwrap_or_default());
    attributes.extend(size.map(|size| number(SIZE_BYTES, size)).unwrap_or_default());
    if !sockets.is_empty() {
        attributes.extend(socket_list(sockets));
    }
    Family::find()?.call(RECONFIGURE, &attributes).map(drop)
}

/// Sends DISCONNECT for the device with this number.
pub(crate) fn disconnect(index: u32) -> Result<(), Errno> {
    Family::find()?.call(DISCONNECT, &attribute(INDEX, &index.to_ne_bytes())).map(drop)
}

/// The driver's generic netlink family, as visible in the calling thread's network namespace.
pub(crate) struct Family {
    socket: OwnedFd,
    id: u16,
    /// Its multicast group.
    pub(crate) group: u32,
}

impl Family {
    /// Looks up the family.
    pub(crate) fn find() -> Result<Self, Errno> {
        let socket = open(0)?;
        let reply = exchange(&socket, CONTROLLER, GET_FAMILY, &text(FAMILY_NAME, "nbd"))?;
        let id = find(&reply, FAMILY_ID).map(|id| u16::from_ne_bytes([id[0], id[1]]));
        let group = find(&reply, FAMILY_GROUPS)
            .and_then(|list| find(list, 1))
            .and_then(|first| find(first, GROUP_ID))
            .map(read_u32);
        let (id, group) = id.zip(group).ok_or(Errno::EPROTO)?;
        Ok(Self { socket, id, group })
    }

    fn call(&self, command: u8, attributes: &[u8]) -> Result<Vec<u8>, Errno> {
        exchange(&self.socket, self.id, command, attributes)
    }
}

/// A subscription to LINK_DEAD events.
pub(crate) struct Links(OwnedFd);

impl Links {
    /// Joins the group, in the calling thread's network namespace.
    pub(crate) fn join(group: u32) -> Result<Self, Errno> {
        assert!((1..=32).contains(&group), "group {group} does not fit the mask of bind");
        open(1 << (group - 1)).map(Self)
    }

    /// Waits for the next event and returns its device; `None` when no event arrives within `limit`.
    pub(crate) fn next(&self, limit: Duration) -> Option<u32> {
        let limit = TimeVal::new(limit.as_secs().try_into().expect("seconds"), 1);
        setsockopt(&self.0, sockopt::ReceiveTimeout, &limit).expect("a time limit");
        let mut buffer = [0; 4096];
        let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()).ok()?;
        assert!(length >= HEADERS && buffer[HEADER] == LINK_DEAD, "{:?}", &buffer[..length]);
        find(&buffer[HEADERS..length], INDEX).map(read_u32)
    }
}

fn open(groups: u32) -> Result<OwnedFd, Errno> {
    let protocol = SockProtocol::NetlinkGeneric;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

/// Sends a command, waits for its acknowledgement, and returns the attributes of the reply.
fn exchange(
    socket: &OwnedFd,
    family: u16,
    command: u8,
    attributes: &[u8],
) -> Result<Vec<u8>, Errno> {
    let length = u32::try_from(HEADERS + attributes.len()).expect("a short message");
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST_AND_ACK.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    send(socket.as_raw_fd(), &message, MsgFlags::empty())?;
    let mut reply = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..length];
        while rest.len() >= HEADERS {
            let size = (read_u32(rest) as usize).clamp(HEADERS, rest.len());
            if u16::from_ne_bytes([rest[4], rest[5]]) == ERROR {
                let code = i32::from_ne_bytes([rest[16], rest[17], rest[18], rest[19]]);
                return if code == 0 { Ok(reply) } else { Err(Errno::from_raw(-code)) };
            }
            reply = rest[HEADERS..size].to_vec();
            rest = &rest[size.next_multiple_of(4).min(rest.len())..];
        }
    }
}

fn attribute(kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + payload.len()).expect("a short attribute");
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn number(kind: u16, value: u64) -> Vec<u8> {
    attribute(kind, &value.to_ne_bytes())
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, format!("{value}\0").as_bytes())
}

fn socket_list(sockets: &[OwnedFd]) -> Vec<u8> {
    let items = sockets
        .iter()
        .flat_map(|socket| attribute(1 | NESTED, &attribute(1, &socket.as_raw_fd().to_ne_bytes())));
    attribute(SOCKETS | NESTED, &items.collect::<Vec<u8>>())
}

/// The payload of the first attribute of that kind.
fn find(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    while attributes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        let found = u16::from_ne_bytes([attributes[2], attributes[3]]) & !NESTED;
        let payload = attributes.get(4..length)?;
        if found == kind {
            return Some(payload);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

fn read_u32(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
