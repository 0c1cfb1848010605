//! Copies the content of a file into another one, consistently.
//!
//! - Where the file system can share extents (reflink: XFS, btrfs), the copy takes no space and is atomic:
//!   "Clones are atomic with regards to concurrent writes" (FICLONE(2const)). The kernel locks the file against
//!   writes, buffered and direct ones, waits for those in flight, and writes dirty pages back. The copy
//!   therefore has every write that was acknowledged before the call, and one state of the file for the rest.
//! - Otherwise the data is read and written, without the holes. That takes time, so a lock keeps writers away,
//!   and a file with a writer is refused.
//! - On a network file system the server makes the clone. No rule says that it excludes writers there, so the
//!   file must have none.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;

use super::{claim, file_system};
use crate::extents::{self, Layout};
use crate::store::Progress;
use cleat_core::error::{Error, ErrorKind, Result};

/// The number of bytes that are copied between two reports of progress.
const PIECE: usize = 1 << 20;

/// The maximum number of extents that are looked up at a time.
const MAX_EXTENTS: usize = 1024;

/// An open file, with its path for messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named<'a> {
    pub(super) file: &'a File,
    pub(super) path: &'a str,
}

/// Makes `to`, which must be empty, a copy of `from`. Nothing is synced.
///
/// # Errors
/// Returns `InUse` if `from` has a writer and its content cannot be shared, `Aborted` if `progress` stopped the
/// copy, and the kernel's error otherwise. `to` then has an undefined content.
pub(super) fn copy(from: Named<'_>, to: Named<'_>, progress: Progress<'_>) -> Result<()> {
    let remote = file_system::is_network(file_system::of(from.file, from.path)?);
    if remote {
        lock_out_writers(from)?;
    }
    match rustix::fs::ioctl_ficlone(to.file, from.file) {
        Ok(()) => return Ok(()),
        Err(error) if means_unsupported(error) => {}
        Err(error) => {
            let message = format!("cannot clone {} to {}", from.path, to.path);
            return Err(Error::from_io(message, error.into()));
        }
    }
    if !remote {
        lock_out_writers(from)?;
    }
    copy_data(from, to, progress)
}

/// Returns whether the file system cannot share the extents of the two files (FICLONE(2const)). EINVAL stands
/// for files that differ in a property, such as `chattr +C` on btrfs.
fn means_unsupported(error: Errno) -> bool {
    [Errno::OPNOTSUPP, Errno::XDEV, Errno::INVAL, Errno::NOTTY, Errno::NOSYS].contains(&error)
}

fn lock_out_writers(from: Named<'_>) -> Result<()> {
    claim::lock_out_writers(from.file, from.path).map_err(|error| match error.kind() {
        ErrorKind::InUse => {
            let message = format!(
                "{} is being written, and its file system cannot clone it in one step",
                from.path
            );
            Error::new(ErrorKind::InUse, message)
                .with_repair("unmap it first, or keep volumes on XFS or btrfs on a local disk")
                .with_source(error)
        }
        _ => error,
    })
}

fn copy_data(from: Named<'_>, to: Named<'_>, progress: Progress<'_>) -> Result<()> {
    let failed = |error| Error::from_io(format!("cannot copy {} to {}", from.path, to.path), error);
    let size = from.file.metadata().map_err(failed)?.len();
    to.file.set_len(size).map_err(failed)?;
    let mut buffer = vec![0; PIECE];
    let mut position = 0;
    while position < size {
        let mut layout = Layout::new(position..size, 1, MAX_EXTENTS);
        let known = match extents::of_file(from.file, position..size, 0, &mut layout) {
            Ok(known) => known,
            // The file system does not report holes.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                layout.data(position..size);
                size
            }
            Err(error) => return Err(failed(error)),
        };
        for extent in layout.finish(known) {
            let end = position + extent.length;
            while position < end && !extent.hole {
                let length = buffer.len().min(usize::try_from(end - position).unwrap_or(PIECE));
                copy_piece(from.file, to.file, position, &mut buffer[..length]).map_err(failed)?;
                position += length as u64;
                if progress(position, size).is_break() {
                    let message = format!("the copy of {} was interrupted", from.path);
                    return Err(Error::new(ErrorKind::Aborted, message)
                        .with_repair("repeat the call, which copies it again"));
                }
            }
            position = end;
        }
    }
    Ok(())
}

fn copy_piece(from: &File, to: &File, position: u64, buffer: &mut [u8]) -> io::Result<()> {
    from.read_exact_at(buffer, position)?;
    to.write_all_at(buffer, position)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn on(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn named<'a>(file: &'a File, path: &'a str) -> Named<'a> {
        Named { file, path }
    }

    #[test]
    fn data_is_copied_and_holes_stay() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.set_len(64 << 20).unwrap();
        from.write_all_at(&[7; 10_000], 20 << 20).unwrap();
        from.write_all_at(&[8; 3], (64 << 20) - 3).unwrap();
        let mut last = (0, 0);
        let mut progress = |done, total| {
            last = (done, total);
            ControlFlow::Continue(())
        };
        copy_data(named(&from, "from"), named(&to, "to"), &mut progress).unwrap();
        assert_eq!(last, (64 << 20, 64 << 20));
        assert_eq!(to.metadata().unwrap().len(), 64 << 20);
        let mut read = [0; 10_000];
        to.read_exact_at(&mut read, 20 << 20).unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
        to.read_exact_at(&mut read[..3], (64 << 20) - 3).unwrap();
        assert_eq!(read[..3], [8; 3]);
        assert!(to.metadata().unwrap().blocks() * 512 < 8 << 20, "the holes were filled");
    }

    #[test]
    fn a_copy_can_be_interrupted() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.write_all_at(&vec![1; 3 * PIECE], 0).unwrap();
        let mut stop = |_, _| ControlFlow::Break(());
        let error = copy_data(named(&from, "from"), named(&to, "to"), &mut stop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted);
    }

    #[test]
    fn a_writer_is_excluded_unless_the_clone_is_atomic() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, "data").unwrap();
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        claim::lock(&writer, "a").unwrap();
        let (from, to) = (File::open(&path).unwrap(), tempfile::tempfile_in(&directory).unwrap());
        match copy(named(&from, "a"), named(&to, "b"), &mut on) {
            // The file system of this machine can share extents.
            Ok(()) => assert_eq!(to.metadata().unwrap().len(), 4),
            Err(error) => assert_eq!(error.kind(), ErrorKind::InUse, "{error}"),
        }
        drop(writer);
        to.set_len(0).unwrap();
        copy(named(&from, "a"), named(&to, "b"), &mut on).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 4);
    }
}
