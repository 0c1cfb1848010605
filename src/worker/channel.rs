//! The worker's end of a channel to a supervisor: messages of [`super::protocol`], one a packet.

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

/// How long the other side may keep us waiting in the middle of an exchange, in seconds. A
/// supervisor that is stopped must not stop the worker's control thread for good.
const PATIENCE_S: i64 = 5;

/// A connected SOCK_SEQPACKET unix socket.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// A command that arrived, with its descriptors; `None`: the other side is gone.
pub type Incoming = Option<(ToWorker, Vec<OwnedFd>)>;

impl Channel {
    /// Takes a connected socket.
    ///
    /// # Errors
    /// `InvalidArgument` when it is not a SOCK_SEQPACKET socket.
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
        // Blocking, with a bound: its other end may be non-blocking, that is another description.
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL).map_err(failed)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).map_err(failed)?;
        let patience = TimeVal::new(PATIENCE_S, 0);
        setsockopt(&socket, SendTimeout, &patience).map_err(failed)?;
        setsockopt(&socket, ReceiveTimeout, &patience).map_err(failed)?;
        Ok(Self(socket))
    }

    /// Accepts a connection; `None` when the caller is neither root nor our own user.
    ///
    /// # Errors
    /// When nobody is there any more, or the process has no descriptor left.
    pub fn accept(listener: &UnixListener) -> Result<Option<Self>> {
        // The type is for stream sockets, but accept4(2) is the same for every connected kind.
        let (socket, _) = listener
            .accept()
            .map_err(|e| Error::from_io("cannot accept on the control socket", e))?;
        let socket = OwnedFd::from(socket);
        let credentials = getsockopt(&socket, PeerCredentials)
            .map_err(|e| Error::from_io("cannot tell who connected", e.into()))?;
        let own = nix::unistd::geteuid().as_raw();
        if credentials.uid() != 0 && credentials.uid() != own {
            tracing::warn!(
                uid = credentials.uid(),
                pid = credentials.pid(),
                "a connection to the control socket was refused"
            );
            return Ok(None);
        }
        Self::new(socket).map(Some)
    }

    /// The next message. Call it when the socket is readable.
    ///
    /// # Errors
    /// `InvalidArgument` for what is no message; `Unavailable` when the channel breaks.
    pub fn receive(&self) -> Result<Incoming> {
        let mut buffer = vec![0; MAX_PACKET];
        let (length, descriptors) =
            seqpacket::receive(self.0.as_fd(), &mut buffer).map_err(|e| match e.kind() {
                std::io::ErrorKind::InvalidData => {
                    Error::new(ErrorKind::InvalidArgument, "the message does not fit")
                        .with_source(e)
                }
                _ => broken(e),
            })?;
        if length == 0 {
            return Ok(None);
        }
        let message = &buffer[..length];
        let command = match pretends_ignorance(message) {
            None => serde_json::from_slice(message),
            Some(error) => Err(error),
        }
        .map_err(|error| not_understood(message, error))?;
        Ok(Some((command, descriptors)))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `Unavailable` when the other side is gone, or takes nothing for too long.
    pub fn send(&self, message: &FromWorker, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = serde_json::to_vec(message)
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot encode").with_source(e))?;
        if bytes.len() > MAX_PACKET {
            return Err(Error::new(ErrorKind::Internal, "the message is too long"));
        }
        seqpacket::send(self.0.as_fd(), &bytes, descriptors).map_err(broken)
    }

    /// Sends that the last command failed.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send_failure(&self, error: &Error) -> Result<()> {
        let mut message = error.report();
        // Whatever a backend put into its text: it must fit into a packet.
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

const MESSAGE_BYTES: usize = 8192;

/// A message, as far as its name goes.
#[derive(serde::Deserialize)]
struct Named {
    command: String,
}

/// A test has a worker pretend to be older, by a command that it does not know.
fn pretends_ignorance(message: &[u8]) -> Option<serde_json::Error> {
    if !cfg!(feature = "fault") {
        return None;
    }
    let unknown = std::env::var("CLEAT_TEST_UNKNOWN").ok()?;
    let Named { command } = serde_json::from_slice(message).ok()?;
    (command == unknown).then(|| serde::de::Error::unknown_variant(&command, &[]))
}

/// A command of a newer supervisor is refused by its name, so that it can tell who must be replaced.
fn not_understood(message: &[u8], error: serde_json::Error) -> Error {
    let named = serde_json::from_slice::<Named>(message).ok();
    // serde's words for a tag that is not in the enum.
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
