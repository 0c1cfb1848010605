//! The identity with which a process claims a volume, and the proof that an earlier process has ended.

use serde::{Deserialize, Serialize};

use cleat_core::error::{Error, Result};
use cleat_sys::host;
use cleat_sys::process::{is_gone, pid_namespace, started_ticks};

/// Host names that many machines have, so that they do not identify a node.
const COMMON_NAMES: [&str; 4] = ["", "localhost", "localhost.localdomain", "(none)"];

/// Begins the mapping of a process without a supervisor.
const ALONE: &str = "process-";

/// The identity of a process that opens a volume for writing. The default has no identity and takes over
/// from no other claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claimant {
    /// The node's name, unique in the cluster.
    pub node: String,
    /// A hash of the machine id, which distinguishes nodes of the same name; empty if it is not known.
    pub machine: String,
    /// The boot id of the node's kernel.
    pub boot_id: String,
    /// The mapping. It has one process at a time, and a new one starts only after the end of the previous one
    /// was proved.
    pub mapping_id: String,
    /// Take the volume over from any other claim, because the user asked for it.
    pub take_over: bool,
    /// The mapping already has a device, whose users rely on the content of the volume. They can continue only
    /// if no other client has claimed the volume since.
    pub resumes: bool,
    /// The process; `None` where `/proc` could not be read.
    pub process: Option<ProcessMark>,
    /// The generation of the grant with which the mapping claims (see `cleat_grants`); 0 for a mapping without a
    /// grant. `None` for a command that does not use the volume: any generation is admitted.
    pub grant: Option<u64>,
}

impl Claimant {
    /// Returns the identity of this process, which serves a volume without a supervisor. `node` is the
    /// configured name of the node; empty for the host name.
    ///
    /// # Errors
    /// Returns an error if `/proc` cannot be read.
    pub fn alone(node: &str, take_over: bool) -> Result<Self> {
        let (node, machine, boot_id) = (node_name(node)?, host::machine_id_hash(), boot_id()?);
        let process = ProcessMark::own();
        // Unique during this boot, as the process is.
        let mark = process.map(|mark| format!("{ALONE}{}-{}", mark.pid, mark.started_ticks));
        let mapping_id = mark.unwrap_or_default();
        Ok(Self {
            node,
            machine,
            boot_id,
            mapping_id,
            take_over,
            resumes: false,
            process,
            grant: None,
        })
    }

    /// Whether a mapping is that of a process without a supervisor, as [`Claimant::alone`] makes it.
    pub fn is_alone(mapping_id: &str) -> bool {
        mapping_id.starts_with(ALONE)
    }
}

/// Identifies a process, so that its end can be proved later. Valid during one boot of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// The process number.
    pub pid: u32,
    /// The start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub started_ticks: u64,
    /// The inode of the pid namespace in which the process has this number.
    pub pid_namespace: u64,
}

impl ProcessMark {
    /// Returns the mark of this process; `None` if `/proc` cannot be read.
    pub fn own() -> Option<Self> {
        let pid = std::process::id();
        let started_ticks = started_ticks(pid).ok()?;
        Some(Self { pid, started_ticks, pid_namespace: pid_namespace().ok()? })
    }

    /// Returns whether it is proved that the process has ended. `own` is the mark of the calling process:
    /// numbers can be compared only within one pid namespace, so the result is false in another one.
    pub fn has_ended(&self, own: Option<&Self>) -> bool {
        let same_place = own.is_some_and(|own| own.pid_namespace == self.pid_namespace);
        let reused = || started_ticks(self.pid).is_ok_and(|ticks| ticks != self.started_ticks);
        same_place && (is_gone(self.pid) || reused())
    }
}

/// Returns the name of this node: `configured`, or the host name if that is empty.
///
/// # Errors
/// Returns an error if `/proc` cannot be read.
pub fn node_name(configured: &str) -> Result<String> {
    match configured {
        "" => host::host_name().map_err(|e| Error::from_io("cannot read the host name", e)),
        name => Ok(name.to_owned()),
    }
}

/// Returns the boot id of the running kernel.
///
/// # Errors
/// Fails as [`node_name`] does.
pub fn boot_id() -> Result<String> {
    host::boot_id().map_err(|e| Error::from_io("cannot read the boot id", e))
}

/// Returns whether two nodes, each given by its name and its machine id, are one node. Two machines may have the same
/// name, so the machine ids are compared if both are known. A name that many machines have proves nothing.
pub fn is_same_node(one: (&str, &str), other: (&str, &str)) -> bool {
    let ((name, machine), (other_name, other_machine)) = (one, other);
    let is_known = !machine.is_empty() && !other_machine.is_empty();
    let is_other_machine = is_known && machine != other_machine;
    name == other_name && !COMMON_NAMES.contains(&name) && !is_other_machine
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_proved_only_in_the_same_pid_namespace() {
        let own = ProcessMark::own().unwrap();
        assert!(!own.has_ended(Some(&own)));
        let earlier = ProcessMark { started_ticks: own.started_ticks - 1, ..own };
        assert!(earlier.has_ended(Some(&own)), "another process has its number");
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let ended = ProcessMark { pid, ..own };
        assert!(ended.has_ended(Some(&own)));
        assert!(!ended.has_ended(None));
        let elsewhere = ProcessMark { pid_namespace: 1, ..own };
        assert!(!ended.has_ended(Some(&elsewhere)));
        // No process ever has this number.
        assert!(ProcessMark { pid: u32::MAX, ..own }.has_ended(Some(&own)));
    }
}
