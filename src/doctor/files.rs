//! The checks that read files of the machine.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::{Check, Machine};

/// The oldest kernel that is tested.
const KERNEL_TESTED: (u32, u32) = (6, 1);
/// The first kernel with the backend identifier, which identifies a device of cleat.
const KERNEL_NEEDED: (u32, u32) = (5, 14);
/// The first kernel whose nbd driver sends WRITE_ZEROES.
const KERNEL_WRITE_ZEROES: (u32, u32) = (6, 12);
/// The initial pid namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

impl Machine {
    pub(super) fn kernel(&self) -> Check {
        const NAME: &str = "kernel";
        let release = self.release();
        let Some(version) = parse_version(&release) else {
            let finding = format!("cannot parse the kernel's version {release:?}");
            return Check::warning(NAME, finding, "use a Linux kernel from 6.1");
        };
        if version < KERNEL_NEEDED {
            let finding = format!("Linux {release} has no backend identifiers for nbd (5.14)");
            return Check::error(NAME, finding, "use a kernel from 6.1");
        }
        if version < KERNEL_TESTED {
            let finding = format!("Linux {release} is older than what is tested");
            return Check::warning(NAME, finding, "use a kernel from 6.1");
        }
        let zeroes = if version >= KERNEL_WRITE_ZEROES { "with" } else { "without" };
        Check::ok(NAME, format!("Linux {release}, {zeroes} write-zeroes on nbd"))
    }

    pub(super) fn module(&self) -> Check {
        const NAME: &str = "module";
        if self.path("sys/module/nbd").exists() {
            return Check::ok(NAME, "the nbd driver is loaded");
        }
        let modules = self.path("lib/modules").join(self.release());
        let lists = ["modules.dep", "modules.builtin"];
        let known = lists.iter().any(|list| {
            fs::read_to_string(modules.join(list)).is_ok_and(|list| has_module(&list, "nbd"))
        });
        if known {
            return Check::ok(NAME, "the nbd module exists, and the first map loads it");
        }
        Check::error(
            NAME,
            "the kernel has no nbd driver, or its module is not visible here",
            "run `modprobe nbd` (in a container: on the host); if there is no such module, \
             install the kernel's full or -extra package (on Talos: machine.kernel.modules)",
        )
    }

    pub(super) fn user_namespace(&self) -> Check {
        const NAME: &str = "user_namespace";
        let map = self.read("proc/self/uid_map").unwrap_or_default();
        let fields: Vec<_> = map.split_whitespace().collect();
        if fields == ["0", "0", "4294967295"] {
            return Check::ok(NAME, "the initial user namespace");
        }
        Check::error(
            NAME,
            "not the initial user namespace; the kernel permits the configuration of nbd only there",
            "run it on the host, or in a container without user namespaces (not rootless)",
        )
    }

    /// /dev must be a devtmpfs, in which the kernel creates device nodes.
    pub(super) fn dev(&self) -> Check {
        const NAME: &str = "dev";
        let mounts = fs::read(self.path("proc/self/mountinfo")).unwrap_or_default();
        // The last mount on a path covers the earlier ones.
        let dev =
            cleat_kernel::parse_mountinfo(&mounts).filter(|mount| mount.path == Path::new("/dev"));
        match dev.last().map(|mount| mount.filesystem) {
            Some(kind) if kind == "devtmpfs" => Check::ok(NAME, "/dev is a devtmpfs"),
            kind => Check::error(
                NAME,
                match kind {
                    Some(kind) => {
                        format!("/dev is a {kind}: the kernel creates no device nodes in it")
                    }
                    None => "/dev is not a mount: the kernel creates no device nodes in it".into(),
                },
                "mount a devtmpfs on /dev; in a container, mount the host's /dev",
            ),
        }
    }

    pub(super) fn run_directory(&self) -> Check {
        const NAME: &str = "run_directory";
        let directory = &self.run_directory;
        let existing = directory.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let shown = directory.display();
        match access(existing, AccessFlags::W_OK | AccessFlags::X_OK) {
            Ok(()) => Check::ok(NAME, format!("{shown} is writable")),
            Err(errno) => Check::error(
                NAME,
                format!("cannot write to {}: {errno}", existing.display()),
                format!("run it as root, or make {shown} writable for the supervisor's user"),
            ),
        }
    }

    /// The driver's events reach only the initial network namespace; on Linux 6.1 its commands also work only
    /// there. The holders of a device are visible only in the same pid namespace.
    pub(super) fn namespaces(&self) -> Check {
        const NAME: &str = "namespaces";
        let link = |path: &str| fs::read_link(self.path(path)).ok();
        if link("proc/self/ns/pid").is_some_and(|pid| pid != Path::new(INITIAL_PID_NAMESPACE)) {
            return Check::warning(
                NAME,
                "not the host's pid namespace: holders of devices outside of it are not found",
                "in a pod, set hostPID: true and hostNetwork: true",
            );
        }
        match (link("proc/self/ns/net"), link("proc/1/ns/net")) {
            (Some(own), Some(initial)) if own == initial => {
                Check::ok(NAME, "the host's pid and network namespaces")
            }
            (Some(_), Some(_)) => Check::warning(
                NAME,
                "not the host's network namespace: events of the kernel and of udev do not arrive",
                "in a pod, set hostNetwork: true",
            ),
            _ => Check::warning(
                NAME,
                "cannot read the network namespace of process 1",
                "run it as root",
            ),
        }
    }

    pub(super) fn systemd(&self) -> Check {
        const NAME: &str = "systemd";
        if self.path("run/systemd/system").is_dir() {
            return Check::ok(NAME, "systemd runs");
        }
        if self.cgroup.is_some() {
            return Check::ok(NAME, "systemd was not found; workers have their own control group");
        }
        Check::warning(
            NAME,
            "systemd was not found: workers end with the supervisor's control group",
            "run cleat as a systemd unit (`make install`); in a pod, set workers.cgroup",
        )
    }

    /// The daemon must be able to move workers to the configured control group, outside of its own group.
    pub(super) fn cgroup(&self) -> Check {
        const NAME: &str = "worker_cgroup";
        let Some(group) = &self.cgroup else {
            return Check::ok(NAME, "workers stay in the supervisor's control group");
        };
        match cleat_kernel::cgroup::check(group) {
            Ok(()) => Check::ok(NAME, format!("workers run in {}", group.display())),
            Err(error) => {
                let repair = error.repair().unwrap_or("set another group in workers.cgroup");
                Check::warning(NAME, error.report(), repair)
            }
        }
    }

    pub(super) fn read(&self, path: &str) -> Option<String> {
        Some(fs::read_to_string(self.path(path)).ok()?.trim_end().to_owned())
    }

    fn release(&self) -> String {
        self.read("proc/sys/kernel/osrelease").unwrap_or_default()
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

/// Returns major and minor version of a release such as `6.12.9-cloud-amd64`.
fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns whether a list of depmod, with lines such as `kernel/drivers/block/nbd.ko.xz: …`, has the module.
fn has_module(list: &str, name: &str) -> bool {
    list.lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default();
        let file = path.rsplit('/').next().unwrap_or_default();
        file.split_once(".ko").is_some_and(|(module, _)| module == name)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::doctor::Verdict;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let run_directory = root.path().join("run/cleat");
        let machine = Machine { root: root.path().to_owned(), run_directory, cgroup: None };
        (root, machine)
    }

    fn kernel(release: &str) -> Check {
        machine(&[("proc/sys/kernel/osrelease", release)]).1.kernel()
    }

    #[test]
    fn the_kernel_check_depends_on_the_version() {
        assert_eq!(kernel("5.10.0-33-amd64\n").verdict, Verdict::Error);
        assert_eq!(kernel("5.15.0\n").verdict, Verdict::Warning);
        assert!(kernel("6.1.0-56-cloud-amd64\n").finding.contains("without write-zeroes"));
        assert!(kernel("6.12.117+deb12\n").finding.contains("with write-zeroes"));
        assert_eq!(kernel("unknown").verdict, Verdict::Warning);
    }

    #[test]
    fn a_module_is_loaded_loadable_or_missing() {
        let release = ("proc/sys/kernel/osrelease", "6.12.1\n");
        let (_root, missing) = machine(&[release]);
        assert_eq!(missing.module().verdict, Verdict::Error);
        assert!(missing.module().repair.contains("modprobe nbd"));
        let dep = "kernel/drivers/block/xnbd.ko:\nkernel/drivers/block/nbd.ko.xz: kernel/a.ko\n";
        let (_root, loadable) = machine(&[release, ("lib/modules/6.12.1/modules.dep", dep)]);
        assert_eq!(loadable.module().verdict, Verdict::Ok);
        let (_root, other) =
            machine(&[release, ("lib/modules/6.12.1/modules.dep", "kernel/xnbd.ko:\n")]);
        assert_eq!(other.module().verdict, Verdict::Error);
        let (_root, loaded) = machine(&[("sys/module/nbd/refcnt", "0")]);
        assert_eq!(loaded.module().verdict, Verdict::Ok);
    }

    #[test]
    fn a_rootless_container_is_detected() {
        let (_root, host) = machine(&[("proc/self/uid_map", "         0   0 4294967295\n")]);
        assert_eq!(host.user_namespace().verdict, Verdict::Ok);
        let (_root, rootless) = machine(&[("proc/self/uid_map", "0 1000 1\n")]);
        assert_eq!(rootless.user_namespace().verdict, Verdict::Error);
    }

    #[test]
    fn a_dev_without_device_nodes_is_detected() {
        let line = |kind| format!("20 1 0:5 / /dev rw - {kind} udev rw\n");
        let host = line("devtmpfs");
        let (_root, host) = machine(&[("proc/self/mountinfo", &host)]);
        assert_eq!(host.dev().verdict, Verdict::Ok);
        let covered = line("devtmpfs") + &line("tmpfs");
        let (_root, covered) = machine(&[("proc/self/mountinfo", &covered)]);
        assert_eq!(covered.dev().verdict, Verdict::Error);
    }

    #[test]
    fn namespaces_are_compared_with_those_of_the_host() {
        let (root, machine) = machine(&[]);
        let namespaces = |pid: &str, own: &str| {
            let _ = fs::remove_dir_all(root.path().join("proc"));
            for process in ["self", "1"] {
                fs::create_dir_all(root.path().join("proc").join(process).join("ns")).unwrap();
            }
            symlink(pid, root.path().join("proc/self/ns/pid")).unwrap();
            symlink(own, root.path().join("proc/self/ns/net")).unwrap();
            symlink("net:[1]", root.path().join("proc/1/ns/net")).unwrap();
            machine.namespaces().verdict
        };
        assert_eq!(namespaces(INITIAL_PID_NAMESPACE, "net:[1]"), Verdict::Ok);
        assert_eq!(namespaces(INITIAL_PID_NAMESPACE, "net:[2]"), Verdict::Warning);
        assert_eq!(namespaces("pid:[7]", "net:[1]"), Verdict::Warning);
    }

    #[test]
    fn a_run_directory_need_not_exist_yet() {
        let (_root, machine) = machine(&[]);
        assert_eq!(machine.run_directory().verdict, Verdict::Ok);
        assert_eq!(machine.systemd().verdict, Verdict::Warning);
        assert_eq!(machine.cgroup().verdict, Verdict::Ok);
        let apart = Machine { cgroup: Some("/nowhere/group".into()), ..machine };
        assert_eq!(apart.systemd().verdict, Verdict::Ok);
        assert_eq!(apart.cgroup().verdict, Verdict::Warning);
    }
}
