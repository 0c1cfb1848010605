//! Crashes of workers: the volume of a crashed worker pauses, and other volumes are not affected.

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, cleat_ok, shell, signal, status, wait_for_state};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("crash_of_a_worker_affects_no_other_volume", neighbours),
        trial("crash_of_a_worker_is_repaired_under_a_filesystem", repaired),
        trial("crash_of_a_memory_worker_is_reported_as_data_loss", memory_is_lost),
    ]
}

pub(crate) fn kill_worker(name: &str) {
    let pid = status(name)["worker_pid"].as_u64().expect("a worker");
    signal("KILL", u32::try_from(pid).expect("a pid"));
}

fn neighbours() {
    let mut node = Node::start();
    let image = Image::new("victim", "32M");
    cleat_ok(&["map", &image.uri(), "--name", "victim"]);
    let other = cleat_ok(&["map", "mem:32M", "--name", "other"]);
    kill_worker("victim");
    shell(&format!("dd if=/dev/urandom of={other} bs=1M count=8 oflag=direct status=none"));
    assert_eq!(status("other")["state"], "mapped");
    assert!(std::path::Path::new(&format!("/proc/{}", node.pid())).exists(), "the supervisor died");
    wait_for_state("victim", "mapped");
    cleat_ok(&["unmap", "victim"]);
    cleat_ok(&["unmap", "other"]);
    node.terminate();
}

fn repaired() {
    let _node = Node::start();
    let image = Image::new("repair", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "repair"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/repair; mount {device} /mnt/repair"));
    for round in 0..3 {
        shell(&format!("head -c 4M /dev/urandom > /mnt/repair/file{round}"));
        kill_worker("repair");
        shell(&format!(
            "sync -f /mnt/repair; sha256sum /mnt/repair/file{round} >> /tmp/repair.sums"
        ));
        wait_for_state("repair", "mapped");
    }
    shell("umount /mnt/repair");
    cleat_ok(&["unmap", "repair"]);
    let again = cleat_ok(&["map", &image.uri(), "--name", "repair"]);
    shell(&format!(
        "e2fsck -fn {again}; mount {again} /mnt/repair; sha256sum --quiet -c /tmp/repair.sums; umount /mnt/repair; rm /tmp/repair.sums"
    ));
    cleat_ok(&["unmap", "repair"]);
}

fn memory_is_lost() {
    let _node = Node::start();
    cleat_ok(&["map", "mem:32M", "--name", "lost"]);
    kill_worker("lost");
    wait_for_state("lost", "failed");
    let message = status("lost")["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("the content of lost is lost"), "{message}");
    cleat_ok(&["unmap", "lost"]);
}
