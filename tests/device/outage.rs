//! Outages of a backend under fio and file systems, rate limits under fio, and crash loops.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, TIMEOUT, cleat, cleat_ok, promised, shell, signal, status};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("outage_under_a_filesystem_delays_io_without_errors", waited_out),
        trial("outage_with_policy_queue_2s_or_fail_fails_io", fails),
        trial("limits_hold_and_change_under_fio", limits),
        trial("crash_loop_fails_io_after_the_timeout_and_can_be_repaired", crash_loop),
    ]
}

fn faulty(image: &Image) -> String {
    format!("fault:{}", image.uri())
}

/// Three outages of five seconds under fio's verification on ext4: no error, and the data is right.
fn waited_out() {
    let _node = Node::start();
    let image = Image::new("away", "192M");
    let device = cleat_ok(&["map", &faulty(&image), "--name", "away"]);
    shell(&format!(
        "dmesg -C; mkfs.ext4 -q {device}; mkdir -p /mnt/away; mount {device} /mnt/away"
    ));
    let fio = std::thread::spawn(|| {
        shell(
            "fio --name=verify --directory=/mnt/away --direct=1 --ioengine=libaio --iodepth=16 \
               --rw=randrw --bsrange=4k-64k --size=96M --verify=crc32c --verify_backlog=256 \
               --verify_fatal=1 --fsync=64 --time_based --runtime=32 --randseed=7 \
               --output-format=terse --terse-version=3",
        )
    });
    std::thread::sleep(Duration::from_secs(4));
    for _ in 0..3 {
        cleat_ok(&["fault", "away", "error=retry"]);
        std::thread::sleep(Duration::from_secs(5));
        let now = status("away");
        assert_eq!(now["state"], "mapped", "{now}");
        assert_eq!(now["outage"]["reason"], "injected: error=retry", "{now}");
        assert!(now["outage"]["queued"].as_u64() > Some(0), "nothing waits: {now}");
        let text = cleat_ok(&["status", "away"]);
        assert!(text.contains("the backend has not answered since"), "{text}");
        cleat_ok(&["fault", "away", ""]);
        until("the outage is over", || status("away")["outage"].is_null());
        std::thread::sleep(Duration::from_secs(3));
    }
    let report = fio.join().expect("fio ended well");
    let fields: Vec<&str> = report.lines().last().unwrap_or_default().split(';').collect();
    assert_eq!(fields.get(4), Some(&"0"), "fio counted errors: {report}");
    shell(&format!(
        "umount /mnt/away; e2fsck -fn {device};
         dmesg | grep -E 'I/O error|Buffer I/O|EXT4-fs error' && exit 1 || true"
    ));
    println!("figures: {} KiB read, {} KiB written beside three outages", fields[5], fields[46]);
    cleat_ok(&["unmap", "away"]);
}

fn fails() {
    let _node = Node::start();
    let image = Image::new("fails", "32M");
    let device = cleat_ok(&["map", &faulty(&image), "--name", "fails", "--on-outage", "queue:2s"]);
    let write = format!("dd if=/dev/zero of={device} bs=4k count=1 oflag=direct status=none");
    let failing = format!("if {write} 2>/tmp/dd.log; then exit 1; fi; cat /tmp/dd.log");
    shell(&write);
    cleat_ok(&["fault", "fails", "error=retry"]);
    let begun = Instant::now();
    let message = shell(&failing);
    let lasted = begun.elapsed();
    assert!(message.contains("Input/output error"), "{message}");
    assert!(lasted >= Duration::from_secs(2), "{lasted:?}");
    promised(lasted, Duration::from_secs(4), "the failure of a write under queue:2s");
    println!("figures: queue:2s failed after {} ms", lasted.as_millis());
    cleat_ok(&["fault", "fails", ""]);
    until("the outage is over", || status("fails")["outage"].is_null());
    shell(&write);
    cleat_ok(&["set", "fails", "--on-outage", "fail"]);
    cleat_ok(&["fault", "fails", "error=retry"]);
    // Take the quickest of three, as the machine may be slow. A request that waits would take longer.
    let quickest = (0..3).map(|_| {
        let begun = Instant::now();
        shell(&failing);
        begun.elapsed()
    });
    let quickest = quickest.min().unwrap_or_default();
    assert!(quickest < Duration::from_millis(1900), "{quickest:?}");
    println!("figures: fail failed after {} ms", quickest.as_millis());
    // A change of the policy fails a request that already waits.
    cleat_ok(&["set", "fails", "--on-outage", "queue"]);
    let waiting = std::thread::spawn({
        let failing = failing.clone();
        move || shell(&failing)
    });
    until("it waits", || status("fails")["outage"]["queued"].as_u64() > Some(0));
    cleat_ok(&["set", "fails", "--on-outage", "fail"]);
    waiting.join().expect("the write failed");
    cleat_ok(&["fault", "fails", ""]);
    cleat_ok(&["unmap", "fails"]);
}

fn limits() {
    let _node = Node::start();
    let device = cleat_ok(&["map", "mem:64M", "--name", "limited", "--iops", "200"]);
    let rate = |bs: &str, seconds: u32, field: usize| -> f64 {
        let report = shell(&format!(
            "fio --name=limit --filename={device} --direct=1 --ioengine=libaio --iodepth=16 \
               --rw=randwrite --bs={bs} --size=64M --time_based --runtime={seconds} \
               --output-format=terse --terse-version=3"
        ));
        let fields: Vec<&str> = report.lines().last().unwrap_or_default().split(';').collect();
        fields[field].parse().expect("fio prints numbers")
    };
    // Terse version 3: 47 is the bandwidth of writes in KiB/s, 48 their number per second.
    let iops = rate("4k", 8, 48);
    // Requests in flight when fio ends count, and so does the burst of a tenth of a second. A slow machine
    // may do fewer.
    assert!((50.0..=230.0).contains(&iops), "{iops} requests/s at a limit of 200");
    let shown = status("limited");
    assert_eq!((&shown["iops"], &shown["bytes_per_s"]), (&200.into(), &0.into()), "{shown}");
    cleat_ok(&["set", "limited", "--iops", "0", "--bps", "2M"]);
    let kib = rate("64k", 8, 47);
    assert!((512.0..=2500.0).contains(&kib), "{kib} KiB/s at a limit of 2048");
    cleat_ok(&["set", "limited", "--bps", "0"]);
    let free = rate("4k", 4, 48);
    assert!(free > 250.0, "{free} requests/s without a limit");
    println!("figures: {iops} requests/s of 200, {kib} KiB/s of 2048, {free} requests/s of any");
    cleat_ok(&["unmap", "limited"]);
}

/// A worker that dies repeatedly: requests in flight fail after the configured time, not before, and once
/// the cause is gone the same device works again.
fn crash_loop() {
    let _node = Node::start();
    let image = Image::new("loop", "32M");
    let (uri, timeout) = (image.uri(), "--dead-connection-timeout");
    let map = ["map", &uri, "--name", "loop", timeout, "20s"];
    let device = cleat_ok(&map);
    let write = format!("dd if=/dev/zero of={device} bs=4k count=1 oflag=direct status=none");
    shell(&write);
    let killer = std::thread::spawn(|| {
        let end = Instant::now() + 3 * TIMEOUT;
        let mut last = 0;
        while Instant::now() < end {
            let now = status("loop");
            if now["state"] == "failed" {
                return now;
            }
            let pid = now["worker_pid"].as_u64().unwrap_or(0);
            if pid != 0 && pid != last {
                signal(
                    if pid.is_multiple_of(2) { "ABRT" } else { "KILL" },
                    u32::try_from(pid).expect("pid"),
                );
                last = pid;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the daemon never gives the mapping up");
    });
    let begun = Instant::now();
    let failing = format!("if {write} 2>/tmp/loop.log; then exit 1; fi; cat /tmp/loop.log");
    // A worker may live long enough for some writes.
    let mut done = 0;
    let writer = std::thread::spawn(move || {
        while !std::process::Command::new("bash")
            .args(["-c", &failing])
            .status()
            .expect("bash runs")
            .success()
        {
            done += 1;
        }
        (done, Instant::now())
    });
    let failed = killer.join().expect("the killer ended");
    let given_up = begun.elapsed();
    let message = failed["message"].as_str().unwrap_or_default();
    assert!(message.contains("10 attempts") && message.contains("worker"), "{failed}");
    assert!(failed["last_worker_end"].as_str().unwrap_or_default().contains("worker"), "{failed}");
    let (done, ended) = writer.join().expect("a write failed in the end");
    println!(
        "figures: given up after {} ms, I/O failed after {} ms, {done} writes before",
        given_up.as_millis(),
        (ended - begun).as_millis()
    );
    assert_eq!(cleat_ok(&map), device);
    shell(&write);
    assert!(cleat(&["status", "loop"]).status.success());
    cleat_ok(&["unmap", "loop"]);
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < end, "waited for too long: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
