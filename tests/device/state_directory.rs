//! A state directory that is full, read-only, failed or hung, with real file systems and a mounted device.

use std::time::Duration;
use std::time::Instant;

use libtest_mimic::Trial;

use crate::crash::kill_worker;
use crate::fixture::{
    Image, Loop, Node, TIMEOUT, cleat_command, cleat_ok, promised, shell, status, wait_for_state,
};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("a_full_state_directory_stops_neither_a_repair_nor_an_unmap", full),
        trial("a_read_only_state_directory_stops_neither_a_repair_nor_an_unmap", read_only),
        trial(
            "a_state_directory_whose_file_system_failed_stops_neither_a_repair_nor_an_unmap",
            failed,
        ),
        trial("a_hung_state_directory_stops_neither_a_repair_nor_an_unmap", hung),
    ]
}

const MOUNT: &str = "/mnt/state";
const STATE_DIR: &str = "/mnt/state/cleat";

/// A file system with the state directory, which is unmounted when the value is dropped.
struct StateFileSystem;

impl StateFileSystem {
    /// Mounts a file system with this command, in which `{}` stands for the directory.
    fn mount(command: &str) -> Self {
        shell(&format!("mkdir -p {MOUNT}; {}; chmod 700 {MOUNT}", command.replace("{}", MOUNT)));
        Self
    }
}

impl Drop for StateFileSystem {
    fn drop(&mut self) {
        shell(&format!("umount -l {MOUNT} || true"));
    }
}

fn start() -> Node {
    Node::start_as(cleat_command(&["node", "--state-dir", STATE_DIR]))
}

fn message(name: &str) -> String {
    status(name)["message"].as_str().unwrap_or_default().to_owned()
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let done = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < done, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Maps a volume and mounts a file system from its device.
fn map_and_mount(image: &Image) -> String {
    let device = cleat_ok(&["map", &image.uri(), "--name", "data"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/data; mount {device} /mnt/data"));
    device
}

/// Kills the worker while the mounted file system is in use, and checks that nothing is lost.
fn crash_under_load() {
    shell("head -c 4M /dev/urandom > /mnt/data/file; sha256sum /mnt/data/file > /tmp/data.sum");
    let before = status("data")["worker_pid"].clone();
    kill_worker("data");
    shell(
        "sync -f /mnt/data; echo 3 > /proc/sys/vm/drop_caches; sha256sum --quiet -c /tmp/data.sum",
    );
    wait_for_state("data", "mapped");
    assert_ne!(status("data")["worker_pid"], before);
}

/// Returns how many files the journal has.
fn records() -> String {
    shell(&format!("ls {STATE_DIR}/mappings /run/cleat/records | grep -c '\\.' || true"))
}

fn full() {
    let _mount = StateFileSystem::mount("mount -t tmpfs -o size=256k,mode=700 tmpfs {}");
    let mut node = start();
    let image = Image::new("data", "64M");
    map_and_mount(&image);
    let fill = format!("dd if=/dev/zero of={MOUNT}/fill bs=4k status=none || true");
    shell(&format!("{fill}; ls /run/cleat"));
    crash_under_load();
    wait_until("the status names the error", || {
        let message = message("data");
        message.contains("No space left on device") && message.contains("free disk space")
    });
    // A supervisor that starts now knows the worker.
    node.kill();
    node.restart_as(cleat_command(&["node", "--state-dir", STATE_DIR]));
    wait_for_state("data", "mapped");
    crash_under_load();
    shell("umount /mnt/data");
    cleat_ok(&["unmap", "data"]);
    assert_eq!(records(), "0");
    // The record gets to the state directory by itself.
    cleat_ok(&["map", &image.uri(), "--name", "data"]);
    assert_eq!(shell("ls /run/cleat/records | wc -l"), "1");
    shell(&format!("rm {MOUNT}/fill"));
    wait_until("the copy is removed", || shell("ls /run/cleat/records | wc -l") == "0");
    wait_until("the message is gone", || message("data").is_empty());
    assert_eq!(records(), "1");
    cleat_ok(&["unmap", "data"]);
    node.terminate();
}

fn read_only() {
    let disk = Loop::new("state", "32M");
    let device = disk.device();
    let _mount = StateFileSystem::mount(&format!("mkfs.ext4 -q -F {device}; mount {device} {{}}"));
    let mut node = start();
    let image = Image::new("data", "64M");
    map_and_mount(&image);
    // The kernel refuses this while the daemon has its lock open for writing.
    node.kill();
    shell(&format!("mount -o remount,ro {MOUNT}"));
    node.restart_as(cleat_command(&["node", "--state-dir", STATE_DIR]));
    wait_for_state("data", "mapped");
    crash_under_load();
    wait_until("the status names the error", || message("data").contains("Read-only file system"));
    shell("umount /mnt/data");
    cleat_ok(&["unmap", "data"]);
    // The record is still there and is marked as removed.
    assert_eq!(shell(&format!("ls {STATE_DIR}/mappings | wc -l")), "1");
    node.kill();
    node.restart_as(cleat_command(&["node", "--state-dir", STATE_DIR]));
    assert!(cleat_ok(&["ls", "-o", "json"]).contains("\"mappings\": []"));
    shell(&format!("mount -o remount,rw {MOUNT}"));
    wait_until("the removed record is gone", || records() == "0");
    node.terminate();
}

/// As after an I/O error of the disk: the file system fails all changes, and since Linux 6.12 also all reads.
fn failed() {
    let disk = Loop::new("state", "32M");
    let device = disk.device();
    let _mount = StateFileSystem::mount(&format!(
        "mkfs.ext4 -q -F {device}; mount -o errors=remount-ro {device} {{}}"
    ));
    let mut node = start();
    let image = Image::new("data", "64M");
    map_and_mount(&image);
    let name = device.trim_start_matches("/dev/");
    shell(&format!("echo 1 > /sys/fs/ext4/{name}/trigger_fs_error"));
    let refused = shell(&format!("if touch {MOUNT}/x 2>&1; then echo writable; exit 1; fi"));
    let cause = refused.rsplit(": ").next().unwrap_or_default();
    assert!(["Input/output error", "Read-only file system"].contains(&cause), "{refused}");
    crash_under_load();
    wait_until("the status names the error", || message("data").contains(cause));
    shell("umount /mnt/data");
    cleat_ok(&["unmap", "data"]);
    assert!(cleat_ok(&["ls", "-o", "json"]).contains("\"mappings\": []"));
    node.terminate();
}

fn hung() {
    let disk = Loop::new("state", "32M");
    let device = disk.device();
    shell(&format!(
        "dmsetup create state --table \"0 $(blockdev --getsz {device}) linear {device} 0\""
    ));
    let mount =
        StateFileSystem::mount("mkfs.ext4 -q -F /dev/mapper/state; mount /dev/mapper/state {}");
    let mut node = start();
    let image = Image::new("data", "64M");
    map_and_mount(&image);
    let others: Vec<String> = (0..20).map(|n| format!("other{n}")).collect();
    for other in &others {
        cleat_ok(&["map", "mem:1M", "--name", other]);
    }
    shell("dmsetup suspend --noflush --nolockfs state");
    // Many writes hang, and no thread is left for others if they are not limited.
    for other in &others {
        cleat_ok(&["set", other, "--iops", "1000"]);
    }
    crash_under_load();
    let begun = Instant::now();
    cleat_ok(&["unmap", "--force", &others[0]]);
    promised(begun.elapsed(), Duration::from_secs(5), "a forced unmap");
    cleat_ok(&["unmap", &others[1]]);
    shell("umount /mnt/data");
    cleat_ok(&["unmap", "data"]);
    shell("dmsetup resume state");
    wait_until("the removed records are gone", || records() == (others.len() - 2).to_string());
    for other in &others[2..] {
        cleat_ok(&["unmap", other]);
    }
    assert_eq!(records(), "0");
    node.terminate();
    drop(mount);
    shell("dmsetup remove --retry state");
}
