//! The control sockets of workers: where they are, and whether a process listens.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket, socketpair,
};
use tokio::time::{Instant, sleep};

use cleat_core::error::{Error, Result};

/// What stands behind a worker's control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// There is no socket: nothing is known.
    Absent,
    /// Nobody listens any more: the only process that did has ended.
    Refused,
    /// Somebody listens.
    Answers,
}

/// The directory of the control sockets. Each worker has its own, named after mapping and process:
/// during a handover there are two of one mapping.
pub(crate) struct ControlSockets(PathBuf);

impl ControlSockets {
    /// The control sockets in `directory`.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Looks at the control sockets of a mapping that nothing else is known of.
    pub(crate) fn probe(&self, mapping_id: &str) -> Probe {
        let probes = self.of_mapping(mapping_id).into_iter().map(|path| probe(&path));
        probes.fold(Probe::Absent, |sum, one| match (sum, one) {
            (Probe::Answers, _) | (_, Probe::Answers) => Probe::Answers,
            (Probe::Refused, _) | (_, Probe::Refused) => Probe::Refused,
            (Probe::Absent, Probe::Absent) => Probe::Absent,
        })
    }

    /// Looks at the control socket of one worker of a mapping.
    pub(crate) fn probe_worker(&self, mapping_id: &str, pid: u32) -> Probe {
        probe(&self.path(mapping_id, pid))
    }

    /// Removes the control sockets of a mapping that has ended.
    pub(crate) fn forget(&self, mapping_id: &str) {
        for path in self.of_mapping(mapping_id) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Each worker has its own, named after mapping and process: during a planned hand-over there are
    /// two of one mapping.
    pub(crate) fn path(&self, mapping_id: &str, pid: u32) -> PathBuf {
        self.0.join(format!("{mapping_id}.{pid}.sock"))
    }

    pub(crate) fn of_mapping(&self, mapping_id: &str) -> Vec<PathBuf> {
        let found = self.all().into_iter().filter(|(id, _)| id == mapping_id);
        found.map(|(_, path)| path).collect()
    }

    /// Every control socket, with the id of its mapping.
    pub(crate) fn all(&self) -> Vec<(String, PathBuf)> {
        // Unreadable, it is as good as empty: nobody can be reached there.
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (id, _pid) = name.strip_suffix(".sock")?.split_once('.')?;
            Some((id.to_owned(), entry.path()))
        });
        named.collect()
    }

    /// The listening socket through which later supervisors find the worker.
    pub(crate) fn listen(&self, mapping_id: &str, pid: u32, is_successor: bool) -> Result<OwnedFd> {
        let path = self.path(mapping_id, pid);
        // What lies there belongs to workers that are proved gone, unless this one is to succeed one.
        if !is_successor {
            self.forget(mapping_id);
        }
        let _ = std::fs::remove_file(&path);
        let make = || -> std::io::Result<OwnedFd> {
            let socket = seqpacket()?;
            bind(socket.as_raw_fd(), &UnixAddr::new(&path)?)?;
            // Nobody can connect before listen, so there is no moment of wider permissions.
            set_private(&path)?;
            listen(&socket, Backlog::new(8)?)?;
            Ok(socket)
        };
        make().map_err(|error| {
            Error::from_io(format!("cannot make the control socket {}", path.display()), error)
        })
    }
}

fn probe(path: &Path) -> Probe {
    match connect_to(path) {
        Ok(_) => Probe::Answers,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Probe::Refused,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Probe::Absent,
        // A full queue, say: somebody must be there.
        Err(_) => Probe::Answers,
    }
}

/// Waits for a moment until no process listens on a control socket; returns whether none does.
pub(crate) async fn stops_listening(probe: impl Fn() -> Probe) -> bool {
    let until = Instant::now() + ENDING_LIMIT;
    while probe() == Probe::Answers {
        if Instant::now() >= until {
            return false;
        }
        sleep(Duration::from_millis(20)).await;
    }
    true
}

/// For a process that does not listen to have ended: it was perhaps on its way out.
pub(crate) const ENDING_LIMIT: Duration = Duration::from_secs(1);

pub(crate) fn connect_to(path: &Path) -> std::io::Result<OwnedFd> {
    let socket = seqpacket()?;
    // Non-blocking: a listener with a full queue must not stop the event loop.
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

pub(crate) fn seqpacket_pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?)
}
