//! The test suite of the kernel trait on the real kernel, and tests that need a real kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_kernel::real::RealKernel;
use cleat_kernel::udev::{RUN_DIRECTORY, rule_installed, udevd_runs};
use cleat_kernel::{Holder, Kernel};
use libtest_mimic::Trial;
use test_kit::kernel::{connect, settled_holders, soon, suite};

use crate::fixture::{install_rules, shell};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("kernel_trait_suite_on_the_real_kernel", real_kernel)]
}

fn real_kernel() {
    let left_behind = Path::new(RUN_DIRECTORY).join("udev/cleat.00.left-behind");
    std::fs::create_dir_all(left_behind.parent().unwrap()).unwrap();
    std::fs::write(&left_behind, "CLEAT_NAME=left-behind\n").unwrap();
    let kernel = RealKernel::new(Path::new(RUN_DIRECTORY));
    assert!(!left_behind.exists(), "names that a dead supervisor left are removed");
    // First without the rules of cleat: the symlinks are then made without udev.
    suite(&kernel);
    install_rules();
    suite(&kernel);
    assert!(udevd_runs() && rule_installed(), "the rest needs udev, with the rules of cleat");
    real_io(&kernel);
    real_holders(&kernel);
    real_layers(&kernel);
    real_collision(&kernel);
    real_queue(&kernel);
    real_latency(&kernel);
    nothing_is_left(&kernel);
}

/// Checks that no device stays connected. Retries, because the driver reports a disconnected device as
/// connected while udev opens it.
fn nothing_is_left(kernel: &RealKernel) {
    let deadline = soon();
    loop {
        let mut left = kernel.status().unwrap();
        left.retain(|(_, connected)| *connected);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "left behind: {left:?} of {:?}", kernel.devices());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Checks that written data is stored, before and after a crash of the server.
fn real_io(kernel: &RealKernel) {
    let mapped = connect(kernel, "io", 1);
    let node = mapped.ready().node;
    let file = File::options().read(true).write(true).open(&node).unwrap();
    file.write_all_at(&[7; 8192], 4096).unwrap();
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(mapped.server.bytes(4096, 8192), [7; 8192], "flushed to the server");
    mapped.server.cut();
    let writer = std::thread::spawn(move || {
        file.write_all_at(&[8; 4096], 0).unwrap();
        file.sync_all().unwrap();
    });
    kernel.reconfigure(mapped.index, &mapped.identity, vec![mapped.server.connection()]).unwrap();
    writer.join().unwrap();
    assert_eq!(mapped.server.bytes(0, 4096), [8; 4096]);
    mapped.disconnect();
}

/// Checks that a holder of a device is reported, blocks a disconnect, and no longer does so once it has
/// closed the device.
fn real_holders(kernel: &RealKernel) {
    let mapped = connect(kernel, "held", 1);
    let node = mapped.ready().node;
    settled_holders(kernel, mapped.index);
    let file = File::open(&node).unwrap();
    let holders = kernel.holders(mapped.index).unwrap();
    let pid = std::process::id();
    let ours = |h: &Holder| matches!(h, Holder::Process { pid: found, .. } if *found == pid);
    assert!(holders.iter().any(ours), "{holders:?}");
    let deadline = Instant::now() + Duration::from_millis(300);
    let held = kernel.disconnect(mapped.index, &mapped.identity, deadline).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::TimedOut, "{}", held.report());
    assert!(Instant::now() < deadline + Duration::from_secs(5), "long after its deadline");
    drop(file);
    mapped.disconnect();
}

/// Checks the holders on a partition with its own link: a file system in two mount namespaces, a loop
/// device, and swap.
fn real_layers(kernel: &RealKernel) {
    let mapped = connect(kernel, "layers", 1);
    let paths = mapped.ready();
    let node = paths.node.to_str().unwrap();
    let named = |wanted: &dyn Fn(&Holder) -> bool| {
        let deadline = soon();
        while !kernel.holders(mapped.index).unwrap().iter().any(wanted) {
            assert!(Instant::now() < deadline, "{:?}", kernel.holders(mapped.index));
            std::thread::sleep(Duration::from_millis(20));
        }
    };

    shell(&format!("echo 'start=64, size=900' | sfdisk --quiet {node}"));
    let partition = format!("{}-part1", paths.symlink.display());
    let found = || std::fs::canonicalize(&partition).unwrap_or_default();
    let deadline = soon();
    while found() != Path::new(&format!("{node}p1")) {
        assert!(Instant::now() < deadline, "{partition} leads to {}", found().display());
        std::thread::sleep(Duration::from_millis(20));
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("a place");
    let shown = place.display();
    std::fs::create_dir(&place).unwrap();
    shell(&format!("mkfs.ext4 -q -F {node}p1 && mount {node}p1 '{shown}'"));
    let at = |h: &Holder, own| {
        matches!(h, Holder::Mount { path, filesystem, namespace_pid }
            if *path == place && filesystem == "ext4" && namespace_pid.is_none() == own)
    };
    named(&|holder| at(holder, true));
    // The copy of the mount is reported only once ours is gone: while both exist, one is reported.
    let mut other = Command::new("unshare").args(["--mount", "sleep", "1000"]).spawn().unwrap();
    let shared = std::fs::read_link("/proc/self/ns/mnt").unwrap();
    let theirs = format!("/proc/{}/ns/mnt", other.id());
    let deadline = soon();
    while std::fs::read_link(&theirs).unwrap() == shared {
        assert!(Instant::now() < deadline, "unshare does not unshare");
        std::thread::sleep(Duration::from_millis(20));
    }
    shell(&format!("umount '{shown}'"));
    named(&|holder| at(holder, false));
    other.kill().unwrap();
    other.wait().unwrap();

    shell(&format!("losetup /dev/loop7 {node}p1"));
    named(&|holder| matches!(holder, Holder::Device { name, .. } if name == "loop7"));
    shell("losetup -d /dev/loop7");
    shell(&format!("mkswap {node}p1 && swapon {node}p1"));
    named(&|holder| matches!(holder, Holder::Device { name, .. } if name == "swap"));
    shell(&format!("swapoff {node}p1"));
    assert_eq!(settled_holders(kernel, mapped.index), []);
    mapped.disconnect();
}

/// Checks that no partition takes the symlink of another device, in either order of their appearance.
fn real_collision(kernel: &RealKernel) {
    let partition = |node: &Path| {
        let node = node.display();
        shell(&format!("echo 'start=64, size=900' | sfdisk --quiet {node}; udevadm settle"));
    };
    let leads_to = |link: &Path| std::fs::canonicalize(link).unwrap_or_default();
    let disk = connect(kernel, "twin-part1", 1);
    let first = disk.ready();
    let other = connect(kernel, "twin", 1);
    partition(&other.ready().node);
    assert_eq!(leads_to(&first.symlink), first.node, "a new partition has taken the link");
    settled_holders(kernel, disk.index);
    disk.disconnect();
    shell("udevadm settle");
    let disk = connect(kernel, "twin-part1", 1);
    let second = disk.ready();
    shell("udevadm settle");
    assert_eq!(
        leads_to(&second.symlink),
        second.node,
        "the partition that was first keeps the link"
    );
    settled_holders(kernel, disk.index);
    disk.disconnect();
    settled_holders(kernel, other.index);
    other.disconnect();
}

/// Checks the queue of a device, also of one whose last owner has left other values.
fn real_queue(kernel: &RealKernel) {
    let queue = |index: u32| format!("/sys/block/nbd{index}/queue");
    let wanted = "0 1280 4096 none";
    let read = |index| {
        let queue = queue(index);
        shell(&format!(
            "cd {queue}; echo $(cat rotational max_sectors_kb read_ahead_kb) \
             $(sed 's/.*\\[\\(.*\\)\\].*/\\1/' scheduler)"
        ))
    };
    let mapped = connect(kernel, "queue", 1);
    mapped.ready();
    let index = mapped.index;
    assert_eq!(read(index).trim(), wanted);
    shell(&format!(
        "cd {}; echo 1 > rotational; echo 64 > max_sectors_kb; echo 0 > read_ahead_kb",
        queue(index)
    ));
    assert_eq!(read(index).trim(), "1 64 0 none");
    mapped.disconnect();
    let again = connect(kernel, "queue-again", 1);
    again.ready();
    assert_eq!(again.index, index, "the kernel gives the first free device");
    assert_eq!(read(index).trim(), wanted);
    again.disconnect();
}

/// Prints how long a map and an unmap take in the kernel, without an assertion.
fn real_latency(kernel: &RealKernel) {
    let mut steps = [const { Vec::new() }; 3];
    for round in 0..20 {
        let start = Instant::now();
        let mapped = connect(kernel, &format!("round-{round}"), 1);
        let connected = Instant::now();
        mapped.ready();
        let ready = Instant::now();
        mapped.disconnect();
        let times = [connected - start, ready - connected, ready.elapsed()];
        steps.iter_mut().zip(times).for_each(|(step, time)| step.push(time));
    }
    let median = steps.map(|mut step| {
        step.sort_unstable();
        (step[step.len() / 2], step[step.len() - 1])
    });
    println!(
        "median and worst: connect {:?}, ready {:?}, disconnect {:?}",
        median[0], median[1], median[2]
    );
}
