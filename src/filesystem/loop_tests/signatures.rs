//! Signatures of formats, as bytes with their positions.

/// Bytes, and where they are on the device.
pub(super) type Parts = Vec<(u64, Vec<u8>)>;

/// The header of a LUKS volume: magic and version.
pub(super) fn luks(version: u8) -> Parts {
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(&[b'L', b'U', b'K', b'S', 0xba, 0xbe, 0, version]);
    header[168..204].copy_from_slice(b"01234567-89ab-cdef-0123-456789abcdef");
    vec![(0, header)]
}

/// The label of a physical volume of LVM in the second sector. Its checksum is that of LVM if `is_intact`.
pub(super) fn lvm(is_intact: bool) -> Parts {
    let mut label = vec![0; 512];
    label[..8].copy_from_slice(b"LABELONE");
    label[8] = 1;
    label[20] = 32;
    label[24..32].copy_from_slice(b"LVM2 001");
    label[32..64].copy_from_slice(b"0123456789abcdef0123456789abcdef");
    let sum = crc32(0xf597_a6cf, &label[20..]);
    let sum = if is_intact { sum } else { !sum };
    label[16..20].copy_from_slice(&sum.to_le_bytes());
    vec![(512, label)]
}

/// The superblock of a member of an md array, metadata 1.2 (at 4 KiB).
pub(super) fn md() -> Parts {
    let mut block = vec![0; 1024];
    block[..4].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
    block[4] = 1;
    block[16..32].fill(7);
    block[144..152].copy_from_slice(&8_u64.to_le_bytes());
    vec![(4096, block)]
}

/// The superblock of a member of an md array, metadata 0.90 (in the last 128 KiB).
pub(super) fn old_md(size: u64) -> Parts {
    let mut block = vec![0; 4096];
    block[..4].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
    block[8] = 90;
    block[20..24].fill(7);
    vec![((size & !0xffff) - 0x10000, block)]
}

/// A GUID partition table without partitions, with its protective MBR.
pub(super) fn gpt(size: u64) -> Parts {
    let sectors = size / 512;
    let mut protective = vec![0; 512];
    protective[446 + 4] = 0xee;
    protective[446 + 8] = 1;
    protective[446 + 12..446 + 16].fill(0xff);
    protective[510..].copy_from_slice(&[0x55, 0xaa]);
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..12].copy_from_slice(&0x10000_u32.to_le_bytes());
    header[12..16].copy_from_slice(&92_u32.to_le_bytes());
    header[24..32].copy_from_slice(&1_u64.to_le_bytes());
    header[32..40].copy_from_slice(&(sectors - 1).to_le_bytes());
    header[40..48].copy_from_slice(&34_u64.to_le_bytes());
    header[48..56].copy_from_slice(&(sectors - 34).to_le_bytes());
    header[56..72].fill(7);
    header[72..80].copy_from_slice(&2_u64.to_le_bytes());
    header[80..84].copy_from_slice(&128_u32.to_le_bytes());
    header[84..88].copy_from_slice(&128_u32.to_le_bytes());
    let entries = !crc32(!0, &[0; 128 * 128]);
    header[88..92].copy_from_slice(&entries.to_le_bytes());
    let sum = !crc32(!0, &header[..92]);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    vec![(0, protective), (512, header)]
}

/// An MBR with one partition that begins at 1 MiB.
pub(super) fn dos() -> Parts {
    let mut table = vec![0; 512];
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&2048_u32.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&4096_u32.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    vec![(0, table)]
}

/// Swap space.
pub(super) fn swap() -> Parts {
    let mut header = vec![0; 8];
    header[0] = 1;
    header[4] = 100;
    vec![(1024, header), (4086, b"SWAPSPACE2".to_vec())]
}

/// The uberblocks of the first label of a ZFS pool.
pub(super) fn zfs() -> Parts {
    let block = [0x00ba_b10c_u64.to_le_bytes(), 5000_u64.to_le_bytes(), 1_u64.to_le_bytes()];
    (0..8).map(|number| ((128 << 10) + (number << 10), block.concat())).collect()
}

/// The superblock of a bcache backing device, without a valid checksum.
pub(super) fn bcache() -> Parts {
    let magic = [
        0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d,
        0x81,
    ];
    vec![(4096 + 8, 8_u64.to_le_bytes().to_vec()), (4096 + 24, magic.to_vec())]
}

/// The superblock of F2FS.
pub(super) fn f2fs() -> Parts {
    let mut block = vec![0; 512];
    block[..4].copy_from_slice(&0xf2f5_2010_u32.to_le_bytes());
    block[4] = 1;
    block[8..12].copy_from_slice(&9_u32.to_le_bytes());
    block[16..20].copy_from_slice(&12_u32.to_le_bytes());
    block[108..124].fill(7);
    vec![(1024, block)]
}

/// The boot sector of a FAT32 file system.
pub(super) fn vfat() -> Parts {
    let mut boot = vec![0; 512];
    boot[..11].copy_from_slice(b"\xeb\x58\x90mkfs.fat");
    boot[11..13].copy_from_slice(&512_u16.to_le_bytes());
    boot[13] = 1;
    boot[14] = 32;
    boot[16] = 2;
    boot[21] = 0xf8;
    boot[32..36].copy_from_slice(&200_000_u32.to_le_bytes());
    boot[36..40].copy_from_slice(&1600_u32.to_le_bytes());
    boot[44] = 2;
    boot[66] = 0x29;
    boot[82..90].copy_from_slice(b"FAT32   ");
    boot[510..].copy_from_slice(&[0x55, 0xaa]);
    vec![(0, boot)]
}

/// The boot sector of NTFS, without the file table that blkid looks for.
pub(super) fn ntfs() -> Parts {
    vec![(0, b"\xebR\x90NTFS    ".to_vec()), (510, vec![0x55, 0xaa])]
}

/// The volume descriptor of a CD image.
pub(super) fn iso9660() -> Parts {
    vec![(32 << 10, b"\x01CD001\x01".to_vec())]
}

/// The superblock of squashfs 4.0.
pub(super) fn squashfs() -> Parts {
    vec![(0, b"hsqs".to_vec()), (28, vec![4, 0, 0, 0])]
}

/// The label of a Ceph OSD.
pub(super) fn bluestore() -> Parts {
    vec![(0, b"bluestore block device\n01234567-89ab-cdef-0123-456789abcdef\n".to_vec())]
}

/// CRC-32 with the polynomial of Ethernet, without the final inversion.
fn crc32(start: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(start, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            let shifted = sum >> 1;
            if sum & 1 == 1 { shifted ^ 0xedb8_8320 } else { shifted }
        })
    })
}
