//! A store that logs its writes in the order in which they become durable: dm-log-writes
//! (Documentation/admin-guide/device-mapper/log-writes.rst; the format is in drivers/md/dm-log-writes.c).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::fixture::shell;

const NAME: &str = "durability";

/// The images: the store, the log, the store before the log began, and the store at a mark.
const STORE: &str = "/tmp/durability-store.img";
const LOG: &str = "/tmp/durability-log.img";
const BEFORE: &str = "/tmp/durability-before.img";
const AT_MARK: &str = "/tmp/durability-mark.img";

/// WRITE_LOG_MAGIC, and the flags of an entry.
const MAGIC: u64 = 0x6a_7366_7773_6872;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// The length of struct log_write_entry. The name of a mark follows it.
const ENTRY_LEN: usize = 32;

/// A device whose writes are logged. Dropping it removes the device.
pub(super) struct WriteLog {
    device: String,
}

/// The log of a store that is no longer in use. Dropping it removes the images.
pub(super) struct Log(());

impl WriteLog {
    /// Makes a store of `size` bytes. `prepare` gets a device with its content before the log begins.
    pub(super) fn new(size: &str, prepare: impl FnOnce(&str)) -> Self {
        shell(&format!("rm -f {STORE} {LOG}; truncate -s {size} {STORE}; truncate -s 512M {LOG}"));
        let raw = shell(&format!("modprobe dm-log-writes; losetup --find --show {STORE}"));
        prepare(&raw);
        // The store is a loop device of the test's own, so its cache can be written without a wait.
        let device = shell(&format!(
            "blockdev --flushbufs {raw}; sync {STORE}; cp --sparse=always {STORE} {BEFORE}
             log=$(losetup --find --show {LOG})
             dmsetup create {NAME} --noudevsync --noudevrules \
                 --table \"0 $(blockdev --getsz {raw}) log-writes {raw} $log\"
             dmsetup info --columns --noheadings -o blkdevname {NAME}"
        ));
        Self { device: format!("/dev/{device}") }
    }

    /// Returns the path of the device, which exists without udev's rules.
    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// Adds a mark to the log: the power cut of a later replay.
    pub(super) fn mark(&self, name: &str) {
        shell(&format!("dmsetup message {NAME} 0 mark {name}"));
    }

    /// Removes the device, which completes the log.
    pub(super) fn finish(self) -> Log {
        Log(())
    }
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        // udev may still have the device open. After a failure the log has no marks, and the test fails there.
        shell(&format!(
            "dmsetup remove --retry --noudevsync {NAME} || true
             for image in {STORE} {LOG}; do
                 losetup -d $(losetup --noheadings --output NAME --associated $image) || true
             done"
        ));
    }
}

impl Log {
    /// Returns an image with the content of the store at a mark.
    pub(super) fn image_at(&self, mark: &str) -> PathBuf {
        shell(&format!("cp --sparse=always {BEFORE} {AT_MARK}"));
        let image = File::options().write(true).open(AT_MARK).unwrap();
        replay(&File::open(LOG).unwrap(), &image, mark);
        Path::new(AT_MARK).to_owned()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        shell(&format!("rm -f {STORE} {LOG} {BEFORE} {AT_MARK}"));
    }
}

/// Applies the entries of `log` to `image`, up to the mark `name`, which must exist.
fn replay(log: &File, image: &File, name: &str) {
    let at = |offset: u64, length: usize| {
        let mut bytes = vec![0; length];
        log.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    let number = |bytes: &[u8], index: usize| {
        u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().unwrap())
    };
    let superblock = at(0, ENTRY_LEN);
    assert_eq!(number(&superblock, 0), MAGIC, "the superblock of the log");
    let sector_len = number(&superblock, 3) & u64::from(u32::MAX);
    let mut offset = sector_len;
    for _ in 0..number(&superblock, 2) {
        let entry = at(offset, usize::try_from(sector_len).unwrap());
        let (target, length) = (number(&entry, 0) * sector_len, number(&entry, 1) * sector_len);
        let flags = number(&entry, 2);
        offset += sector_len;
        let length = usize::try_from(length).unwrap();
        if flags & MARK != 0 {
            let end = ENTRY_LEN + usize::try_from(number(&entry, 3)).unwrap();
            if entry[ENTRY_LEN..end] == *name.as_bytes() {
                return;
            }
        } else if flags & DISCARD != 0 {
            image.write_all_at(&vec![0; length], target).unwrap();
        } else {
            image.write_all_at(&at(offset, length), target).unwrap();
            offset += length as u64;
        }
    }
    panic!("the log has no mark {name:?}");
}
