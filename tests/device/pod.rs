//! The daemon in a pod: the pod has its own control group, cgroup namespace, mount namespace and root
//! directory. The tests end a pod through `cgroup.kill`, as a container runtime does.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::campaign::WHOLE;
use crate::campaign::load::{Fio, Prober, longest};
use crate::fixture::{Image, Node, TIMEOUT, cleat_ok, shell, status, wait_for_state};
use crate::trial;

/// The control group for workers.
const WORKERS: &str = "/sys/fs/cgroup/cleat-workers";

/// The offset of the prober's region, beyond the region of fio.
const PROBED: u64 = 110 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("pod_is_replaced_under_load", replaced),
        trial("pod_without_a_worker_group_ends_with_its_workers", crashed),
    ]
}

/// One of several pods that replace each other.
struct Pod {
    number: u32,
}

impl Pod {
    /// Makes the image of the pod: a copy of the binary, which counts as another build, and the
    /// configuration.
    fn new(number: u32, configuration: &str) -> Self {
        let pod = Self { number };
        let (root, group) = (pod.root(), pod.group());
        shell(&format!(
            "mkdir {group} {root}; cd {root}; mkdir dev etc out proc run sys tmp usr var
             cp -a /bin /lib /lib64 /sbin .; cp $OLDPWD/cleat cleat
             printf '[workers]\\n{configuration}' > cleat.toml"
        ));
        pod
    }

    fn root(&self) -> String {
        format!("/run/pod-{}", self.number)
    }

    fn group(&self) -> String {
        format!("/sys/fs/cgroup/pod-{}", self.number)
    }

    /// The command that becomes the daemon of the pod. The bind mounts stand for hostPath volumes.
    fn daemon(&self) -> Command {
        let (root, group) = (self.root(), self.group());
        let enter = format!(
            "for path in dev etc out proc run sys tmp usr var; do mount --rbind /$path {root}/$path; done
             exec chroot {root} /cleat node --config /cleat.toml"
        );
        let mut command = Command::new("bash");
        command.args([
            "-euc",
            &format!(
                "echo $$ > {group}/cgroup.procs
             exec unshare --mount --cgroup --propagation slave bash -euc '{enter}'"
            ),
        ]);
        command
    }

    /// Kills all processes in the pod's group, and waits until they have ended.
    fn end(&self) {
        let group = self.group();
        shell(&format!("echo 1 > {group}/cgroup.kill"));
        let done = Instant::now() + TIMEOUT;
        while !shell(&format!("cat {group}/cgroup.procs")).is_empty() {
            assert!(Instant::now() < done, "something in {group} does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        // A runtime removes the image, even if a process still runs from it.
        shell(&format!("rm -rf --one-file-system {}", self.root()));
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // It has ended already, unless the test failed.
        let (root, group) = (self.root(), self.group());
        shell(&format!(
            "echo 1 > {group}/cgroup.kill; sleep 0.1; rmdir {group} || true; rm -rf --one-file-system {root}"
        ));
    }
}

fn worker() -> u64 {
    status("pod")["worker_pid"].as_u64().expect("a worker")
}

fn lives(pid: u64) -> bool {
    Path::new(&format!("/proc/{pid}/root/")).exists()
}

fn group_of(pid: u64) -> String {
    shell(&format!("sed -n 's,^0::,/sys/fs/cgroup,p' /proc/{pid}/cgroup"))
}

/// The number of reads and writes that the device has completed.
fn requests(device: &str) -> u64 {
    let name = device.trim_start_matches("/dev/");
    let done = shell(&format!("awk '{{ print $1 + $5 }}' /sys/block/{name}/stat"));
    done.parse().expect("a number")
}

/// The kernel's log messages about failed I/O.
fn complaints() -> String {
    shell("dmesg | grep -E 'I/O error|Buffer I/O|nbd.*(timed out|Dead)' || true")
}

fn replaced() {
    let before = complaints();
    let grouped = format!("cgroup = \\\"{WORKERS}\\\"\\n");
    // The second and the third pod are other builds; the third upgrades workers at its start.
    let (first, second) = (Pod::new(1, &grouped), Pod::new(2, &grouped));
    let third = Pod::new(3, &format!("{grouped}upgrade_at_start = true\\n"));
    let mut node = Node::start_as(first.daemon());
    let image = Image::new("pod", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "pod"]);
    let fio = Fio::start(&device, "100M", WHOLE);
    let (began, prober) = (Instant::now(), Prober::start(&device, PROBED));
    let served_by = worker();
    assert_eq!(group_of(served_by), WORKERS);
    first.end();
    assert!(lives(served_by), "the worker has ended with the pod");
    let done = requests(&device);
    std::thread::sleep(Duration::from_secs(1));
    assert!(requests(&device) > done, "no request is served without a daemon");

    node.restart_as(second.daemon());
    assert_eq!((worker(), status("pod")["state"].as_str()), (served_by, Some("mapped")));
    let upgraded = cleat_ok(&["upgrade", "--workers-only", "-o", "json"]);
    assert!(upgraded.contains("handed_over"), "{upgraded}");
    let successor = worker();
    assert!(successor != served_by && !lives(served_by));
    assert_eq!(group_of(successor), WORKERS);
    second.end();
    assert!(lives(successor), "the successor has ended with the pod");

    node.restart_as(third.daemon());
    let until = Instant::now() + TIMEOUT;
    while worker() == successor {
        assert!(Instant::now() < until, "nothing was upgraded: {}", status("pod"));
        std::thread::sleep(Duration::from_millis(100));
    }
    let longest = longest(&prober.finish(), began, Instant::now());
    let report = fio.finish(Duration::from_secs(120));
    println!(
        "figures: three pods in turn: longest request {longest:?}, fio's {:?}",
        report.longest
    );
    assert_eq!(status("pod")["generation"], 3);
    assert_eq!(complaints(), before);
    cleat_ok(&["unmap", "pod"]);
    third.end();
    shell(&format!("rmdir {WORKERS}"));
}

fn crashed() {
    let before = complaints();
    // A path that is not a group of cgroup v2 has only this effect.
    let (first, second) = (Pod::new(1, "cgroup = \\\"/tmp/group\\\"\\n"), Pod::new(2, ""));
    let mut node = Node::start_as(first.daemon());
    let image = Image::new("pod", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "pod"]);
    let health = cleat_ok(&["status", "-o", "json"]);
    assert!(health.contains("not a group of cgroup v2"), "{health}");
    // Workers in a group below the pod's would end with the pod as well.
    let group = first.group();
    let doctor = shell(&format!(
        "printf '[workers]\\ncgroup = \"{group}/workers\"' > /tmp/pod.toml
         (echo $BASHPID > {group}/cgroup.procs; ./cleat doctor --config /tmp/pod.toml -o json || true)"
    ));
    assert!(
        doctor.contains("is inside the control group of this process and ends with it"),
        "{doctor}"
    );
    let (began, prober) = (Instant::now(), Prober::start(&device, PROBED));
    let served_by = worker();
    assert_eq!(group_of(served_by), group);
    first.end();
    assert!(!lives(served_by), "the worker still runs");
    node.restart_as(second.daemon());
    wait_for_state("pod", "mapped");
    assert_ne!(worker(), served_by);
    let longest = longest(&prober.finish(), began, Instant::now());
    println!("figures: a pod and its worker are replaced: longest request {longest:?}");
    assert_eq!(complaints(), before);
    cleat_ok(&["unmap", "pod"]);
    second.end();
}
