//! Finds out which parts of a range hold data, so that a client can copy a volume without its holes.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use cleat_core::volume::Extent;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// Builds the list of extents of a range from the positions of its data.
pub struct Layout {
    position: u64,
    end: u64,
    /// Extents begin and end at multiples of this, in bytes.
    alignment: u64,
    limit: usize,
    extents: Vec<Extent>,
}

impl Layout {
    /// Starts the list for `range`, which is aligned. The list has at most `limit` extents.
    pub fn new(range: Range<u64>, alignment: u32, limit: usize) -> Self {
        let (position, end) = (range.start, range.end);
        Self { position, end, alignment: alignment.into(), limit, extents: Vec::new() }
    }

    /// Adds data in `range`; between it and the data added before there is a hole. Data must be added in
    /// order; it may overlap and may lie outside of the list's range. Returns whether the list can take more.
    pub fn data(&mut self, range: Range<u64>) -> bool {
        let start = range.start - range.start % self.alignment;
        let end = range.end.checked_next_multiple_of(self.alignment).unwrap_or(self.end);
        self.up_to(start, true);
        self.up_to(end, false);
        !self.is_complete()
    }

    /// Returns whether the list is full or covers its range.
    pub fn is_complete(&self) -> bool {
        self.position == self.end || self.extents.len() > self.limit
    }

    /// Returns the extents up to the position `known`, up to which all data was added. Leaves out the rest
    /// of the range.
    pub fn finish(mut self, known: u64) -> Vec<Extent> {
        self.up_to(known - known % self.alignment, true);
        self.extents.truncate(self.limit);
        self.extents
    }

    fn up_to(&mut self, position: u64, hole: bool) {
        let position = position.min(self.end);
        let length = position.saturating_sub(self.position);
        if length == 0 || self.extents.len() > self.limit {
            return;
        }
        self.position = position;
        match self.extents.last_mut() {
            Some(last) if last.hole == hole => last.length += length,
            _ => self.extents.push(Extent { length, hole }),
        }
    }
}

/// Adds the data of a sparse file in `range` (lseek(2), `SEEK_DATA`). The start of the file is at `base` of
/// the volume. Returns the position in the volume up to which all data was added.
///
/// # Errors
/// Returns the kernel's error; EINVAL for files that do not report holes.
pub fn of_file(
    file: impl AsFd,
    range: Range<u64>,
    base: u64,
    layout: &mut Layout,
) -> io::Result<u64> {
    let mut position = range.start;
    while position < range.end && !layout.is_complete() {
        let Some(start) = seek(&file, position, Whence::SeekData)? else { break };
        // A hole begins at the end of the file at the latest.
        let end = seek(&file, start, Whence::SeekHole)?.unwrap_or(range.end);
        if start >= range.end {
            break;
        }
        let end = end.min(range.end);
        layout.data(base + start..base + end);
        // The range may have become a hole between the two calls.
        position = end.max(position + 1);
    }
    Ok(base + if layout.is_complete() { position.min(range.end) } else { range.end })
}

/// Returns whether a file has data besides holes. A file system that does not report holes has data everywhere.
///
/// # Errors
/// Returns the kernel's error.
pub fn has_data(file: impl AsFd) -> io::Result<bool> {
    match seek(&file, 0, Whence::SeekData) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(true),
        found => Ok(found?.is_some()),
    }
}

/// Returns `None` behind the last data and behind the end of the file.
fn seek(file: impl AsFd, position: u64, whence: Whence) -> io::Result<Option<u64>> {
    let position = i64::try_from(position).map_err(|_| io::Error::from(Errno::EINVAL))?;
    match lseek(file, position, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernel_reports_the_holes_of_a_sparse_file() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&vec![1; 65536], 1 << 20).unwrap();
        file.write_all_at(&vec![1; 65536], 3 << 20).unwrap();
        let extents = |range: Range<u64>, limit| {
            let mut layout = Layout::new(range.clone(), 1, limit);
            let known = of_file(&file, range, 0, &mut layout).unwrap();
            layout.finish(known).iter().map(|e| (e.length, e.hole)).collect::<Vec<_>>()
        };
        let (hole, data) = (true, false);
        let all =
            [(1 << 20, hole), (65536, data), ((2 << 20) - 65536, hole), (65536, data)].to_vec();
        let last = [((1 << 20) - 65536, hole)];
        assert_eq!(extents(0..4 << 20, 9), [&all[..], &last].concat());
        assert_eq!(extents(0..4 << 20, 1), [(1 << 20, hole)]);
        assert_eq!(extents(0..4 << 20, 2), all[..2]);
        assert_eq!(extents((1 << 20) + 5..(1 << 20) + 9, 9), [(4, data)]);
        assert_eq!(extents((3 << 20) + 65536..4 << 20, 9), last);
    }

    proptest! {
        /// Data is never reported as a hole, the extents lie in the range, and holes are aligned.
        #[test]
        fn every_byte_of_data_is_reported(
            (start, length) in (0u64..64, 1u64..64),
            power in 0u32..3,
            limit in 1usize..6,
            mut data in proptest::collection::vec((0u64..600, 0u64..80), 0..12),
        ) {
            let alignment = 1u32 << power;
            let range = start * 4..(start + length) * 4;
            data.sort_unstable();
            let mut layout = Layout::new(range.clone(), alignment, limit);
            let mut known = range.end;
            for &(at, length) in &data {
                if !layout.data(at..at + length) {
                    known = (at + length).clamp(range.start, range.end);
                    break;
                }
            }
            let extents = layout.finish(known);
            prop_assert!(extents.len() <= limit);
            let mut position = range.start;
            for (index, extent) in extents.iter().enumerate() {
                let end = position + extent.length;
                prop_assert!(extent.length > 0 && end <= range.end);
                prop_assert!(end.is_multiple_of(alignment.into()));
                prop_assert!(index == 0 || extents[index - 1].hole != extent.hole);
                let holds = data.iter().any(|&(at, length)| at < end && position < at + length && length > 0);
                prop_assert!(!extent.hole || !holds, "{position}..{end} of {data:?}");
                position = end;
            }
            prop_assert!(position == range.end || extents.len() == limit || known < range.end);
        }
    }
}
