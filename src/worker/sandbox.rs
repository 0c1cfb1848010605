//! What a worker gives up before it serves: everything but the descriptors that it has.
//!
//! In this order, each layer where the kernel has it and the process may; what is missing is told
//! in the [`Report`], never an error, because a worker without a layer still serves:
//!
//! 1. A network namespace of its own, empty: io_uring can make sockets past any system call filter.
//! 2. `no_new_privs`, and no core dumps or tracing by equals (`PR_SET_DUMPABLE` 0).
//! 3. Landlock: no file can be opened, made, removed or executed, by io_uring neither; no TCP port
//!    bound or reached; no signal sent and no abstract socket reached outside.
//! 4. Every capability dropped from every set.
//! 5. seccomp, on all threads: the system calls of [`filter`], EPERM for the rest. Not "kill": a
//!    library that tries something new falls back, and a killed worker costs a volume.
//!
//! Stays: memory, threads, time, io_uring and reads, writes, sizes and holes of what is open.
//! A backend whose threads start when it opens is confined before, with the paths it will read and,
//! if it says so, with sockets of AF_UNIX, AF_INET and AF_INET6; never AF_NETLINK.

mod filter;

use std::path::PathBuf;

use caps::CapSet;
use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    Scope, path_beneath_rules,
};
use nix::sched::CloneFlags;

use cleat_backend::Confinement;

/// What will stay possible.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// Files and directories that can still be opened for reading.
    pub paths: Vec<PathBuf>,
    /// Sockets.
    pub network: bool,
}

/// Which layers are in place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Layers that are in place.
    pub applied: Vec<&'static str>,
    /// Layers that are not, or in part, and why.
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

/// Confines this process for good. To be called while it has one thread: of the layers, only the
/// system call filter reaches threads that exist.
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
    // What the kernel does not know of these is left out by the crate, and told in the status.
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
        RulesetStatus::PartiallyEnforced => Err("enforced as far as this kernel knows it".into()),
        RulesetStatus::NotEnforced => Err("this kernel has no Landlock (5.13) enabled".into()),
    }
}

fn drop_capabilities() -> Result<(), String> {
    let mut failures = Vec::new();
    // The bounding set needs CAP_SETPCAP, so it goes first, capability by capability; the ambient
    // set cannot hold what the others do not.
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
    // Unprivileged, the bounding set stays; without any capability, and with no_new_privs, it
    // means nothing.
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
