//! Checks whether the machine has what cleat needs. Each finding has a repair.
//!
//! - Input: files of the machine, below a root that tests replace, and a few real attempts: a ring, a netlink
//!   request, a Landlock ruleset.
//! - Output: [`Check`]s in a fixed order.
//!
//! Never allowed here: a change to the machine. The first map loads the kernel module.

mod files;

use std::path::PathBuf;
use std::time::Duration;

use caps::{CapSet, Capability};
use landlock::{ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use nix::sys::resource::{Resource, getrlimit};

use cleat_core::clock::{Clock as _, SystemClock};
use cleat_core::error::ErrorKind;
use cleat_node::config::Config;
use cleat_sys::ring::Ring;

/// The severity of a finding, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No problem.
    Ok,
    /// cleat works, but with restrictions.
    Warning,
    /// Volumes cannot be mapped.
    Error,
}

impl Verdict {
    /// Returns the verdict as a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The name of the check, one word. Names are stable, for scripts.
    pub name: &'static str,
    /// The severity.
    pub verdict: Verdict,
    /// The finding, a sentence without a period.
    pub finding: String,
    /// What to do; empty for [`Verdict::Ok`].
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

/// The machine to check.
#[derive(Debug, Clone)]
struct Machine {
    root: PathBuf,
    run_directory: PathBuf,
    /// The configured control group of the workers.
    cgroup: Option<PathBuf>,
}

/// Checks this machine for a supervisor with this configuration. Blocks for up to 5 s if the nbd driver does
/// not reply.
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

/// The timeout for a reply of the nbd driver.
const NETLINK_TIMEOUT: Duration = Duration::from_secs(5);

fn netlink() -> Check {
    const NAME: &str = "netlink";
    match cleat_kernel::real::probe(SystemClock.now() + NETLINK_TIMEOUT) {
        Ok(()) => Check::ok(NAME, "the nbd driver answers over generic netlink"),
        Err(error) if error.kind() == ErrorKind::Unsupported => Check::warning(
            NAME,
            "the nbd driver is not loaded and was not tested",
            "run `modprobe nbd`; otherwise the first map does it",
        ),
        Err(error) => {
            let repair =
                error.repair().unwrap_or("check `dmesg`; a command that hangs blocks all others");
            Check::error(NAME, error.report(), repair)
        }
    }
}

/// The capabilities that the supervisor needs, with the severity and the consequence of their absence.
const CAPABILITIES: [(Capability, Verdict, &str); 7] = [
    (Capability::CAP_SYS_ADMIN, Verdict::Error, "configures nbd devices"),
    (Capability::CAP_SETUID, Verdict::Error, "gives each worker a user of its own"),
    (Capability::CAP_SETGID, Verdict::Error, "gives each worker a group of its own"),
    (Capability::CAP_KILL, Verdict::Error, "ends workers, which have users of their own"),
    (Capability::CAP_SYS_RESOURCE, Verdict::Warning, "excludes workers from memory reclaim"),
    (Capability::CAP_SYS_PTRACE, Verdict::Warning, "finds the holders of a device"),
    (Capability::CAP_DAC_READ_SEARCH, Verdict::Warning, "finds the holders of a device"),
];

fn capabilities() -> Check {
    const NAME: &str = "capabilities";
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(needed, ..)| !has(*needed)).collect();
    let Some(verdict) = missing.iter().map(|(_, verdict, _)| *verdict).max() else {
        return Check::ok(NAME, "the process has every capability that the supervisor uses");
    };
    let list = missing.iter().map(|(capability, _, why)| format!("{capability} ({why})"));
    let finding = format!("missing capabilities: {}", list.collect::<Vec<_>>().join(", "));
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
            format!("udevd runs, but {rule} is not installed: cleat creates the symlinks itself"),
            "run `make install`, or copy systemd/60-cleat.rules to /etc/udev/rules.d and run \
             `udevadm control --reload`",
        ),
        (false, _) => Check::warning(
            NAME,
            "udevd was not found: cleat creates the symlinks itself, and partitions have none",
            "start systemd-udevd; in a container, mount the host's /run/udev",
        ),
    }
}

/// The number of descriptors that a supervisor needs for several hundred volumes.
const DESCRIPTORS_WANTED: u64 = 4096;

fn limits() -> Check {
    const NAME: &str = "limits";
    let soft = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => soft,
        Err(errno) => {
            return Check::warning(NAME, format!("RLIMIT_NOFILE: {errno}"), "check `ulimit -n`");
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

/// The backends' own checks of this machine.
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
            Ok(_) => return Check::ok(NAME, "a ring can be created"),
            Err(error) => error,
        };
        let repair = match self.read("proc/sys/kernel/io_uring_disabled").as_deref() {
            Some("1" | "2") => "run `sysctl kernel.io_uring_disabled=0`",
            None => "the kernel has no io_uring: use a kernel with CONFIG_IO_URING",
            Some(_) => {
                "a seccomp profile forbids it: allow io_uring_setup, io_uring_enter and \
                 io_uring_register, or run the container unconfined"
            }
        };
        Check::error(NAME, format!("cannot create a ring: {error}"), repair)
    }

    fn sandbox(&self) -> Check {
        const NAME: &str = "sandbox";
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(ABI::V1))
            .and_then(Ruleset::create);
        let seccomp = self.read("proc/sys/kernel/seccomp/actions_avail").is_some();
        match (ruleset.is_ok(), seccomp) {
            (true, true) => Check::ok(NAME, "Landlock and seccomp can confine workers"),
            (landlock, _) => {
                let missing = if landlock { "seccomp" } else { "Landlock" };
                Check::error(
                    NAME,
                    format!("workers cannot be confined: the kernel has no {missing}"),
                    "add landlock to the lsm= kernel parameter; use a kernel with \
                     CONFIG_SECURITY_LANDLOCK and CONFIG_SECCOMP_FILTER; or accept less with \
                     workers.allow_missing",
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_warning_and_error_has_a_repair() {
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
