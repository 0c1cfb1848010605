//! Attributes of the driver's messages (include/uapi/linux/nbd-netlink.h), encoded and decoded.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use neli::err::{BuilderError, SerError};
use neli::genl::{AttrTypeBuilder, Genlmsghdr, Nlattr, NlattrBuilder};
use neli::types::{Buffer, GenlBuffer};
use neli::{Size, ToBytes};

use crate::{ConnectSpec, DeviceIndex};
use cleat_core::error::{Error, ErrorKind, Result};

pub(super) const ATTR_INDEX: u16 = 1;
pub(super) const ATTR_SIZE_BYTES: u16 = 2;
pub(super) const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
pub(super) const ATTR_TIMEOUT: u16 = 4;
pub(super) const ATTR_SERVER_FLAGS: u16 = 5;
pub(super) const ATTR_SOCKETS: u16 = 7;
pub(super) const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
pub(super) const ATTR_DEVICE_LIST: u16 = 9;
pub(super) const ATTR_BACKEND_IDENTIFIER: u16 = 10;
pub(super) const DEVICE_ITEM: u16 = 1;
pub(super) const DEVICE_INDEX: u16 = 1;
pub(super) const DEVICE_CONNECTED: u16 = 2;
pub(super) const SOCK_ITEM: u16 = 1;
pub(super) const SOCK_FD: u16 = 1;

pub(super) type Attributes = GenlBuffer<u16, Buffer>;
pub(super) type Message = Genlmsghdr<u8, u16>;

#[derive(Debug, thiserror::Error)]
pub(super) enum EncodeError {
    #[error(transparent)]
    Build(#[from] BuilderError),
    #[error(transparent)]
    Serialize(#[from] SerError),
}

pub(super) fn connect_attributes(spec: &ConnectSpec) -> Result<Attributes, EncodeError> {
    let mut attributes = Attributes::new();
    attributes.push(attribute(ATTR_SIZE_BYTES, spec.size)?);
    attributes.push(attribute(ATTR_BLOCK_SIZE_BYTES, u64::from(spec.block_size))?);
    attributes.push(attribute(ATTR_SERVER_FLAGS, u64::from(spec.transmission_flags))?);
    // Always given: without it, a reused device keeps the request timeout of its last configuration.
    attributes.push(attribute(ATTR_TIMEOUT, whole_seconds(spec.request_timeout))?);
    let dead_connection_timeout = whole_seconds(spec.dead_connection_timeout);
    attributes.push(attribute(ATTR_DEAD_CONN_TIMEOUT, dead_connection_timeout)?);
    attributes.push(attribute(ATTR_BACKEND_IDENTIFIER, spec.identity.as_str())?);
    attributes.push(socket_attributes(&spec.sockets)?);
    Ok(attributes)
}

pub(super) fn device_attributes(index: DeviceIndex) -> Result<Attributes> {
    let index = attribute(ATTR_INDEX, index).map_err(encoding)?;
    Ok(std::iter::once(index).collect())
}

pub(super) fn attribute(
    kind: u16,
    value: impl Size + ToBytes,
) -> Result<Nlattr<u16, Buffer>, EncodeError> {
    let kind = AttrTypeBuilder::default().nla_type(kind).build().map_err(BuilderError::from)?;
    let built = NlattrBuilder::default().nla_type(kind).nla_payload(value).build();
    Ok(built.map_err(BuilderError::from)?)
}

pub(super) fn socket_attributes(sockets: &[OwnedFd]) -> Result<Nlattr<u16, Buffer>, EncodeError> {
    let mut list = attribute(ATTR_SOCKETS, Vec::<u8>::new())?;
    for socket in sockets {
        let item = attribute(SOCK_ITEM, Vec::<u8>::new())?;
        list = list.nest(&item.nest(&attribute(SOCK_FD, socket.as_raw_fd())?)?)?;
    }
    Ok(list)
}

/// Returns `time` in seconds, the driver's unit, rounded up so that a timeout is never shorter than
/// requested.
pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

pub(super) fn number(message: &Message, kind: u16) -> Option<u32> {
    message.attrs().get_attr_handle().get_attr_payload_as::<u32>(kind).ok()
}

pub(super) fn device_list(message: &Message) -> Vec<(DeviceIndex, bool)> {
    let handle = message.attrs().get_attr_handle();
    let Ok(list) = handle.get_nested_attributes::<u16>(ATTR_DEVICE_LIST) else { return Vec::new() };
    let items = list.iter().filter(|item| *item.nla_type().nla_type() == DEVICE_ITEM);
    items
        .filter_map(|item| {
            let item = item.get_attr_handle::<u16>().ok()?;
            let index = item.get_attr_payload_as::<u32>(DEVICE_INDEX).ok()?;
            let connected = item.get_attr_payload_as::<u8>(DEVICE_CONNECTED).ok()?;
            Some((index, connected != 0))
        })
        .collect()
}

pub(super) fn encoding(error: EncodeError) -> Error {
    unexpected("cannot build a netlink message").with_source(error)
}

pub(super) fn unexpected(message: &str) -> Error {
    Error::new(ErrorKind::Internal, message)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::net::UnixStream;

    use neli::genl::GenlmsghdrBuilder;

    use super::*;
    use crate::Identity;
    use crate::netlink::socket::Command;

    fn bytes(attributes: &Attributes) -> Vec<u8> {
        let mut cursor = io::Cursor::new(Vec::new());
        attributes.to_bytes(&mut cursor).unwrap();
        cursor.into_inner()
    }

    /// Compares the message byte for byte with the layout of `nbd-netlink.h` and nlattr(7).
    #[test]
    fn connect_is_encoded_as_the_driver_reads_it() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let fd = socket.as_raw_fd().to_ne_bytes();
        let spec = ConnectSpec {
            sockets: vec![socket.into()],
            size: 1 << 20,
            block_size: 4096,
            transmission_flags: 0x105,
            identity: Identity::new("00", "a"),
            dead_connection_timeout: Duration::from_millis(1500),
            request_timeout: Duration::ZERO,
            replay_delay: None,
        };
        let mut expected = Vec::new();
        for (kind, value) in [(2u16, 1u64 << 20), (3, 4096), (5, 0x105), (4, 0), (8, 2)] {
            expected.extend(12u16.to_ne_bytes());
            expected.extend(kind.to_ne_bytes());
            expected.extend(value.to_ne_bytes());
        }
        expected.extend(15u16.to_ne_bytes());
        expected.extend(10u16.to_ne_bytes());
        expected.extend(b"cleat.00.a\0\0");
        const NESTED: u16 = 1 << 15;
        for (len, kind) in [(16u16, 7 | NESTED), (12, 1 | NESTED), (8, 1)] {
            expected.extend(len.to_ne_bytes());
            expected.extend(kind.to_ne_bytes());
        }
        expected.extend(fd);
        assert_eq!(bytes(&connect_attributes(&spec).unwrap()), expected);
    }

    #[test]
    fn a_list_of_devices_is_parsed() {
        let item = |index: u32, connected: u8| {
            let item = attribute(DEVICE_ITEM, Vec::<u8>::new()).unwrap();
            item.nest(&attribute(DEVICE_INDEX, index).unwrap())
                .unwrap()
                .nest(&attribute(DEVICE_CONNECTED, connected).unwrap())
                .unwrap()
        };
        let list = attribute(ATTR_DEVICE_LIST, Vec::<u8>::new()).unwrap();
        let list = list.nest(&item(0, 1)).unwrap().nest(&item(7, 0)).unwrap();
        let message = GenlmsghdrBuilder::default()
            .cmd(Command::Status as u8)
            .version(1)
            .attrs(std::iter::once(list).collect())
            .build()
            .unwrap();
        assert_eq!(device_list(&message), [(0, true), (7, false)]);
    }

    #[test]
    fn timeouts_are_rounded_up() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(1)), 1);
        assert_eq!(whole_seconds(Duration::from_secs(5)), 5);
    }
}
