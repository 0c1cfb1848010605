//! Volumes with data of any kind are never formatted.

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use tonic::Code;

use super::{Scene, VOLUMES, filesystem};
use crate::fixture::shell;

/// Kinds of content, and the commands that write them to the file `$F` of 16 MiB.
const KINDS: [(&str, &str); 22] = [
    ("luks", r"printf 'LUKS\xba\xbe\0\1' | dd of=$F conv=notrunc status=none"),
    (
        "lvm",
        r"printf 'LABELONE\1\0\0\0\0\0\0\0\0\0\0\0 \0\0\0LVM2 001' | dd of=$F bs=512 seek=1 conv=notrunc status=none",
    ),
    ("md 1.2", r"printf '\xfc\x4e\x2b\xa9\1' | dd of=$F bs=4096 seek=1 conv=notrunc status=none"),
    (
        "md 1.0",
        r"printf '\xfc\x4e\x2b\xa9\1' | dd of=$F bs=512 seek=$((32768 - 16)) conv=notrunc status=none",
    ),
    ("gpt", "printf 'label: gpt\\n,5M\\n' | sfdisk -q $F"),
    ("dos", "printf 'label: dos\\n,5M\\n' | sfdisk -q $F"),
    ("boot signature", r"printf '\x55\xaa' | dd of=$F bs=1 seek=510 conv=notrunc status=none"),
    ("swap", "mkswap -q $F"),
    (
        "zfs",
        r"for i in $(seq 128 255); do printf '\x0c\xb1\xba\0\0\0\0\0' | dd of=$F bs=1024 seek=$i conv=notrunc status=none; done",
    ),
    ("random", "head -c 16777216 /dev/urandom > $F"),
    ("a byte at the end", "printf x | dd of=$F bs=1 seek=16777215 conv=notrunc status=none"),
    ("a byte at 1 MiB", "printf x | dd of=$F bs=1 seek=1048575 conv=notrunc status=none"),
    (
        "data in the middle",
        "dd if=/dev/urandom of=$F bs=1M seek=5 count=5 conv=notrunc status=none",
    ),
    (
        "ext4 without its first superblock",
        "mkfs.ext4 -q -F $F; dd if=/dev/zero of=$F bs=1024 seek=1 count=1 conv=notrunc status=none",
    ),
    (
        "xfs without its first superblock",
        "truncate -s 320M $F; mkfs.xfs -q $F; dd if=/dev/zero of=$F bs=512 count=1 conv=notrunc status=none",
    ),
    (
        "two signatures",
        r"mkfs.ext4 -q -F $F; printf 'LUKS\xba\xbe\0\1' | dd of=$F conv=notrunc status=none",
    ),
    ("iso9660", r"printf '\1CD001\1' | dd of=$F bs=2048 seek=16 conv=notrunc status=none"),
    ("squashfs", r"printf 'hsqs' | dd of=$F conv=notrunc status=none"),
    ("a tar archive", "tar -C /etc -cf - hostname | dd of=$F conv=notrunc status=none"),
    ("text", "echo important | dd of=$F conv=notrunc status=none"),
    (
        "drbd",
        r"printf '\x83\x74\x02\x6d' | dd of=$F bs=1 seek=$((16777216 - 4096 + 60)) conv=notrunc status=none",
    ),
    ("ones", r"tr '\0' '\377' < $F | dd of=$F conv=notrunc status=none"),
];

pub(crate) fn never_formats_content() {
    let scene = Scene::new();
    for (index, (kind, write)) in KINDS.iter().enumerate() {
        let name = format!("content-{index}");
        let id = scene.volume(&name, "16M");
        let file = format!("{VOLUMES}/{name}");
        shell(&format!("F={file}; {write}"));
        let before = shell(&format!("sha256sum < {file}"));
        // Whether a type is named makes no difference to the search for content.
        let wanted = filesystem(["", "xfs"][index % 2], Mode::SingleNodeWriter);
        let refused = scene.stage(&id, &wanted).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{kind}: {refused:?}");
        assert!(refused.message().contains("not formatted"), "{kind}: {refused:?}");
        scene.unstage(&id);
        assert_eq!(shell(&format!("sha256sum < {file}")), before, "{kind} was changed");
        shell(&format!("rm {file}"));
    }
}
