//! Devices on RBD images, with a cluster in the same machine: under fio, under ext4 while each component
//! crashes or restarts in turn, and unmapped by force while the OSD is stopped.

mod encrypted;

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use test_kit::ceph::{Cluster, ID, POOL};
use test_kit::wait::wait_at_most;

use crate::fixture::{Node, cleat_ok, repeat, shell, signal, status};
use crate::force::{self, ended, no_task_is_blocked, nothing_is_mapped, refused, spawn};
use crate::resize::{Load, no_io_errors, size_of};
use crate::{trial, verify};

/// The script that makes the cluster, in the payload.
pub(crate) const CLUSTER: &str = "ceph-cluster";

/// The timeout of each wait. It covers a worker that replaces a dead one, whose client the OSDs may consider
/// alive for 30 s, and a cluster under emulation.
const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("row_40_rbd_fio_verify_zeroes_and_discards", row_40_verified),
        trial("rbd_ext4_survives_crashes_upgrades_and_an_osd_restart", survives),
        // librbd encrypts, so the kernel sees nothing of it: in `make soak`.
        trial("rbd_encrypted_ext4_survives_and_grows", encrypted::survives)
            .with_ignored_flag(repeat().is_none()),
        trial("row_39_rbd_force_unmap_with_the_osd_stopped", row_39_forced),
    ]
}

/// The cluster, which takes a minute to start and runs until this program ends.
pub(crate) fn cluster() -> &'static Cluster {
    static CLUSTER_HERE: OnceLock<Cluster> = OnceLock::new();
    CLUSTER_HERE.get_or_init(|| {
        let begun = Instant::now();
        let cluster = Cluster::start_by(&Path::new(".").join(CLUSTER), "memory");
        println!("figures: a cluster is up after {:.0?}", begun.elapsed());
        cluster
    })
}

/// Makes an image, which exists until the cluster ends. Returns its URI.
pub(crate) fn image(name: &str, size: &str) -> String {
    rbd(&["create", &format!("{POOL}/{name}"), "--size", size]);
    image_uri(name)
}

fn image_uri(name: &str) -> String {
    let (conf, keyring) = (cluster().conf(), cluster().keyring(ID));
    format!("rbd:{POOL}/{name}?conf={}&keyring={}&id={ID}", conf.display(), keyring.display())
}

pub(crate) fn rbd(arguments: &[&str]) {
    cluster().rbd(arguments).expect("rbd succeeds");
}

/// Waits as long as a cluster on an emulated processor may take.
#[track_caller]
pub(crate) fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_at_most(TIMEOUT, what, condition);
}

fn row_40_verified() {
    let uri = image("verified", "64M");
    let node = Node::start();
    shell("dmesg -C");
    let device = cleat_ok(&["map", &uri, "--name", "verified"]);
    let load = Load::start(&format!(
        "--filename={device} --direct=1 --ioengine=libaio --iodepth=16 --size=48M"
    ));
    goes_on("verified", 500);
    load.stop();
    no_io_errors(&device);
    cleat_ok(&["unmap", "verified"]);
    drop(node);
    verify::zeroes_on(&uri);
}

fn survives() {
    let mut node = Node::start();
    shell("dmesg -C");
    let uri = image("alive", "96M");
    let device = cleat_ok(&["map", &uri, "--name", "alive"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/alive; mount {device} /mnt/alive"));
    let load = Load::start("--directory=/mnt/alive --ioengine=libaio --iodepth=8 --size=8M");
    goes_on("alive", 50);

    // `None` while there is no worker.
    let worker = || status("alive")["worker_pid"].as_u64().filter(|pid| *pid != 0);
    let (killed, begun) = (worker().expect("a worker"), Instant::now());
    signal("KILL", u32::try_from(killed).expect("a pid"));
    wait_until("another worker serves", || {
        let now = status("alive");
        let another = now["worker_pid"].as_u64().is_some_and(|pid| ![0, killed].contains(&pid));
        now["state"] == "mapped" && another
    });
    println!("figures: over RBD, a killed worker is replaced after {:.1?}", begun.elapsed());
    goes_on("alive", 50);

    node.kill();
    node.restart();
    goes_on("alive", 50);
    let before = worker();
    let upgraded = cleat_ok(&["upgrade", "alive", "--workers-only", "--force", "-o", "json"]);
    assert!(upgraded.contains("handed_over"), "{upgraded}");
    println!("figures: over RBD, {upgraded}");
    assert_ne!(worker(), before);
    goes_on("alive", 50);

    rbd(&["resize", &format!("{POOL}/alive"), "--size", "160M", "--no-progress"]);
    wait_until("the device grows", || size_of(&device) == 160 << 20);
    shell(&format!("resize2fs {device} 2>&1; fallocate -l 40M /mnt/alive/more"));
    goes_on("alive", 50);

    cluster().tell("stop osd");
    std::thread::sleep(Duration::from_secs(3));
    cluster().tell("start osd");
    goes_on("alive", 50);
    load.stop();
    shell(&format!("umount /mnt/alive; e2fsck -fn {device}"));
    no_io_errors(&device);
    cleat_ok(&["unmap", "alive"]);
}

/// Waits until the mapping has served `writes` more writes.
pub(crate) fn goes_on(name: &str, writes: u64) {
    let written = || count(name, "write");
    let mut before = None;
    wait_until("it is served", || {
        before = written();
        before.is_some()
    });
    let enough = before.unwrap_or_default() + writes;
    wait_until("the load continues", || written().is_some_and(|count| count >= enough));
}

/// The number of requests of one operation so far; `None` while a worker is being replaced.
fn count(name: &str, op: &str) -> Option<u64> {
    let text = cleat_ok(&["stats", name, "--total", "-o", "json"]);
    let stats: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    stats["volumes"][0]["counters"][op]["count"].as_u64()
}

fn row_39_forced() {
    let _node = Node::start();
    let uri = image("forced", "96M");
    let device = cleat_ok(&["map", &uri, "--name", "forced"]);
    force::mount(&device, "ext4");
    cluster().tell("pause osd");
    // Direct I/O, so that the write reaches the OSD.
    let mut writer =
        spawn("exec dd if=/dev/zero of=/mnt/forced/file bs=64k count=8 oflag=direct conv=notrunc");
    wait_until("it waits for the OSD", || {
        shell(&format!("cat /proc/{}/stat || true", writer.id())).contains(" D ")
    });
    let (code, message) = refused("4s");
    assert!(!ended(&mut writer), "a write that no server stored succeeded");
    // This node has completed the unmap, but the OSD may still execute a write that it has received.
    assert_eq!(code, Some(10), "{message}");
    assert!(message.contains("not done: prove no writes"), "{message}");
    assert!(
        !Path::new(&format!("/sys/block/{}/pid", &device[5..])).exists(),
        "the device is still connected"
    );
    shell("fails findmnt /mnt/forced");
    no_task_is_blocked();
    cluster().tell("resume osd");
    wait_until("the daemon completes the unmap", nothing_is_mapped);
    let device = cleat_ok(&["map", &uri, "--name", "forced"]);
    // After a replay of the journal the file system is consistent and contains the synced data.
    shell(&format!(
        "e2fsck -fy {device} || test $? = 1; mount {device} /mnt/forced
         test $(stat -c %s /mnt/forced/file) = 4194304; umount /mnt/forced"
    ));
    cleat_ok(&["unmap", "forced"]);
}
