//! Mappings and checks as the commands print them: the documented JSON schema, which mirrors the control API,
//! and text.
//!
//! Fields of the schema are only added. They never get another name or meaning. A field without a value is
//! null, not missing. Sizes are in bytes, times in seconds since the epoch.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::output::Table;
use super::size;
use super::space::Space;
use crate::doctor::{self, Verdict};
use cleat_api::v1;
use cleat_core::clock::{Clock as _, SystemClock};

/// One mapping.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Mapping {
    pub name: String,
    pub uri: String,
    /// mapping, mapped, recovering, failed, unmapping, orphan
    pub state: &'static str,
    /// The reason for the state.
    pub message: Option<String>,
    /// `/dev/nbdX`
    pub device: Option<String>,
    /// `/dev/disk/by-id/cleat-<name>`
    pub symlink: Option<String>,
    pub size_bytes: u64,
    pub block_size: u32,
    /// As requested, or because the volume is always read-only.
    pub read_only: bool,
    /// As requested; 0 is the daemon's default.
    pub connections: u32,
    /// As requested; 0 is the daemon's default.
    pub dead_connection_timeout_s: u32,
    /// queue, queue:DURATION, fail
    pub on_outage: Option<String>,
    /// The limit of requests per second; 0 is no limit.
    pub iops: u64,
    /// The limit of bytes per second; 0 is no limit.
    pub bytes_per_s: u64,
    /// auto or off
    pub busy_poll: Option<String>,
    /// Another client owns the volume. This node does not write to it until it is mapped again.
    pub fenced: bool,
    /// A sync of the volume failed: acknowledged writes may be lost, and every flush fails.
    pub sync_failed: bool,
    /// Acknowledged writes that are in memory and not in the store yet.
    pub unsaved_bytes: u64,
    /// What the volume costs in its store.
    pub space: Option<Space>,
    /// The current outage of the backend.
    pub outage: Option<Outage>,
    /// Whether the device is quiesced for snapshots.
    pub quiesce: bool,
    /// The current quiesce.
    pub quiet: Option<Quiesced>,
    /// How the last worker ended, if it ended unexpectedly.
    pub last_worker_end: Option<String>,
    pub worker_pid: Option<u32>,
    /// The build of the worker.
    pub worker_version: Option<String>,
    pub mapping_id: Option<String>,
    pub generation: u64,
    pub mapped_at_s: Option<u64>,
    /// Filled by `status TARGET`, and by `ls` for orphans.
    pub holders: Vec<Holder>,
}

/// An outage of a mapping's backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Outage {
    /// Milliseconds since the epoch.
    pub since_unix_ms: u64,
    pub reason: Option<String>,
    /// The number of requests that wait.
    pub queued: u64,
    pub policy: String,
}

/// A device that is quiesced for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Quiesced {
    /// Milliseconds since the epoch.
    pub since_unix_ms: u64,
    /// The hook that quiesces the device; null if its file systems are frozen instead.
    pub hook: Option<String>,
}

/// A holder of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Holder {
    Mount {
        path: String,
        filesystem: String,
        namespace_pid: Option<u32>,
    },
    Process {
        pid: u32,
        command: String,
    },
    Device {
        name: String,
    },
    /// A user inside the kernel.
    Kernel {
        what: String,
    },
    Unknown,
}

/// One finding of `doctor` or of the daemon's own checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub name: String,
    pub verdict: Verdict,
    pub finding: String,
    pub repair: Option<String>,
}

impl From<v1::Mapping> for Mapping {
    fn from(mapping: v1::Mapping) -> Self {
        let state = state_name(mapping.state());
        let options = mapping.options.unwrap_or_default();
        Self {
            name: mapping.name,
            uri: mapping.uri,
            state,
            message: text(mapping.message),
            device: text(mapping.device),
            symlink: text(mapping.symlink),
            size_bytes: mapping.size_bytes,
            block_size: mapping.block_size,
            read_only: mapping.read_only || options.read_only,
            connections: options.connections,
            dead_connection_timeout_s: options.dead_connection_timeout_s,
            on_outage: text(options.on_outage),
            iops: options.iops.unwrap_or(0),
            bytes_per_s: options.bytes_per_s.unwrap_or(0),
            busy_poll: text(options.busy_poll),
            fenced: mapping.fenced,
            sync_failed: mapping.sync_failed,
            unsaved_bytes: mapping.unsaved_bytes,
            space: mapping.space.map(Space::from),
            outage: mapping.outage.map(|outage| Outage {
                since_unix_ms: outage.since_unix_ms,
                reason: text(outage.reason),
                queued: outage.queued,
                policy: outage.policy,
            }),
            quiesce: options.quiesce,
            quiet: mapping.quiet.map(|quiet| Quiesced {
                since_unix_ms: quiet.since_unix_ms,
                hook: text(quiet.hook),
            }),
            last_worker_end: text(mapping.last_worker_end),
            worker_pid: number(mapping.worker_pid),
            worker_version: text(mapping.worker_version),
            mapping_id: text(mapping.mapping_id),
            generation: mapping.generation,
            mapped_at_s: Some(mapping.mapped_at_s).filter(|&at| at > 0),
            holders: mapping.holders.into_iter().map(Holder::from).collect(),
        }
    }
}

impl From<v1::Holder> for Holder {
    fn from(holder: v1::Holder) -> Self {
        match holder.kind {
            Some(v1::holder::Kind::Mount(mount)) => Self::Mount {
                path: mount.path,
                filesystem: mount.filesystem,
                namespace_pid: number(mount.namespace_pid),
            },
            Some(v1::holder::Kind::Process(process)) => {
                Self::Process { pid: process.pid, command: process.command }
            }
            Some(v1::holder::Kind::Device(name)) => Self::Device { name },
            Some(v1::holder::Kind::Kernel(what)) => Self::Kernel { what },
            // A newer daemon may know kinds that this client does not.
            None => Self::Unknown,
        }
    }
}

impl From<v1::Check> for Check {
    fn from(check: v1::Check) -> Self {
        let verdict = match check.verdict() {
            v1::check::Verdict::Ok => Verdict::Ok,
            v1::check::Verdict::Warning => Verdict::Warning,
            // A verdict that this client does not know may be serious.
            v1::check::Verdict::Error | v1::check::Verdict::Unspecified => Verdict::Error,
        };
        Self { name: check.name, verdict, finding: check.finding, repair: text(check.repair) }
    }
}

impl From<doctor::Check> for Check {
    fn from(check: doctor::Check) -> Self {
        let doctor::Check { name, verdict, finding, repair } = check;
        Self { name: name.to_owned(), verdict, finding, repair: text(repair) }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mount { path, filesystem, namespace_pid } => {
                write!(f, "mounted at {path}")?;
                if !filesystem.is_empty() {
                    write!(f, " ({filesystem})")?;
                }
                if let Some(pid) = namespace_pid {
                    write!(f, " in the mount namespace of process {pid}")?;
                }
                Ok(())
            }
            Self::Process { pid, command } => write!(f, "open in process {pid} ({command})"),
            Self::Device { name } if name == "swap" => f.write_str("used as swap"),
            Self::Device { name } => write!(f, "under the block device {name}"),
            Self::Kernel { what } => f.write_str(what),
            Self::Unknown => f.write_str("held in a way that this version of cleat does not know"),
        }
    }
}

/// The outage as text: its start, its duration, its reason, and what happens to requests.
impl std::fmt::Display for Outage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(self.since_unix_ms);
        let lasts = SystemClock.wall().duration_since(since).unwrap_or_default();
        write!(
            f,
            "the backend has not answered since {} ({})",
            humantime::format_rfc3339_seconds(since),
            humantime::format_duration(Duration::from_secs(lasts.as_secs()))
        )?;
        if let Some(reason) = &self.reason {
            write!(f, ": {reason}")?;
        }
        let requests = if self.queued == 1 { "request waits" } else { "requests wait" };
        write!(f, "; {} {requests}; policy: {}", self.queued, self.policy)
    }
}

/// The quiesce as text: its start and its hook.
impl std::fmt::Display for Quiesced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(self.since_unix_ms);
        let since = humantime::format_rfc3339_seconds(since);
        match &self.hook {
            None => write!(f, "file systems frozen for a snapshot since {since}"),
            Some(hook) => write!(f, "for a snapshot since {since}, by {hook}"),
        }
    }
}

/// Returns a table of mappings.
pub(super) fn mappings(mappings: &[Mapping], wide: bool) -> String {
    let mut headings = vec!["NAME", "DEVICE", "SIZE", "STATE", "URI"];
    if wide {
        headings.extend([
            "SYMLINK",
            "MODE",
            "BLOCK",
            "CONNECTIONS",
            "WORKER",
            "VERSION",
            "GENERATION",
            "AGE",
            "MESSAGE",
        ]);
    }
    let mut table = Table::new(&headings).align_right([2]);
    for mapping in mappings {
        let mut cells = vec![
            mapping.name.clone(),
            or_empty(mapping.device.as_deref()),
            size::human(mapping.size_bytes),
            match mapping.outage {
                Some(_) => format!("{} (outage)", mapping.state),
                None => mapping.state.to_owned(),
            },
            mapping.uri.clone(),
        ];
        if wide {
            cells.extend([
                or_empty(mapping.symlink.as_deref()),
                mode(mapping).to_owned(),
                mapping.block_size.to_string(),
                connections(mapping),
                mapping.worker_pid.map(|pid| pid.to_string()).unwrap_or_default(),
                or_empty(mapping.worker_version.as_deref()),
                mapping.generation.to_string(),
                mapping.mapped_at_s.map(age).unwrap_or_default(),
                or_empty(mapping.message.as_deref()),
            ]);
        }
        table.row(cells);
    }
    table.render()
}

/// Returns one mapping as text with one property per line.
pub(super) fn details(mapping: &Mapping) -> String {
    let mut table = Table::new(&["NAME", &super::output::printable(&mapping.name)]);
    let mut line = |label: &str, value: String| table.row(vec![label.to_owned(), value]);
    line("uri", mapping.uri.clone());
    line("state", mapping.state.to_owned());
    if let Some(message) = &mapping.message {
        line("message", message.clone());
    }
    if mapping.unsaved_bytes > 0 {
        line("not in store", format!("{} bytes of acknowledged writes", mapping.unsaved_bytes));
    }
    if let Some(space) = &mapping.space {
        line("write amplification", space.of_writes());
        line("space amplification", space.of_space());
        line("collector", space.of_collector());
    }
    if let Some(outage) = &mapping.outage {
        line("outage", outage.to_string());
    }
    if let Some(quiet) = &mapping.quiet {
        line("quiesced", quiet.to_string());
    }
    line("device", or_empty(mapping.device.as_deref()));
    line("symlink", or_empty(mapping.symlink.as_deref()));
    line("size", format!("{} ({} bytes)", size::human(mapping.size_bytes), mapping.size_bytes));
    line("block size", format!("{} bytes", mapping.block_size));
    line("mode", mode(mapping).to_owned());
    line("connections", connections(mapping));
    line("worker", mapping.worker_pid.map_or(String::new(), |pid| format!("process {pid}")));
    line("worker version", or_empty(mapping.worker_version.as_deref()));
    if let Some(end) = &mapping.last_worker_end {
        line("last worker", end.clone());
    }
    line("on outage", or_empty(mapping.on_outage.as_deref()));
    line("limits", limits(mapping));
    line("quiesce", if mapping.quiesce { "for snapshots" } else { "no" }.to_owned());
    line("generation", mapping.generation.to_string());
    line("mapping id", or_empty(mapping.mapping_id.as_deref()));
    line("mapped", mapping.mapped_at_s.map_or(String::new(), |at| format!("{} ago", age(at))));
    if mapping.holders.is_empty() {
        line("held by", "none".to_owned());
    }
    for holder in &mapping.holders {
        line("held by", holder.to_string());
    }
    table.render()
}

/// Returns checks as text. Each is followed by its repair.
pub(super) fn checks(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let name = super::output::printable(&check.name);
        let finding = super::output::printable(&check.finding);
        text.push_str(&format!("{:<7}  {name:<width$}  {finding}\n", check.verdict.name()));
        for line in check.repair.iter().flat_map(|repair| repair.lines()) {
            text.push_str(&format!("         repair: {}\n", super::output::printable(line)));
        }
    }
    text
}

fn state_name(state: v1::MappingState) -> &'static str {
    match state {
        v1::MappingState::Unspecified => "unknown",
        v1::MappingState::Mapping => "mapping",
        v1::MappingState::Mapped => "mapped",
        v1::MappingState::Recovering => "recovering",
        v1::MappingState::Failed => "failed",
        v1::MappingState::Unmapping => "unmapping",
        v1::MappingState::Orphan => "orphan",
    }
}

fn mode(mapping: &Mapping) -> &'static str {
    if mapping.read_only { "read-only" } else { "read-write" }
}

fn limits(mapping: &Mapping) -> String {
    let requests = (mapping.iops > 0).then(|| format!("{} requests/s", mapping.iops));
    let bytes =
        (mapping.bytes_per_s > 0).then(|| format!("{}/s", size::human(mapping.bytes_per_s)));
    let limits: Vec<String> = requests.into_iter().chain(bytes).collect();
    if limits.is_empty() { "none".to_owned() } else { limits.join(", ") }
}

fn connections(mapping: &Mapping) -> String {
    if mapping.connections == 0 { "default".to_owned() } else { mapping.connections.to_string() }
}

fn age(since_s: u64) -> String {
    let age_s = SystemClock.unix_s().saturating_sub(since_s);
    humantime::format_duration(Duration::from_secs(age_s)).to_string()
}

/// Returns `None` if `value` is empty.
pub(super) fn text(value: String) -> Option<String> {
    Some(value).filter(|value| !value.is_empty())
}

fn number(value: u32) -> Option<u32> {
    Some(value).filter(|&value| value != 0)
}

fn or_empty(value: Option<&str>) -> String {
    value.unwrap_or_default().to_owned()
}
