//! Power-off with mounted file systems on devices: systemd unmounts them while the workers serve. The machine boots
//! twice with the same disks; the second boot checks them without cleat.
//!
//! Four volumes: a disk; a file, whose file system must be unmounted after the one in it; a disk whose file system
//! is in use by a process that no unit ends and that ignores SIGTERM, as a container may; and a disk whose file
//! system is in use by the kernel, so that it cannot be unmounted and must be frozen.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::fixture::{cleat_ok, shell};
use crate::host::{BOOT, BOOTS};
use crate::{systemd, trial};

/// How long systemd may take. With nothing that hangs it takes seconds.
const SHUTDOWN: Duration = Duration::from_secs(240);

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("shutdown_leaves_mounted_file_systems_clean", || {
        match std::env::var(BOOT).unwrap_or_default() {
            boot if boot == BOOTS[0] => prepare_and_power_off(),
            boot if boot == BOOTS[1] => check(),
            _ => panic!("this test powers the machine off: it runs only in a virtual machine"),
        }
    })]
}

/// The disks that keep their content.
fn disks() -> [String; 4] {
    let disks = std::env::var("CLEAT_VM_DISKS").expect("the machine has disks");
    let disks: Vec<String> = disks.split_whitespace().map(str::to_owned).collect();
    disks.try_into().expect("four disks")
}

/// Maps a volume, makes a file system on it, and writes files without a sync.
fn fill(uri: &str, name: &str, mkfs: &str) {
    let device = cleat_ok(&["map", uri, "--name", name]);
    shell(&format!(
        "{mkfs} {device}; mkdir -p /mnt/{name}; mount {device} /mnt/{name}; cd /mnt/{name}
         for n in $(seq 8); do head -c 3M /dev/urandom > file$n; done; sha256sum file* > sums"
    ));
}

fn prepare_and_power_off() {
    systemd::install();
    let [disk, below, busy, kept] = disks();
    fill(&format!("file:{disk}"), "disk", "mkfs.ext4 -q");
    shell(&format!(
        "mkfs.ext4 -q {below}; mkdir -p /mnt/below; mount {below} /mnt/below
         truncate -s 400M /mnt/below/volume"
    ));
    fill("file:/mnt/below/volume", "inner", "mkfs.xfs -q");
    fill(&format!("file:{busy}"), "busy", "mkfs.ext4 -q");
    // The process belongs to the job of the test, whose unit ends only its main process.
    shell(
        "(trap '' TERM HUP INT; exec 9>> /mnt/busy/held; while :; do date >&9; sleep 0.2; done) \
             < /dev/null > /dev/null 2>&1 &
         while [ ! -s /mnt/busy/held ]; do sleep 0.1; done",
    );
    fill(&format!("file:{kept}"), "kept", "mkfs.ext4 -q");
    shell("losetup --find /mnt/kept/file1");
    // The lines of systemd and of the unit are on the console.
    shell("systemctl poweroff --no-block");
    let end = Instant::now() + SHUTDOWN;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_secs(1));
    }
    panic!("the machine does not power off");
}

fn check() {
    let [disk, below, busy, kept] = disks();
    for device in [&disk, &below, &busy, &kept] {
        let shown = shell(&format!("dumpe2fs -h {device} 2> /dev/null"));
        let line = |key: &str| shown.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        assert!(line("Filesystem state:").ends_with(" clean"), "{device}: {shown}");
        assert!(!line("Filesystem features:").contains("needs_recovery"), "{device}: {shown}");
        shell(&format!("e2fsck -fn {device}"));
    }
    // The process did write until it was ended.
    for (device, name) in [(&disk, "disk"), (&busy, "busy"), (&kept, "kept")] {
        complete(device, name);
    }
    shell(&format!("mkdir -p /mnt/below; mount {below} /mnt/below; dmesg -C"));
    complete("-o loop /mnt/below/volume", "inner");
    let log = shell("dmesg");
    assert!(log.contains("Ending clean mount") && !log.contains("Starting recovery"), "{log}");
    shell("umount /mnt/below");
}

/// Checks that all files are there with their content.
fn complete(device: &str, name: &str) {
    shell(&format!(
        "mkdir -p /mnt/{name}; mount {device} /mnt/{name}
         cd /mnt/{name}; sha256sum --quiet -c sums; test $(wc -l < sums) = 8; cd /; umount /mnt/{name}"
    ));
}
