//! The size of a file system, from its superblock.
//!
//! `statfs` does not have it: the blocks that ext4 counts there exclude its own metadata.

use crate::kind::Kind;

/// The number of bytes at the beginning of a device that contain the superblocks of all kinds.
pub(crate) const LENGTH: usize = 128 << 10;

/// A superblock's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// The size of the file system on this device, in bytes.
    pub(crate) bytes: u64,
    /// The size of a block, in bytes: the unit in which the file system can grow.
    pub(crate) block: u64,
}

/// Reads the size of a file system from the first [`LENGTH`] bytes of its device. Returns `None` if they
/// have no superblock of this kind, or a damaged one.
pub(crate) fn size(kind: Kind, start: &[u8]) -> Option<Size> {
    let size = match kind {
        Kind::Ext4 => ext4(start.get(1024..)?),
        Kind::Xfs => xfs(start),
        Kind::Btrfs => btrfs(start.get(64 << 10..)?),
    }?;
    size.block.is_power_of_two().then_some(size)
}

/// `struct ext4_super_block` of fs/ext4/ext4.h.
fn ext4(block: &[u8]) -> Option<Size> {
    const INCOMPAT_64BIT: u32 = 0x80;
    if bytes(block, 0x38)? != [0x53, 0xef] {
        return None;
    }
    let is_wide = u32::from_le_bytes(bytes(block, 0x60)?) & INCOMPAT_64BIT != 0;
    let low = u64::from(u32::from_le_bytes(bytes(block, 0x4)?));
    let high = u64::from(u32::from_le_bytes(bytes(block, 0x150)?));
    let count = if is_wide { high << 32 | low } else { low };
    let shift = u32::from_le_bytes(bytes(block, 0x18)?);
    // The largest block has 64 KiB.
    let size = 1024_u64 << Some(shift).filter(|shift| *shift <= 6)?;
    Some(Size { bytes: count.checked_mul(size)?, block: size })
}

/// `struct xfs_dsb` of fs/xfs/libxfs/xfs_format.h.
fn xfs(block: &[u8]) -> Option<Size> {
    if &bytes::<4>(block, 0)? != b"XFSB" {
        return None;
    }
    let size = u64::from(u32::from_be_bytes(bytes(block, 4)?));
    let count = u64::from_be_bytes(bytes(block, 8)?);
    Some(Size { bytes: count.checked_mul(size)?, block: size })
}

/// `struct btrfs_super_block` of include/uapi/linux/btrfs_tree.h: the sector size, and of the item of this
/// device its number of bytes.
fn btrfs(block: &[u8]) -> Option<Size> {
    if &bytes::<8>(block, 0x40)? != b"_BHRfS_M" {
        return None;
    }
    let size = u64::from(u32::from_le_bytes(bytes(block, 0x90)?));
    Some(Size { bytes: u64::from_le_bytes(bytes(block, 0xd1)?), block: size })
}

fn bytes<const N: usize>(block: &[u8], at: usize) -> Option<[u8; N]> {
    block.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn start(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut start = vec![0; LENGTH];
        for (at, part) in parts {
            start[*at..*at + part.len()].copy_from_slice(part);
        }
        start
    }

    #[test]
    fn sizes_are_read_from_superblocks() {
        let ext4 = |features: u32| {
            start(&[
                (1024 + 0x38, &[0x53, 0xef]),
                (1024 + 0x4, &8_u32.to_le_bytes()),
                (1024 + 0x18, &2_u32.to_le_bytes()),
                (1024 + 0x60, &features.to_le_bytes()),
                (1024 + 0x150, &1_u32.to_le_bytes()),
            ])
        };
        let of = |bytes, block| Some(Size { bytes, block });
        assert_eq!(size(Kind::Ext4, &ext4(0x80)), of((1 << 32 | 8) * 4096, 4096));
        // Without the feature 64bit, the upper half has another meaning.
        assert_eq!(size(Kind::Ext4, &ext4(0)), of(8 * 4096, 4096));
        let xfs = start(&[(0, b"XFSB"), (4, &4096_u32.to_be_bytes()), (8, &100_u64.to_be_bytes())]);
        assert_eq!(size(Kind::Xfs, &xfs), of(409_600, 4096));
        let base = 64 << 10;
        let btrfs = start(&[
            (base + 0x40, b"_BHRfS_M"),
            (base + 0x90, &4096_u32.to_le_bytes()),
            (base + 0xd1, &(1_u64 << 30).to_le_bytes()),
        ]);
        assert_eq!(size(Kind::Btrfs, &btrfs), of(1 << 30, 4096));
        for kind in Kind::ALL {
            assert_eq!(size(kind, &start(&[])), None);
            assert_eq!(size(kind, b"XFSB"), None);
        }
        assert_eq!(size(Kind::Ext4, &xfs), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(noise in proptest::collection::vec(any::<u8>(), 512)) {
            let base = 64 << 10;
            let mut first = start(&[(0, &noise), (1024, &noise), (base, &noise)]);
            first[..4].copy_from_slice(b"XFSB");
            first[1024 + 0x38..1024 + 0x3a].copy_from_slice(&[0x53, 0xef]);
            first[base + 0x40..base + 0x48].copy_from_slice(b"_BHRfS_M");
            for kind in Kind::ALL {
                if let Some(size) = size(kind, &first) {
                    prop_assert!(size.block.is_power_of_two());
                }
            }
        }
    }
}
