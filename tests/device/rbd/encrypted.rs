//! A device over an encrypted image: its worker killed and succeeded, under ext4.

use std::time::Instant;

use super::{POOL, cluster, goes_on, image_uri, wait_for};
use crate::fixture::{Node, cleat_ok, shell, signal, status};
use crate::resize::{Load, size_of};

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
    shell(&format!("mkfs.ext4 -q {device}; mkdir -p /mnt/secret; mount {device} /mnt/secret"));
    let load = Load::start("--directory=/mnt/secret --ioengine=libaio --iodepth=8 --size=8M");
    goes_on("secret", 50);

    let worker = || status("secret")["worker_pid"].as_u64().filter(|pid| *pid != 0);
    let (killed, begun) = (worker().expect("a worker"), Instant::now());
    signal("KILL", u32::try_from(killed).expect("a pid"));
    wait_for("another worker serves", || {
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

    load.stop();
    shell("head -c 1M /dev/urandom > /mnt/secret/known; sha256sum /mnt/secret/known > /root/sum");
    shell(&format!("umount /mnt/secret; e2fsck -fn {device}"));
    // A device whose last owner offered WRITE_ZEROES goes on being asked for them (6.12). They are
    // refused here, since they were not offered, and the kernel writes zeroes instead.
    let failed =
        format!("dmesg | grep 'I/O error, dev {}' | grep -v WRITE_ZEROES || true", &device[5..]);
    assert_eq!(shell(&failed), "");
    cleat_ok(&["unmap", "secret"]);

    // What the cluster has is cipher text: a header, and no file system behind it.
    let raw = cluster().rbd(&["export", "--no-progress", &format!("{POOL}/secret"), "-"]);
    let raw = raw.expect("rbd succeeds");
    assert_eq!((raw.len(), &raw[..8]), ((96 + 16) << 20, &b"LUKS\xba\xbe\0\x02"[..]));
    assert_ne!(raw[(16 << 20) + 0x438..][..2], [0x53, 0xef], "ext4's magic number");

    let device = cleat_ok(&["map", &uri, "--name", "secret"]);
    shell(&format!("mount -o ro {device} /mnt/secret; sha256sum -c /root/sum; umount /mnt/secret"));
    cleat_ok(&["unmap", "secret"]);
}
