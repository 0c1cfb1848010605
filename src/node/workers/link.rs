//! The supervisor's end of the channel to a worker: sends and receives messages on the event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use cleat_sys::seqpacket;
use cleat_worker_protocol::protocol::{FromWorker, MAX_PACKET, ToWorker};

/// A connected SOCK_SEQPACKET socket.
#[derive(Debug)]
pub(super) struct Link(AsyncFd<OwnedFd>);

impl Link {
    /// Wraps a connected socket. Must be called on the event loop.
    ///
    /// # Errors
    /// Returns an error if the event loop cannot register the descriptor.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self(watched(socket, Interest::READABLE | Interest::WRITABLE)?))
    }

    /// Sends a command with its descriptors.
    ///
    /// # Errors
    /// Returns an error if the worker has closed the channel, or if the message exceeds [`MAX_PACKET`].
    pub(super) async fn send(&self, command: &ToWorker, descriptors: &[OwnedFd]) -> io::Result<()> {
        let bytes = serde_json::to_vec(command)?;
        if bytes.len() > MAX_PACKET {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the message is longer than a packet",
            ));
        }
        let send = |socket: &OwnedFd| {
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            seqpacket::send(socket.as_fd(), &bytes, &borrowed)
        };
        self.0.async_io(Interest::WRITABLE, send).await
    }

    /// Receives the next message with its descriptors; returns `None` at the end of the channel.
    ///
    /// # Errors
    /// Returns an error if the channel breaks, or if the packet is not a message of the protocol.
    pub(super) async fn receive(&self) -> io::Result<Option<(FromWorker, Vec<OwnedFd>)>> {
        let receive = |socket: &OwnedFd| {
            let mut buffer = vec![0; MAX_PACKET];
            let received = match seqpacket::receive(socket.as_fd(), &mut buffer) {
                // A worker that ends with a command unread: the kernel reports that once, and before what the worker
                // has sent last (unix_release_sock in net/unix/af_unix.c).
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    seqpacket::receive(socket.as_fd(), &mut buffer)
                }
                received => received,
            };
            let (length, descriptors) = received?;
            buffer.truncate(length);
            Ok((buffer, descriptors))
        };
        let (bytes, descriptors) = self.0.async_io(Interest::READABLE, receive).await?;
        if bytes.is_empty() {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes)?, descriptors)))
    }

    /// Returns the user and the process that called listen(2) or socketpair(2) for the other end. The kernel
    /// keeps the process itself, not its number; the number is 0 if the process is not visible from here.
    ///
    /// # Errors
    /// Returns the error of getsockopt(2).
    pub(super) fn peer(&self) -> io::Result<(u32, u32)> {
        let credentials = nix::sys::socket::sockopt::PeerCredentials;
        let found = nix::sys::socket::getsockopt(self.0.get_ref(), credentials)?;
        Ok((found.uid(), found.pid().unsigned_abs()))
    }
}

/// Registers a descriptor with the event loop.
///
/// # Errors
/// Returns an error if the event loop cannot register it.
#[expect(
    deprecated,
    reason = "the replacement is unsafe for types whose descriptor may change; an OwnedFd's does not"
)]
pub(super) fn watched(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, interest)
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_messages_of_a_worker_are_received_although_it_has_not_read_a_command() {
        let (own, other) = crate::workers::sockets::seqpacket_pair().unwrap();
        let link = Link::new(own).unwrap();
        for message in [FromWorker::Disconnected, FromWorker::Closed] {
            let bytes = serde_json::to_vec(&message).unwrap();
            seqpacket::send(other.as_fd(), &bytes, &[]).unwrap();
        }
        link.send(&ToWorker::Stop, &[]).await.unwrap();
        drop(other);
        let first = link.receive().await.unwrap();
        assert!(matches!(first, Some((FromWorker::Disconnected, _))), "{first:?}");
        let second = link.receive().await.unwrap();
        assert!(matches!(second, Some((FromWorker::Closed, _))), "{second:?}");
        assert!(link.receive().await.unwrap().is_none());
    }
}
