//! A device on an encrypted image: zeroes and trims, a killed worker, an upgrade, and a resize, under
//! ext4.

use std::time::Instant;

use super::{POOL, cluster, count, goes_on, image_uri, wait_until};
use crate::fixture::{Node, cleat, cleat_ok, kernel_is_at_least, shell, signal, status};
use crate::resize::{Load, no_io_errors, size_of};

pub(super) fn survives() {
    let _node = Node::start();
    shell("dmesg -C; (umask 077; printf 'correct horse' > /root/passphrase)");
    let uri = format!("{}&encryption=luks2&passphrase_file=/root/passphrase", image_uri("secret"));
    let begun = Instant::now();
    cleat_ok(&["volume", "create", &uri, "96M"]);
    println!("figures: an encrypted image is made in {:.1?}", begun.elapsed());
    let begun = Instant::now();
    let device = cleat_ok(&["map", &uri, "--name", "secret"]);
    println!("figures: an encrypted image is mapped in {:.1?}", begun.elapsed());
    assert_eq!(size_of(&device), 96 << 20);
    zeroed(&device);
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/secret; mount {device} /mnt/secret"));
    let load = Load::start("--directory=/mnt/secret --ioengine=libaio --iodepth=8 --size=8M");
    goes_on("secret", 50);

    let worker = || status("secret")["worker_pid"].as_u64().filter(|pid| *pid != 0);
    let (killed, begun) = (worker().expect("a worker"), Instant::now());
    signal("KILL", u32::try_from(killed).expect("a pid"));
    wait_until("another worker serves", || {
        status("secret")["state"] == "mapped" && worker().is_some_and(|pid| pid != killed)
    });
    println!(
        "figures: over an encrypted image, a killed worker is replaced in {:.1?}",
        begun.elapsed()
    );
    goes_on("secret", 50);

    let before = worker();
    let upgraded = cleat_ok(&["upgrade", "secret", "--workers-only", "--force", "-o", "json"]);
    assert!(upgraded.contains("handed_over"), "{upgraded}");
    println!("figures: over an encrypted image, {upgraded}");
    assert_ne!(worker(), before);
    goes_on("secret", 50);

    // The kernel may still have to repeat requests of the killed worker; until then a resize fails.
    wait_until("it can be resized", || {
        let _ = cleat(&["resize", "secret", "160M"]);
        size_of(&device) == 160 << 20
    });
    let zeroings = || count("secret", "write_zeroes").expect("it is served");
    let before = zeroings();
    shell(&format!("resize2fs {device} 2>&1; fallocate -l 40M /mnt/secret/more"));
    assert!(zeroings() > before || !kernel_is_at_least(6, 12), "new groups are zeroed");
    goes_on("secret", 50);
    load.stop();
    shell("head -c 1M /dev/urandom > /mnt/secret/known; sha256sum /mnt/secret/known > /root/sum");
    shell(&format!("umount /mnt/secret; e2fsck -fn {device}"));
    no_io_errors(&device);
    cleat_ok(&["unmap", "secret"]);

    // The cluster stores cipher text: a header, and no readable file system behind it.
    let raw = cluster().rbd(&["export", "--no-progress", &format!("{POOL}/secret"), "-"]);
    let raw = raw.expect("rbd succeeds");
    assert_eq!((raw.len(), &raw[..8]), ((160 + 16) << 20, &b"LUKS\xba\xbe\0\x02"[..]));
    assert_ne!(raw[(16 << 20) + 0x438..][..2], [0x53, 0xef], "ext4's magic number");

    let device = cleat_ok(&["map", &uri, "--name", "secret"]);
    shell(&format!("mount -o ro {device} /mnt/secret; sha256sum -c /root/sum; umount /mnt/secret"));
    cleat_ok(&["unmap", "secret"]);
}

/// Zeroes a range of written data, within objects and across them. Trims are not supported, and the kernel
/// knows that.
fn zeroed(device: &str) {
    shell("(yes 'a known line' || true) | head -c 16M > /root/known");
    shell(&format!("dd if=/root/known of={device} bs=1M oflag=direct status=none"));
    shell(&format!("blkdiscard -z -o 1052672 -l 14M {device}; echo 3 > /proc/sys/vm/drop_caches"));
    shell(&format!("cmp -n 14M -i 1052672:0 {device} /dev/zero"));
    for range in ["-n 1052672", "-i 15732736 -n 1044480"] {
        shell(&format!("cmp {range} {device} /root/known"));
    }
    let refused = shell(&format!("blkdiscard -l 1M {device} 2>&1 || true"));
    assert!(refused.contains("not supported"), "{refused}");
    assert_eq!(count("secret", "trim"), Some(0), "the kernel sends no trim that is not offered");
}
