//! The confinement of a worker: it gives up everything but the descriptors that it has.
//!
//! The layers are applied in this order, each where the kernel has it and the process may use it. A missing
//! layer is listed in the [`Report`] and is never an error, because a worker without a layer still serves:
//!
//! 1. An empty network namespace of its own: io_uring can make sockets in spite of any system call filter.
//! 2. `no_new_privs`, and neither core dumps nor tracing by processes of the same user (`PR_SET_DUMPABLE` 0).
//! 3. Landlock: no file can be opened, made, removed or executed, also not by io_uring; no TCP port can be
//!    bound or reached; no signal can be sent to a process outside, and no abstract socket outside can be
//!    reached.
//! 4. Every capability is dropped from every set.
//! 5. seccomp, on all threads: the system calls of [`filter`] are allowed, and the others fail with EPERM.
//!    They do not kill the process, because a library that tries a new call falls back to an old one, and a
//!    killed worker costs a volume.
//!
//! What remains: memory, threads, time, io_uring, and reads, writes, sizes and holes of open files. A backend
//! whose library starts threads when it opens a volume is confined before that, with the paths that it will
//! read and, if it declares so, with sockets of AF_UNIX, AF_INET and AF_INET6; never with AF_NETLINK.

mod filter;

use std::path::PathBuf;

use caps::CapSet;
use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    Scope, path_beneath_rules,
};
use nix::sched::CloneFlags;

use cleat_backend::Confinement;

/// What remains possible under the confinement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// Files and directories that can still be opened for reading.
    pub paths: Vec<PathBuf>,
    /// Whether the worker may use sockets.
    pub network: bool,
}

/// The result of the confinement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Layers that are in place.
    pub applied: Vec<&'static str>,
    /// Layers that are not in place, or only in part, each with the reason.
    pub missing: Vec<(&'static str, String)>,
}

impl From<&Confinement> for Needs {
    fn from(confinement: &Confinement) -> Self {
        match confinement {
            Confinement::AfterOpen => Self::default(),
            Confinement::BeforeOpen { paths, network } => {
                Self { paths: paths.clone(), network: *network }
            }
        }
    }
}

/// Confines this process for the rest of its life. Must be called while the process has one thread: of the
/// layers, only the system call filter applies to threads that exist already.
pub fn confine(needs: &Needs) -> Report {
    let mut report = Report::default();
    let mut layer = |name, outcome: Result<(), String>| match outcome {
        Ok(()) => report.applied.push(name),
        Err(reason) => report.missing.push((name, reason)),
    };
    layer("single thread", single_thread());
    if !needs.network {
        layer("empty network", nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(text));
    }
    layer("no new privileges", nix::sys::prctl::set_no_new_privs().map_err(text));
    layer("not dumpable", nix::sys::prctl::set_dumpable(false).map_err(text));
    layer("landlock", restrict_files(needs));
    layer("capabilities", drop_capabilities());
    layer("system call filter", filter::apply(needs));
    report
}

fn single_thread() -> Result<(), String> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(text)?.count();
    if threads == 1 { Ok(()) } else { Err(format!("{threads} threads exist already")) }
}

fn restrict_files(needs: &Needs) -> Result<(), String> {
    // The crate omits the rights that this kernel does not know, and reports that in the status.
    let newest = ABI::V6;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(newest))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(newest)))
        .map_err(text)?;
    if !needs.network {
        ruleset = ruleset.handle_access(AccessNet::from_all(newest)).map_err(text)?;
    }
    let readable = path_beneath_rules(&needs.paths, AccessFs::from_read(newest));
    let status = ruleset
        .create()
        .and_then(|created| created.add_rules(readable))
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(text)?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced => {
            Err("this kernel enforces only a part of the rules".into())
        }
        RulesetStatus::NotEnforced => Err("this kernel has no Landlock (5.13) enabled".into()),
    }
}

fn drop_capabilities() -> Result<(), String> {
    let mut failures = Vec::new();
    // Dropping from the bounding set needs CAP_SETPCAP, so this set is first, one capability at a time. The
    // ambient set cannot contain a capability that the permitted and inheritable sets do not contain.
    for capability in caps::read(None, CapSet::Bounding).map_err(text)? {
        if let Err(error) = caps::drop(None, CapSet::Bounding, capability) {
            failures.push(error.to_string());
        }
    }
    for set in [CapSet::Ambient, CapSet::Effective, CapSet::Inheritable, CapSet::Permitted] {
        if let Err(error) = caps::clear(None, set) {
            failures.push(format!("{set:?}: {error}"));
        }
    }
    // An unprivileged process cannot change its bounding set. Without any capability and with no_new_privs,
    // that set has no effect.
    let powerless = [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable]
        .iter()
        .all(|set| caps::read(None, *set).is_ok_and(|left| left.is_empty()));
    if powerless { Ok(()) } else { Err(failures.join("; ")) }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests;
