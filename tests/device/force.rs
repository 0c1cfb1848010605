//! Forced unmaps while a component hangs or a process holds the device. Each must end within 5 s with the
//! right report, leave no task in D state, and permit that the volume is mapped again at once.
//! `CLEAT_REPEAT` is the number of repetitions of each situation.

use std::collections::HashSet;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use serde_json::Value;

use crate::fixture::{
    Image, Node, TIMEOUT, cleat, cleat_ok, kernel_is_at_least, promised, repeat, shell, signal,
    status,
};
use crate::trial;
use test_kit::stopwatch::Stopwatch;
use test_kit::wait::wait_until;

/// The documented limit of a forced unmap. Time in which the whole machine is paused does not count.
const LIMIT: Duration = Duration::from_secs(5);

/// The exit status of an unmap that succeeded although the device still has holders.
const LEFT_BEHIND: i32 = 22;

/// A situation: sets it up on the device of the mapping, calls [`force`], and cleans up.
type Situation = fn(&str);

pub(crate) fn trials() -> Vec<Trial> {
    let situations: [(&str, Situation); 12] = [
        ("row_39_force_a_hung_backend", row_39_hung_backend),
        ("force_a_stopped_worker", stopped_worker),
        ("force_dirty_pages_under_ext4", |device| dirty_pages(device, "ext4", hang)),
        ("force_dirty_pages_under_xfs", |device| dirty_pages(device, "xfs", hang)),
        ("force_dirty_pages_under_ext4_and_a_stopped_worker", |device| {
            dirty_pages(device, "ext4", stop_worker);
        }),
        ("force_dirty_pages_under_xfs_and_a_stopped_worker", |device| {
            dirty_pages(device, "xfs", stop_worker);
        }),
        ("force_a_process_blocked_in_fsync", blocked_in_fsync),
        ("force_an_opener_that_never_closes", opener),
        ("force_an_open_file_on_its_filesystem", open_file),
        ("force_device_mapper_on_top", device_mapper),
        ("force_a_loop_device_on_top", loop_device),
        ("force_mounts_in_other_namespaces", namespaces),
    ];
    let mut trials: Vec<Trial> = situations
        .into_iter()
        .map(|(name, situation)| trial(name, move || repeat_situation(situation)))
        .collect();
    trials.push(trial("force_leaves_mounts_alone_with_unmount_none", mounts_left_alone));
    trials.push(trial("force_aborts_an_unmap_that_hangs", unmap_hangs));
    trials.push(trial("force_is_completed_after_a_crash_of_the_supervisor", killed_half_way));
    trials.push(trial("force_reports_a_worker_that_cannot_be_killed", unkillable_worker));
    trials.push(trial("force_reports_a_stuck_driver", stuck_driver));
    trials
}

/// Runs a situation on a new mapping, and checks afterwards that the volume can be mapped again.
fn repeat_situation(situation: Situation) {
    let mut node = Node::start();
    for round in 0..repeat().unwrap_or(1) {
        let image = Image::new("forced", "320M");
        let uri = format!("fault:{}", image.uri());
        let device = cleat_ok(&["map", &uri, "--name", "forced"]);
        situation(&device);
        works_again(&uri);
        if round % 10 == 9 {
            println!("round {}", round + 1);
        }
    }
    node.terminate();
}

fn row_39_hung_backend(device: &str) {
    hang();
    let mut writer = writing(device);
    let report = force(0, &[]);
    assert_eq!(report["device_left"], Value::Null, "{report}");
    assert!(!ended(&mut writer), "a write to a volume that is gone succeeded");
}

fn stopped_worker(device: &str) {
    stop_worker();
    let mut writer = writing(device);
    let report = force(0, &[]);
    assert!(report.to_string().contains("was killed"), "{report}");
    assert!(!ended(&mut writer), "a write to a volume that is gone succeeded");
}

fn dirty_pages(device: &str, filesystem: &str, failure: fn()) {
    mount(device, filesystem);
    failure();
    let mut writer = dirty();
    let report = force(0, &[]);
    ended(&mut writer);
    assert_eq!(report["unmounted"][0]["path"], "/mnt/forced", "{report}");
    assert_eq!(report["remaining_holders"].as_array().map(Vec::len), Some(0), "{report}");
    shell("fails findmnt /mnt/forced");
}

fn blocked_in_fsync(device: &str) {
    mount(device, "ext4");
    hang();
    let mut writer =
        spawn("exec dd if=/dev/zero of=/mnt/forced/file bs=1M count=4 conv=notrunc,fsync");
    wait_until("dd blocks in fsync", || {
        let state = shell(&format!("cat /proc/{}/stat || true", writer.id()));
        state.contains(" D ")
    });
    // The process ends as soon as its fsync has failed; it may still be reported as a holder.
    let report = force_any();
    assert!(!ended(&mut writer), "an fsync of lost data succeeded: {report}");
    wait_until("the device is free", || orphans().is_empty());
}

fn opener(device: &str) {
    let link = "/dev/disk/by-id/cleat-forced";
    let mut opener = spawn(&format!("exec sleep 1000 < {device}"));
    wait_until("it is open", || is_open(opener.id(), device));
    hang();
    let report = force(LEFT_BEHIND, &[]);
    assert_eq!(report["device_left"], device, "{report}");
    assert!(is_among(&report["remaining_holders"], opener.id()), "{report}");
    assert!(!std::path::Path::new(link).is_symlink(), "its name is left");
    let orphan = orphans().remove(0);
    assert_eq!(orphan["device"], device, "{orphan}");
    assert!(is_among(&orphan["holders"], opener.id()), "{orphan}");

    // Another device gets the name and the volume.
    let image = "fault:file:/tmp/forced.img";
    let other = cleat_ok(&["map", image, "--name", "forced"]);
    assert_ne!(other, device);
    assert_eq!(shell(&format!("readlink -f {link}")), other);
    // An event of the old device changes nothing.
    shell(&format!("echo change > /sys/block/{}/uevent; udevadm settle", &device[5..]));
    assert_eq!(shell(&format!("readlink -f {link}")), other);
    opener.kill().expect("killing the opener");
    opener.wait().expect("waiting for the opener");
    wait_until("the orphan disappears", || orphans().is_empty());
    shell("udevadm settle");
    assert_eq!(shell(&format!("readlink -f {link}")), other);
    shell(&format!("dd if=/dev/zero of={other} bs=64k count=4 oflag=direct status=none"));
    cleat_ok(&["unmap", "forced"]);
}

fn open_file(device: &str) {
    mount(device, "ext4");
    let mut user = spawn("exec sleep 1000 > /mnt/forced/file");
    wait_until("it is open", || is_open(user.id(), "/mnt/forced/file"));
    hang();
    let report = force(LEFT_BEHIND, &[]);
    assert_eq!(report["unmounted"][0]["path"], "/mnt/forced", "{report}");
    assert!(is_among(&report["remaining_holders"], user.id()), "{report}");
    user.kill().expect("killing the user");
    user.wait().expect("waiting for the user");
    wait_until("the device is free", || orphans().is_empty());
}

fn device_mapper(device: &str) {
    let sectors = shell(&format!("blockdev --getsz {device}"));
    shell(&format!("dmsetup create forced --table '0 {sectors} linear {device} 0'"));
    mount("/dev/mapper/forced", "ext4");
    shell("udevadm settle");
    hang();
    let mut writer = dirty();
    let report = force(LEFT_BEHIND, &[]);
    ended(&mut writer);
    let holders = report["remaining_holders"].to_string();
    assert!(holders.contains("dm-") && holders.contains("/mnt/forced"), "{report}");
    // The daemon must not unmount file systems on the device-mapper device.
    shell("findmnt /mnt/forced; umount /mnt/forced; dmsetup remove --retry forced");
    wait_until("the device is free", || orphans().is_empty());
}

fn loop_device(device: &str) {
    let upper = shell(&format!("losetup --find --show {device}"));
    shell("udevadm settle");
    hang();
    let mut writer = spawn(&format!("exec dd if=/dev/zero of={upper} bs=1M count=4"));
    let report = force(LEFT_BEHIND, &[]);
    let holders = report["remaining_holders"].to_string();
    assert!(holders.contains(upper.trim_start_matches("/dev/")), "{report}");
    ended(&mut writer);
    shell(&format!("losetup -d {upper}"));
    wait_until("the device is free", || orphans().is_empty());
}

/// The path of a pod's volume on the host, where kubelet shows it to containers that it starts.
const POD_VOLUME: &str = "/srv/pods/uid/volumes/kubernetes.io~csi/name/mount";

/// Three other mount namespaces: one has a copy of our mount, one has its own mount of the device below a tmpfs, and one
/// is a container with a root of its own, which opens its file again and again. Another process does so at the path of a
/// pod's volume, whose mounts the namespaces of the host share. All mounts of the device have dirty pages.
pub(crate) fn namespaces(device: &str) {
    mount(device, "ext4");
    shell("mount -t tmpfs none /srv; mount --make-shared /srv");
    shell(&format!("mkdir -p {POD_VOLUME}; mount --bind /mnt/forced {POD_VOLUME}"));
    let mut pod = spawn(&format!("exec 2>&-; while :; do true >> {POD_VOLUME}/dirty; done"));
    let mut copy = spawn("exec unshare --mount --propagation private sleep 1000");
    let mut own = spawn(&format!(
        "exec unshare --mount --propagation private sh -c '
           umount /srv/pods/*/*/*/*/mount; mount -t tmpfs none /srv; mkdir /srv/inner; mount {device} /srv/inner
           mkdir /srv/inner/sub; mount -t tmpfs none /srv/inner/sub; echo x > /srv/inner/dirty; exec sleep 1000'"
    ));
    let mut container = spawn(
        "exec unshare --mount --propagation private sh -c '
           mount -t tmpfs none /media; cd /media; mkdir usr proc old data; ln -s usr/bin usr/lib usr/lib64 .
           mount --bind /usr usr; mount --bind /proc proc; mount --bind /mnt/forced data; pivot_root . old; umount --lazy /old
           echo x > /data/dirty; exec 2>&-; while :; do true >> /data/dirty; done'",
    );
    let mounted = |pid: u32, path: &str| {
        shell(&format!("cat /proc/{pid}/mountinfo || true")).contains(&format!(" {path} "))
    };
    let separate = |pid: u32| {
        shell(&format!("readlink /proc/{pid}/ns/mnt || true"))
            != shell("readlink /proc/self/ns/mnt")
    };
    wait_until("both are there", || {
        separate(copy.id())
            && mounted(copy.id(), "/mnt/forced")
            && mounted(own.id(), "/srv/inner/sub")
            && mounted(container.id(), "/data")
            && !mounted(container.id(), "/old")
    });
    hang();
    let mut writer = dirty();
    let report = force(0, &[]);
    ended(&mut writer);
    let paths = report["unmounted"].to_string();
    assert!(paths.contains("\"/mnt/forced\"") && paths.contains("\"/srv/inner\""), "{report}");
    assert!(!mounted(copy.id(), "/mnt/forced") && !mounted(own.id(), "/srv/inner"));
    assert!(mounted(own.id(), "/srv"), "a mount of another file system was detached");
    // What the container writes to the path of the volume must not succeed: it would be lost.
    let write = format!("nsenter --mount --target {} sh -c 'echo x > /data/file'", container.id());
    shell(&format!(
        "test -z \"$(nsenter --mount --target {} ls /data)\"; fails {write}",
        container.id()
    ));
    shell(&format!("test -z \"$(ls {POD_VOLUME})\"; fails sh -c 'echo x > {POD_VOLUME}/file'"));
    pod.kill().expect("killing the process");
    pod.wait().expect("waiting for the process");
    shell(&format!("umount {POD_VOLUME}; fails mountpoint -q {POD_VOLUME}"));
    // Nor may they have succeeded in the moment of the unmount.
    if kernel_is_at_least(6, 5) {
        shell(&format!("test -z \"$(ls {POD_VOLUME})\""));
        let pid = container.id();
        signal("STOP", pid);
        // Until then, the process may be about to open its file, and the mount is busy.
        wait_until("the process has stopped", || {
            shell(&format!("cat /proc/{pid}/stat")).contains(") T ")
        });
        shell(&format!("nsenter --mount --target {pid} umount /data"));
        shell(&format!("test -z \"$(nsenter --mount --target {pid} ls /data)\""));
    }
    for child in [&mut copy, &mut own, &mut container] {
        child.kill().expect("killing the process");
        child.wait().expect("waiting for the process");
    }
    shell("umount /srv");
}

fn mounts_left_alone() {
    let _node = Node::start();
    let device = cleat_ok(&["map", "mem:64M", "--name", "forced"]);
    mount(&device, "ext4");
    let refused = cleat(&["unmap", "forced"]);
    let hint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(hint.contains("cleat unmap forced --force"), "{hint}");
    let report = force(LEFT_BEHIND, &["--unmount", "none"]);
    assert_eq!(report["remaining_holders"][0]["path"], "/mnt/forced", "{report}");
    assert_eq!(report["unmounted"].as_array().map(Vec::len), Some(0), "{report}");
    shell("findmnt /mnt/forced; fails dd if=/dev/zero of=/mnt/forced/x bs=1M count=1 conv=fsync");
    shell("umount /mnt/forced");
    wait_until("the device is free", || orphans().is_empty());
    let nothing = cleat(&["unmap", "forced", "--force"]);
    assert_eq!(nothing.status.code(), Some(0), "{nothing:?}");
}

fn unmap_hangs() {
    let _node = Node::start();
    let image = Image::new("forced", "64M");
    let uri = format!("fault:{}", image.uri());
    cleat_ok(&["map", &uri, "--name", "forced"]);
    hang();
    let mut unmap = spawn("exec ./cleat unmap forced");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(cleat(&["unmap", "forced"]).status.code(), Some(6), "no other call was in progress");
    // The flush of the other call holds the device open until it fails.
    force(0, &[]);
    assert_eq!(unmap.wait().expect("waiting for the unmap").code(), Some(6));
    works_again(&uri);
}

fn killed_half_way() {
    let mut node = Node::start();
    for _ in 0..repeat().unwrap_or(1) {
        let image = Image::new("forced", "64M");
        let device = cleat_ok(&["map", &image.uri(), "--name", "forced"]);
        mount(&device, "ext4");
        stop_worker();
        let mut writer = dirty();
        // The daemon waits one second for an answer of the worker.
        let mut call = spawn("exec ./cleat unmap forced --force");
        std::thread::sleep(Duration::from_millis(400));
        node.kill();
        assert_ne!(call.wait().expect("waiting for the call").code(), Some(0));
        node.restart();
        let begun = Stopwatch::start();
        let second = cleat(&["unmap", "forced", "--force"]);
        promised(begun.elapsed(), LIMIT, "a forced unmap");
        assert_eq!(second.status.code(), Some(0), "{second:?}");
        shell("fails findmnt /mnt/forced");
        ended(&mut writer);
        no_task_is_blocked();
        works_again(&image.uri());
    }
}

/// The file system below the volume is frozen, so that even a killed worker does not end. The daemon must
/// not report that no request reaches the volume any more before the worker has ended.
fn unkillable_worker() {
    let _node = Node::start();
    shell(
        "truncate -s 128M /tmp/below.img; mkfs.ext4 -q -F /tmp/below.img; mkdir -p /mnt/below
         mount -o loop /tmp/below.img /mnt/below; truncate -s 32M /mnt/below/volume.img",
    );
    let uri = "file:/mnt/below/volume.img";
    let device = cleat_ok(&["map", uri, "--name", "forced"]);
    shell("fsfreeze --freeze /mnt/below");
    let mut writer = writing(&device);
    let (code, message) = refused("4s");
    let gone = !std::path::Path::new(&format!("/sys/block/{}/pid", &device[5..])).exists();
    let failed = !ended(&mut writer);
    shell("fsfreeze --unfreeze /mnt/below");
    assert_eq!(code, Some(10), "{message}");
    assert!(message.contains("not done: end the worker"), "{message}");
    assert!(gone && failed, "the device is left: {message}");
    wait_until("the daemon completes the unmap", nothing_is_mapped);
    works_again(uri);
    no_task_is_blocked();
    shell("umount /mnt/below; rm /tmp/below.img");
}

/// The command of another NBD client holds the driver's lock, because its server is stopped.
fn stuck_driver() {
    let _node = Node::start();
    let image = Image::new("forced", "64M");
    cleat_ok(&["map", &image.uri(), "--name", "forced"]);
    let (socket, other) = ("/tmp/other.sock", "/dev/nbd15");
    shell(&format!(
        "rm -f {socket}; nbdkit -U {socket} -P /tmp/other.pid memory 64M
         nbd-client -unix {socket} {other} >&2"
    ));
    // The kernel must have read the partition table of the new device: an unanswered read would block the
    // open of the writer.
    shell(&format!(
        "dd if={other} of=/dev/null bs=4k count=1 iflag=direct; udevadm settle
         kill -STOP $(cat /tmp/other.pid)"
    ));
    let mut writer = spawn(&format!("exec dd if=/dev/zero of={other} bs=8M count=4 oflag=direct"));
    wait_until("its socket is full", || !sending_for(Duration::from_secs(1)).is_empty());
    let mut client = spawn(&format!("exec nbd-client -d {other}"));
    wait_until("its command is stuck", || {
        shell(&format!("cat /proc/{}/stack || true", client.id())).contains("[nbd]")
    });
    let (code, message) = refused("3s");
    shell("kill -CONT $(cat /tmp/other.pid)");
    ended(&mut client);
    ended(&mut writer);
    assert_eq!(code, Some(10), "{message}");
    assert!(message.contains("not done: disconnect"), "{message}");
    wait_until("the daemon completes the unmap", nothing_is_mapped);
    works_again(&image.uri());
    shell("kill $(cat /tmp/other.pid) || true");
    no_task_is_blocked();
}

/// The processes that were sending to a device's socket in every sample during `time`.
fn sending_for(time: Duration) -> HashSet<String> {
    let samples = 10;
    let sample = || -> HashSet<String> {
        std::thread::sleep(time / samples);
        shell("grep -ls sock_xmit /proc/[0-9]*/stack || true").lines().map(str::to_owned).collect()
    };
    (1..samples).fold(sample(), |still, _| &still & &sample())
}

/// Unmaps by force, which must fail by `deadline`. Returns the exit status and stderr.
pub(crate) fn refused(deadline: &str) -> (Option<i32>, String) {
    let begun = Stopwatch::start();
    let output = cleat(&["unmap", "forced", "--force", "--deadline", deadline]);
    promised(begun.elapsed(), LIMIT, "a forced unmap");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{:?}: {message}", begun.elapsed());
    (output.status.code(), message)
}

pub(crate) fn nothing_is_mapped() -> bool {
    cleat_ok(&["ls", "-o", "json"]).contains("\"mappings\": []")
}

/// Unmaps by force, within the limit and with the exit status `code`. Returns the report.
fn force(code: i32, options: &[&str]) -> Value {
    let (report, found) = forced(options);
    assert_eq!(found, Some(code), "{report}");
    report
}

/// As [`force`], with either exit status.
fn force_any() -> Value {
    let (report, found) = forced(&[]);
    assert!(matches!(found, Some(0 | LEFT_BEHIND)), "{found:?}: {report}");
    report
}

fn forced(options: &[&str]) -> (Value, Option<i32>) {
    let worker = status("forced")["worker_pid"].clone();
    let mut arguments = vec!["unmap", "forced", "--force", "-o", "json"];
    arguments.extend(options);
    let begun = Stopwatch::start();
    let output = cleat(&arguments);
    let took = begun.elapsed();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report after {took:?}: {output:?}"));
    promised(took, LIMIT, &report.to_string());
    println!("{took:?}: {}", brief(&report));
    assert_eq!(report["was_mapped"], true, "{report}");
    assert_eq!(report["unproven"], Value::Null, "{report}");
    let alive = std::path::Path::new(&format!("/proc/{worker}")).exists();
    assert!(!alive, "the worker {worker} still runs: {report}");
    no_task_is_blocked();
    (report, output.status.code())
}

/// The steps of the unmap with their times, for the reader.
fn brief(report: &Value) -> String {
    let steps = report["steps"].as_array().cloned().unwrap_or_default();
    let steps: Vec<String> = steps
        .iter()
        .map(|step| format!("{} {} ms", step["step"].as_str().unwrap_or("?"), step["took_ms"]))
        .collect();
    steps.join(", ")
}

/// Checks that no task is left in D state: every request that waited for the device has failed.
pub(crate) fn no_task_is_blocked() {
    let waiting = || shell("ps -eLo state,pid,wchan:32,args | grep '^D' || true");
    let done = Instant::now() + Duration::from_secs(10);
    while !waiting().is_empty() {
        assert!(Instant::now() < done, "left in D state: {}", waiting());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn works_again(uri: &str) {
    let device = cleat_ok(&["map", uri, "--name", "forced"]);
    shell(&format!(
        "dd if=/dev/zero of={device} bs=64k count=8 oflag=direct conv=fsync status=none"
    ));
    cleat_ok(&["unmap", "forced"]);
}

pub(crate) fn mount(device: &str, filesystem: &str) {
    let make = if filesystem == "ext4" { "mkfs.ext4 -q -F" } else { "mkfs.xfs -q -f" };
    shell(&format!("{make} {device}; mkdir -p /mnt/forced; mount {device} /mnt/forced"));
    // The file exists and is synced, so that a later overwrite does not need the device.
    shell("dd if=/dev/urandom of=/mnt/forced/file bs=1M count=4 status=none; sync -f /mnt/forced");
}

/// Dirties pages of the existing file. The writer may then block on the device.
fn dirty() -> Child {
    let mut writer = spawn("exec dd if=/dev/zero of=/mnt/forced/file bs=1M count=4 conv=notrunc");
    let deadline = Instant::now() + Duration::from_millis(500);
    while writer.try_wait().expect("waiting for dd").is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    writer
}

/// Makes the backend hang: it answers no request from now on.
fn hang() {
    cleat_ok(&["fault", "forced", "hang=true"]);
}

fn stop_worker() {
    let pid = status("forced")["worker_pid"].as_u64().expect("a worker");
    signal("STOP", u32::try_from(pid).expect("a pid"));
}

/// Starts a process that blocks in a write to the hung device.
fn writing(device: &str) -> Child {
    let child = spawn(&format!("exec dd if=/dev/zero of={device} bs=64k count=8 oflag=direct"));
    wait_until("dd waits", || {
        shell(&format!("cat /proc/{}/stat || true", child.id())).contains(" D ")
    });
    child
}

pub(crate) fn spawn(script: &str) -> Child {
    let mut command = Command::new("bash");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).spawn().expect("bash starts")
}

/// Waits until the process ends. Returns whether it succeeded.
pub(crate) fn ended(child: &mut Child) -> bool {
    let done = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().expect("waiting for a process") {
            return status.success();
        }
        assert!(Instant::now() < done, "process {} does not end", child.id());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_open(pid: u32, path: &str) -> bool {
    shell(&format!("readlink /proc/{pid}/fd/* || true")).lines().any(|line| line == path)
}

/// Whether the process is one of the holders. A udev worker that probes the device may be another.
fn is_among(holders: &Value, pid: u32) -> bool {
    holders.as_array().is_some_and(|list| list.iter().any(|holder| holder["pid"] == pid))
}

/// The devices that are listed without a record.
fn orphans() -> Vec<Value> {
    let listed: Value = serde_json::from_str(&cleat_ok(&["ls", "-o", "json"])).expect("JSON");
    let all = listed["mappings"].as_array().expect("a list").clone();
    all.into_iter().filter(|mapping| mapping["state"] == "orphan").collect()
}
