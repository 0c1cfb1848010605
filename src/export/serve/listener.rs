//! The listening socket of `cleat serve`: bound, private, and removed with its owner.

use std::fs::Metadata;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, setsockopt,
    socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::process::{Janitor, after_this_process};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Keepalive probes are sent to a TCP client after this idle time, and then at this interval, in seconds.
const KEEPALIVE_IDLE_S: u32 = 60;
const KEEPALIVE_INTERVAL_S: u32 = 15;

/// The connection ends when this number of probes has no answer, 120 s after the client's last packet.
const KEEPALIVE_PROBES: u32 = 4;

/// The address at which clients connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket file, made with mode 0600. One that a dead server left behind is replaced.
    Unix(PathBuf),
    /// A TCP address. There is no authentication: every client that reaches it can read and write the volume.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Distinguishes a socket's file from the file of a later server, which may get the same inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileMark {
    inode: u64,
    changed: (i64, i64),
}

impl FileMark {
    fn of(found: &Metadata) -> Self {
        Self { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()) }
    }
}

/// A bound socket; its file, if it has one, is removed with it.
#[derive(Debug)]
pub(super) enum Listener {
    Unix { socket: UnixListener, path: PathBuf, mark: FileMark, janitor: Option<Janitor> },
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn bind(address: &Address) -> Result<Self> {
        match address {
            Address::Unix(path) => Self::bind_unix(path),
            Address::Tcp(address) => {
                let failed = |error| bind_error(&address.to_string(), error);
                let socket = TcpListener::bind(address).map_err(failed)?;
                socket.set_nonblocking(true).map_err(failed)?;
                Ok(Self::Tcp(socket))
            }
        }
    }

    fn bind_unix(path: &Path) -> Result<Self> {
        let failed = |error| bind_error(&path.display().to_string(), error);
        let socket = match bind_private(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                bind_private(path)
            }
            done => done,
        };
        let socket = UnixListener::from(socket.map_err(failed)?);
        let mark = FileMark::of(&path.symlink_metadata().map_err(failed)?);
        Ok(Self::Unix { socket, path: path.to_owned(), mark, janitor: None })
    }

    /// Leaves the removal of the socket's file to another process, because this one is going to lose its access
    /// to paths. Must be called while this process has one thread.
    pub(super) fn leave_removal_to_another_process(&mut self) -> Result<()> {
        let Self::Unix { path, mark, janitor, .. } = self else { return Ok(()) };
        let failed = |error| Error::from_io("cannot start a process", error);
        let (absolute, mark) = (std::path::absolute(path).map_err(failed)?, *mark);
        *janitor = Some(after_this_process(move || remove(&absolute, mark)).map_err(failed)?);
        Ok(())
    }

    /// Returns the socket of a new client, and its address if it has one.
    pub(super) fn accept(&self) -> io::Result<(OwnedFd, Option<IpAddr>)> {
        match self {
            Self::Unix { socket, .. } => {
                let (stream, _): (UnixStream, _) = socket.accept()?;
                Ok((stream.into(), None))
            }
            Self::Tcp(socket) => {
                let (stream, address): (TcpStream, _) = socket.accept()?;
                stream.set_nodelay(true)?;
                notice_dead_peers(&stream)?;
                Ok((stream.into(), Some(address.ip())))
            }
        }
    }

    pub(super) fn address(&self) -> Result<Address> {
        match self {
            Self::Unix { path, .. } => Ok(Address::Unix(path.clone())),
            Self::Tcp(socket) => socket
                .local_addr()
                .map(Address::Tcp)
                .map_err(|error| Error::from_io("cannot read the socket's address", error)),
        }
    }
}

/// Without probes, a client whose machine has crashed would occupy a connection without end.
///
/// No probe is sent while replies are unsent. Then the kernel's retransmissions (or its probes of a closed
/// window) end the connection after `net.ipv4.tcp_retries2` of them have had no answer: about 15 minutes.
/// TCP_USER_TIMEOUT would shorten that, but it also ends the connection of a client that lives, answers every
/// probe, and does not read for that time (net/ipv4/tcp_timer.c, tcp_probe_timer). A paused virtual machine
/// or a stopped process is such a client.
fn notice_dead_peers(stream: &TcpStream) -> io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
    Ok(())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix { socket, .. } => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, mark, janitor, .. } = self {
            match janitor.take() {
                Some(janitor) => drop(janitor),
                None => remove(path, *mark),
            }
        }
    }
}

/// Removes the file of a socket, unless another server has replaced it.
fn remove(path: &Path, mark: FileMark) {
    if path.symlink_metadata().is_ok_and(|found| FileMark::of(&found) == mark) {
        // Another process may have removed it first.
        let _ = std::fs::remove_file(path);
    }
}

/// Binds and listens. The file has mode 0600 from the moment of its creation, because Linux takes the
/// socket's own mode (net/unix/af_unix.c, unix_bind_bsd), which no umask widens.
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let file = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(file.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&file, Backlog::new(BACKLOG)?)?;
    Ok(file)
}

/// Removes a socket on which no process listens.
fn remove_stale(path: &Path) -> Result<()> {
    let name = path.display();
    let found = path
        .symlink_metadata()
        .map_err(|error| Error::from_io(format!("cannot look at {name}"), error))?;
    if !found.file_type().is_socket() {
        let message = format!("{name} exists and is not a socket");
        return Err(
            Error::new(ErrorKind::AlreadyExists, message).with_repair("choose another path")
        );
    }
    let failed = |error: nix::Error| bind_error(&name.to_string(), error.into());
    // Non-blocking: a server that hangs with a full backlog would block this process.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(failed)?;
    let address = UnixAddr::new(path).map_err(failed)?;
    match connect(probe.as_raw_fd(), &address) {
        Err(nix::Error::ECONNREFUSED) => std::fs::remove_file(path).map_err(|error| {
            Error::from_io(format!("cannot remove the stale socket {name}"), error)
        }),
        Err(error @ nix::Error::EACCES) => Err(failed(error)),
        _ => Err(in_use(&name.to_string())),
    }
}

fn bind_error(address: &str, error: io::Error) -> Error {
    use io::ErrorKind as Io;
    let (kind, repair) = match error.kind() {
        Io::AddrInUse => return in_use(address),
        Io::NotFound => (ErrorKind::NotFound, "make the socket's directory first"),
        Io::PermissionDenied => (
            ErrorKind::PermissionDenied,
            "choose a directory that you can write to, or a port from 1024 on",
        ),
        Io::AddrNotAvailable => {
            (ErrorKind::InvalidArgument, "use an address of this machine; `ip address` lists them")
        }
        Io::InvalidFilename => {
            (ErrorKind::InvalidArgument, "the path of a unix socket has at most 107 bytes")
        }
        _ => return Error::from_io(format!("cannot listen on {address}"), error),
    };
    Error::new(kind, format!("cannot listen on {address}")).with_repair(repair).with_source(error)
}

fn in_use(address: &str) -> Error {
    Error::new(ErrorKind::InUse, format!("another server listens on {address}"))
        .with_repair("stop that server, or choose another address")
}

pub(super) fn is_exhausted(error: &io::Error) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Whether the client closed the connection before it was accepted (see accept(2), "Error handling").
pub(super) fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
        || matches!(error.raw_os_error(), Some(libc::EPROTO | libc::ENETDOWN | libc::EHOSTUNREACH))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_socket_is_private_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let address = Address::Unix(path.clone());
        let listener = Listener::bind(&address).unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_server_that_accepts_nothing_is_still_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let busy = bind_private(&path).unwrap();
        listen(&busy, Backlog::new(1).unwrap()).unwrap();
        // One more than the backlog fits; the next one would wait.
        let _waiting = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
        let error = Listener::bind(&Address::Unix(path)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
    }

    #[test]
    fn an_address_that_cannot_be_used_comes_with_a_repair() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(200));
        let cases = [
            (Address::Unix(dir.path().join("missing/s")), ErrorKind::NotFound),
            (Address::Unix(long), ErrorKind::InvalidArgument),
            // TEST-NET-1, which is assigned to no machine.
            (Address::Tcp(([192, 0, 2, 1], 0).into()), ErrorKind::InvalidArgument),
        ];
        for (address, kind) in cases {
            let error = Listener::bind(&address).unwrap_err();
            assert_eq!(error.kind(), kind, "{}", error.report());
            assert!(error.repair().is_some());
        }
    }

    #[test]
    fn a_client_by_tcp_is_probed_and_may_stop_reading() {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let Address::Tcp(address) = listener.address().unwrap() else { unreachable!() };
        let _client = TcpStream::connect(address).unwrap();
        let (accepted, address) = listener.accept().unwrap();
        assert_eq!(address, Some(IpAddr::from([127, 0, 0, 1])));
        use nix::sys::socket::getsockopt;
        assert!(getsockopt(&accepted, sockopt::KeepAlive).unwrap());
        assert_eq!(getsockopt(&accepted, sockopt::TcpKeepCount).unwrap(), KEEPALIVE_PROBES);
        // 0: a closed window alone does not end the connection.
        assert_eq!(getsockopt(&accepted, sockopt::TcpUserTimeout).unwrap(), 0);
    }

    #[test]
    fn a_taken_port_is_named() {
        let first = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let error = Listener::bind(&first.address().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
    }
}
