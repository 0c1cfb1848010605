//! File systems on mapped volumes: each test makes one, fills it, checks it, unmaps the volume, maps it
//! again, and compares the content.

use libtest_mimic::Trial;

use crate::fixture::{Image, Loop, Node, cleat_ok, shell};
use crate::trial;

/// What the volume is stored in.
#[derive(Clone, Copy, PartialEq)]
enum Store {
    Memory,
    File,
    DirectFile,
    Loop,
}

pub(crate) fn trials() -> Vec<Trial> {
    let cases = [
        (Store::Memory, "ext4", 1),
        (Store::Memory, "xfs", 4),
        (Store::File, "ext4", 1),
        (Store::File, "xfs", 4),
        (Store::DirectFile, "ext4", 4),
        (Store::Loop, "ext4", 1),
        (Store::Loop, "xfs", 4),
    ];
    cases
        .into_iter()
        .map(|(store, filesystem, connections)| {
            let kind = match store {
                Store::Memory => "mem",
                Store::File => "file",
                Store::DirectFile => "file_direct",
                Store::Loop => "loop",
            };
            trial(format!("{filesystem}_on_{kind}_with_{connections}_connections"), move || {
                round_trip(store, filesystem, connections);
            })
        })
        .collect()
}

fn round_trip(store: Store, filesystem: &str, connections: u32) {
    let _node = Node::start();
    let image = match store {
        Store::DirectFile => Image::on_disk("fs", "320M"),
        _ => Image::new("fs", "320M"),
    };
    let below = Loop::new("fs", "320M");
    let uri = match store {
        Store::Memory => "mem:320M".to_owned(),
        Store::File => image.uri(),
        Store::DirectFile => format!("{}?direct=true", image.uri()),
        Store::Loop => below.uri(),
    };
    let map =
        || cleat_ok(&["map", &uri, "--name", "fs", "--connections", &connections.to_string()]);
    let device = map();
    let (mkfs, check) = match filesystem {
        "ext4" => ("mkfs.ext4 -q", "e2fsck -fn"),
        _ => ("mkfs.xfs -q", "xfs_repair -n"),
    };
    shell(&format!(
        "{mkfs} {device}; mkdir -p /mnt/fs; mount {device} /mnt/fs; cp -a /etc /mnt/fs;
         cd /mnt/fs; rm -rf etc/udev; fstrim -v . ; sync -f .; find . -type f -print0 | sort -z | xargs -0 sha256sum > /tmp/sums;
         test $(wc -l < /tmp/sums) -gt 100; cd /; umount /mnt/fs; {check} {device}"
    ));
    if store != Store::Memory {
        cleat_ok(&["unmap", "fs"]);
        assert_eq!(map(), device);
    }
    shell(&format!(
        "mount {device} /mnt/fs; cd /mnt/fs; sha256sum --quiet -c /tmp/sums; cd /; umount /mnt/fs"
    ));
    cleat_ok(&["unmap", "fs"]);
}
