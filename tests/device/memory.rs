//! Shortage of memory: dirty pages of a device are written although little memory is left, also when the worker
//! dies then; and swap on a device is refused.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, TIMEOUT, cleat_ok, shell, signal, status, wait_for_state};
use crate::trial;

/// The memory that is left for everything, in MiB.
const LEFT_MIB: u64 = 256;

/// The dirty data: most of the memory that is left. The worker needs as much again for the pages of the file
/// below.
const DIRTY: &str = "180M";

/// How long writing it back may take. Emulation is slow, and a deadlock lasts for ever.
const WRITE_BACK: Duration = Duration::from_secs(300);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("memory_pressure_does_not_stop_write_back", pressure),
        trial("memory_supervisor_and_workers_are_locked_and_limited", locked),
        trial("memory_swap_on_a_device_is_refused", || {
            let _node = Node::start();
            let image = Image::new("swap", "64M");
            let device = cleat_ok(&["map", &image.uri(), "--name", "swap"]);
            swap_is_refused(&device);
            let log = shell("grep -c 'swap on a device of cleat was turned off' /out/node.log");
            assert_eq!(log, "2");
            cleat_ok(&["unmap", "swap"]);
        }),
    ]
}

/// Fills the memory, so that [`LEFT_MIB`] are left, until the value is dropped.
struct Filled;

impl Filled {
    fn new() -> Self {
        // Without swap, pages of a tmpfs cannot be reclaimed.
        shell(&format!(
            "mkdir -p /mnt/filled; mount -t tmpfs -o size=100% filled /mnt/filled
             available=$(awk '/^MemAvailable:/ {{ print int($2 / 1024) }}' /proc/meminfo)
             fallocate -l $((available - {LEFT_MIB}))M /mnt/filled/file"
        ));
        Self
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        shell("umount /mnt/filled || umount -l /mnt/filled");
    }
}

/// Lets dirty pages take most of the memory, until the value is dropped.
struct DirtyLimits(String);

impl DirtyLimits {
    fn new() -> Self {
        let before = shell("cd /proc/sys/vm; cat dirty_ratio dirty_background_ratio | xargs");
        shell("cd /proc/sys/vm; echo 85 > dirty_ratio; echo 80 > dirty_background_ratio");
        Self(before)
    }
}

impl Drop for DirtyLimits {
    fn drop(&mut self) {
        shell(&format!(
            "cd /proc/sys/vm; set -- {}; echo $2 > dirty_background_ratio; echo $1 > dirty_ratio",
            self.0
        ));
    }
}

fn pressure() {
    let _node = Node::start();
    let image = Image::on_disk("pressure", "320M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "pressure"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/pressure; mount {device} /mnt/pressure"));
    let fio = |more: &str| {
        format!(
            "fio --name=dirty --directory=/mnt/pressure --rw=write --bs=128k --size={DIRTY} \
                 --ioengine=psync --verify=crc32c --verify_state_save=0 --invalidate=0 {more}"
        )
    };
    {
        let _limits = DirtyLimits::new();
        let _filled = Filled::new();
        // Nothing is synced yet.
        within(WRITE_BACK, &fio("--do_verify=0"));
        let dirty = shell("awk '/^Dirty:/ { print $2 }' /proc/meminfo");
        println!("dirty: {dirty} kB");
        let worker = status("pressure")["worker_pid"].as_u64().expect("a worker");
        let began = Instant::now();
        let sync = start("sync -f /mnt/pressure");
        signal("KILL", u32::try_from(worker).expect("a pid"));
        finish(sync, WRITE_BACK, "sync");
        println!("written back in {:?}", began.elapsed());
        wait_for_state("pressure", "mapped");
    }
    shell("umount /mnt/pressure");
    cleat_ok(&["unmap", "pressure"]);
    let device = cleat_ok(&["map", &image.uri(), "--name", "pressure"]);
    shell(&format!("e2fsck -fn {device}; mount {device} /mnt/pressure"));
    shell(&fio("--verify_only"));
    shell("umount /mnt/pressure");
    cleat_ok(&["unmap", "pressure"]);
}

fn start(script: &str) -> std::process::Child {
    let mut command = Command::new("bash");
    command.args(["-euc", script]).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().expect("bash runs")
}

fn finish(mut child: std::process::Child, limit: Duration, what: &str) {
    let done = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("waiting for the command") {
            assert!(status.success(), "{what}: {status}");
            return;
        }
        if Instant::now() >= done {
            // A process that waits for the device cannot be killed: the kernel's log shows where it waits.
            shell("echo w > /proc/sysrq-trigger");
            panic!("{what} takes longer than {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a script that may hang in the kernel.
fn within(limit: Duration, script: &str) {
    finish(start(script), limit, script);
}

fn locked() {
    let node = Node::start();
    cleat_ok(&["map", "mem:16M", "--name", "locked"]);
    let worker = status("locked")["worker_pid"].as_u64().expect("a worker");
    for pid in [u64::from(node.pid()), worker] {
        let locked = shell(&format!("awk '/^VmLck:/ {{ print $2 }}' /proc/{pid}/status"));
        assert!(locked.parse::<u64>().expect("a number") > 1024, "{pid}: {locked} kB");
        let limit = shell(&format!("grep '^Max data size' /proc/{pid}/limits"));
        assert!(limit.contains("4294967296"), "{pid}: {limit}");
        // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of linux/sched.h, in the flags of each thread.
        let flags = shell(&format!("sed 's/.*) //' /proc/{pid}/task/*/stat | cut -d ' ' -f 7"));
        for flags in flags.lines().map(|text| text.parse::<u32>().expect("a number")) {
            assert_eq!(flags & 0x0018_0000, 0x0018_0000, "{pid}");
        }
    }
    cleat_ok(&["unmap", "locked"]);
}

/// Checks that swap on the device, and in a file on it, is turned off by the daemon.
pub(crate) fn swap_is_refused(device: &str) {
    let gone = || {
        let done = Instant::now() + TIMEOUT;
        while shell("wc -l < /proc/swaps") != "1" {
            assert!(Instant::now() < done, "{}", shell("cat /proc/swaps"));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    // swapon fails if swap is turned off before it has finished.
    shell(&format!("mkswap -q {device}; swapon {device} || true"));
    gone();
    shell(&format!(
        "mkfs.ext4 -qF {device}; mkdir -p /mnt/swap; mount {device} /mnt/swap
         dd if=/dev/zero of=/mnt/swap/file bs=1M count=16 status=none; chmod 600 /mnt/swap/file
         mkswap -q /mnt/swap/file; swapon /mnt/swap/file || true"
    ));
    gone();
    shell("umount /mnt/swap");
}
