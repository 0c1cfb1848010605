//! Map and unmap: output, refusals, many volumes in parallel, restarts, and leftovers.

use std::path::Path;

use libtest_mimic::Trial;

use crate::fixture::{
    Image, Node, cleat, cleat_ok, promised, repeat, shell, signal, status, wait_for_state,
};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("row_40_map_prints_the_device_and_unmap_frees_it", row_40_map_and_unmap),
        trial("the_kernel_has_the_block_size_of_the_mapping", block_size),
        trial("map_returns_with_the_links_of_existing_partitions", existing_partitions),
        trial("mapping_is_idempotent_and_conflicts_are_refused", idempotence),
        trial("unmap_is_refused_while_held_naming_the_holder", refused_while_held),
        trial("unmap_is_refused_while_used_inside_the_kernel", used_inside_the_kernel),
        trial("a_worker_that_dies_during_the_flush_of_an_unmap_is_replaced", dies_during_the_flush),
        trial("many_volumes_are_mapped_and_unmapped_in_parallel", parallel),
        trial("a_restarted_supervisor_still_has_its_mappings", restart),
        trial("leftovers_are_reconciled_and_reported", leftovers),
        trial("a_missing_module_is_reported_with_a_repair_hint", missing_module),
        trial("resize_grows_the_device_online", resize),
        trial("figures_map_latency_and_memory", figures),
    ]
}

fn row_40_map_and_unmap() {
    let _node = Node::start();
    let device = cleat_ok(&["map", "mem:64M", "--name", "scratch"]);
    assert!(device.starts_with("/dev/nbd") && !device.contains('\n'), "{device}");
    assert_eq!(shell(&format!("blockdev --getsize64 {device}")), "67108864");
    assert_eq!(shell("readlink -f /dev/disk/by-id/cleat-scratch"), device);
    shell(&format!(
        "head -c 1M /dev/urandom > /tmp/data; dd if=/tmp/data of={device} bs=64k oflag=direct status=none;
         dd if={device} bs=1M count=1 iflag=direct status=none | cmp - /tmp/data"
    ));
    let shown = status("scratch");
    assert_eq!(shown["state"], "mapped", "{shown}");
    assert_eq!(shown["device"], device.as_str(), "{shown}");
    cleat_ok(&["unmap", "scratch"]);
    let index = device.trim_start_matches("/dev/nbd");
    assert!(!Path::new(&format!("/sys/block/nbd{index}/pid")).exists(), "still connected");
    assert!(!Path::new("/dev/disk/by-id/cleat-scratch").is_symlink(), "the symlink is still there");
    assert_eq!(shell("pgrep -cf '[c]leat worker' || true"), "0", "a worker was left behind");
    cleat_ok(&["unmap", "scratch"]);
}

fn block_size() {
    let _node = Node::start();
    for (name, options, size) in
        [("default", &[][..], "512 512"), ("chosen", &["--block-size", "4096"], "4096 4096")]
    {
        let device = cleat_ok(&[&["map", "mem:64M", "--name", name], options].concat());
        assert_eq!(shell(&format!("echo $(blockdev --getss --getpbsz {device})")), size);
    }
    let refused = cleat(&["map", "mem:64M", "--name", "odd", "--block-size", "1000"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}

fn existing_partitions() {
    let _node = Node::start();
    let image = Image::new("parted", "64M");
    shell(&format!("printf 'size=8M\\nsize=8M\\n' | sfdisk --quiet {}", image.path()));
    for _ in 0..10 {
        let device = cleat_ok(&["map", &image.uri(), "--name", "parted"]);
        // Nothing between the end of the command and the check gives udevd time.
        for partition in [1, 2] {
            let link = format!("/dev/disk/by-id/cleat-parted-part{partition}");
            let leads_to = std::fs::canonicalize(&link).unwrap_or_default();
            assert_eq!(leads_to, Path::new(&format!("{device}p{partition}")), "{link}");
        }
        cleat_ok(&["unmap", "parted"]);
    }
}

fn idempotence() {
    let _node = Node::start();
    let image = Image::new("same", "16M");
    let first = cleat_ok(&["map", &image.uri()]);
    assert_eq!(cleat_ok(&["map", &image.uri()]), first);
    let other = cleat(&["map", &image.uri(), "--name", "other"]);
    assert_eq!(other.status.code(), Some(5), "a second writer was admitted: {other:?}");
    let conflict = cleat(&["map", &image.uri(), "--read-only"]);
    assert_eq!(conflict.status.code(), Some(4), "{conflict:?}");
    cleat_ok(&["unmap", &first]);
    let read_only = cleat_ok(&["map", &image.uri(), "--read-only"]);
    assert_eq!(shell(&format!("blockdev --getro {read_only}")), "1");
    cleat_ok(&["unmap", &image.uri()]);
}

fn refused_while_held() {
    let _node = Node::start();
    let device = cleat_ok(&["map", "mem:64M", "--name", "held"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/held; mount {device} /mnt/held"));
    refused("held", "/mnt/held");
    shell("umount /mnt/held");
    let mut opener = std::process::Command::new("sleep")
        .arg("300")
        .stdin(std::fs::File::open(&device).expect("the device opens"))
        .spawn()
        .expect("sleep starts");
    refused("held", &opener.id().to_string());
    opener.kill().expect("killing the opener");
    opener.wait().expect("waiting for the opener");
    cleat_ok(&["unmap", "held"]);
}

/// Neither /proc/mounts nor a process names the second member of a btrfs, or the log device of XFS.
fn used_inside_the_kernel() {
    let _node = Node::start();
    let (first, second) = (Image::new("first", "400M"), Image::new("second", "200M"));
    let map = |name: &str, image: &Image| cleat_ok(&["map", &image.uri(), "--name", name]);
    let (one, two) = (map("first", &first), map("second", &second));
    shell(&format!(
        "modprobe btrfs; mkfs.btrfs -q -f {one} {two}; mkdir -p /mnt/several; mount {one} /mnt/several"
    ));
    refused("second", "is a member of the btrfs");
    refused("first", "/mnt/several");
    shell("umount /mnt/several");
    shell(&format!(
        "wipefs -qa {one} {two}; mkfs.xfs -q -f -l logdev={two},size=100m {one};
         mount -o logdev={two} {one} /mnt/several"
    ));
    refused("second", "claimed inside the kernel");
    shell("echo data > /mnt/several/file; umount /mnt/several");
    // A claim of a partition counts, too.
    shell(&format!(
        "wipefs -qa {two}; echo 'start=2048' | sfdisk --quiet {two}; udevadm settle;
         mkfs.xfs -q -f -l logdev={two}p1,size=100m {one}; mount -o logdev={two}p1 {one} /mnt/several"
    ));
    refused("second", "claimed inside the kernel");
    shell("umount /mnt/several");
    cleat_ok(&["unmap", "first"]);
    cleat_ok(&["unmap", "second"]);
}

/// An unmap that has timed out leaves a flush behind, which has the device open in the supervisor.
fn dies_during_the_flush() {
    let node = Node::start();
    let image = Image::new("dies", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "dies"]);
    // udev reads the device after it was written. A read that hangs would be another user than the flush.
    shell(&format!(
        "dd if=/dev/urandom of={device} bs=1M count=4 oflag=direct status=none; udevadm settle"
    ));
    let worker = status("dies")["worker_pid"].as_u64().expect("a worker");
    let worker = u32::try_from(worker).expect("a process number");
    signal("STOP", worker);
    for _ in 0..2 {
        let output = cleat(&["unmap", "dies", "--deadline", "5s"]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains("flush"), "{message}");
        assert!(!message.contains(&format!("process {}", node.pid())), "{message}");
    }
    let killing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(2));
        signal("KILL", worker);
    });
    let began = std::time::Instant::now();
    cleat_ok(&["unmap", "dies", "--deadline", "300s"]);
    promised(began.elapsed(), std::time::Duration::from_secs(10), "an unmap without a worker");
    killing.join().expect("the worker is killed");
}

fn refused(target: &str, holder: &str) {
    let output = cleat(&["unmap", target]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{message}");
    assert!(message.contains(holder), "{holder} is not named: {message}");
    assert_eq!(status(target)["state"], "mapped");
}

/// Maps and unmaps many volumes in parallel: 25, or 100 if `CLEAT_REPEAT` is set.
fn parallel() {
    let count = if repeat().is_some() { "100" } else { "25" };
    let each = |script: &str| shell(&script.replace("COUNT", count));
    let _node = Node::start();
    let devices = each(
        "for i in $(seq COUNT); do ./cleat map mem:4M --name v$i --timeout 300s & done > /tmp/devices 2> /out/parallel.log
         wait; sort -u /tmp/devices | wc -l",
    );
    let errors =
        shell("sed 's/ v[0-9]*/ vN/g' /out/parallel.log | sort | uniq -c | sort -rn | head -n 20");
    assert_eq!(devices, count, "{errors}");
    assert_eq!(shell("./cleat ls -o json | grep -c '\"state\": *\"mapped\"'"), count);
    assert_eq!(shell("ls /dev/disk/by-id | grep -c '^cleat-v'"), count);
    each(
        "pids=(); for i in $(seq COUNT); do ./cleat unmap v$i --timeout 300s & pids+=($!); done
           for pid in ${pids[@]}; do wait $pid; done",
    );
    assert_eq!(shell("ls -d /sys/block/nbd*/pid 2>/dev/null | wc -l || true"), "0");
    assert_eq!(shell("pgrep -cf '[c]leat worker' || true"), "0");
    assert_eq!(shell("ls /var/lib/cleat/ -R | grep -c '\\.json$' || true"), "0");
}

fn restart() {
    let mut node = Node::start();
    let image = Image::new("restart", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "kept"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/kept; mount {device} /mnt/kept"));
    let worker = status("kept")["worker_pid"].clone();
    for round in 0..2 {
        if round == 0 {
            node.kill()
        } else {
            node.terminate()
        }
        shell(&format!("echo round {round} > /mnt/kept/file{round}; sync -f /mnt/kept"));
        node.restart();
        wait_for_state("kept", "mapped");
        let shown = status("kept");
        assert_eq!(shown["device"], device.as_str(), "{shown}");
        assert_eq!(shown["worker_pid"], worker, "the worker was replaced: {shown}");
        assert_eq!(shell(&format!("cat /mnt/kept/file{round}")), format!("round {round}"));
    }
    shell("umount /mnt/kept");
    cleat_ok(&["unmap", "kept"]);
    shell(&format!("e2fsck -fn {}", image.path()));
}

fn leftovers() {
    let mut node = Node::start();
    cleat_ok(&["map", "mem:16M", "--name", "no-record"]);
    cleat_ok(&["map", "mem:16M", "--name", "no-device"]);
    let device = status("no-device")["device"].as_str().expect("a device").to_owned();
    node.kill();
    shell("grep -rlF '\"no-record\"' /var/lib/cleat | xargs rm");
    shell(&format!("nbd-client -d {device}"));
    node.restart();
    let listed = cleat_ok(&["ls", "-o", "json"]);
    assert!(listed.contains("orphan"), "the device without a record is not reported: {listed}");
    let shown = status("no-device");
    assert_ne!(shown["state"], "mapped", "its device is gone: {shown}");
    cleat_ok(&["unmap", "no-device"]);
    cleat_ok(&["unmap", "no-record"]);
    assert_eq!(shell("ls -d /sys/block/nbd*/pid 2>/dev/null | wc -l || true"), "0");
}

fn missing_module() {
    let _node = Node::start();
    shell(
        "modprobe -r nbd; mv /sbin/modprobe /sbin/modprobe.away; mv /lib/modules /lib/modules.away",
    );
    let output = cleat(&["map", "mem:16M"]);
    let doctor = cleat(&["doctor"]);
    shell("mv /sbin/modprobe.away /sbin/modprobe; mv /lib/modules.away /lib/modules; modprobe nbd");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(8), "{message}");
    assert!(message.contains("modprobe nbd"), "{message}");
    assert_eq!(doctor.status.code(), Some(21), "{}", String::from_utf8_lossy(&doctor.stdout));
    cleat_ok(&["unmap", &cleat_ok(&["map", "mem:16M"])]);
}

fn resize() {
    let _node = Node::start();
    let image = Image::new("grow", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "grow"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/grow; mount {device} /mnt/grow"));
    cleat_ok(&["resize", "grow", "128M"]);
    assert_eq!(shell(&format!("blockdev --getsize64 {device}")), "134217728");
    shell(&format!("resize2fs {device} 2>&1; umount /mnt/grow"));
    let shrunk = cleat(&["resize", "grow", "64M"]);
    assert_eq!(shrunk.status.code(), Some(2), "{shrunk:?}");
    cleat_ok(&["unmap", "grow"]);
    shell(&format!("e2fsck -fn {}", image.path()));
}

/// Prints figures: times under emulation (tcg) have no meaning by themselves. Of the memory, it checks that none is in huge
/// pages, which are 4 MiB of an idle process if the allocator begins before they are switched off.
/// `CLEAT_REPEAT` is the number of mappings (default 5).
fn figures() {
    let node = Node::start();
    let mut times_ms = Vec::new();
    for _ in 0..repeat().unwrap_or(5) {
        let start = std::time::Instant::now();
        cleat_ok(&["map", "mem:16M", "--name", "timed"]);
        times_ms.push(start.elapsed().as_millis());
        cleat_ok(&["unmap", "timed"]);
    }
    times_ms.sort_unstable();
    let start = std::time::Instant::now();
    cleat_ok(&["ls"]);
    let client_ms = start.elapsed().as_millis();
    cleat_ok(&["map", "mem:16M", "--name", "idle"]);
    let worker = status("idle")["worker_pid"].clone();
    let memory = |pid: &str| {
        let fields = "/^Pss:/ { pss = $2 } /^Private_Dirty:/ { own = $2 }";
        let print = "END { print own \" (PSS \" pss \")\" }";
        shell(&format!("awk '{fields} {print}' /proc/{pid}/smaps_rollup"))
    };
    for pid in [worker.to_string(), node.pid().to_string()] {
        shell(&format!("grep -x 'AnonHugePages: *0 kB' /proc/{pid}/smaps_rollup"));
    }
    println!(
        "figures: map to ready, ms: median {} (min {}, max {}), of which a bare client call {client_ms}; \
         idle, written and private KiB: worker {}, supervisor {}",
        times_ms[times_ms.len() / 2],
        times_ms[0],
        times_ms[times_ms.len() - 1],
        memory(&worker.to_string()),
        memory(&node.pid().to_string()),
    );
    cleat_ok(&["unmap", "idle"]);
}
