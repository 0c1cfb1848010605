//! The peer of a kernel socket, as a test needs it: it answers requests, holds them, or closes the
//! socket. And a device that is connected to such peers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use test_kit::nbd::server::hangs_up;
use test_kit::nbd::wire::{DISCONNECT, READ, REPLY_LEN, REQUEST_LEN, Request, WRITE, encode_reply};

use super::netlink::{self, Setup};
use crate::fixture::{Block, TIMEOUT, shell};

/// HAS_FLAGS, SEND_FLUSH, CAN_MULTI_CONN.
pub(crate) const FLAGS: u64 = 1 | 1 << 2 | 1 << 8;
pub(crate) const SIZE: u64 = 64 << 20;
/// The offset from which on tests read and write. Below it, the kernel reads the partition table.
pub(crate) const OURS: u64 = 1 << 20;
/// Flags (SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES) that tests add.
pub(crate) const FUA_TRIM_AND_ZEROES: u64 = 1 << 3 | 1 << 5 | 1 << 6;

/// The peer of one kernel socket. Dropping it closes the socket.
pub(crate) struct Peer {
    stream: UnixStream,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    holds: bool,
    held: Vec<Request>,
    /// The offsets of the requests at `OURS` and above.
    seen: Vec<u64>,
    /// The commands of these requests.
    commands: Vec<u16>,
    /// The command that is answered with EINVAL.
    refused: Option<u16>,
    disconnected: bool,
}

impl Peer {
    /// Makes a peer that answers. Also returns the kernel's end of the socket.
    pub(crate) fn new() -> (Self, OwnedFd) {
        let (peer, theirs) = Self::deaf();
        let (shared, stream) = (Arc::clone(&peer.shared), peer.copy());
        std::thread::spawn(move || {
            // It ends when its socket is closed.
            let _ = serve(&shared, stream);
        });
        (peer, theirs)
    }

    /// Makes a peer that reads nothing. Also returns the kernel's end of the socket.
    pub(crate) fn deaf() -> (Self, OwnedFd) {
        let (stream, theirs) = UnixStream::pair().expect("a pair of sockets");
        (Self { stream, shared: Arc::default() }, theirs.into())
    }

    /// Holds requests from now on: they are received and not answered.
    pub(crate) fn hold(&self) {
        self.shared.state.lock().expect("the peer's state").holds = true;
    }

    /// Answers the held requests, and all later ones.
    pub(crate) fn release(&self) {
        let mut state = self.shared.state.lock().expect("the peer's state");
        state.holds = false;
        for request in std::mem::take(&mut state.held) {
            // The kernel may have closed the socket meanwhile.
            let _ = answer(&self.stream, request, 0);
        }
    }

    /// The offsets of the test's requests so far, in the order of their arrival.
    pub(crate) fn seen(&self) -> Vec<u64> {
        self.shared.state.lock().expect("the peer's state").seen.clone()
    }

    /// The commands of the test's requests so far.
    pub(crate) fn commands(&self) -> Vec<u16> {
        self.shared.state.lock().expect("the peer's state").commands.clone()
    }

    /// Answers `command` with an error from now on.
    pub(crate) fn refuse(&self, command: u16) {
        self.shared.state.lock().expect("the peer's state").refused = Some(command);
    }

    /// Whether the peer has received NBD_CMD_DISC.
    pub(crate) fn disconnected(&self) -> bool {
        self.shared.state.lock().expect("the peer's state").disconnected
    }

    /// Waits until `count` of the test's requests have arrived.
    pub(crate) fn wait_seen(&self, count: usize) {
        let state = self.shared.state.lock().expect("the peer's state");
        let more = |state: &mut State| state.seen.len() < count;
        let waited = self.shared.changed.wait_timeout_while(state, TIMEOUT, more);
        let (state, late) = waited.expect("the peer's state");
        assert!(!late.timed_out(), "{} of {count} requests arrived", state.seen.len());
    }

    /// Returns a second descriptor of the same socket.
    pub(crate) fn copy(&self) -> UnixStream {
        self.stream.try_clone().expect("a second descriptor")
    }

    /// Shuts the socket down, on all its descriptors.
    pub(crate) fn die(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the kernel closes its end within `limit`.
    pub(crate) fn hangs_up(&self, limit: Duration) -> bool {
        hangs_up(&self.stream, limit)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.die();
    }
}

fn serve(shared: &Shared, mut stream: UnixStream) -> io::Result<()> {
    loop {
        let mut header = [0; REQUEST_LEN];
        stream.read_exact(&mut header)?;
        let request = Request::parse(&header);
        if request.command == WRITE {
            stream.read_exact(&mut vec![0; request.length as usize])?;
        }
        let mut state = shared.state.lock().expect("the peer's state");
        if request.offset >= OURS {
            state.seen.push(request.offset);
            state.commands.push(request.command);
        }
        if request.command == DISCONNECT {
            state.disconnected = true;
        } else if state.holds {
            state.held.push(request);
        } else {
            let refused = state.refused == Some(request.command);
            answer(&stream, request, if refused { libc::EINVAL } else { 0 })?;
        }
        shared.changed.notify_all();
    }
}

fn answer(mut stream: &UnixStream, request: Request, errno: i32) -> io::Result<()> {
    let mut reply = encode_reply(request.cookie, errno.cast_unsigned()).to_vec();
    if request.command == READ && errno == 0 {
        reply.resize(REPLY_LEN + request.length as usize, 0);
    }
    stream.write_all(&reply)
}

/// The properties in which the devices of the tests differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Make {
    pub(crate) connections: usize,
    pub(crate) timeout_s: Option<u64>,
    pub(crate) dead_timeout_s: u64,
    pub(crate) io_timeout_ms: Option<u32>,
    /// Transmission flags in addition to [`FLAGS`].
    pub(crate) more_flags: u64,
}

impl Default for Make {
    fn default() -> Self {
        Self {
            connections: 1,
            timeout_s: Some(0),
            dead_timeout_s: 120,
            io_timeout_ms: None,
            more_flags: 0,
        }
    }
}

/// A connected device and its peers. Dropping it disconnects the device in any state.
pub(crate) struct Device {
    pub(crate) index: u32,
    pub(crate) identifier: String,
    pub(crate) peers: Vec<Peer>,
    file: Option<Arc<File>>,
}

impl Device {
    pub(crate) fn connect(make: Make) -> Self {
        let (peers, ends): (Vec<_>, Vec<_>) = (0..make.connections).map(|_| Peer::new()).unzip();
        Self::connect_to(make, peers, ends)
    }

    /// Connects a device to peers that the test has made.
    pub(crate) fn connect_to(make: Make, peers: Vec<Peer>, ends: Vec<OwnedFd>) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let identifier = format!("facts.{}.{number}", std::process::id());
        let setup = Setup {
            size: SIZE,
            flags: FLAGS | make.more_flags,
            identifier: &identifier,
            timeout_s: make.timeout_s,
            dead_timeout_s: make.dead_timeout_s,
        };
        let index = netlink::connect(setup, &ends).expect("CONNECT");
        drop(ends);
        let mut device = Self { index, identifier, peers, file: None };
        if let Some(ms) = make.io_timeout_ms {
            set_io_timeout(device.index, ms);
        }
        device.file = Some(Arc::new(device.open()));
        device
    }

    /// Opens the device once more.
    pub(crate) fn open(&self) -> File {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(self.node()).expect("the device opens")
    }

    pub(crate) fn node(&self) -> String {
        format!("/dev/nbd{}", self.index)
    }

    pub(crate) fn attribute(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(format!("/sys/block/nbd{}/{name}", self.index)).ok()?;
        Some(text.trim_end().to_owned())
    }

    /// Starts a read of one block.
    pub(crate) fn read(&self, offset: u64) -> Io {
        let file = Arc::clone(self.file.as_ref().expect("an open device"));
        Io::start(move || file.read_exact_at(&mut Block::new().0, offset))
    }

    /// Starts a write of one block.
    pub(crate) fn write(&self, offset: u64) -> Io {
        let file = Arc::clone(self.file.as_ref().expect("an open device"));
        Io::start(move || file.write_all_at(&Block::new().0, offset))
    }

    /// Gives the device the socket of a new peer, and returns the peer.
    pub(crate) fn reconfigure(&self) -> Peer {
        let (peer, end) = Peer::new();
        self.reconfigure_with(vec![end]).expect("RECONFIGURE");
        peer
    }

    pub(crate) fn reconfigure_with(&self, ends: Vec<OwnedFd>) -> Result<(), nix::errno::Errno> {
        netlink::reconfigure(self.index, Some(&self.identifier), &ends, None)
    }

    /// Repeats [`Device::reconfigure`] until the device accepts a socket. Returns its peer, and the number of
    /// sockets that the device dropped before.
    pub(crate) fn replace(&self) -> (Peer, u32) {
        let deadline = Instant::now() + TIMEOUT;
        for dropped in 0.. {
            let peer = self.reconfigure();
            if !peer.hangs_up(Duration::ZERO) {
                return (peer, dropped);
            }
            assert!(Instant::now() < deadline, "no socket of the device is dead");
        }
        unreachable!("the range has no end");
    }

    /// Closes the test's own descriptor of the device.
    pub(crate) fn close(&mut self) {
        self.file = None;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.peers.clear();
        let _ = netlink::disconnect(self.index);
        self.file = None;
        let deadline = Instant::now() + TIMEOUT;
        let pid = format!("/sys/block/nbd{}/pid", self.index);
        while Path::new(&pid).exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Sets the queue's timer, for requests that start from now on.
pub(crate) fn set_io_timeout(index: u32, ms: u32) {
    let path = format!("/sys/block/nbd{index}/queue/io_timeout");
    std::fs::write(path, ms.to_string()).expect("io_timeout is written");
}

/// A call on its own thread, because it may block.
pub(crate) struct Io<T = io::Result<()>> {
    started: Instant,
    result: mpsc::Receiver<(T, Instant)>,
}

impl<T: Send + 'static> Io<T> {
    pub(crate) fn start(call: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, result) = mpsc::channel();
        let started = Instant::now();
        std::thread::spawn(move || {
            // The test may have dropped the receiver.
            let _ = sender.send((call(), Instant::now()));
        });
        Self { started, result }
    }

    /// Waits for the call. Returns its result and how long it took. Panics when it does not end within
    /// `limit`.
    pub(crate) fn finish(self, limit: Duration) -> (T, Duration) {
        let ended = self.result.recv_timeout(limit);
        let (result, at) = ended.unwrap_or_else(|_| panic!("not done in {limit:?}"));
        (result, at - self.started)
    }

    /// Whether the call does not end within `limit`.
    pub(crate) fn hangs_for(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            match self.result.try_recv() {
                Err(mpsc::TryRecvError::Empty) => {}
                _ => return false,
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

/// Pauses udev, which would otherwise open devices while a test counts and holds requests. Dropping it
/// resumes udev.
pub(crate) struct PausedUdev;

impl PausedUdev {
    pub(crate) fn new() -> Self {
        settle();
        shell("udevadm control --stop-exec-queue");
        Self
    }
}

impl Drop for PausedUdev {
    fn drop(&mut self) {
        shell("udevadm control --start-exec-queue");
        settle();
    }
}

/// Waits until udev has handled all events. A udev that hangs is shown and started again: otherwise no later
/// test would get its symlink.
fn settle() {
    let hung = shell("udevadm settle --timeout=45 2>&1 || echo hung");
    if hung.is_empty() {
        return;
    }
    println!("figures: udev hangs:");
    println!(
        "{}",
        shell(
            "udevadm settle --timeout=0 || true; ls -l /run/udev; for pid in $(pgrep udev); do
               ps -o pid,stat,wchan:32,args -p $pid || true; cat /proc/$pid/stack 2>/dev/null || true; done"
        )
    );
    shell(
        "pkill -KILL udev || true; sleep 0.5; rm -f /run/udev/queue
         /lib/systemd/systemd-udevd --daemon --resolve-names=never",
    );
}
