//! Packets with file descriptors, over SOCK_SEQPACKET sockets (unix(7), SCM_RIGHTS).
//!
//! Invariant: every descriptor that the kernel delivers has an owner at once, so that none leaks, not even
//! from an invalid packet.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The maximum number of descriptors in a packet: enough for all connections of a worker, or for all parts
/// of a volume in memory, and a few more.
pub const MAX_DESCRIPTORS: usize = 128;

/// The kernel's own limit of descriptors in a packet (SCM_MAX_FD). With space for all of them, no list of
/// descriptors is truncated, and each one that arrives can be closed.
const ROOM: usize = 253;

/// Sends one packet. Does not raise SIGPIPE.
///
/// # Errors
/// Returns `WouldBlock` on a non-blocking socket whose peer is slow; `EPIPE` if the peer has closed its
/// socket; `InvalidInput` for more than [`MAX_DESCRIPTORS`] descriptors.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::Error::other("a packet was sent partially")) }
}

/// Receives one packet into `buffer`. Returns its length and its descriptors, which are close-on-exec. A
/// length of 0 means that the peer has closed its socket.
///
/// # Errors
/// Returns `WouldBlock` on a non-blocking socket; `InvalidData` for a packet that is longer than `buffer`, or
/// for more than [`MAX_DESCRIPTORS`] descriptors.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(ROOM))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(buffer)];
    let message = recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let cut = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let length = message.bytes;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            descriptors.extend(received);
        }
    }
    if cut || descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than allowed"));
    }
    Ok((length, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, AsRawFd};

    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, socketpair,
    };

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SockFlag::SOCK_CLOEXEC;
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap()
    }

    #[test]
    fn packets_arrive_one_by_one_with_their_descriptors() {
        let (a, b) = pair();
        let (read_end, write_end) = nix::unistd::pipe().unwrap();
        send(a.as_fd(), b"one", &[write_end.as_fd()]).unwrap();
        send(a.as_fd(), b"two!", &[]).unwrap();
        drop(write_end);
        let mut buffer = [0; 16];
        let (length, descriptors) = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..length], descriptors.len()), (&b"one"[..], 1));
        nix::unistd::write(&descriptors[0], b"x").unwrap();
        nix::unistd::read(&read_end, &mut buffer).unwrap();
        assert_eq!(buffer[0], b'x');
        let (length, descriptors) = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..length], descriptors.len()), (&b"two!"[..], 0));
        drop(a);
        assert_eq!(receive(b.as_fd(), &mut buffer).unwrap().0, 0);
        assert!(send(b.as_fd(), b"x", &[]).is_err());
    }

    #[test]
    fn a_packet_longer_than_the_buffer_is_refused() {
        let (a, b) = pair();
        send(a.as_fd(), &[7; 32], &[]).unwrap();
        let error = receive(b.as_fd(), &mut [0; 16]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn too_many_descriptors_are_refused_and_closed() {
        let (a, b) = pair();
        let (read_end, write_end) = nix::unistd::pipe().unwrap();
        let raw = vec![write_end.as_raw_fd(); MAX_DESCRIPTORS + 1];
        let rights = [ControlMessage::ScmRights(&raw)];
        let bytes = [IoSlice::new(b"x")];
        nix::sys::socket::sendmsg::<UnixAddr>(
            a.as_raw_fd(),
            &bytes,
            &rights,
            MsgFlags::empty(),
            None,
        )
        .unwrap();
        drop(write_end);
        let error = receive(b.as_fd(), &mut [0; 16]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        // The end of file shows that all write ends are closed.
        assert_eq!(nix::unistd::read(&read_end, &mut [0; 1]).unwrap(), 0);
    }
}
