//! Snapshots of images with mounted file systems: the daemon freezes the file systems, so that the
//! snapshots need no repair, and thaws them even if a process dies meanwhile.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};

use librbd::{Cluster, Config, Open, QuiesceWatch};
use libtest_mimic::Trial;
use test_kit::ceph::{ID, POOL};

use crate::fixture::{Node, cleat, cleat_command, cleat_ok, shell, signal, status};
use crate::force::spawn;
use crate::rbd::{cluster, image, wait_until};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("rbd_quiesce_makes_snapshots_that_need_no_repair", clean),
        trial("objects_quiesce_makes_snapshots_that_need_no_repair", clean_objects),
        trial("rbd_quiesce_is_ended_by_the_next_supervisor", supervisor_dies),
        trial("rbd_quiesce_is_ended_after_a_crash_of_the_worker", worker_dies),
        trial("rbd_quiesce_ends_at_its_deadline", too_long),
        trial("rbd_quiesce_ends_before_a_forced_unmap", forced),
        trial("rbd_quiesce_hook_freezes_in_place_of_the_daemon", hooked),
    ]
}

/// The number of lines in a file of the writer. Each line contains the number of the file.
const LINES: u32 = 2000;

/// A file system on a device with a writer, which makes one file after the other and never syncs. A file
/// gets its name only once it is complete.
struct Busy {
    device: String,
    writer: Child,
}

impl Busy {
    /// Mounts the device only in a new mount namespace, and starts the writer there.
    fn elsewhere(device: &str, kind: &str) -> Self {
        make(device, kind);
        Self::write(device, &format!("mkdir -p /mnt/busy; mount {device} /mnt/busy"))
    }

    fn write(device: &str, before: &str) -> Self {
        let script = format!(
            "{before}
             cd /mnt/busy; n=0
             while :; do
                 n=$((n + 1)); yes file $n | head -{LINES} >half || true
                 mv half $n; test $n -lt 20 || rm -f $((n - 20))
             done"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "bash", "-euc", &script]);
        Self { device: device.to_owned(), writer: command.spawn().expect("unshare runs") }
    }

    /// Waits until the writer has made several more files.
    fn goes_on(&self) {
        let place = format!("/proc/{}/root/mnt/busy", self.writer.id());
        let newest = || {
            let names = std::fs::read_dir(&place).into_iter().flatten().flatten();
            let names = names.filter_map(|entry| entry.file_name().into_string().ok());
            names.filter_map(|name| name.parse::<u32>().ok()).max().unwrap_or(0)
        };
        let before = newest();
        wait_until("the writer continues", || newest() >= before + 5);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.writer.kill();
        let _ = self.writer.wait();
        // The namespace ends with the process, and the mount with the namespace.
        let device = self.device.clone();
        wait_until("it is mounted no more", || {
            shell(&format!("fuser {device} >/dev/null 2>&1 && echo held || true")).is_empty()
        });
    }
}

fn make(device: &str, kind: &str) {
    let force = if kind == "xfs" { "-f" } else { "" };
    shell(&format!("mkfs.{kind} -q {force} {device}"));
}

fn map(name: &str, size: &str, quiesce: bool) -> String {
    let uri = image(name, size);
    let more: &[&str] = if quiesce { &["--quiesce"] } else { &[] };
    cleat_ok(&[&["map", &uri, "--name", name], more].concat())
}

fn snap(at: &str) {
    cluster().rbd(&["snap", "create", "--no-progress", &format!("{POOL}/{at}")]).expect(at);
}

/// Maps a snapshot in addition to its image.
fn map_snapshot(name: &str, snapshot: &str) -> String {
    let (conf, keyring) = (cluster().conf(), cluster().keyring(ID));
    let (conf, keyring) = (conf.display(), keyring.display());
    let uri = format!("rbd:{POOL}/{name}@{snapshot}?conf={conf}&keyring={keyring}&id={ID}");
    cleat_ok(&["map", &uri, "--name", "then"])
}

fn needs_recovery(device: &str) -> bool {
    shell(&format!("dumpe2fs -h {device} 2>/dev/null")).contains("needs_recovery")
}

/// Checks that all files are complete, except the one that was being written.
fn assert_whole(device: &str, options: &str) {
    shell(&format!("mkdir -p /mnt/then; mount -o {options} {device} /mnt/then"));
    let mut complete = 0;
    for entry in std::fs::read_dir("/mnt/then").expect("the directory is readable") {
        let path = entry.expect("an entry").path();
        let Some(number) = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok())
        else {
            continue;
        };
        let content = std::fs::read_to_string(&path).expect("the file is readable");
        let line = format!("file {number}");
        assert!(content.lines().all(|found| found == line), "{} is broken", path.display());
        assert_eq!(content.lines().count(), LINES as usize, "{} is broken", path.display());
        complete += 1;
    }
    assert!(complete > 3, "{complete} files");
    shell("umount /mnt/then");
}

fn clean() {
    let node = Node::start();
    shell("dmesg -C");
    // Without a quiesce the snapshot needs recovery.
    let device = map("dirty", "128M", false);
    let busy = Busy::elsewhere(&device, "ext4");
    busy.goes_on();
    snap("dirty@s");
    let then = map_snapshot("dirty", "s");
    assert!(needs_recovery(&then), "a snapshot without a quiesce needs no recovery either");
    cleat_ok(&["unmap", "then"]);
    drop(busy);
    cleat_ok(&["unmap", "dirty"]);

    for (kind, options, snapshots) in
        [("ext4", "ro,noload", &["one", "two"][..]), ("xfs", "ro,norecovery,nouuid", &["one"])]
    {
        let device = map(kind, "384M", true);
        let busy = Busy::elsewhere(&device, kind);
        for snapshot in snapshots {
            busy.goes_on();
            let before = std::time::Instant::now();
            snap(&format!("{kind}@{snapshot}"));
            println!("figures: a snapshot of a busy {kind}: {:.1?}", before.elapsed());
            let then = map_snapshot(kind, snapshot);
            if kind == "ext4" {
                assert!(!needs_recovery(&then), "the snapshot needs a journal replay");
                shell(&format!("e2fsck -fn {then}"));
            }
            // A freeze leaves the log of XFS dirty, because of orphaned inodes (xfs_super.c), and XFS
            // keeps its counters there. So only its files are checked, without the log.
            assert_whole(&then, options);
            cleat_ok(&["unmap", "then"]);
        }
        busy.goes_on();
        assert_eq!(status(kind)["message"], serde_json::Value::Null);
        drop(busy);
        shell(&format!("fsck.{kind} {} {device}", if kind == "ext4" { "-fn" } else { "" }));
        cleat_ok(&["unmap", kind]);
    }
    let log = shell("dmesg");
    assert!(!log.contains("I/O error"), "{log}");
    drop(node);
}

/// The same for a volume of objects, whose client takes the snapshot itself.
fn clean_objects() {
    let _node = Node::start();
    let uri = "dir:/tmp/quiesced/v";
    shell("mkdir -p /tmp/quiesced");
    cleat_ok(&["volume", "create", uri, "128M"]);
    let device = cleat_ok(&["map", uri, "--name", "objects", "--quiesce"]);
    let busy = Busy::elsewhere(&device, "ext4");
    busy.goes_on();
    let snapshot = format!("{uri}@s");
    cleat_ok(&["volume", "snapshot", "create", &snapshot]);
    let then = cleat_ok(&["map", &snapshot, "--name", "then"]);
    assert!(!needs_recovery(&then), "the snapshot needs a journal replay");
    shell(&format!("e2fsck -fn {then}"));
    assert_whole(&then, "ro,noload");
    cleat_ok(&["unmap", "then"]);
    busy.goes_on();
    assert_eq!(status("objects")["message"], serde_json::Value::Null);
    drop(busy);
    cleat_ok(&["unmap", "objects"]);
}

/// A second client of an image that does not acknowledge quiesce requests, so that every snapshot of the
/// image waits.
struct Brake(QuiesceWatch);

impl Brake {
    fn on(name: &str) -> Self {
        let config = Config {
            conf: Some(cluster().conf()),
            id: Some(ID.to_owned()),
            keyring: Some(cluster().keyring(ID)),
            ..Config::default()
        };
        let pool = Cluster::connect(&config).expect("connects").pool(POOL, None).expect("a pool");
        let image = pool.open(name, None, Open::Write).expect("opens");
        Self(image.watch_quiesce(None, |_| ()).expect("watches"))
    }

    fn release(&self) {
        self.0.set_default_answer(Some(0));
    }
}

/// Whether a process has ended.
fn has_ended(child: &mut Child) -> bool {
    child.try_wait().expect("waiting for a process").is_some()
}

/// A mounted, frozen image of which a snapshot is being made, with a writer that waits.
struct Frozen {
    brake: Brake,
    snap: Child,
    writer: Child,
    place: String,
}

impl Frozen {
    fn new(name: &str) -> Self {
        let device = map(name, "96M", true);
        make(&device, "ext4");
        let place = format!("/mnt/{name}");
        shell(&format!("mkdir -p {place}; mount {device} {place}; touch {place}/before"));
        let brake = Brake::on(name);
        let conf = cluster().conf();
        let snap = spawn(&format!(
            "exec rbd --id admin --conf {} snap create --no-progress {POOL}/{name}@s",
            conf.display()
        ));
        wait_until("the device is quiesced", || !status(name)["quiet"].is_null());
        let writer = spawn(&format!("sleep 1; exec touch {place}/written"));
        wait_until("a writer waits", || {
            shell(&format!("cat /proc/{}/stat || true", writer.id())).contains(" D ")
        });
        Self { brake, snap, writer, place }
    }

    fn wait_until_thawed(&mut self) {
        wait_until("the writer continues", || has_ended(&mut self.writer));
        let name = self.place.trim_start_matches("/mnt/").to_owned();
        wait_until("the quiesce has ended", || status(&name)["quiet"].is_null());
    }

    fn finish(mut self) {
        self.brake.release();
        wait_until("the snapshot ends", || has_ended(&mut self.snap));
        let name = self.place.trim_start_matches("/mnt/").to_owned();
        wait_until("the quiesce has ended", || status(&name)["quiet"].is_null());
        shell(&format!("touch {0}/after; umount {0}", self.place));
        cleat_ok(&["unmap", &name]);
    }
}

fn configured(text: &str) -> Command {
    std::fs::write("/tmp/quiesce.toml", text).expect("the configuration is written");
    cleat_command(&["node", "--config", "/tmp/quiesce.toml"])
}

fn supervisor_dies() {
    let mut node = Node::start_as(configured("[map]\nquiesce_deadline = \"5m\"\n"));
    let mut frozen = Frozen::new("orphaned");
    // The daemon holds the file system open, so that it cannot be unmounted while it is frozen.
    assert!(!Command::new("umount").arg(&frozen.place).status().expect("umount runs").success());
    let refused = cleat(&["upgrade", "orphaned", "--workers-only", "--force"]);
    assert!(!refused.status.success(), "{refused:?}");
    node.kill();
    assert!(!has_ended(&mut frozen.writer), "thawed without a supervisor");
    node.restart();
    frozen.wait_until_thawed();
    let message = status("orphaned")["message"].to_string();
    assert!(message.contains("may not be consistent"), "{message}");
    frozen.finish();
}

fn worker_dies() {
    let _node = Node::start_as(configured("[map]\nquiesce_deadline = \"5m\"\n"));
    let mut frozen = Frozen::new("widowed");
    let killed = status("widowed")["worker_pid"].as_u64().expect("a worker");
    signal("KILL", u32::try_from(killed).expect("a pid"));
    wait_until("another worker serves", || {
        let now = status("widowed")["worker_pid"].as_u64();
        now.is_some_and(|pid| ![0, killed].contains(&pid))
    });
    frozen.brake.release();
    frozen.wait_until_thawed();
    frozen.finish();
}

fn too_long() {
    let _node = Node::start_as(configured("[map]\nquiesce_deadline = \"15s\"\n"));
    let mut frozen = Frozen::new("lasting");
    frozen.wait_until_thawed();
    assert!(!has_ended(&mut frozen.snap), "the snapshot had ended already");
    let message = status("lasting")["message"].to_string();
    assert!(message.contains("longer than map.quiesce_deadline"), "{message}");
    frozen.finish();
}

fn forced() {
    let _node = Node::start_as(configured("[map]\nquiesce_deadline = \"5m\"\n"));
    let mut frozen = Frozen::new("ended");
    let refused = cleat(&["unmap", "ended"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert!(!has_ended(&mut frozen.writer), "a refused unmap ended the quiesce");
    cleat_ok(&["unmap", "ended", "--force", "--deadline", "40s"]);
    wait_until("the writer ends", || has_ended(&mut frozen.writer));
    shell("fails findmnt /mnt/ended");
    frozen.brake.release();
    wait_until("the snapshot ends", || has_ended(&mut frozen.snap));
}

/// The hook works as that of rbd-nbd.
fn hooked() {
    let hook = "#!/bin/sh
        test \"$2\" = quiesce && how=--freeze || how=--unfreeze
        echo \"$1 $2\" >>/tmp/quiesce.calls
        for place in $(findmnt -n -o TARGET \"$1\"); do fsfreeze $how \"$place\"; done
        ";
    std::fs::write("/tmp/quiesce.hook", hook).expect("the hook is written");
    let path = Path::new("/tmp/quiesce.hook");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    shell("rm -f /tmp/quiesce.calls");
    let _node = Node::start_as(configured("[map]\nquiesce_hook = \"/tmp/quiesce.hook\"\n"));
    let device = map("hooked", "96M", true);
    make(&device, "ext4");
    shell(&format!("mkdir -p /mnt/hooked; mount {device} /mnt/hooked; touch /mnt/hooked/a"));
    snap("hooked@s");
    wait_until("the quiesce has ended", || status("hooked")["quiet"].is_null());
    let calls = shell("cat /tmp/quiesce.calls");
    assert_eq!(calls, format!("{device} quiesce\n{device} unquiesce"));
    let then = map_snapshot("hooked", "s");
    assert!(!needs_recovery(&then));
    cleat_ok(&["unmap", "then"]);
    shell("touch /mnt/hooked/b; umount /mnt/hooked");
    cleat_ok(&["unmap", "hooked"]);
}
