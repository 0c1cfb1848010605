//! Raw files and block devices. Everything is served by the ring of the connection's own thread.
//!
//! - FLUSH is `fdatasync`, FUA is `RWF_DSYNC`. Once an `fdatasync` has failed, every later FLUSH
//!   fails too: the kernel tells of a lost page once and then calls it clean (see `queue`).
//! - TRIM punches a hole, also on block devices: there the kernel zeroes what the device can zero
//!   without writing, and refuses otherwise, in which case the trim is ignored. A bare discard
//!   (BLKDISCARD) would free more on devices that know only that, but leaves the content
//!   undefined, and a range that once read as zero must never turn back.
//! - WRITE_ZEROES punches, or zeroes the range and keeps it allocated; where the file system can do
//!   neither, zeroes are written in bounded pieces.
//! - Errors of a lost transport below (`IoError::from_errno`) are `Retry`, except where a sync may
//!   have failed: a page that could not be written back is lost, and no repetition brings it back. So
//!   only direct access sits out an outage of the storage below.
//! - CACHE lets the kernel read ahead, a bounded part of the range.
//! - A writable volume is claimed: a file by an OFD lock on all of it (which excludes qemu as
//!   well), a device by O_EXCL (which excludes mounts). Both hold on this node only.

mod claim;
mod queue;
mod registration;
mod spec;
mod store;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::extents::{self, Layout};
use super::uri::{Size, invalid};
use super::{
    Completer, Extents, Handover, HandoverFiles, HandoverState, Image, ImageQueue, Resize, Shrink,
};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::block;
use cleat_sys::buffer::ALIGNMENT;
use cleat_sys::ring::Ring;
use queue::{Abilities, FileQueue};
pub use registration::BACKEND;
use spec::FileSpec;

/// The longest payload of one request: what NBD clients expect to be able to send.
const MAX_PAYLOAD: u32 = 32 << 20;

/// How often the size is read again: the kernel sends no notification when a file or device grows.
const SIZE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// An open file or block device.
struct FileImage {
    file: File,
    path: String,
    device: bool,
    read_only: bool,
    direct: bool,
    size: AtomicU64,
    blocks: BlockSizes,
    abilities: Arc<Abilities>,
}

impl FileImage {
    /// Opens `spec`, claiming it unless `read_only`.
    fn open(spec: &FileSpec, read_only: bool) -> Result<Self> {
        let path = spec.path.display().to_string();
        let (device, missing) = inspect(spec, read_only)?;
        let file = open(spec, read_only, device)?;
        let metadata = file.metadata().map_err(|e| Error::from_io(format!("stat {path}"), e))?;
        if metadata.file_type().is_block_device() != device {
            return Err(Error::new(ErrorKind::Aborted, format!("{path} was replaced meanwhile")));
        }
        if !device && !read_only {
            claim::lock(&file, &path)?;
            create(spec, &file).inspect_err(|_| {
                if missing {
                    // Ours, locked, and empty: nothing is left behind.
                    let _ = std::fs::remove_file(&spec.path);
                }
            })?;
        }
        let image = Self::of(spec, file, read_only)?;
        if image.refresh_size()? == 0 {
            let error = invalid(format!("{} is empty", image.path));
            return Err(if device {
                error.with_repair("the device has no medium, or its driver is not set up")
            } else {
                error.with_repair(format!(
                    "give it a size with `truncate -s 10G {}`, or let cleat do so with ?create=10G",
                    image.path
                ))
            });
        }
        Ok(image)
    }

    /// The open description of a process that serves `spec`: its lock, or O_EXCL, is in both hands.
    fn open_successor(spec: &FileSpec, files: HandoverFiles, read_only: bool) -> Result<Self> {
        let path = spec.path.display();
        let [file]: [OwnedFd; 1] = files.descriptors.try_into().map_err(|got: Vec<_>| {
            invalid(format!("{path} was handed over with {} descriptors, not one", got.len()))
        })?;
        let failed = |e: nix::Error| Error::from_io(format!("cannot look at {path}"), e.into());
        let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL).map_err(failed)?);
        let wanted = if read_only { OFlag::O_RDONLY } else { OFlag::O_RDWR };
        let direct = flags.contains(OFlag::O_DIRECT);
        if flags & OFlag::O_ACCMODE != wanted || direct != spec.direct {
            return Err(invalid(format!("{path} was handed over, open in another way")));
        }
        let image = Self::of(spec, file.into(), read_only)?;
        image.refresh_size()?;
        Ok(image)
    }

    fn of(spec: &FileSpec, file: File, read_only: bool) -> Result<Self> {
        let path = spec.path.display().to_string();
        let metadata = file.metadata().map_err(|e| Error::from_io(format!("stat {path}"), e))?;
        let device = metadata.file_type().is_block_device();
        if !device && !metadata.is_file() {
            return Err(invalid(format!("{path} is neither a file nor a block device")));
        }
        let blocks = block_sizes(&file, spec.direct, device, &path)?;
        Ok(Self {
            file,
            path,
            device,
            read_only,
            direct: spec.direct,
            size: AtomicU64::new(0),
            blocks,
            abilities: Arc::new(Abilities::new(device, spec.direct)),
        })
    }
}

impl Image for FileImage {
    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    fn block_sizes(&self) -> BlockSizes {
        self.blocks
    }

    fn features(&self) -> Features {
        Features {
            read_only: self.read_only,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            // Direct access goes past what would be read ahead.
            cache: !self.direct,
            multi_connection: true,
            keeps_acknowledged_writes: true,
        }
    }

    fn queue(&self, ring: &mut Ring, _completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let slot = ring.register(self.file.as_fd()).map_err(|e| {
            Error::from_io(format!("cannot put {} into the thread's ring", self.path), e)
        })?;
        let abilities = Arc::clone(&self.abilities);
        Ok(Box::new(FileQueue::new(slot, self.blocks.minimum, abilities)))
    }

    fn refresh_size(&self) -> Result<u64> {
        let raw = if self.device {
            block::device_size(&self.file)
        } else {
            self.file.metadata().map(|metadata| metadata.len())
        }
        .map_err(|e| Error::from_io(format!("cannot ask {} for its size", self.path), e))?;
        let size = raw - raw % u64::from(self.blocks.minimum);
        if size != raw && self.size() != size {
            tracing::warn!(
                path = %self.path, size = raw, block_size = self.blocks.minimum,
                "the size is no multiple of the block size; the last {} bytes are not served",
                raw - size
            );
        }
        self.size.store(size, Ordering::Release);
        Ok(size)
    }

    fn size_check_interval(&self) -> Option<Duration> {
        Some(SIZE_CHECK_INTERVAL)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn shrink(&self) -> Option<&dyn Shrink> {
        Some(self)
    }

    fn extents(&self) -> Option<&dyn Extents> {
        Some(self)
    }

    fn handover(&self) -> Option<&dyn Handover> {
        Some(self)
    }
}

impl Resize for FileImage {
    fn grow(&self, size: u64) -> Result<()> {
        self.check_resizable(size)?;
        let now = self.refresh_size()?;
        if size < now {
            let (size, now) = (Size(size), Size(now));
            return Err(invalid(format!("{} holds {now}; {size} would cut it off", self.path)));
        }
        self.set_length(size)
    }
}

impl Shrink for FileImage {
    fn shrink_to(&self, size: u64) -> Result<()> {
        self.check_resizable(size)?;
        if size == 0 {
            return Err(invalid(format!("{} cannot be made empty", self.path)));
        }
        self.set_length(size)
    }
}

impl Extents for FileImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let range = offset..offset + length;
        let mut layout = Layout::new(range.clone(), self.blocks.minimum, limit);
        // Block devices do not tell, nor do some file systems.
        match extents::of_file(&self.file, range, 0, &mut layout) {
            Ok(known) => Ok(layout.finish(known)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(vec![Extent { length, hole: false }])
            }
            Err(e) => Err(Error::from_io(format!("cannot ask {} for its holes", self.path), e)),
        }
    }
}

impl Handover for FileImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        let file = self.file.as_fd().try_clone_to_owned();
        let file = file.map_err(|e| Error::from_io(format!("cannot share {}", self.path), e))?;
        Ok(HandoverFiles { descriptors: vec![file] })
    }

    fn release(&self) -> Result<HandoverState> {
        let sync_failed = self.abilities.sync_failed();
        Ok(HandoverState { sync_failed, ..HandoverState::default() })
    }

    fn resume(&self) -> Result<()> {
        Ok(())
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        if state.sync_failed {
            self.abilities.set_sync_failed();
        }
        // It may have grown since this one opened it.
        self.refresh_size().map(drop)
    }
}

impl FileImage {
    fn check_resizable(&self, size: u64) -> Result<()> {
        if self.device {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} is a block device, whose size is not cleat's to change", self.path),
            )
            .with_repair("resize it where it comes from (lvextend, losetup -c, …), then refresh"));
        }
        if self.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        if !size.is_multiple_of(u64::from(self.blocks.minimum)) {
            let block = self.blocks.minimum;
            return Err(invalid(format!("{size} is no multiple of the block size, {block}")));
        }
        Ok(())
    }

    fn set_length(&self, size: u64) -> Result<()> {
        self.file
            .set_len(size)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| Error::from_io(format!("cannot resize {}", self.path), e))?;
        self.refresh_size().map(drop)
    }
}

/// Looks before it opens, since opening some kinds of file blocks (a FIFO) or acts (a tape).
/// Returns whether it is a block device, and whether it is missing and to be made.
fn inspect(spec: &FileSpec, read_only: bool) -> Result<(bool, bool)> {
    let path = spec.path.display();
    let kind = match std::fs::metadata(&spec.path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if spec.create.is_some() && !read_only {
                return Ok((false, true));
            }
            return Err(Error::new(ErrorKind::NotFound, format!("{path} does not exist"))
                .with_repair(format!(
                    "create it with `truncate -s 10G {path}`, or let cleat do so with ?create=10G"
                )));
        }
        Err(error) => return Err(Error::from_io(format!("cannot look at {path}"), error)),
    };
    if kind.is_block_device() || kind.is_file() {
        return Ok((kind.is_block_device(), false));
    }
    let what = if kind.is_dir() { "a directory" } else { "a special file" };
    Err(invalid(format!("{path} is {what}, not a file or a block device")))
}

fn open(spec: &FileSpec, read_only: bool, device: bool) -> Result<File> {
    let path = spec.path.display();
    let mut flags = libc::O_NOCTTY;
    if spec.direct {
        flags |= libc::O_DIRECT;
    }
    if device && !read_only {
        flags |= libc::O_EXCL;
    }
    let open = || {
        let create = spec.create.is_some() && !device && !read_only;
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only).create(create).mode(0o600).custom_flags(flags);
        options.open(&spec.path)
    };
    let error = match claim::patiently(open, |e| e.raw_os_error() == Some(libc::EBUSY)) {
        Ok(file) => return Ok(file),
        Err(error) => error,
    };
    Err(match error.raw_os_error() {
        Some(libc::EBUSY) => claim::device_in_use(&spec.path),
        Some(libc::EINVAL) if spec.direct => Error::new(
            ErrorKind::Unsupported,
            format!("the file system of {path} does not support direct I/O"),
        )
        .with_repair("leave direct=true out")
        .with_source(error),
        Some(libc::ENOENT) if spec.create.is_some() && !read_only => {
            let directory = spec.path.parent().unwrap_or(Path::new("/")).display();
            Error::new(ErrorKind::NotFound, format!("the directory of {path} does not exist"))
                .with_repair(format!("make it first: mkdir -p {directory}"))
        }
        Some(libc::EROFS | libc::EACCES | libc::EPERM) if !read_only => {
            Error::new(ErrorKind::PermissionDenied, format!("{path} cannot be opened for writing"))
                .with_repair("map it read-only, or make it writable for the daemon's user")
                .with_source(error)
        }
        _ => Error::from_io(format!("cannot open {path}"), error),
    })
}

/// Gives a missing or empty file its size: a crash between open and here leaves an empty one.
fn create(spec: &FileSpec, file: &File) -> Result<()> {
    let Some(size) = spec.create else { return Ok(()) };
    let path = spec.path.display();
    let made = || -> io::Result<()> {
        if file.metadata()?.len() != 0 {
            return Ok(());
        }
        file.set_len(size)?;
        file.sync_all()?;
        // The name must be as durable as what FLUSH promises of the content.
        sync_directory(&spec.path)
    };
    made().map_err(|e| Error::from_io(format!("cannot make {path} with {}", Size(size)), e))
}

/// Makes it durable that `path` is there, or is not.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

fn block_sizes(file: &File, direct: bool, device: bool, path: &str) -> Result<BlockSizes> {
    let failed = |e| Error::from_io(format!("cannot ask {path} for its block size"), e);
    let (mut minimum, mut preferred) = (1, 4096);
    if device {
        minimum = block::logical_block_size(file).map_err(failed)?;
        preferred = block::physical_block_size(file).map_err(failed)?.max(preferred);
    } else if direct {
        // Before Linux 6.1 nobody says: a page is enough everywhere.
        minimum = match block::direct_alignment(file).map_err(failed)? {
            Some(alignment) if alignment.memory as usize <= ALIGNMENT => alignment.offset,
            Some(_) => 0,
            None => 4096,
        };
    }
    if !device {
        let optimal = file.metadata().map_err(failed)?.blksize();
        preferred = u32::try_from(optimal.clamp(4096, 1 << 20)).unwrap_or(preferred);
    }
    if !minimum.is_power_of_two() || minimum > 65536 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{path} does not support direct I/O that cleat can do"),
        )
        .with_repair("leave direct=true out"));
    }
    let preferred = preferred.max(minimum).checked_next_power_of_two().unwrap_or(minimum);
    Ok(BlockSizes { minimum, preferred, maximum: MAX_PAYLOAD })
}
