//! The control sockets of workers: their paths, and whether a process listens.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket, socketpair,
};
use tokio::time::{Instant, sleep};

use cleat_core::error::{Error, Result};

/// The state of a worker's control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// There is no socket, so nothing is known about the worker.
    Absent,
    /// No process listens: the only process that did has ended.
    Refused,
    /// A process listens.
    Answers,
}

/// The directory of the control sockets. Each worker has one, named after its mapping and its process, since
/// a mapping has two workers during a handover.
pub(crate) struct ControlSockets(PathBuf);

impl ControlSockets {
    /// Creates the handle of the control sockets in `directory`.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Checks whether any worker of a mapping listens.
    pub(crate) fn probe(&self, mapping_id: &str) -> Probe {
        let probes = self.of_mapping(mapping_id).into_iter().map(|path| probe(&path));
        probes.fold(Probe::Absent, |sum, one| match (sum, one) {
            (Probe::Answers, _) | (_, Probe::Answers) => Probe::Answers,
            (Probe::Refused, _) | (_, Probe::Refused) => Probe::Refused,
            (Probe::Absent, Probe::Absent) => Probe::Absent,
        })
    }

    /// Checks whether one worker of a mapping listens.
    pub(crate) fn probe_worker(&self, mapping_id: &str, pid: u32) -> Probe {
        probe(&self.path(mapping_id, pid))
    }

    /// Removes the control sockets of a mapping whose workers have ended.
    pub(crate) fn remove(&self, mapping_id: &str) {
        for path in self.of_mapping(mapping_id) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Returns the path of a worker's control socket.
    pub(crate) fn path(&self, mapping_id: &str, pid: u32) -> PathBuf {
        self.0.join(format!("{mapping_id}.{pid}.sock"))
    }

    /// Returns the paths of all control sockets of a mapping.
    pub(crate) fn of_mapping(&self, mapping_id: &str) -> Vec<PathBuf> {
        let found = self.all().into_iter().filter(|(id, _)| id == mapping_id);
        found.map(|(_, path)| path).collect()
    }

    /// Returns all control sockets with the ids of their mappings.
    pub(crate) fn all(&self) -> Vec<(String, PathBuf)> {
        // If the directory cannot be read, no worker can be reached.
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (id, _pid) = name.strip_suffix(".sock")?.split_once('.')?;
            Some((id.to_owned(), entry.path()))
        });
        named.collect()
    }

    /// Creates the listening socket of a worker, through which later supervisors find it.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub(crate) fn listen(&self, mapping_id: &str, pid: u32, is_successor: bool) -> Result<OwnedFd> {
        let path = self.path(mapping_id, pid);
        // All earlier workers have provably ended, except during a handover.
        if !is_successor {
            self.remove(mapping_id);
        }
        let _ = std::fs::remove_file(&path);
        let make = || -> std::io::Result<OwnedFd> {
            let socket = seqpacket()?;
            bind(socket.as_raw_fd(), &UnixAddr::new(&path)?)?;
            // A client cannot connect before listen(2), so the wider default permissions have no effect.
            set_private(&path)?;
            listen(&socket, Backlog::new(8)?)?;
            Ok(socket)
        };
        make().map_err(|error| {
            Error::from_io(format!("cannot create the control socket {}", path.display()), error)
        })
    }
}

fn probe(path: &Path) -> Probe {
    match connect_to(path) {
        Ok(_) => Probe::Answers,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Probe::Refused,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Probe::Absent,
        // Other errors, such as a full queue, come from a process that listens.
        Err(_) => Probe::Answers,
    }
}

/// Waits [`EXIT_TIMEOUT`] until no process listens on a control socket; returns whether none does.
pub(crate) async fn stops_listening(probe: impl Fn() -> Probe) -> bool {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    while probe() == Probe::Answers {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(20)).await;
    }
    true
}

/// How long a process that is about to exit may still listen.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects to a control socket without waiting.
///
/// # Errors
/// Returns the error of connect(2).
pub(crate) fn connect_to(path: &Path) -> std::io::Result<OwnedFd> {
    let socket = seqpacket()?;
    // Non-blocking: a listener with a full queue must not block the event loop.
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

fn set_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
}

fn seqpacket() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
}

/// Returns a pair of connected SOCK_SEQPACKET sockets.
///
/// # Errors
/// Returns the error of socketpair(2).
pub(crate) fn seqpacket_pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?)
}
