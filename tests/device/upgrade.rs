//! Planned upgrades under load: workers hand their devices over, the daemon restarts as another build, and
//! users of the devices notice at most a short pause.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::campaign::WHOLE;
use crate::campaign::load::{Fio, Prober, REGION, longest};
use crate::fixture::{Image, Node, cleat, cleat_ok, promised, repeat, shell, status};
use crate::trial;

/// The time by which a handover may prolong the longest request, compared with the noise of the machine.
const STALL_LIMIT: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("upgrade_of_workers_under_fio_on_the_device", || under_fio(false)),
        trial("upgrade_of_workers_under_fio_on_ext4", || under_fio(true)),
        trial("upgrade_of_the_daemon_and_back", daemon),
        trial("upgrade_keeps_the_content_of_memory_volumes", memory),
        trial("upgrade_of_several_connections", connections),
    ]
}

fn upgrade(arguments: &[&str]) -> serde_json::Value {
    let output = cleat(&[&["upgrade", "-o", "json"], arguments].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).expect("upgrade prints JSON")
}

fn worker(name: &str) -> u64 {
    status(name)["worker_pid"].as_u64().expect("a worker")
}

/// Several upgrades (`CLEAT_REPEAT`; 5 by default), and before each, to measure the noise, the start and end of an unrelated worker.
fn under_fio(ext4: bool) {
    let _node = Node::start();
    shell("dmesg --clear");
    let image = Image::new("upgrade", "256M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "up"]);
    let (fio_target, probed) = if ext4 {
        shell(&format!(
            "mkfs.ext4 -q {device}; mkdir -p /mnt/up; mount {device} /mnt/up
             truncate -s {REGION} /mnt/up/probed; dd if=/dev/zero of=/mnt/up/probed bs={REGION} count=1 conv=fsync status=none"
        ));
        ("/mnt/up/fio".to_owned(), "/mnt/up/probed".to_owned())
    } else {
        (device.clone(), device.clone())
    };
    let offset = if ext4 { 0 } else { 200 << 20 };
    let fio = Fio::start(&fio_target, "128M", WHOLE);
    let prober = Prober::start(&probed, offset);
    std::thread::sleep(Duration::from_secs(3));
    let (mut noise, mut upgrades, mut paused_us) = (Vec::new(), Vec::new(), Vec::new());
    let count = repeat().unwrap_or(5);
    for _ in 0..count {
        let began = Instant::now();
        cleat_ok(&["map", "mem:16M", "--name", "beside"]);
        cleat_ok(&["unmap", "beside"]);
        std::thread::sleep(Duration::from_millis(300));
        noise.push((began, Instant::now()));
        let (before, began) = (worker("up"), Instant::now());
        let upgraded = upgrade(&["up", "--workers-only", "--force"]);
        std::thread::sleep(Duration::from_millis(300));
        upgrades.push((began, Instant::now()));
        assert_eq!(upgraded["volumes"][0]["outcome"], "handed_over", "{upgraded}");
        paused_us.push(upgraded["volumes"][0]["paused_us"].as_u64().expect("a number"));
        assert_ne!(worker("up"), before);
    }
    let probes = prober.finish();
    let report = fio.finish(Duration::from_secs(180));
    let over = |spans: &[(Instant, Instant)]| {
        spans.iter().map(|(from, until)| longest(&probes, *from, *until)).max().unwrap_or_default()
    };
    let (noise, stall) = (over(&noise), over(&upgrades));
    let errors = shell("dmesg | grep -E 'I/O error|nbd.*(timed out|Dead)' || true");
    println!(
        "figures: {count} upgrades, {}: paused {paused_us:?} us; longest request {stall:?}, beside them \
         {noise:?}; fio's longest {:?}, {} MiB read, {} MiB written and verified",
        if ext4 { "ext4" } else { "raw" },
        report.longest,
        report.read_mib,
        report.written_mib,
    );
    assert_eq!(errors, "");
    promised(stall.saturating_sub(noise), STALL_LIMIT, "more than the noise");
    assert_eq!(status("up")["generation"], count + 1);
    if ext4 {
        shell(&format!("umount /mnt/up; e2fsck -fn {device}"));
    }
    cleat_ok(&["unmap", "up"]);
}

/// Replaces the executable by another file of the same program, as a package manager does.
fn replace_binary() {
    shell("cp cleat cleat.next; mv cleat.next cleat");
}

fn daemon() {
    let node = Node::start();
    let image = Image::new("daemon", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "up"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/up; mount {device} /mnt/up"));
    let executable = || std::fs::read_link(format!("/proc/{}/exe", node.pid())).expect("its name");
    let began = executable();
    // Upgrade twice: to another file, and from it to the next.
    for round in 0..2 {
        replace_binary();
        assert!(executable().to_string_lossy().ends_with("(deleted)"));
        let before = worker("up");
        shell(&format!("head -c 1M /dev/urandom > /mnt/up/{round}; sync -f /mnt/up"));
        let upgraded = upgrade(&[]);
        assert_eq!(upgraded["daemon"]["outcome"], "restarted", "{upgraded}");
        assert_eq!(upgraded["volumes"][0]["outcome"], "handed_over", "{upgraded}");
        // The process is the same, and the executable is the new one.
        assert_eq!(executable(), began);
        assert_ne!(worker("up"), before);
        assert_eq!(upgrade(&[])["volumes"][0]["outcome"], "current");
    }
    // An executable that does not run replaces nothing.
    shell(
        "printf '#!/bin/sh\\nexit 1\\n' > cleat.next; chmod +x cleat.next; cp cleat cleat.good; mv cleat.next cleat",
    );
    let output = std::process::Command::new("./cleat.good")
        .args(["upgrade", "-o", "json"])
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(9), "{}", String::from_utf8_lossy(&output.stderr));
    let upgraded: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(upgraded["daemon"]["outcome"], "failed", "{upgraded}");
    shell("mv cleat.good cleat; umount /mnt/up");
    cleat_ok(&["unmap", "up"]);
}

fn memory() {
    let _node = Node::start();
    let device = cleat_ok(&["map", "mem:64M", "--name", "up"]);
    shell(&format!("dd if=/dev/urandom of={device} bs=1M count=64 oflag=direct status=none"));
    let sum =
        |device: &str| shell(&format!("echo 3 > /proc/sys/vm/drop_caches; sha256sum < {device}"));
    let before = sum(&device);
    for _ in 0..3 {
        upgrade(&["--workers-only", "--force"]);
        assert_eq!(sum(&device), before);
    }
    cleat_ok(&["unmap", "up"]);
}

fn connections() {
    let _node = Node::start();
    let image = Image::new("several", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "up", "--connections", "4"]);
    let fio = Fio::start(&device, "100M", WHOLE);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_secs(1));
        upgrade(&["--workers-only", "--force"]);
    }
    fio.finish(Duration::from_secs(120));
    cleat_ok(&["unmap", "up"]);
}
