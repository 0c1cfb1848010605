//! The worker's end of a channel to a supervisor: one message of [`super::protocol`] in each packet.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::sockopt::{PeerCredentials, ReceiveTimeout, SendTimeout, SockType};
use nix::sys::socket::{getsockopt, setsockopt};
use nix::sys::time::TimeVal;

use super::protocol::{Failure, FromWorker, MAX_PACKET, ToWorker};
use super::version::BUILD;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::seqpacket;

/// The timeout of a send or a receive, in seconds. A supervisor that is stopped (SIGSTOP) must not block the
/// worker's control thread without a limit.
const TIMEOUT_S: i64 = 5;

/// A connected SOCK_SEQPACKET unix socket.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// A received command with its descriptors; `None` at the end of the channel.
pub type Incoming = Option<(ToWorker, Vec<OwnedFd>)>;

impl Channel {
    /// Takes a connected socket.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if it is not a SOCK_SEQPACKET socket.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        let failed = |error: nix::Error| {
            Error::new(ErrorKind::InvalidArgument, "the channel is not a usable socket")
                .with_source(error)
        };
        if getsockopt(&socket, SockType).map_err(failed)? != nix::sys::socket::SockType::SeqPacket {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "the channel is not a SOCK_SEQPACKET socket",
            ));
        }
        // Blocking, with a timeout. The other end is another open file description and may be non-blocking.
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL).map_err(failed)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).map_err(failed)?;
        let timeout = TimeVal::new(TIMEOUT_S, 0);
        setsockopt(&socket, SendTimeout, &timeout).map_err(failed)?;
        setsockopt(&socket, ReceiveTimeout, &timeout).map_err(failed)?;
        Ok(Self(socket))
    }

    /// Returns the user of the process that made the other end.
    ///
    /// # Errors
    /// Returns the error of getsockopt(2).
    pub fn peer_user(&self) -> Result<u32> {
        let credentials = getsockopt(&self.0, PeerCredentials)
            .map_err(|e| Error::from_io("cannot read the credentials of a connection", e.into()))?;
        Ok(credentials.uid())
    }

    /// Accepts a connection. Returns `None` if the peer's user is not `user`.
    ///
    /// # Errors
    /// Returns an error if the peer has closed the connection, or if no descriptor is left.
    pub fn accept(listener: &UnixListener, user: u32) -> Result<Option<Self>> {
        // The type is for stream sockets, but accept4(2) is the same for every connection-based type.
        let (socket, _) = listener
            .accept()
            .map_err(|e| Error::from_io("cannot accept on the control socket", e))?;
        let socket = OwnedFd::from(socket);
        let credentials = getsockopt(&socket, PeerCredentials)
            .map_err(|e| Error::from_io("cannot read the credentials of a connection", e.into()))?;
        if credentials.uid() != user {
            tracing::warn!(
                uid = credentials.uid(),
                pid = credentials.pid(),
                "a connection to the control socket was refused"
            );
            return Ok(None);
        }
        Self::new(socket).map(Some)
    }

    /// Receives the next message. Blocks for at most 5 s if the socket is not readable.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an invalid message, `Unsupported` for a command that this build does not
    /// know, and `Unavailable` if the channel breaks.
    pub fn receive(&self) -> Result<Incoming> {
        let mut buffer = vec![0; MAX_PACKET];
        let (length, descriptors) =
            seqpacket::receive(self.0.as_fd(), &mut buffer).map_err(|e| match e.kind() {
                std::io::ErrorKind::InvalidData => {
                    Error::new(ErrorKind::InvalidArgument, "the message is too long").with_source(e)
                }
                _ => broken(e),
            })?;
        if length == 0 {
            return Ok(None);
        }
        let message = &buffer[..length];
        let command = match simulated_unknown(message) {
            None => serde_json::from_slice(message),
            Some(error) => Err(error),
        }
        .map_err(|error| invalid_message(message, error))?;
        Ok(Some((command, descriptors)))
    }

    /// Sends a message with descriptors. Blocks for at most 5 s.
    ///
    /// # Errors
    /// Returns `Unavailable` if the channel is closed, or if the other side does not receive for 5 s.
    pub fn send(&self, message: &FromWorker, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = serde_json::to_vec(message).map_err(|e| {
            Error::new(ErrorKind::Internal, "cannot encode a message").with_source(e)
        })?;
        if bytes.len() > MAX_PACKET {
            return Err(Error::new(ErrorKind::Internal, "the message is too long"));
        }
        seqpacket::send(self.0.as_fd(), &bytes, descriptors).map_err(broken)
    }

    /// Reports that the last command failed.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send_failure(&self, error: &Error) -> Result<()> {
        let mut message = error.report();
        // The text of a backend may be longer than a packet.
        let end = (0..=MESSAGE_BYTES).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or(0));
        let repair = error.repair().map(|text| text.chars().take(1024).collect());
        self.send(&FromWorker::Failed(Failure { kind: error.kind(), message, repair }), &[])
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The maximum length of the message of a failure.
const MESSAGE_BYTES: usize = 8192;

/// The name of a command, without its fields.
#[derive(serde::Deserialize)]
struct Named {
    command: String,
}

/// Returns an error for the command that a test selects with `CLEAT_TEST_UNKNOWN`, as an older build does
/// that does not know it.
fn simulated_unknown(message: &[u8]) -> Option<serde_json::Error> {
    if !cfg!(feature = "fault") {
        return None;
    }
    let unknown = std::env::var("CLEAT_TEST_UNKNOWN").ok()?;
    let Named { command } = serde_json::from_slice(message).ok()?;
    (command == unknown).then(|| serde::de::Error::unknown_variant(&command, &[]))
}

/// Makes the error for a message that cannot be parsed. A command that only a newer build knows is refused by
/// name, and the error names this build, so that the reader knows which side is older.
fn invalid_message(message: &[u8], error: serde_json::Error) -> Error {
    let named = serde_json::from_slice::<Named>(message).ok();
    // serde's message for a tag that is not in the enum.
    match named.filter(|_| error.to_string().starts_with("unknown variant")) {
        Some(Named { command }) => {
            let command: String = command.chars().take(64).collect();
            let message = format!("this worker, {BUILD}, does not know the command {command:?}");
            Error::new(ErrorKind::Unsupported, message)
        }
        None => Error::new(ErrorKind::InvalidArgument, "not a message of the worker protocol")
            .with_source(error),
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the channel to the supervisor broke").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType as Kind, UnixAddr, bind, connect, listen, socket,
    };
    use std::os::fd::AsRawFd;

    fn seqpacket() -> OwnedFd {
        let flags = SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Unix, Kind::SeqPacket, flags, None).unwrap()
    }

    #[test]
    fn only_a_peer_of_the_expected_user_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let address = UnixAddr::new(&directory.path().join("control.sock")).unwrap();
        let listener = seqpacket();
        bind(listener.as_raw_fd(), &address).unwrap();
        listen(&listener, Backlog::new(2).unwrap()).unwrap();
        let listener = UnixListener::from(listener);
        let clients = [seqpacket(), seqpacket()];
        for client in &clients {
            connect(client.as_raw_fd(), &address).unwrap();
        }
        let own = nix::unistd::geteuid().as_raw();
        // Root is refused, too, unless the supervisor is root.
        assert!(Channel::accept(&listener, own + 1).unwrap().is_none());
        let accepted = Channel::accept(&listener, own).unwrap().unwrap();
        assert_eq!(accepted.peer_user().unwrap(), own);
    }
}
