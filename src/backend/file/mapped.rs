//! Short reads of the page cache from a mapping of the file.
//!
//! A read with the ring takes 1 µs in the kernel, most of which is the wait for memory: for the page, and for what the kernel
//! knows of it. A copy from a mapping needs no kernel, and the processor can load what several reads of a batch need at the same
//! time. A read takes this way if the page cache had its range in the last minute, see [`FileWindow`]. All others, and those
//! whose copy fails, go to the ring, which also has the error if the file cannot be read.
//!
//! What is behind the end of a file reads as zeroes, up to the end of its page. If another process has truncated the file, the read
//! must fail instead. So the length of the file is read after the copies, once for a batch. On XFS this leaves a gap: it writes
//! zeroes up to the end of the new last block before it changes the length. A copy from there at that moment has them.

use std::fs::File;
use std::sync::{Arc, OnceLock};

use cleat_core::request::{Op, Request};
use cleat_sys::buffer::Buffer;
use cleat_sys::file_window::{FileWindow, PART_BYTES};
use cleat_sys::page_cache::has_pages;

use super::super::{RequestId, index};
use super::file_system::{OVERLAYFS, TMPFS};

/// The maximum length of a read from the mapping, in bytes. In longer ones, the copy takes most of the time.
const MAX_LENGTH: u64 = 16 << 10;

/// The mapping of a file, which all its queues share.
#[derive(Debug)]
pub(super) struct Mapping {
    /// It is made with the first short read. `None`: the kernel refuses it.
    window: OnceLock<Option<FileWindow>>,
    /// The file is on tmpfs. There a page fault in a hole takes memory for the hole, so a range is read from the mapping only
    /// if the page cache has it.
    pub(super) in_memory: bool,
}

/// A read that waits for the end of its batch.
pub(super) struct Waiting {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) buffer: Buffer,
    /// Its bytes were copied from the mapping.
    pub(super) is_copied: bool,
}

/// The reads from the mapping of one connection.
pub(super) struct Mapped {
    file: Arc<File>,
    mapping: Arc<Mapping>,
    batch: Vec<Waiting>,
}

impl Mapping {
    /// `None` if short reads of a file with this flag are not copied from a mapping. `file_system` is the magic number of its
    /// file system, which is local: on others, a mapping may show old data where a read would ask a server, or a fault may wait
    /// for one. On overlayfs, the first process that opens a file for writing copies it to another file system, and a mapping
    /// made before shows the old file.
    pub(super) fn new(file_system: i64, direct: bool, read_only: bool) -> Option<Self> {
        let stays = file_system != OVERLAYFS || !read_only;
        let in_memory = file_system == TMPFS;
        (stays && !direct).then(|| Self { window: OnceLock::new(), in_memory })
    }
}

impl Mapped {
    pub(super) fn new(file: Arc<File>, mapping: Arc<Mapping>) -> Self {
        Self { file, mapping, batch: Vec::new() }
    }

    /// Whether a read may be copied at the end of its batch.
    pub(super) fn takes(&self, request: &Request) -> bool {
        is_short(request) && self.window().is_some()
    }

    /// Holds a read back until the end of the batch.
    pub(super) fn hold(&mut self, id: RequestId, request: Request, buffer: Buffer) {
        self.batch.push(Waiting { id, request, buffer, is_copied: false });
    }

    /// Copies what the reads of the batch need, as far as the mapping has it, and returns the reads.
    pub(super) fn copy(&mut self) -> Vec<Waiting> {
        let mut batch = std::mem::take(&mut self.batch);
        let Some(window) = self.window().filter(|window| has_most(window, &batch)) else {
            return batch;
        };
        for Waiting { request, .. } in &batch {
            let (part, skip) = place(request);
            window.prefetch(part, skip);
        }
        for Waiting { request, buffer, is_copied, .. } in &mut batch {
            let (part, skip) = place(request);
            *is_copied = window.copy(part, skip, buffer.payload_mut());
        }
        let length = self.file.metadata().map_or(0, |metadata| metadata.len());
        for Waiting { request, is_copied, .. } in &mut batch {
            *is_copied &= request.offset + request.length <= length;
        }
        batch
    }

    /// Gives the memory of a batch back.
    pub(super) fn reuse(&mut self, batch: Vec<Waiting>) {
        self.batch = batch;
    }

    /// Records that a range is being emptied, or was: the page cache has nothing of it.
    pub(super) fn was_emptied(&self, request: &Request) {
        if let Some(window) = self.window() {
            let part = PART_BYTES as u64;
            window.forget(request.offset / part..(request.offset + request.length).div_ceil(part));
        }
    }

    fn window(&self) -> Option<&FileWindow> {
        self.mapping.window.get().and_then(Option::as_ref)
    }

    /// Records that a read has found its whole range, so that the page cache has it now.
    pub(super) fn was_read(&self, request: &Request) {
        let is_hole =
            || self.mapping.in_memory && !has_pages(&self.file, request.offset, request.length);
        if !is_short(request) || is_hole() {
            return;
        }
        let new = || {
            FileWindow::new()
                .inspect_err(|error| tracing::info!("all reads go to the ring: {error}"))
                .ok()
        };
        if let Some(window) = self.mapping.window.get_or_init(new) {
            let (part, skip) = place(request);
            window.prove(part, &self.file, request.offset - skip, skip, index(request.length));
        }
    }
}

/// Whether the window has what most of the reads need. If many of them go to the ring, all do, because a batch that is answered
/// in one piece costs less.
fn has_most(window: &FileWindow, batch: &[Waiting]) -> bool {
    let has = |waiting: &&Waiting| {
        let (part, skip) = place(&waiting.request);
        window.has(part, skip, index(waiting.request.length))
    };
    let copies = batch.iter().filter(has).count();
    copies > 0 && 4 * copies >= 3 * batch.len()
}

/// Whether the request is a short read within a part of the mapping.
fn is_short(request: &Request) -> bool {
    let (_, skip) = place(request);
    request.op == Op::Read
        && request.length <= MAX_LENGTH
        && skip + request.length <= PART_BYTES as u64
}

/// The part of the file in which a request begins, and where.
fn place(request: &Request) -> (u64, u64) {
    (request.offset / PART_BYTES as u64, request.offset % PART_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use cleat_core::request::Flags;
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::super::file_system::EXT4;
    use super::*;

    const BLOCK: u64 = 4096;
    const PARTS: u64 = 2;

    /// A file of two parts on the disk of the test. The last block is a hole, so the page cache does not have all of the last
    /// part.
    fn mapped() -> Mapped {
        let executable = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(executable.parent().unwrap()).unwrap();
        let length = PARTS * PART_BYTES as u64;
        file.write_all_at(&vec![1; index(length - BLOCK)], 0).unwrap();
        file.set_len(length).unwrap();
        Mapped::new(Arc::new(file), Arc::new(Mapping::new(EXT4, false, false).unwrap()))
    }

    fn read(offset: u64, length: u64) -> Request {
        Request { op: Op::Read, flags: Flags::default(), offset, length }
    }

    /// Returns which of the reads were copied from the mapping.
    fn copied(mapped: &mut Mapped, reads: &[Request]) -> Vec<bool> {
        for (id, read) in (0..).zip(reads) {
            mapped.hold(id, *read, Buffer::zeroed(index(read.length)));
        }
        let mut batch = mapped.copy();
        let copied = batch.drain(..).map(|read| {
            let has_data = read.buffer.payload().iter().all(|byte| *byte == 1);
            assert!(has_data || !read.is_copied);
            read.is_copied
        });
        let copied = copied.collect();
        mapped.reuse(batch);
        copied
    }

    #[test]
    fn a_mapping_is_for_the_page_cache_of_files_that_stay_the_same() {
        for (file_system, of_read_only) in [(EXT4, true), (TMPFS, true), (OVERLAYFS, false)] {
            let mapping = |direct, read_only| Mapping::new(file_system, direct, read_only);
            assert!(mapping(false, false).is_some() && mapping(true, false).is_none());
            assert_eq!(mapping(false, true).is_some(), of_read_only);
        }
    }

    #[test]
    fn the_holes_of_a_file_in_memory_stay_holes() {
        let file = File::from(memfd_create("volume", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.set_len(PART_BYTES as u64).unwrap();
        let mut mapped =
            Mapped::new(Arc::new(file), Arc::new(Mapping::new(TMPFS, false, false).unwrap()));
        let (data, hole) = (read(0, BLOCK), read(BLOCK, BLOCK));
        [data, hole].iter().for_each(|read| mapped.was_read(read));
        assert_eq!(copied(&mut mapped, &[data]), [true]);
        assert_eq!(copied(&mut mapped, &[hole]), [false]);
        assert_eq!(mapped.file.metadata().unwrap().blocks(), BLOCK / 512);
    }

    #[test]
    fn only_short_reads_within_a_part_are_taken_once_there_is_a_mapping() {
        let mapped = mapped();
        assert!(!mapped.takes(&read(0, BLOCK)));
        mapped.was_read(&read(0, MAX_LENGTH + 1));
        assert!(!mapped.takes(&read(0, BLOCK)));
        mapped.was_read(&read(0, BLOCK));
        assert!(mapped.takes(&read(0, BLOCK)));
        assert!(mapped.takes(&read(0, MAX_LENGTH)));
        assert!(!mapped.takes(&read(0, MAX_LENGTH + 1)));
        assert!(!mapped.takes(&read(PART_BYTES as u64 - 1, 2)));
        assert!(!mapped.takes(&Request { op: Op::Write, ..read(0, BLOCK) }));
    }

    #[test]
    fn a_batch_is_copied_if_the_mapping_has_most_of_it() {
        let mut mapped = mapped();
        let last = PART_BYTES as u64;
        let [one, two, three, absent, absent_too] =
            [0, 1, 2, 3, 4].map(|block| read(last + block * BLOCK, BLOCK));
        [one, two, three].iter().for_each(|read| mapped.was_read(read));
        assert_eq!(copied(&mut mapped, &[one]), [true]);
        assert_eq!(copied(&mut mapped, &[absent]), [false]);
        assert_eq!(copied(&mut mapped, &[one, absent]), [false; 2]);
        assert_eq!(copied(&mut mapped, &[one, absent, two, three]), [true, false, true, true]);
        assert_eq!(copied(&mut mapped, &[one, absent, two, absent_too, three]), [false; 5]);
        assert_eq!(copied(&mut mapped, &[]), [true; 0]);
    }

    #[test]
    fn a_range_that_was_emptied_is_not_copied() {
        let mut mapped = mapped();
        let [first, second] = [0, 1].map(|part| read(part * PART_BYTES as u64, BLOCK));
        [first, second].iter().for_each(|read| mapped.was_read(read));
        mapped.was_emptied(&Request { op: Op::Trim, ..read(PART_BYTES as u64 - 1, 1) });
        assert_eq!(copied(&mut mapped, &[first]), [false]);
        assert_eq!(copied(&mut mapped, &[second]), [true]);
        mapped.was_emptied(&Request { op: Op::Trim, ..read(0, PARTS * PART_BYTES as u64) });
        assert_eq!(copied(&mut mapped, &[second]), [false]);
    }

    #[test]
    fn nothing_is_copied_from_behind_the_end_of_the_file() {
        let mut mapped = mapped();
        let last = PART_BYTES as u64;
        let [first, second, third] = [0, 1, 2].map(|block| read(last + block * BLOCK, BLOCK));
        [first, second, third].iter().for_each(|read| mapped.was_read(read));
        assert_eq!(copied(&mut mapped, &[first, second, third]), [true; 3]);
        mapped.file.set_len(last + 2 * BLOCK - 1).unwrap();
        assert_eq!(copied(&mut mapped, &[first, second, third]), [true, false, false]);
    }
}
