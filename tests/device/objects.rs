//! Volumes of objects in a directory (`dir:`) with the kernel's driver and filesystems.

use std::time::Duration;

use libtest_mimic::Trial;

use crate::campaign::WHOLE;
use crate::campaign::load::Fio;
use crate::crash::kill_worker;
use crate::fixture::{Node, TIMEOUT, cleat_ok, shell, status, wait_for_state};
use crate::rbd::wait_until;
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("objects_survive_kills_under_a_filesystem", killed),
        trial("objects_wait_for_space_on_a_full_disk", full),
    ]
}

/// The directory of the volumes.
const DIRECTORY: &str = "/tmp/objects";

/// Kills the worker, the supervisor, and both, while fio verifies its data on ext4. No request may fail, and all data
/// must be there in a new mapping.
fn killed() {
    let mut node = Node::start();
    let device = create_and_map("192M");
    shell(&format!(
        "dmesg --clear; mkfs.ext4 -q {device}; mkdir -p /mnt/objects; mount {device} /mnt/objects
         head -c 8M /dev/urandom > /mnt/objects/kept; sync -f /mnt/objects
         sha256sum /mnt/objects/kept > /tmp/objects.sums"
    ));
    let mut fio = Fio::start("/mnt/objects/data", "64M", WHOLE);
    for (worker, supervisor) in [(true, false), (false, true), (true, true)] {
        std::thread::sleep(Duration::from_secs(3));
        assert!(fio.runs(), "the load ended early");
        if worker {
            kill_worker("objects");
        }
        if supervisor {
            node.kill();
            node.restart();
        }
        wait_for_state("objects", "mapped");
    }
    std::thread::sleep(Duration::from_secs(2));
    let report = fio.finish(2 * TIMEOUT);
    println!(
        "figures: {} MiB read and {} MiB written verified on a volume of objects; the longest request took {:.2?}",
        report.read_mib, report.written_mib, report.longest
    );
    shell("umount /mnt/objects");
    cleat_ok(&["unmap", "objects"]);
    let device = map();
    shell(&format!(
        "e2fsck -fn {device}; mount -o ro {device} /mnt/objects
         sha256sum --quiet -c /tmp/objects.sums; umount /mnt/objects; rm /tmp/objects.sums
         dmesg | grep -E 'I/O error|EXT4-fs error' && exit 1 || true"
    ));
    cleat_ok(&["unmap", "objects"]);
    shell(&format!("rm -rf {DIRECTORY}"));
}

/// A flush waits while the disk of the directory is full, or fails if the policy says so. It succeeds when there is
/// space. Without it, the writes are acknowledged from the tail file.
fn full() {
    let _node = Node::start();
    shell(&format!("mkdir -p {DIRECTORY}; mount -t tmpfs -o size=24M tmpfs {DIRECTORY}"));
    let device = create_and_map("64M");
    let write = format!(
        "dd if=/dev/urandom of={device} bs=1M count=32 oflag=direct conv=fsync status=none"
    );
    let start = || {
        std::thread::spawn({
            let write = write.clone();
            move || shell(&write)
        })
    };
    let writer = start();
    wait_until("the disk is full", || !status("objects")["outage"].is_null());
    let outage = status("objects")["outage"].clone();
    assert!(outage["reason"].as_str().is_some_and(|text| text.contains("No space")), "{outage}");
    assert!(!writer.is_finished(), "the write did not wait");
    cleat_ok(&["set", "objects", "--on-outage", "fail"]);
    assert!(writer.join().is_err(), "the write did not fail");
    cleat_ok(&["set", "objects", "--on-outage", "queue"]);
    let writer = start();
    wait_until("the write waits", || status("objects")["outage"]["queued"].as_u64() > Some(0));
    shell(&format!("mount -o remount,size=128M {DIRECTORY}"));
    writer.join().expect("the write succeeds");
    wait_until("the outage is over", || status("objects")["outage"].is_null());
    cleat_ok(&["unmap", "objects"]);
    shell(&format!("umount {DIRECTORY}"));
}

fn create_and_map(size: &str) -> String {
    shell(&format!("mkdir -p {DIRECTORY}"));
    cleat_ok(&["volume", "create", &format!("dir:{DIRECTORY}/v"), size]);
    map()
}

fn map() -> String {
    cleat_ok(&["map", &format!("dir:{DIRECTORY}/v"), "--name", "objects"])
}
