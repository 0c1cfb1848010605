//! The user of a worker, and its capabilities.

use caps::{CapSet, Capability};
use nix::sched::CloneFlags;
use nix::unistd::{Gid, Uid, getegid, geteuid, setgroups, setresgid, setresuid};

use super::text;

/// Makes a user namespace if this process lacks CAP_SYS_ADMIN: there it may make the other namespaces. It
/// keeps its user and group. If the kernel refuses, the layers that need a namespace are missing. Returns whether
/// this process has CAP_SYS_ADMIN.
pub(super) fn enter_user_namespace_if_unprivileged() -> bool {
    let privileged = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN);
    if privileged.unwrap_or(false) {
        return true;
    }
    let (user, group) = (geteuid(), getegid());
    if nix::sched::unshare(CloneFlags::CLONE_NEWUSER).is_ok() {
        // Without the maps, no file could be created in the new root.
        let _ = std::fs::write("/proc/self/setgroups", "deny");
        let _ = std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"));
        let _ = std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"));
    }
    false
}

/// Becomes the user and the group `number`, with no other group. The process must be root.
///
/// As root, even without capabilities, it could open root's files and sockets, and signal root's processes.
pub(super) fn become_user(number: Option<u32>) -> Result<(), String> {
    let Some(number) = number else { return Err("the worker got no user of its own".to_owned()) };
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    setgroups(&[]).map_err(|error| format!("CAP_SETGID: {error}"))?;
    setresgid(group, group, group).map_err(|error| format!("CAP_SETGID: {error}"))?;
    setresuid(user, user, user).map_err(|error| format!("CAP_SETUID: {error}"))
}

/// Drops every capability from the bounding set, which needs CAP_SETPCAP, so before the user changes.
/// Returns the failures.
pub(super) fn drop_bounding_set() -> Vec<String> {
    let bounding = match caps::read(None, CapSet::Bounding) {
        Ok(bounding) => bounding,
        Err(error) => return vec![error.to_string()],
    };
    let drop = |capability| caps::drop(None, CapSet::Bounding, capability).err();
    bounding.into_iter().filter_map(drop).map(|error| error.to_string()).collect()
}

/// Drops every capability from all other sets. `failures` are those of [`drop_bounding_set`].
pub(super) fn drop_capabilities(mut failures: Vec<String>) -> Result<(), String> {
    // The ambient set cannot contain a capability that the permitted and inheritable sets do not contain.
    for set in [CapSet::Ambient, CapSet::Effective, CapSet::Inheritable, CapSet::Permitted] {
        if let Err(error) = caps::clear(None, set) {
            failures.push(format!("{set:?}: {error}"));
        }
    }
    // An unprivileged process cannot change its bounding set. Without any capability and with no_new_privs,
    // that set has no effect.
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        if !caps::read(None, set).map_err(text)?.is_empty() {
            return Err(failures.join("; "));
        }
    }
    Ok(())
}
