//! TCP connections to one address, for a process that has no network.
//!
//! No layer of a confinement restricts the addresses to which a process connects: Landlock knows ports only. So a second
//! process makes the connections of a process that is confined, and passes the sockets. It starts before the
//! confinement, and is confined itself. The first process can only ask for a connection: the address is the one that
//! [`Connector::start`] got.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, shutdown, socketpair};

use crate::confinement::{Address, Confinement, NAME_FILES, Network};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::process::{beside_this_process, exit_now};
use cleat_sys::seqpacket;

/// How long one connection may take, without the resolution of the name.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of addresses of a name that are tried for one connection.
const MAX_ADDRESSES: u32 = 4;

/// The maximum number of connections that are being made at the same time. So many requests fit into the channel, so that
/// none waits for a second process that is stopped.
const MAX_CONNECTING: usize = 64;

/// The stack of a thread that resolves a name and connects, in bytes.
const STACK: usize = 256 << 10;

/// How long the second process may take until it is confined, in milliseconds.
const START_TIMEOUT_MS: u16 = 10_000;

/// The length of an answer without its text: the number of the request, and an errno or 0.
const HEAD: usize = 12;

/// The maximum length of an answer, in bytes.
const MAX_ANSWER: usize = 1024;

/// The port of name servers: a long answer comes over TCP.
const NAMES: u16 = 53;

/// The exit code of a process that has lost the second one.
const LOST: u8 = 1;

/// The directory to which `/etc/resolv.conf` may lead.
const NAME_DIRECTORY: &str = "/run/systemd/resolve";

/// Gets connections to one address from a second process. That process ends when this one has ended, or has dropped the
/// connector. If it ends earlier, this process ends, too: only another process of the volume can reach the store again.
pub struct Connector {
    address: Address,
    channel: Arc<OwnedFd>,
    requests: Mutex<Requests>,
}

/// The requests without an answer, by their numbers.
#[derive(Default)]
struct Requests {
    open: BTreeMap<u64, Done>,
    next: u64,
    has_receiver: bool,
}

/// Takes the result of a request.
type Done = Box<dyn FnOnce(io::Result<TcpStream>) + Send>;

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connector({})", self.address)
    }
}

impl Connector {
    /// Starts the second process, as [`Connector::start`] does, if `confinement` has [`Network::Connector`].
    ///
    /// # Errors
    /// As [`Connector::start`].
    pub fn for_process(
        confinement: &Confinement,
        confine: impl FnOnce(&Confinement) -> Result<()>,
    ) -> Result<Option<Arc<Self>>> {
        match confinement {
            Confinement::BeforeOpen { network: Network::Connector(address), .. } => {
                Self::start(address, confine).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Starts the second process, and returns when it is confined by `confine`. Must be called while this process has
    /// one thread, and before it has secrets or rings: the second process gets a copy of the memory.
    ///
    /// # Errors
    /// Returns the error of `confine`, and an error if the process cannot be started.
    pub fn start(
        address: &Address,
        confine: impl FnOnce(&Confinement) -> Result<()>,
    ) -> Result<Arc<Self>> {
        let failed = |error| Error::from_io("cannot start the process that connects", error);
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|error| failed(error.into()))?;
        let work = |channel: OwnedFd| {
            let outcome = confine(&confinement(address.port));
            let text = outcome.as_ref().err().map(Error::report).unwrap_or_default();
            let reported = answer(channel.as_fd(), 0, Err(io::Error::other(text)));
            if outcome.is_ok() && reported.is_ok() {
                serve(channel, address.clone());
            }
        };
        let channel = beside_this_process(ours, theirs, work).map_err(failed)?;
        wait_until_confined(channel.as_fd())?;
        let (channel, requests) = (Arc::new(channel), Mutex::default());
        Ok(Arc::new(Self { address: address.clone(), channel, requests }))
    }

    /// Asks for a connection. `done` gets it on a thread of the connector: non-blocking, and without Nagle's algorithm.
    /// Does not block.
    pub fn connect(self: &Arc<Self>, done: impl FnOnce(io::Result<TcpStream>) + Send + 'static) {
        let mut requests = self.requests();
        if requests.open.len() >= MAX_CONNECTING {
            drop(requests);
            return done(Err(io::Error::other("too many connections are being made")));
        }
        if !requests.has_receiver {
            let (channel, weak) = (Arc::clone(&self.channel), Arc::downgrade(self));
            let receiver = std::thread::Builder::new().name("connections".into());
            if let Err(error) = receiver.spawn(move || receive(&channel, &weak)) {
                drop(requests);
                return done(Err(error));
            }
            requests.has_receiver = true;
        }
        requests.next += 1;
        let number = requests.next;
        requests.open.insert(number, Box::new(done));
        drop(requests);
        if let Err(error) = seqpacket::send(self.channel.as_fd(), &number.to_le_bytes(), &[]) {
            self.end(number, Err(error));
        }
    }

    fn end(&self, number: u64, result: io::Result<TcpStream>) {
        let done = self.requests().open.remove(&number);
        if let Some(done) = done {
            done(result);
        }
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // Ends the receiver and the second process. It fails only if that has ended.
        let _ = shutdown(self.channel.as_raw_fd(), Shutdown::Both);
    }
}

/// Waits for the first answer of the second process: an empty text, or why it is not confined.
fn wait_until_confined(channel: BorrowedFd<'_>) -> Result<()> {
    let mut set = [PollFd::new(channel, PollFlags::POLLIN)];
    let mut buffer = [0; MAX_ANSWER];
    let is_ready = poll(&mut set, PollTimeout::from(START_TIMEOUT_MS)).is_ok_and(|count| count > 0);
    let length = match is_ready.then(|| seqpacket::receive(channel, &mut buffer)) {
        Some(Ok((length, _))) if length >= HEAD => length,
        _ => {
            let message = "the process that connects to the store did not start";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
    };
    let text = String::from_utf8_lossy(&buffer[HEAD..length]);
    if text.is_empty() {
        return Ok(());
    }
    let message = format!("the process that connects to the store: {text}");
    Err(Error::new(ErrorKind::Unsupported, message)
        .with_repair("`cleat doctor` shows what this machine lacks"))
}

/// Receives connections until the connector is dropped.
fn receive(channel: &OwnedFd, connector: &Weak<Connector>) {
    let mut buffer = [0; MAX_ANSWER];
    loop {
        let received = seqpacket::receive(channel.as_fd(), &mut buffer);
        let Some(connector) = connector.upgrade() else { return };
        match received {
            Ok((length, mut sockets)) if length >= HEAD => {
                let (number, result) = parse(&buffer[..length], sockets.pop());
                connector.end(number, result);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // This process has no descriptor left for the socket.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let (number, _) = parse(&buffer, None);
                connector.end(number, Err(error));
            }
            Ok(_) | Err(_) => {
                let address = &connector.address;
                tracing::error!(
                    "the process that connects to {address} has ended, so this one ends"
                );
                exit_now(LOST);
            }
        }
    }
}

fn parse(answer: &[u8], socket: Option<OwnedFd>) -> (u64, io::Result<TcpStream>) {
    let number = answer.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let errno = answer[8..].first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
    let result = match socket {
        Some(socket) => Ok(TcpStream::from(socket)),
        None if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other(String::from_utf8_lossy(&answer[HEAD..]).into_owned())),
    };
    (number, result)
}

/// What the second process needs: the port, and the resolution of names.
fn confinement(port: u16) -> Confinement {
    let existing = |paths: &[&str]| -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).filter(|path| path.exists()).collect()
    };
    Confinement::BeforeOpen {
        paths: existing(&[NAME_DIRECTORY]),
        copies: existing(&NAME_FILES),
        writable: Vec::new(),
        network: Network::Ports(vec![port, NAMES]),
    }
}

/// Makes a connection for each request, until the other end of the channel is closed. Runs in the second process.
fn serve(channel: OwnedFd, address: Address) {
    let _ = nix::sys::prctl::set_name(c"cleat:connect");
    let dialer =
        Arc::new(Dialer { channel, address, last: Mutex::default(), running: AtomicUsize::new(0) });
    let mut number = [0; 8];
    loop {
        match seqpacket::receive(dialer.channel.as_fd(), &mut number) {
            Ok((8, _)) => dialer.begin(u64::from_le_bytes(number)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// The second process.
struct Dialer {
    channel: OwnedFd,
    address: Address,
    /// The address that has answered last, which is tried first.
    last: Mutex<Option<SocketAddr>>,
    /// The number of threads that connect.
    running: AtomicUsize,
}

impl Dialer {
    /// Answers a request on a thread of its own: names and connections can take long.
    fn begin(self: &Arc<Self>, number: u64) {
        let dialer = Arc::clone(self);
        let work = move || {
            let result = dialer.connect();
            dialer.running.fetch_sub(1, Ordering::Relaxed);
            // An error means that the other process has ended.
            let _ = answer(dialer.channel.as_fd(), number, result);
        };
        let refused = if self.running.fetch_add(1, Ordering::Relaxed) < MAX_CONNECTING {
            let thread = std::thread::Builder::new().stack_size(STACK);
            thread.spawn(work).map(drop)
        } else {
            Err(io::Error::other("too many connections are being made"))
        };
        if let Err(error) = refused {
            self.running.fetch_sub(1, Ordering::Relaxed);
            let _ = answer(self.channel.as_fd(), number, Err(error));
        }
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let Address { host, port } = &self.address;
        let mut addresses: Vec<_> = (&**host, *port).to_socket_addrs()?.collect();
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let first = *last();
        addresses.sort_by_key(|address| Some(*address) != first);
        addresses.truncate(MAX_ADDRESSES as usize);
        let each = CONNECT_TIMEOUT / u32::try_from(addresses.len()).unwrap_or(1).max(1);
        let mut result = Err(io::Error::other(format!("{host} has no address")));
        for address in addresses {
            result = TcpStream::connect_timeout(&address, each);
            if let Ok(stream) = result {
                *last() = Some(address);
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                return Ok(stream);
            }
        }
        result
    }
}

/// Sends an answer with a connection, or with the reason why there is none.
fn answer(channel: BorrowedFd<'_>, number: u64, result: io::Result<TcpStream>) -> io::Result<()> {
    let mut bytes = number.to_le_bytes().to_vec();
    match result {
        Ok(stream) => {
            bytes.extend(0_i32.to_le_bytes());
            seqpacket::send(channel, &bytes, &[stream.as_fd()])
        }
        Err(error) => {
            bytes.extend(error.raw_os_error().unwrap_or(0).to_le_bytes());
            bytes.extend(error.to_string().bytes().take(MAX_ANSWER - HEAD));
            seqpacket::send(channel, &bytes, &[])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc;

    fn connected(connector: &Arc<Connector>) -> io::Result<TcpStream> {
        let (sender, result) = mpsc::channel();
        connector.connect(move |outcome| sender.send(outcome).unwrap());
        result.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    /// The second process in this one: a test has several threads, so it cannot fork.
    fn connector(address: Address) -> Arc<Connector> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (ours, theirs) = pair.unwrap();
        let served = address.clone();
        std::thread::spawn(move || serve(theirs, served));
        Arc::new(Connector { address, channel: Arc::new(ours), requests: Mutex::default() })
    }

    #[test]
    fn connections_are_passed_and_errors_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address { host: "localhost".into(), port };
        let passed = connector(address);
        for _ in 0..3 {
            let stream = connected(&passed).unwrap();
            let (_, peer) = listener.accept().unwrap();
            assert_eq!(stream.local_addr().unwrap(), peer);
            assert!(stream.nodelay().unwrap());
        }
        drop(listener);
        let error = connected(&passed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let nobody = Address { host: "name.invalid".into(), port };
        let error = connected(&connector(nobody)).unwrap_err();
        assert!(error.to_string().contains("lookup"), "{error}");
    }

    #[test]
    fn a_second_process_that_is_stopped_makes_no_request_wait() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (ours, _stopped) = pair.unwrap();
        let address = Address { host: "store".into(), port: 1 };
        let connector =
            Arc::new(Connector { address, channel: Arc::new(ours), requests: Mutex::default() });
        for _ in 0..MAX_CONNECTING {
            connector.connect(|_| panic!("nobody answers"));
        }
        let error = connected(&connector).unwrap_err();
        assert!(error.to_string().contains("too many connections"), "{error}");
        // The receiver must not take the end of the channel for the loss of the process.
        drop(connector);
    }
}
