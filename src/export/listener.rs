//! `cleat serve`: one volume behind a listening socket, for NBD clients.
//!
//! Comes in: a volume and an address. Goes out: the volume's data path, until SIGTERM or SIGINT;
//! then running requests are finished, and the socket's file is removed. Before the volume is open they
//! end it, too.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, setsockopt,
    socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};

use super::opening::open_unless_told;
use super::server::{Event, ExportName, Limits, Server};
use cleat_backend::uri::VolumeUri;
use cleat_backend::{Image, OpenOptions, Waker, open};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::Policy;
use cleat_statistics::Page;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// How long running requests may take once the end is asked for.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How long nothing is accepted when the process or the system has no descriptor left.
const EXHAUSTED_PAUSE_MS: u16 = 200;

/// A TCP client is asked for a sign of life after this idle time, then at this interval, in seconds.
const KEEPALIVE_IDLE_S: u32 = 60;
const KEEPALIVE_INTERVAL_S: u32 = 15;

/// How long a TCP client may leave bytes or probes without an answer, in milliseconds.
const DEAD_PEER_LIMIT_MS: u32 = 120_000;

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The volume.
    pub uri: VolumeUri,
    /// Where clients connect.
    pub address: Address,
    /// How the volume is opened.
    pub open: OpenOptions,
    /// Clients at one time.
    pub connections: usize,
    /// The export's name; the empty one works for every client.
    pub export_name: String,
    /// What happens in an outage of the backend, and how fast the volume may go.
    pub policy: Policy,
}

/// Where clients connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket file, made with mode 0600. One that a dead server left behind is replaced.
    Unix(PathBuf),
    /// A TCP address. There is no authentication: whoever reaches it reads and writes the volume.
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

/// Serves until SIGTERM or SIGINT. `ready` is called with the address (the port that the system
/// chose included) once clients can connect.
///
/// # Errors
/// When the volume cannot be opened, or the address not be used; `Aborted` for a signal before that.
pub fn run(options: &ServeOptions, ready: impl FnOnce(&Address)) -> Result<()> {
    // Before any thread is made: each inherits the mask, and the signals arrive here alone.
    let signals = catch_signals()?;
    let (uri, how) = (options.uri.clone(), options.open.clone());
    let image = open_unless_told(&signals, move || open(&uri, &how))?;
    let (page, _) = Page::create()?;
    let export = ExportName { name: options.export_name.clone(), description: String::new() };
    let limits = Limits { connections: options.connections, ..Limits::default() };
    let (server, events) = Server::new(Arc::clone(&image), export, page.clone(), limits)?;
    server.set_policy(options.policy);
    let mut outages = Outages::watch(&server, page, Arc::clone(&image))?;
    let listener = Listener::bind(&options.address)?;
    let log = std::thread::Builder::new().name("events".into()).spawn(move || {
        for Event::ConnectionEnded { id, end } in events {
            if end.is_orderly() {
                tracing::debug!(connection = id, "{end}");
            } else {
                tracing::warn!(connection = id, "connection lost: {end}");
            }
        }
    });
    log.map_err(|error| Error::from_io("cannot start a thread", error))?;
    let address = listener.address()?;
    if let Address::Tcp(tcp) = address
        && !tcp.ip().is_loopback()
    {
        tracing::warn!(
            "{tcp} can be reached from other machines, and there is neither encryption nor \
             authentication: whoever connects can read{} the volume",
            if options.open.read_only { "" } else { " and write" }
        );
    }
    tracing::info!(volume = %options.uri, %address, "serving");
    ready(&address);
    let accepted = accept_until_signal(&listener, &signals, &server, &mut outages);
    // No more clients, and nobody who finds a socket that nobody serves.
    drop(listener);
    let ended = accepted.and(server.stop(STOP_LIMIT));
    drop(server);
    image.close();
    ended
}

pub(super) fn catch_signals() -> Result<SignalFd> {
    let mut wanted = SigSet::empty();
    wanted.add(Signal::SIGTERM);
    wanted.add(Signal::SIGINT);
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    wanted
        .thread_block()
        .and_then(|()| SignalFd::with_flags(&wanted, flags))
        .map_err(|error| Error::from_io("cannot catch signals", error.into()))
}

/// Tells of outages of the backend: a client only sees that nothing comes.
struct Outages {
    waker: Waker,
    page: Page,
    image: Arc<dyn Image>,
    told: bool,
}

impl Outages {
    fn watch(server: &Server, page: Page, image: Arc<dyn Image>) -> Result<Self> {
        let waker = Waker::new().map_err(|error| Error::from_io("no descriptor left", error))?;
        server.watch_outages(waker.clone());
        Ok(Self { waker, page, image, told: false })
    }

    fn look(&mut self) {
        self.waker.take();
        let lasts = self.page.snapshot().outage_since_ns != 0;
        match (std::mem::replace(&mut self.told, lasts), lasts) {
            (false, true) => tracing::warn!(
                reason = self.image.trouble().as_deref().unwrap_or("unknown"),
                "the backend does not answer"
            ),
            (true, false) => tracing::warn!("the backend answers again"),
            _ => {}
        }
    }
}

fn accept_until_signal(
    listener: &Listener,
    signals: &SignalFd,
    server: &Server,
    outages: &mut Outages,
) -> Result<()> {
    let failed = |error| Error::from_io("cannot wait for clients", error);
    loop {
        let mut waiting = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(outages.waker.descriptor(), PollFlags::POLLIN),
        ];
        match poll(&mut waiting, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let woken = waiting[2].any().unwrap_or(true);
        if woken {
            outages.look();
        }
        if let Ok(Some(signal)) = signals.read_signal() {
            tracing::info!(signal = signal.ssi_signo, "stopping");
            return Ok(());
        }
        match listener.accept() {
            Ok(client) => {
                if let Err(error) = server.add_client(client) {
                    tracing::warn!("client turned away: {}", error.report());
                }
            }
            Err(error) if is_exhausted(&error) => {
                tracing::warn!("cannot accept: {error}");
                // Only the end is looked out for meanwhile.
                let mut waiting = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut waiting, EXHAUSTED_PAUSE_MS);
            }
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// The client went away before it was accepted (see accept(2), "Error handling").
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
        || matches!(error.raw_os_error(), Some(libc::EPROTO | libc::ENETDOWN | libc::EHOSTUNREACH))
}

/// A bound socket; its file, if it has one, is removed with it.
#[derive(Debug)]
enum Listener {
    Unix { socket: UnixListener, path: PathBuf, inode: u64 },
    Tcp(TcpListener),
}

impl Listener {
    fn bind(address: &Address) -> Result<Self> {
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
        let inode = path.symlink_metadata().map_err(failed)?.ino();
        Ok(Self::Unix { socket, path: path.to_owned(), inode })
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix { socket, .. } => {
                let (stream, _): (UnixStream, _) = socket.accept()?;
                Ok(stream.into())
            }
            Self::Tcp(socket) => {
                let (stream, _): (TcpStream, _) = socket.accept()?;
                stream.set_nodelay(true)?;
                notice_dead_peers(&stream)?;
                Ok(stream.into())
            }
        }
    }

    fn address(&self) -> Result<Address> {
        match self {
            Self::Unix { path, .. } => Ok(Address::Unix(path.clone())),
            Self::Tcp(socket) => socket
                .local_addr()
                .map(Address::Tcp)
                .map_err(|error| Error::from_io("cannot read the socket's address", error)),
        }
    }
}

/// A client whose machine has gone would hold its place for ever.
fn notice_dead_peers(stream: &TcpStream) -> io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
    // With unsent replies no probe is sent; this bounds how long they are tried.
    setsockopt(stream, sockopt::TcpUserTimeout, &DEAD_PEER_LIMIT_MS)?;
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
        if let Self::Unix { path, inode, .. } = self
            && path.symlink_metadata().is_ok_and(|found| found.ino() == *inode)
        {
            // Somebody else may have been faster; then it is gone, too.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Binds and listens; the file has mode 0600 from its first moment on, because Linux takes the
/// socket's own mode (net/unix/af_unix.c, unix_bind_bsd), which no umask widens.
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let file = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(file.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&file, Backlog::new(BACKLOG)?)?;
    Ok(file)
}

/// Removes a socket that nobody listens on.
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
    // Non-blocking: a server that hangs with a full backlog would keep us waiting.
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
            // TEST-NET-1: nobody's.
            (Address::Tcp(([192, 0, 2, 1], 0).into()), ErrorKind::InvalidArgument),
        ];
        for (address, kind) in cases {
            let error = Listener::bind(&address).unwrap_err();
            assert_eq!(error.kind(), kind, "{}", error.report());
            assert!(error.repair().is_some());
        }
    }

    #[test]
    fn a_client_by_tcp_is_watched() {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let Address::Tcp(address) = listener.address().unwrap() else { unreachable!() };
        let _client = TcpStream::connect(address).unwrap();
        let accepted = listener.accept().unwrap();
        use nix::sys::socket::getsockopt;
        assert!(getsockopt(&accepted, sockopt::KeepAlive).unwrap());
        assert_eq!(getsockopt(&accepted, sockopt::TcpUserTimeout).unwrap(), DEAD_PEER_LIMIT_MS);
    }

    #[test]
    fn a_taken_port_is_named() {
        let first = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let error = Listener::bind(&first.address().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
    }
}
