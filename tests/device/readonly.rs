//! Read-only mappings: each layer refuses writes.

use libtest_mimic::Trial;

use crate::fixture::{Image, Node, cleat, cleat_ok, shell, status};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("readonly_mapping_refuses_every_write", refuses),
        trial("readonly_file_is_mapped_twice_at_once", twice),
    ]
}

/// A volume with a filesystem and a file on it.
fn filled(name: &str) -> Image {
    let image = Image::new(name, "64M");
    let device = cleat_ok(&["map", &image.uri(), "--name", name]);
    shell(&format!(
        "mkfs.ext4 -q {device}; mkdir -p /mnt/ro; mount {device} /mnt/ro
         head -c 4M /dev/urandom > /mnt/ro/file; sha256sum < /mnt/ro/file > /tmp/ro.sum
         umount /mnt/ro"
    ));
    cleat_ok(&["unmap", name]);
    image
}

fn refuses() {
    let _node = Node::start();
    let image = filled("ro");
    let before = shell(&format!("sha256sum < {}", image.path()));
    let device = cleat_ok(&["map", &image.uri(), "--name", "ro", "--read-only"]);
    let shown = status("ro");
    assert_eq!(shown["read_only"], true, "{shown}");

    // The kernel.
    assert_eq!(shell(&format!("blockdev --getro {device}")), "1");
    shell(&format!(
        "fails dd if=/dev/zero of={device} bs=4k count=1 oflag=direct status=none
         fails blkdiscard {device}
         fails blkdiscard --zeroout {device}
         if mount -o rw {device} /mnt/ro; then fails touch /mnt/ro/x; umount /mnt/ro; fi
         mount -o ro {device} /mnt/ro; sha256sum < /mnt/ro/file | cmp - /tmp/ro.sum
         fails touch /mnt/ro/x; fails mount -o remount,rw /mnt/ro
         umount /mnt/ro"
    ));
    // Writes fail even if the kernel's flag is cleared by hand.
    shell(&format!(
        "blockdev --setrw {device}
         fails dd if=/dev/zero of={device} bs=4k count=1 oflag=direct conv=notrunc status=none"
    ));
    // The worker has no writable descriptor of the volume.
    let worker = shown["worker_pid"].as_u64().expect("a worker");
    let writable = shell(&format!(
        "for fd in /proc/{worker}/fd/*; do
           if [ \"$(readlink $fd)\" = {path} ]; then grep ^flags /proc/{worker}/fdinfo/${{fd##*/}}; fi
         done",
        path = image.path()
    ));
    assert!(writable.starts_with("flags:") && writable.ends_with('0'), "{writable:?}");
    // The daemon.
    let grown = cleat(&["resize", "ro", "128M"]);
    assert_eq!(grown.status.code(), Some(7), "{grown:?}");
    cleat_ok(&["unmap", "ro"]);
    assert_eq!(shell(&format!("sha256sum < {}", image.path())), before);
}

fn twice() {
    let _node = Node::start();
    let image = filled("twice");
    let map = |name| cleat_ok(&["map", &image.uri(), "--name", name, "--read-only"]);
    let (one, other) = (map("one"), map("other"));
    assert_ne!(one, other);
    shell(&format!(
        "mkdir -p /mnt/ro2; mount -o ro {one} /mnt/ro; mount -o ro {other} /mnt/ro2
         sha256sum < /mnt/ro/file | cmp - /tmp/ro.sum; sha256sum < /mnt/ro2/file | cmp - /tmp/ro.sum
         umount /mnt/ro /mnt/ro2"
    ));
    cleat_ok(&["unmap", "one"]);
    cleat_ok(&["unmap", "other"]);
}
