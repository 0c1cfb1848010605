//! The confinement of a worker: it gives up everything but the descriptors that it has.
//!
//! The layers, in the order in which they are applied ([`layer`] has their names):
//!
//! 1. An empty network namespace of its own: io_uring can make sockets in spite of any system call filter. The
//!    socket to journald is made there, also if the process then returns to a network that it needs.
//! 2. A namespace of its own for System V IPC and message queues.
//! 3. An empty root directory, see [`root`]: no path leads to a file or a socket of the host.
//! 4. `no_new_privs`.
//! 5. Landlock: no file can be opened, made, removed or executed, also not by io_uring; no TCP port can be
//!    bound or reached; no signal can be sent to a process outside, and no abstract socket outside can be
//!    reached. Kernels before 6.12 enforce a part of this.
//! 6. A user and a group that no other process has: what root or another worker owns is out of reach, also
//!    where no other layer checks, and no signal reaches a process of another user.
//! 7. Neither core dumps nor tracing by processes of the same user (`PR_SET_DUMPABLE` 0).
//! 8. Every capability is dropped from every set.
//! 9. seccomp, on all threads: the system calls of [`filter`] are allowed, and the others fail with EPERM.
//!    They do not kill the process, because a library that tries a new call falls back to an old one, and a
//!    killed worker costs a volume.
//!
//! A layer that cannot be had is an error, unless the configuration allows it by name
//! ([`Isolation::allow_missing`]). Without root, the process makes a user namespace for the other namespaces.
//!
//! What remains: memory, threads, time, io_uring, and reads, writes, sizes and holes of open files. A backend
//! that starts threads when it opens a volume is confined before that, with the paths that it will read, the
//! directories in which it will write and, if it declares so, with sockets of AF_INET and AF_INET6; never with
//! AF_UNIX, whose abstract sockets belong to the network, nor with AF_NETLINK.

mod filter;
mod root;
mod user;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use nix::sched::{CloneFlags, setns, unshare};

use cleat_backend::{Confinement, Network};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::isolation::{Isolation, layer};

/// What remains possible under the confinement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// Files and directories that can still be opened for reading.
    pub paths: Vec<PathBuf>,
    /// Files, and directories with files, of which the worker gets copies in memory at the same paths.
    pub copies: Vec<PathBuf>,
    /// Directories that the worker sees as they are, and in which it may make, write, link and remove files and
    /// directories.
    pub writable: Vec<PathBuf>,
    /// The sockets that the worker may use.
    pub network: Network,
}

impl Needs {
    fn has_network(&self) -> bool {
        matches!(self.network, Network::Ports(_) | Network::Any)
    }
}

/// The result of the confinement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Layers that are in place.
    pub applied: Vec<&'static str>,
    /// Layers that are not in place, and may be missing, each with the reason.
    pub missing: Vec<(&'static str, String)>,
}

impl From<&Confinement> for Needs {
    fn from(confinement: &Confinement) -> Self {
        match confinement {
            Confinement::AfterOpen => Self::default(),
            Confinement::BeforeOpen { paths, copies, writable, network } => Self {
                paths: paths.clone(),
                copies: copies.clone(),
                writable: writable.clone(),
                network: network.clone(),
            },
        }
    }
}

/// Confines this process for the rest of its life. Must be called while the process has one thread: of the
/// layers, only the system call filter applies to threads that exist already.
///
/// # Errors
/// Returns `Unsupported` if a layer is missing that `isolation` does not allow to be missing. The process then
/// has the other layers.
pub fn confine(needs: &Needs, isolation: &Isolation) -> Result<Report> {
    let mut report = apply_layers(needs, isolation);
    match filter::apply(needs) {
        Ok(()) => report.applied.push(layer::SYSTEM_CALL_FILTER),
        Err(reason) => report.missing.push((layer::SYSTEM_CALL_FILTER, reason)),
    }
    check(&report, isolation).map(|()| report)
}

/// Applies all layers but the system call filter.
fn apply_layers(needs: &Needs, isolation: &Isolation) -> Report {
    let mut report = Report::default();
    let mut apply = |name, outcome: Result<(), String>| match outcome {
        Ok(()) => report.applied.push(name),
        Err(reason) => report.missing.push((name, reason)),
    };
    apply(layer::SINGLE_THREAD, single_thread());
    let privileged = user::enter_user_namespace_if_unprivileged();
    if !needs.has_network() {
        apply(layer::EMPTY_NETWORK, leave_network());
    } else if privileged && let Err(reason) = leave_network_for_a_moment() {
        apply(layer::EMPTY_NETWORK, Err(reason));
    }
    apply(layer::OWN_IPC, unshare(CloneFlags::CLONE_NEWIPC).map_err(text));
    apply(layer::EMPTY_ROOT, root::enter(needs));
    apply(layer::NO_NEW_PRIVILEGES, nix::sys::prctl::set_no_new_privs().map_err(text));
    apply(layer::LANDLOCK, restrict_files(needs));
    let failures = user::drop_bounding_set();
    apply(layer::OWN_USER, user::become_user(isolation.user));
    // A change of the user resets this property (`commit_creds` of the kernel).
    apply(layer::NOT_DUMPABLE, nix::sys::prctl::set_dumpable(false).map_err(text));
    apply(layer::NO_CAPABILITIES, user::drop_capabilities(failures));
    report
}

/// Checks that every missing layer may be missing.
fn check(report: &Report, isolation: &Isolation) -> Result<()> {
    let allowed = |name: &str| isolation.allow_missing.iter().any(|allowed| allowed == name);
    let missing: Vec<_> = report.missing.iter().filter(|(name, _)| !allowed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<_> = missing.iter().map(|(name, reason)| format!("{name} ({reason})")).collect();
    let names: Vec<_> = missing.iter().map(|(name, _)| format!("{name:?}")).collect();
    let message = format!("the process cannot be confined: it lacks {}", list.join(", "));
    Err(Error::new(ErrorKind::Unsupported, message).with_repair(format!(
        "`cleat doctor` shows what this machine lacks; after a change of the daemon's unit, \
         systemctl daemon-reload && systemctl restart cleat; to accept less, set workers.allow_missing = [{}]",
        names.join(", ")
    )))
}

/// How often the threads are counted until there is one, and the time in between.
const COUNTS: u32 = 50;
const COUNT_INTERVAL: Duration = Duration::from_millis(10);

/// Checks that this process has one thread. A thread that has been joined is in /proc for a moment longer: the
/// kernel wakes the joiner before it removes the thread (mm_release and release_task of the kernel).
#[allow(clippy::disallowed_methods, reason = "no event reports that a joined thread is removed")]
fn single_thread() -> Result<(), String> {
    let count = || std::fs::read_dir("/proc/self/task").map(Iterator::count).map_err(text);
    for _ in 1..COUNTS {
        if count()? == 1 {
            return Ok(());
        }
        std::thread::sleep(COUNT_INTERVAL);
    }
    match count()? {
        1 => Ok(()),
        threads => Err(format!("{threads} threads exist already")),
    }
}

/// Enters an empty network namespace. The socket to journald is made anew in it, because a socket of the host's
/// namespace could send to the abstract sockets of the host (unix_find_other, net/unix/af_unix.c).
fn leave_network() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(text)?;
    // A worker that cannot log must serve, nevertheless.
    let _ = cleat_telemetry::reconnect_journal();
    Ok(())
}

/// Does the same and returns to the network, which needs CAP_SYS_ADMIN.
fn leave_network_for_a_moment() -> Result<(), String> {
    let network = File::open("/proc/self/ns/net").map_err(text)?;
    leave_network()?;
    setns(network, CloneFlags::CLONE_NEWNET).map_err(|e| format!("no way back to the network: {e}"))
}

fn restrict_files(needs: &Needs) -> Result<(), String> {
    // The crate omits the rights that this kernel does not know, and reports that in the status.
    let newest = ABI::V6;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(newest))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(newest)))
        .map_err(text)?;
    let ports: &[u16] = match &needs.network {
        Network::Any => &[],
        Network::None | Network::Connector(_) => {
            ruleset = ruleset.handle_access(AccessNet::from_all(newest)).map_err(text)?;
            &[]
        }
        Network::Ports(ports) => {
            ruleset = ruleset.handle_access(AccessNet::from_all(newest)).map_err(text)?;
            ports
        }
    };
    let port = |port: &u16| Ok::<_, RulesetError>(NetPort::new(*port, AccessNet::ConnectTcp));
    let ports = ports.iter().map(port);
    let readable = needs.paths.iter().chain(&needs.copies);
    let readable = path_beneath_rules(readable, AccessFs::from_read(newest));
    let writable = path_beneath_rules(&needs.writable, writing());
    let status = ruleset
        .create()
        .and_then(|created| created.add_rules(readable))
        .and_then(|created| created.add_rules(writable))
        .and_then(|created| created.add_rules(ports))
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(text)?;
    match status.ruleset {
        // An older kernel enforces the rules on files. The rights that it does not know concern what other
        // layers refuse, too: the network, signals and abstract sockets.
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
        RulesetStatus::NotEnforced => Err("this kernel has no Landlock (5.13) enabled".into()),
    }
}

/// What a worker may do below a writable directory: no devices, sockets or symbolic links, and no execution.
fn writing() -> BitFlags<AccessFs> {
    AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests;
