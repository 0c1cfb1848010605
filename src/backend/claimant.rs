//! Who opens a volume: what its claim will say, and what proves that an earlier one has ended.

use serde::{Deserialize, Serialize};

use cleat_core::error::{Error, Result};
use cleat_sys::host;
use cleat_sys::process::{is_gone, pid_namespace, started_ticks};

/// Names that many machines have: they prove nothing.
const NO_NAMES: [&str; 4] = ["", "localhost", "localhost.localdomain", "(none)"];

/// Who opens a volume to write to it. The default is nobody in particular, who takes over from nobody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claimant {
    /// The node's name, unique in the cluster.
    pub node: String,
    /// What tells the node from another one of the same name, where it is known.
    pub machine: String,
    /// The boot of its kernel.
    pub boot_id: String,
    /// The mapping; each has but one process at a time, and the end of the one before is proved.
    pub mapping_id: String,
    /// Told to take the volume from whoever has it.
    pub take_over: bool,
    /// The mapping has a device already, whose users rely on what the volume held: they can go on only
    /// if nobody else has had it since.
    pub resumes: bool,
    /// The process.
    pub process: Option<ProcessMark>,
}

impl Claimant {
    /// This process, which serves a volume by itself, on the node that is configured as `node`.
    ///
    /// # Errors
    /// When /proc is not there.
    pub fn alone(node: &str, take_over: bool) -> Result<Self> {
        let (node, machine, boot_id) = (node_name(node)?, host::machine_id_hash(), boot_id()?);
        let process = ProcessMark::own();
        // Like the process, unique for this boot.
        let mark = process.map(|mark| format!("process-{}-{}", mark.pid, mark.started_ticks));
        let mapping_id = mark.unwrap_or_default();
        Ok(Self { node, machine, boot_id, mapping_id, take_over, resumes: false, process })
    }
}

/// A process, so that it can be told whether it has ended. Means something during the same boot only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// Its number.
    pub pid: u32,
    /// When it was started, in clock ticks since boot.
    pub started_ticks: u64,
    /// Where it has that number.
    pub pid_namespace: u64,
}

impl ProcessMark {
    /// This process; `None` where /proc is not to be read.
    pub fn own() -> Option<Self> {
        let pid = std::process::id();
        let started_ticks = started_ticks(pid).ok()?;
        Some(Self { pid, started_ticks, pid_namespace: pid_namespace().ok()? })
    }

    /// Whether the process is proved gone, from where `own` is.
    pub fn has_ended(&self, own: Option<&Self>) -> bool {
        let same_place = own.is_some_and(|own| own.pid_namespace == self.pid_namespace);
        let reused = || started_ticks(self.pid).is_ok_and(|ticks| ticks != self.started_ticks);
        same_place && (is_gone(self.pid) || reused())
    }
}

/// What this node is called: as configured, else as the host is.
///
/// # Errors
/// When /proc is not there.
pub fn node_name(configured: &str) -> Result<String> {
    match configured {
        "" => host::host_name().map_err(|e| Error::from_io("cannot read the host's name", e)),
        name => Ok(name.to_owned()),
    }
}

/// Of the kernel now running.
///
/// # Errors
/// As [`node_name`].
pub fn boot_id() -> Result<String> {
    host::boot_id().map_err(|e| Error::from_io("cannot read the boot's id", e))
}

/// Whether a node's name tells one node from all others.
pub fn is_telling(node: &str) -> bool {
    !NO_NAMES.contains(&node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_proved_only_from_the_same_place() {
        let own = ProcessMark::own().unwrap();
        assert!(!own.has_ended(Some(&own)));
        let earlier = ProcessMark { started_ticks: own.started_ticks - 1, ..own };
        assert!(earlier.has_ended(Some(&own)), "its number is another's");
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let gone = ProcessMark { pid, ..own };
        assert!(gone.has_ended(Some(&own)));
        assert!(!gone.has_ended(None));
        let elsewhere = ProcessMark { pid_namespace: 1, ..own };
        assert!(!gone.has_ended(Some(&elsewhere)));
        // A number that is no process's, ever.
        assert!(ProcessMark { pid: u32::MAX, ..own }.has_ended(Some(&own)));
    }
}
