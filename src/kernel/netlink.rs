//! The nbd driver's generic netlink family (include/uapi/linux/nbd-netlink.h, kernel 6.12).
//!
//! The driver carries a command out inside `sendmsg`, under a lock that all commands share
//! (`genl_mutex`; the family has no parallel operations). So each command has a socket and a
//! disposable thread of its own, and a deadline.
//!
//! DESTROY_ON_DISCONNECT is not asked for: the device would be deleted behind a CONNECT that finds
//! it again, and a free device is reused sooner than a new one is made. DISCONNECT_ON_CLOSE is
//! not, either: udev's first look would end the device.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;
use neli::err::{BuilderError, SerError, SocketError};
use neli::genl::{AttrTypeBuilder, Genlmsghdr, GenlmsghdrBuilder, Nlattr, NlattrBuilder};
use neli::nl::{NlPayload, NlmsghdrBuilder};
use neli::socket::synchronous::NlSocketHandle;
use neli::types::{Buffer, GenlBuffer};
use neli::utils::Groups;
use neli::{Size, ToBytes};

use super::bounded_call::BoundedCalls;
use super::{ConnectSpec, DeviceIndex, Identity, module_missing, permission_missing};
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

const ATTR_INDEX: u16 = 1;
const ATTR_SIZE_BYTES: u16 = 2;
const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const ATTR_TIMEOUT: u16 = 4;
const ATTR_SERVER_FLAGS: u16 = 5;
const ATTR_SOCKETS: u16 = 7;
const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
const ATTR_DEVICE_LIST: u16 = 9;
const ATTR_BACKEND_IDENTIFIER: u16 = 10;
const DEVICE_ITEM: u16 = 1;
const DEVICE_INDEX: u16 = 1;
const DEVICE_CONNECTED: u16 = 2;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// More connections than this bring nothing, and must fit one attribute (64 KiB).
const CONNECTIONS_MAX: usize = 128;

/// The commands of `NBD_CMD_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Connect = 1,
    Disconnect = 2,
    Reconfigure = 3,
    LinkDead = 4,
    Status = 5,
}

type Attributes = GenlBuffer<u16, Buffer>;
type Message = Genlmsghdr<u8, u16>;

/// Sends commands, one at a time: the driver takes no two at once either. So no CONNECT of ours comes
/// between the look at a device and its DISCONNECT, and no command that was given up overtakes a
/// later one, or is begun after all.
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
            // Whoever panicked with it: it protects an order, no data.
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            if Instant::now() >= deadline {
                let message = "an earlier command kept the kernel until the deadline";
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
            call()
        };
        let late = |result: Result<T>| result.map_or((), late);
        self.threads.run(what, deadline, call, late)?
    }

    /// CONNECT with an index of the kernel's choice. A device that appears after the deadline goes to
    /// `late`.
    pub(super) fn connect(
        &self,
        spec: ConnectSpec,
        deadline: Instant,
        late: impl FnOnce(DeviceIndex) + Send + 'static,
    ) -> Result<DeviceIndex> {
        check_sockets(&spec.sockets)?;
        if spec.size == 0 || !matches!(spec.block_size, 512 | 1024 | 2048 | 4096) {
            let message =
                format!("a device of {} bytes in blocks of {}", spec.size, spec.block_size);
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let attributes = connect_attributes(&spec).map_err(encoding)?;
        let sockets = spec.sockets;
        let call = move || {
            let reply = execute(Command::Connect, attributes);
            // The kernel has its own references now; an end that is left open here would hide a
            // connection that the kernel dropped.
            drop(sockets);
            reply.and_then(|reply| {
                let index = reply.and_then(|reply| number(&reply, ATTR_INDEX));
                index.ok_or_else(|| unexpected("CONNECT gave no device number"))
            })
        };
        self.run("connect an nbd device", deadline, call, late)
    }

    /// DISCONNECT, if `is_meant` still says so when its turn has come: the command goes by the number
    /// alone. The device is free once its last opener has closed it.
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

    /// RECONFIGURE with new sockets, a new size, or both.
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

    /// STATUS of every device: its index, and whether it is configured (which does not mean that a
    /// socket is alive).
    pub(super) fn status(&self, deadline: Instant) -> Result<Vec<(DeviceIndex, bool)>> {
        let call = || execute(Command::Status, Attributes::new());
        let reply = self.run("list nbd devices", deadline, call, drop)?;
        let reply = reply.ok_or_else(|| unexpected("STATUS gave no list"))?;
        Ok(device_list(&reply))
    }
}

/// Receives what the driver tells by itself.
pub(super) struct LinkEvents(pub(super) NlSocketHandle);

impl LinkEvents {
    /// Subscribes to the driver's multicast group, which reaches the initial network namespace.
    pub(super) fn subscribe() -> Result<Self> {
        let socket = open()?;
        let family = resolve(&socket)?;
        let group = family.group.ok_or_else(|| unexpected("the nbd family has no events"))?;
        let groups = Groups::new_groups(&[group]);
        socket.add_mcast_membership(groups).map_err(|error| socket_error(&error))?;
        Ok(Self(socket))
    }

    /// Takes one packet: the devices with a dead connection. Call when the socket is readable.
    pub(super) fn receive(&self) -> Vec<DeviceIndex> {
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

/// Whether the driver's family is there.
///
/// # Errors
/// `Unsupported` when it is not, and what netlink gives otherwise.
pub(super) fn probe() -> Result<()> {
    resolve(&open()?).map(drop)
}

#[derive(Debug, thiserror::Error)]
enum EncodeError {
    #[error(transparent)]
    Build(#[from] BuilderError),
    #[error(transparent)]
    Serialize(#[from] SerError),
}

fn connect_attributes(spec: &ConnectSpec) -> Result<Attributes, EncodeError> {
    let mut attributes = Attributes::new();
    attributes.push(attribute(ATTR_SIZE_BYTES, spec.size)?);
    attributes.push(attribute(ATTR_BLOCK_SIZE_BYTES, u64::from(spec.block_size))?);
    attributes.push(attribute(ATTR_SERVER_FLAGS, u64::from(spec.transmission_flags))?);
    // Always given: without it a reused device keeps the request timeout of its last owner.
    attributes.push(attribute(ATTR_TIMEOUT, whole_seconds(spec.request_timeout))?);
    let dead_connection_timeout = whole_seconds(spec.dead_connection_timeout);
    attributes.push(attribute(ATTR_DEAD_CONN_TIMEOUT, dead_connection_timeout)?);
    attributes.push(attribute(ATTR_BACKEND_IDENTIFIER, spec.identity.as_str())?);
    attributes.push(socket_attributes(&spec.sockets)?);
    Ok(attributes)
}

fn device_attributes(index: DeviceIndex) -> Result<Attributes> {
    let index = attribute(ATTR_INDEX, index).map_err(encoding)?;
    Ok(std::iter::once(index).collect())
}

fn attribute(kind: u16, value: impl Size + ToBytes) -> Result<Nlattr<u16, Buffer>, EncodeError> {
    let kind = AttrTypeBuilder::default().nla_type(kind).build().map_err(BuilderError::from)?;
    let built = NlattrBuilder::default().nla_type(kind).nla_payload(value).build();
    Ok(built.map_err(BuilderError::from)?)
}

fn socket_attributes(sockets: &[OwnedFd]) -> Result<Nlattr<u16, Buffer>, EncodeError> {
    let mut list = attribute(ATTR_SOCKETS, Vec::<u8>::new())?;
    for socket in sockets {
        let item = attribute(SOCK_ITEM, Vec::<u8>::new())?;
        list = list.nest(&item.nest(&attribute(SOCK_FD, socket.as_raw_fd())?)?)?;
    }
    Ok(list)
}

fn check_sockets(sockets: &[OwnedFd]) -> Result<()> {
    if (1..=CONNECTIONS_MAX).contains(&sockets.len()) {
        return Ok(());
    }
    let message = format!("{} connections; 1 to {CONNECTIONS_MAX} are possible", sockets.len());
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

/// The driver counts in seconds: rounded up, so that what was asked for is never cut short.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Sends one command and takes its reply, on the calling thread.
fn execute(command: Command, attributes: Attributes) -> Result<Option<Message>> {
    let socket = open()?;
    let family = resolve(&socket)?;
    exchange(&socket, family.id, command as u8, attributes).map_err(|error| match error {
        Refusal::Errno(errno) => refused(command, errno),
        Refusal::Socket(error) => error,
    })
}

struct Family {
    id: u16,
    group: Option<u32>,
}

/// Asks for the family's number, which changes when the module is loaded anew.
fn resolve(socket: &NlSocketHandle) -> Result<Family> {
    let name = attribute(CTRL_ATTR_FAMILY_NAME, FAMILY).map_err(encoding)?;
    let attributes = std::iter::once(name).collect();
    let reply = exchange(socket, CTRL_FAMILY, CTRL_CMD_GETFAMILY, attributes);
    let reply = reply.map_err(|error| match error {
        // Before Linux 6.12 (seen on 6.1) only the initial network namespace has the family.
        Refusal::Errno(libc::ENOENT) if Path::new("/sys/module/nbd").exists() => Error::new(
            ErrorKind::Unsupported,
            "the nbd driver is loaded, but out of reach from here",
        )
        .with_repair(
            "run cleat node in the host's network namespace (in a pod: hostNetwork: true)",
        ),
        Refusal::Errno(libc::ENOENT) => module_missing(),
        Refusal::Errno(errno) => {
            Error::new(ErrorKind::Internal, "netlink does not resolve the family nbd")
                .with_source(io::Error::from_raw_os_error(errno))
        }
        Refusal::Socket(error) => error,
    })?;
    let reply = reply.ok_or_else(module_missing)?;
    let handle = reply.attrs().get_attr_handle();
    let id = handle.get_attr_payload_as::<u16>(CTRL_ATTR_FAMILY_ID);
    let id = id.map_err(|_| unexpected("the nbd family has no number"))?;
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

enum Refusal {
    Errno(i32),
    Socket(Error),
}

/// Sends a request and reads up to its acknowledgement. Returns the last message before it.
fn exchange(
    socket: &NlSocketHandle,
    family: u16,
    command: u8,
    attributes: Attributes,
) -> Result<Option<Message>, Refusal> {
    let failed = |error: SocketError| Refusal::Socket(socket_error(&error));
    let version = FAMILY_VERSION;
    let payload = GenlmsghdrBuilder::default().cmd(command).version(version).attrs(attributes);
    let payload = payload.build().map_err(|error| {
        Refusal::Socket(unexpected("a netlink message cannot be built").with_source(error))
    })?;
    let message = NlmsghdrBuilder::default()
        .nl_type(family)
        .nl_flags(NlmF::REQUEST | NlmF::ACK)
        .nl_payload(NlPayload::Payload(payload))
        .build()
        .map_err(|error| {
            Refusal::Socket(unexpected("a netlink message cannot be built").with_source(error))
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

fn open() -> Result<NlSocketHandle> {
    NlSocketHandle::connect(NlFamily::Generic, None, Groups::empty())
        .map_err(|error| socket_error(&error))
}

fn number(message: &Message, kind: u16) -> Option<u32> {
    message.attrs().get_attr_handle().get_attr_payload_as::<u32>(kind).ok()
}

fn device_list(message: &Message) -> Vec<(DeviceIndex, bool)> {
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

/// What the driver's error number means on that command (drivers/block/nbd.c, `nbd_genl_*`).
fn refused(command: Command, errno: i32) -> Error {
    let error = match (command, errno) {
        (_, libc::EPERM | libc::EACCES) => return permission_missing(),
        (_, libc::EBUSY) => Error::new(ErrorKind::InUse, "the nbd device is in use"),
        (_, libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE) => {
            Error::new(ErrorKind::NoSpace, "the kernel has no room for another nbd device")
        }
        (Command::Connect, libc::EINVAL) => Error::new(
            ErrorKind::InvalidArgument,
            "the nbd driver refuses the device: size, block size or kind of socket",
        ),
        (Command::Reconfigure, libc::EINVAL | libc::ENODEV | libc::ENXIO) => Error::new(
            ErrorKind::NotFound,
            "the nbd device is not connected, or belongs to somebody else",
        ),
        (Command::Disconnect, libc::EINVAL | libc::ENODEV | libc::ENXIO) => {
            Error::new(ErrorKind::NotFound, "there is no such nbd device")
        }
        _ => Error::new(ErrorKind::Internal, format!("the nbd driver refused {command:?}"))
            .with_repair("see `dmesg` for what the driver says"),
    };
    error.with_source(io::Error::from_raw_os_error(errno))
}

fn encoding(error: EncodeError) -> Error {
    unexpected("a netlink message cannot be built").with_source(error)
}

fn unexpected(message: &str) -> Error {
    Error::new(ErrorKind::Internal, message)
}

fn socket_error(error: &SocketError) -> Error {
    let kind = match error {
        SocketError::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            ErrorKind::PermissionDenied
        }
        _ => ErrorKind::Internal,
    };
    Error::new(kind, "generic netlink does not work here").with_source(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn bytes(attributes: &Attributes) -> Vec<u8> {
        let mut cursor = io::Cursor::new(Vec::new());
        attributes.to_bytes(&mut cursor).unwrap();
        cursor.into_inner()
    }

    /// The message as `nbd-netlink.h` and `nlattr(7)` lay it out, byte for byte.
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
    fn a_list_of_devices_is_read() {
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
    fn refusals_prescribe_the_reaction() {
        let kind = |command, errno| refused(command, errno).kind();
        assert_eq!(kind(Command::Connect, libc::EPERM), ErrorKind::PermissionDenied);
        assert_eq!(kind(Command::Connect, libc::EBUSY), ErrorKind::InUse);
        assert_eq!(kind(Command::Connect, libc::EINVAL), ErrorKind::InvalidArgument);
        assert_eq!(kind(Command::Reconfigure, libc::EINVAL), ErrorKind::NotFound);
        assert_eq!(kind(Command::Disconnect, libc::EIO), ErrorKind::Internal);
        assert!(refused(Command::Connect, libc::EPERM).repair().is_some());
    }

    #[test]
    fn a_command_that_was_given_up_before_its_turn_is_never_begun() {
        let netlink = Netlink::new(BoundedCalls::new(8));
        let turn = netlink.turn.lock().unwrap();
        let (begun, was_begun) = crossbeam_channel::bounded(1);
        let call = move || begun.send(()).map_err(|_| unexpected("nobody listens"));
        let soon = Instant::now() + Duration::from_millis(20);
        let error = netlink.run("wait", soon, call, drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(turn);
        // The sender is dropped with the call, unused.
        assert!(was_begun.recv().is_err());
        let later = Instant::now() + Duration::from_secs(10);
        assert_eq!(netlink.run("answer", later, || Ok(7), drop).unwrap(), 7);
    }

    #[test]
    fn a_device_that_is_no_longer_meant_is_not_disconnected() {
        let netlink = Netlink::new(BoundedCalls::new(8));
        let later = Instant::now() + Duration::from_secs(10);
        // No socket is even opened: without nbd this would fail.
        netlink.disconnect(0, later, || Ok(false)).unwrap();
    }

    #[test]
    fn timeouts_are_never_cut_short() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(1)), 1);
        assert_eq!(whole_seconds(Duration::from_secs(5)), 5);
    }
}
