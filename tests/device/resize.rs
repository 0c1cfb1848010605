//! Resizes under load, and with a backend that hangs.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, TIMEOUT, cleat, cleat_ok, shell, status};
use crate::trial;
use test_kit::stopwatch::Stopwatch;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("resize_twenty_times_under_verified_load", twenty_times),
        trial("resize_of_a_volume_with_tight_limits", with_limits),
        trial("resize_of_ext4_under_load", || grows_online("ext4", ["64M", "128M", "192M"])),
        trial("resize_of_xfs_under_load", || grows_online("xfs", ["320M", "512M", "640M"])),
        trial("resize_follows_the_size_of_the_backend", follows),
        trial("resize_with_shrink_is_refused_while_the_device_is_held", shrinks),
        trial("resize_with_a_hung_backend_blocks_no_other_mapping", hung),
    ]
}

/// fio in the background, which verifies its writes.
pub(crate) struct Load(Child);

impl Load {
    pub(crate) fn start(arguments: &str) -> Self {
        let script = format!(
            "exec fio --name=load {arguments} --rw=randrw --bsrange=4k-64k --verify=crc32c \
               --verify_backlog=64 --verify_fatal=1 --fsync=32 --time_based --runtime=600 \
               --randseed=7 --output=/tmp/load.log"
        );
        let child = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).spawn();
        Self(child.expect("fio starts"))
    }

    /// Ends fio. Panics when it found an error.
    pub(crate) fn stop(mut self) {
        assert!(self.0.try_wait().expect("fio").is_none(), "{}", shell("cat /tmp/load.log"));
        crate::fixture::signal("INT", self.0.id());
        self.0.wait().expect("fio");
        let log = shell("cat /tmp/load.log");
        assert!(log.contains("err= 0") && !log.contains("verify failed"), "{log}");
    }
}

pub(crate) fn size_of(device: &str) -> u64 {
    shell(&format!("blockdev --getsize64 {device}")).parse().expect("a number")
}

pub(crate) fn no_io_errors(device: &str) {
    let name = device.trim_start_matches("/dev/");
    let errors = shell(&format!("dmesg | grep -E 'I/O error|Buffer I/O' | grep {name} || true"));
    assert_eq!(errors, "");
}

fn twenty_times() {
    let _node = Node::start();
    shell("dmesg -C");
    let image = Image::new("grow", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "grow"]);
    let load = Load::start(&format!(
        "--filename={device} --direct=1 --ioengine=libaio --iodepth=16 --size=48M"
    ));
    std::thread::sleep(Duration::from_secs(2));
    let mut took_ms = Vec::new();
    for round in 1..=20 {
        let size = (64 + round * 4) << 20;
        let began = Instant::now();
        cleat_ok(&["resize", "grow", &size.to_string()]);
        took_ms.push(began.elapsed().as_millis());
        assert_eq!(size_of(&device), size);
    }
    load.stop();
    no_io_errors(&device);
    took_ms.sort_unstable();
    println!("figures: resize under load, ms: median {}, worst {}", took_ms[10], took_ms[19]);
    cleat_ok(&["unmap", "grow"]);
}

/// The kernel waits for requests that the rate limits delay, and holds a lock that all devices share. So
/// the daemon suspends the limits during a resize.
fn with_limits() {
    let _node = Node::start();
    let image = Image::new("slow", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "slow", "--iops", "4"]);
    let load = Load::start(&format!(
        "--filename={device} --direct=1 --ioengine=libaio --iodepth=64 --size=48M"
    ));
    let written = || {
        let text = cleat_ok(&["stats", "slow", "--total", "-o", "json"]);
        let stats: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        stats["volumes"][0]["counters"]["write"]["count"].as_u64().expect("a number")
    };
    while written() < 8 {
        std::thread::sleep(Duration::from_millis(100));
    }
    // 64 requests at 4 a second would take 16 s.
    let began = Stopwatch::start();
    cleat_ok(&["resize", "slow", "128M"]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(size_of(&device), 128 << 20);
    let before = written();
    std::thread::sleep(Duration::from_secs(5));
    let since = written() - before;
    assert!((5..=40).contains(&since), "{since} writes in 5 s at 4 a second");
    cleat_ok(&["set", "slow", "--iops", "0"]);
    load.stop();
    cleat_ok(&["unmap", "slow"]);
}

fn grows_online(filesystem: &str, sizes: [&str; 3]) {
    let _node = Node::start();
    shell("dmesg -C");
    let image = Image::new("online", sizes[0]);
    let device = cleat_ok(&["map", &image.uri(), "--name", "online"]);
    shell(&format!("mkfs.{filesystem} -q {device}; mkdir -p /mnt/grow; mount {device} /mnt/grow"));
    let room = || -> u64 {
        shell("df --output=size -B1 /mnt/grow | tail -1").trim().parse().expect("a number")
    };
    let load = Load::start("--directory=/mnt/grow --ioengine=libaio --iodepth=8 --size=24M");
    std::thread::sleep(Duration::from_secs(2));
    for size in &sizes[1..] {
        let before = room();
        cleat_ok(&["resize", "online", size]);
        match filesystem {
            "ext4" => shell(&format!("resize2fs {device} 2>&1")),
            _ => shell("xfs_growfs /mnt/grow"),
        };
        assert!(room() > before + (32 << 20), "{before} became {}", room());
    }
    // The added space can be used.
    shell("fallocate -l 100M /mnt/grow/more; rm /mnt/grow/more");
    load.stop();
    shell("umount /mnt/grow");
    no_io_errors(&device);
    let check = if filesystem == "ext4" { "e2fsck -fn" } else { "xfs_repair -n" };
    shell(&format!("{check} {device} 2>&1"));
    cleat_ok(&["unmap", "online"]);
}

fn follows() {
    let _node = Node::start();
    let image = Image::new("follows", "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "follows"]);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/grow; mount {device} /mnt/grow"));
    shell(&format!("truncate -s 128M {}", image.path()));
    let began = Instant::now();
    while size_of(&device) != 128 << 20 {
        assert!(began.elapsed() < TIMEOUT, "the device stays at {}", size_of(&device));
        std::thread::sleep(Duration::from_millis(50));
    }
    println!(
        "figures: the device follows a larger backend after {} ms",
        began.elapsed().as_millis()
    );
    shell(&format!("resize2fs {device} 2>&1; fallocate -l 80M /mnt/grow/more; umount /mnt/grow"));
    assert_eq!(status("follows")["size_bytes"], 128 << 20);
    cleat_ok(&["unmap", "follows"]);
    shell(&format!("e2fsck -fn {}", image.path()));
}

fn shrinks() {
    let _node = Node::start();
    let image = Image::new("shrinks", "128M");
    let device = cleat_ok(&["map", &image.uri(), "--name", "shrinks"]);
    shell(&format!(
        "mkfs.ext4 -q {device} 48M; mkdir -p /mnt/grow; mount {device} /mnt/grow
         head -c 8M /dev/urandom > /mnt/grow/file; sha256sum /mnt/grow/file > /tmp/shrinks.sum"
    ));
    assert_eq!(cleat(&["resize", "shrinks", "64M"]).status.code(), Some(2));
    let held = cleat(&["resize", "shrinks", "64M", "--shrink"]);
    assert_eq!(held.status.code(), Some(5), "{held:?}");
    assert_eq!(size_of(&device), 128 << 20);
    shell("umount /mnt/grow");
    cleat_ok(&["resize", "shrinks", "64M", "--shrink"]);
    assert_eq!(size_of(&device), 64 << 20);
    assert_eq!(shell(&format!("stat -c %s {}", image.path())), "67108864");
    shell(&format!(
        "e2fsck -fn {device}; mount {device} /mnt/grow; sha256sum --quiet -c /tmp/shrinks.sum
         umount /mnt/grow; rm /tmp/shrinks.sum"
    ));
    cleat_ok(&["unmap", "shrinks"]);
}

/// A write that hangs at the backend until the guard is dropped.
struct HungWrite {
    name: &'static str,
    writer: Option<Child>,
}

impl HungWrite {
    fn start(name: &'static str, device: &str) -> Self {
        cleat_ok(&["fault", name, "hang=true&ops=write"]);
        let writer = Command::new("dd")
            .args(["if=/dev/zero", "bs=4k", "count=1", "oflag=direct", "status=none"])
            .arg(format!("of={device}"))
            .spawn()
            .expect("dd starts");
        let began = Instant::now();
        let in_flight = || {
            let text = cleat_ok(&["stats", name, "--total", "-o", "json"]);
            let stats: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            stats["volumes"][0]["in_flight"].as_u64().expect("a number")
        };
        while in_flight() == 0 {
            assert!(began.elapsed() < TIMEOUT, "the write does not arrive");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { name, writer: Some(writer) }
    }

    fn release(mut self) {
        let mut writer = self.writer.take().expect("it has not been released");
        cleat_ok(&["fault", self.name, ""]);
        assert!(writer.wait().expect("dd").success(), "the write failed");
    }
}

impl Drop for HungWrite {
    fn drop(&mut self) {
        if let Some(mut writer) = self.writer.take() {
            let _ = cleat(&["fault", self.name, ""]);
            let _ = writer.wait();
        }
    }
}

fn hung() {
    let _node = Node::start();
    let image = Image::new("hung", "64M");
    let uri = format!("fault:{}", image.uri());
    let device = cleat_ok(&["map", &uri, "--name", "hung"]);
    let hung = HungWrite::start("hung", &device);
    let refused = cleat(&["resize", "hung", "128M"]);
    assert_eq!(refused.status.code(), Some(9), "{refused:?}");
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("the backend does not answer"), "{message}");
    // The daemon also detects the new size by itself and defers the resize repeatedly. Other mappings are
    // not delayed.
    for round in 0..4 {
        let other = format!("other{round}");
        let began = Instant::now();
        cleat_ok(&["map", "mem:16M", "--name", &other, "--timeout", "20s"]);
        cleat_ok(&["unmap", &other, "--timeout", "20s"]);
        println!("figures: map and unmap beside a hung resize: {:?}", began.elapsed());
        std::thread::sleep(Duration::from_secs(3));
    }
    assert_eq!(size_of(&device), 64 << 20);
    let shown = status("hung");
    assert_eq!(shown["state"], "mapped", "{shown}");
    assert!(shown["message"].as_str().is_some_and(|m| m.contains("does not answer")), "{shown}");
    hung.release();
    let began = Instant::now();
    while size_of(&device) != 128 << 20 {
        assert!(began.elapsed() < TIMEOUT, "the device does not grow");
        std::thread::sleep(Duration::from_millis(100));
    }
    cleat_ok(&["resize", "hung", "192M"]);
    cleat_ok(&["unmap", "hung"]);
}
