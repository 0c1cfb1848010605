//! Preflight: what cleat needs of the machine, each finding with its repair.
//!
//! Comes in: files of the machine (under a root that tests replace) and a few real attempts: a ring,
//! a netlink question, a Landlock ruleset. Goes out: [`Check`]s, in a fixed order. What may never
//! happen here: a change to the machine. Loading a module is left to the first map.

mod files;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use caps::{CapSet, Capability};
use landlock::{ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use nix::sys::resource::{Resource, getrlimit};

use cleat_core::error::ErrorKind;
use cleat_node::config::Config;
use cleat_sys::ring::Ring;

/// How a finding is to be taken, from harmless to fatal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// In order.
    Ok,
    /// Works, but with less than could be had.
    Warning,
    /// Volumes cannot be mapped.
    Error,
}

impl Verdict {
    /// As a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was looked at, as one word; stable for scripts.
    pub name: &'static str,
    /// How it is to be taken.
    pub verdict: Verdict,
    /// What was found, as a sentence without a period.
    pub finding: String,
    /// What to do; empty when in order.
    pub repair: String,
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, finding: finding.into(), repair: String::new() }
    }

    fn warning(name: &'static str, finding: impl Into<String>, repair: impl Into<String>) -> Self {
        let (finding, repair) = (finding.into(), repair.into());
        Self { name, verdict: Verdict::Warning, finding, repair }
    }

    fn error(name: &'static str, finding: impl Into<String>, repair: impl Into<String>) -> Self {
        let (finding, repair) = (finding.into(), repair.into());
        Self { name, verdict: Verdict::Error, finding, repair }
    }
}

/// The machine that is examined.
#[derive(Debug, Clone)]
struct Machine {
    root: PathBuf,
    run_directory: PathBuf,
    /// That workers are put into.
    cgroup: Option<PathBuf>,
}

/// Examines this machine, for a supervisor with that configuration.
pub fn examine(config: &Config) -> Vec<Check> {
    let run_directory = config.runtime_dir.clone();
    let cgroup = config.workers.cgroup.clone();
    let machine = Machine { root: PathBuf::from("/"), run_directory, cgroup };
    let mut checks = vec![
        machine.kernel(),
        machine.module(),
        netlink(),
        capabilities(),
        machine.user_namespace(),
        machine.io_uring(),
        udev(),
        machine.dev(),
        machine.run_directory(),
        limits(),
        machine.sandbox(),
    ];
    checks.extend(backends());
    checks.extend([machine.namespaces(), machine.systemd(), machine.cgroup()]);
    checks
}

/// How long the driver may take to answer.
const NETLINK_TIMEOUT: Duration = Duration::from_secs(5);

fn netlink() -> Check {
    const NAME: &str = "netlink";
    match cleat_kernel::real::probe(Instant::now() + NETLINK_TIMEOUT) {
        Ok(()) => Check::ok(NAME, "the nbd driver answers over generic netlink"),
        Err(error) if error.kind() == ErrorKind::Unsupported => Check::warning(
            NAME,
            "the nbd driver is not loaded, so it was not asked",
            "run `modprobe nbd`; the first map tries that by itself",
        ),
        Err(error) => {
            let repair = error.repair().unwrap_or("see `dmesg`; a stuck command blocks all others");
            Check::error(NAME, error.report(), repair)
        }
    }
}

/// What the supervisor needs, and what for.
const CAPABILITIES: [(Capability, Verdict, &str); 4] = [
    (Capability::CAP_SYS_ADMIN, Verdict::Error, "configures nbd devices"),
    (Capability::CAP_SYS_RESOURCE, Verdict::Warning, "keeps workers out of memory reclaim"),
    (Capability::CAP_SYS_PTRACE, Verdict::Warning, "sees who holds a device"),
    (Capability::CAP_DAC_READ_SEARCH, Verdict::Warning, "sees who holds a device"),
];

fn capabilities() -> Check {
    const NAME: &str = "capabilities";
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(needed, ..)| !has(*needed)).collect();
    let Some(verdict) = missing.iter().map(|(_, verdict, _)| *verdict).max() else {
        return Check::ok(NAME, "every capability that the supervisor uses is there");
    };
    let list = missing.iter().map(|(capability, _, why)| format!("{capability} ({why})"));
    let finding = format!("missing: {}", list.collect::<Vec<_>>().join(", "));
    let repair = "run it as root; in a container, privileged or with these capabilities";
    Check { name: NAME, verdict, finding, repair: repair.into() }
}

fn udev() -> Check {
    const NAME: &str = "udev";
    let rule = cleat_kernel::udev::RULE;
    match (cleat_kernel::udev::udevd_runs(), cleat_kernel::udev::rule_installed()) {
        (true, true) => Check::ok(NAME, format!("udevd runs and {rule} is installed")),
        (true, false) => Check::warning(
            NAME,
            format!("udevd runs, but {rule} is not installed: cleat makes the symlinks itself"),
            "run `make install`, or copy systemd/60-cleat.rules to /etc/udev/rules.d and run \
             `udevadm control --reload`",
        ),
        (false, _) => Check::warning(
            NAME,
            "no udevd is seen: cleat makes the symlinks itself, partitions get none",
            "start systemd-udevd; in a container, mount the host's /run/udev",
        ),
    }
}

/// Descriptors that a supervisor needs with some hundred volumes.
const DESCRIPTORS_WANTED: u64 = 4096;

fn limits() -> Check {
    const NAME: &str = "limits";
    let soft = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => soft,
        Err(errno) => {
            return Check::warning(NAME, format!("RLIMIT_NOFILE: {errno}"), "see `ulimit -n`");
        }
    };
    let locked = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    let finding = format!("{soft} open files, {} KiB of locked memory", locked / 1024);
    if soft < DESCRIPTORS_WANTED {
        let repair = format!("raise LimitNOFILE= or `ulimit -n` to {DESCRIPTORS_WANTED}");
        return Check::warning(NAME, finding, repair);
    }
    Check::ok(NAME, finding)
}

/// What the backends need of this machine.
fn backends() -> impl Iterator<Item = Check> {
    crate::backends::REGISTRY.backends().filter_map(|backend| {
        let name = backend.scheme();
        Some(match backend.diagnose()? {
            Ok(finding) => Check::ok(name, finding),
            Err(error) => {
                let repair = error.repair().unwrap_or("see the backend's documentation");
                Check::warning(name, error.report(), repair)
            }
        })
    })
}

impl Machine {
    fn io_uring(&self) -> Check {
        const NAME: &str = "io_uring";
        let error = match Ring::new(8) {
            Ok(_) => return Check::ok(NAME, "a ring can be made"),
            Err(error) => error,
        };
        let repair = match self.read("proc/sys/kernel/io_uring_disabled").as_deref() {
            Some("1" | "2") => "run `sysctl kernel.io_uring_disabled=0`",
            None => "the kernel has no io_uring: use one with CONFIG_IO_URING",
            Some(_) => {
                "a seccomp profile forbids it: allow io_uring_setup, io_uring_enter and \
                 io_uring_register, or run the container unconfined"
            }
        };
        Check::error(NAME, format!("no ring can be made: {error}"), repair)
    }

    fn sandbox(&self) -> Check {
        const NAME: &str = "sandbox";
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(ABI::V1))
            .and_then(Ruleset::create);
        let seccomp = self.read("proc/sys/kernel/seccomp/actions_avail").is_some();
        match (ruleset.is_ok(), seccomp) {
            (true, true) => Check::ok(NAME, "workers can be confined by Landlock and seccomp"),
            (landlock, _) => {
                let missing = if landlock { "seccomp" } else { "Landlock" };
                Check::warning(
                    NAME,
                    format!("workers are confined less: the kernel offers no {missing}"),
                    "add landlock to the lsm= kernel parameter; use a kernel with \
                     CONFIG_SECURITY_LANDLOCK and CONFIG_SECCOMP_FILTER",
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_that_is_not_in_order_has_a_repair() {
        let run = tempfile::tempdir().unwrap();
        let mut config = Config { runtime_dir: run.path().to_owned(), ..Config::default() };
        config.workers.cgroup = Some(run.path().join("no-cgroup"));
        let checks = examine(&config);
        for check in &checks {
            assert_eq!(check.repair.is_empty(), check.verdict == Verdict::Ok, "{check:?}");
            assert!(!check.finding.is_empty() && !check.finding.ends_with('.'), "{check:?}");
        }
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len(), "names are unique");
    }
}
