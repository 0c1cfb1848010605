//! Raw files and block devices. The ring of each connection's thread serves all requests, except those that the thread itself
//! executes on some local file systems: short writes and some longer reads (see `at_once`), and short reads of the page cache,
//! which are copied from a mapping of the file (see `mapped`).
//!
//! - FLUSH is `fdatasync`, one at a time for the whole volume (see `sync`). FUA is a write and then such a
//!   sync, or `RWF_DSYNC` with direct access (see `queue`). After one failed sync every later FLUSH and every
//!   write with FUA fails, too: the kernel reports a lost page once and then marks it clean.
//! - TRIM punches a hole, also on block devices: there the kernel zeroes the range if the device can do
//!   that without writing, and refuses otherwise; the trim then does nothing. A bare discard
//!   (BLKDISCARD) would free more on devices that support only that, but it leaves the content
//!   undefined, and a range that has read as zeroes must never show its old content again.
//! - WRITE_ZEROES punches a hole, or zeroes the range and keeps it allocated; on a file system that supports
//!   neither, it writes zeroes in pieces of a bounded length.
//! - Errors of a lost transport below the file (`IoError::from_errno`) are `Retry`, unless a sync may have
//!   failed: a page that could not be written back is lost, and no repetition restores it. Only direct access
//!   can therefore wait for the end of an outage of the storage below. On a network file system writes are
//!   not repeated at all: a server may execute a write after the client has given it up.
//! - A request on a file whose file system is full may wait for space (see `space`). One on a device may not:
//!   there ENOSPC also means that the device has become smaller.
//! - CACHE makes the kernel read ahead a part of the range, of a bounded length.
//! - The identity of a volume is that of the open file or device (`cleat_sys::volume_id`), never its path. A
//!   successor by handover has the file of its predecessor, also where the path leads to another one.
//! - A writable volume is claimed: a file by an OFD lock on the whole file (which excludes qemu, too), a
//!   device by O_EXCL (which excludes mounts). Both are effective on this node only.
//! - Acknowledged writes are in the page cache or on the disk, and survive the worker.

mod at_once;
mod claim;
mod copy;
mod file_system;
mod labels;
mod mapped;
mod queue;
mod registration;
mod snapshots;
mod space;
mod spec;
mod store;
mod sync;
mod unfinished;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::extents::{self, Layout};
use super::uri::{Size, invalid};
use super::{
    Completer, Extents, Handover, HandoverFiles, HandoverState, Image, ImageQueue,
    OpenOptions as Options, Resize, Shrink, SizeChecks, VolumeIdentity, Waker,
};
use at_once::{PagesAtOnce, WritesAtOnce};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::block;
use cleat_sys::buffer::ALIGNMENT;
use cleat_sys::ring::Ring;
use cleat_sys::volume_id::{DeviceId, FileId};
use mapped::{Mapped, Mapping};
use queue::{Abilities, FileQueue};
pub use registration::BACKEND;
use space::FreeSpace;
use spec::FileSpec;
use sync::Syncer;

/// The longest payload of one request in bytes, the length that NBD clients expect to be able to send.
const MAX_PAYLOAD: u32 = 32 << 20;

/// An open file or block device.
struct FileImage {
    file: Arc<File>,
    path: String,
    identity: VolumeIdentity,
    device: bool,
    read_only: bool,
    direct: bool,
    size: AtomicU64,
    blocks: BlockSizes,
    abilities: Arc<Abilities>,
    syncer: Arc<Syncer>,
    /// Short writes are made on the thread of their connection.
    writes_at_once: bool,
    /// Short reads are copied from the mapping.
    mapping: Option<Arc<Mapping>>,
}

impl FileImage {
    /// Opens the volume of `spec`, and claims it unless `read_only` is set. Creates it if `spec` asks for
    /// that, but not a volume that has an `expected` identity: its content is lost.
    fn open(spec: &FileSpec, options: &Options) -> Result<Self> {
        if options.expected.is_none() {
            return Self::open_or_create(spec, options);
        }
        let spec = FileSpec { create: None, ..spec.clone() };
        Self::open_or_create(&spec, options).map_err(|error| match error.kind() {
            ErrorKind::NotFound => is_missing(&spec, error),
            _ => error,
        })
    }

    fn open_or_create(spec: &FileSpec, options: &Options) -> Result<Self> {
        let read_only = options.read_only;
        let path = spec.path.display().to_string();
        let (device, missing) = inspect(spec, read_only)?;
        let file = open(spec, read_only, device)?;
        let metadata = file.metadata().map_err(|e| Error::from_io(format!("stat {path}"), e))?;
        if metadata.file_type().is_block_device() != device {
            return Err(Error::new(
                ErrorKind::Aborted,
                format!("{path} was replaced while it was opened"),
            ));
        }
        // Before the file is locked and changed.
        VolumeIdentity::check(&identity(&file, device, &path)?, options.expected.as_ref(), &path)?;
        if !device && !read_only {
            claim::lock(&file, &path)?;
            claim::check_name(&file, &spec.path)?;
            create(spec, &file).inspect_err(|_| {
                if missing {
                    // This call created the file, locked it, and left it empty.
                    let _ = std::fs::remove_file(&spec.path);
                }
            })?;
        }
        let image = Self::of(spec, file, options)?;
        if image.refresh_size()? == 0 {
            let error = invalid(format!("{} is empty", image.path));
            return Err(if device {
                error.with_repair("insert a medium into the device, or set up its driver")
            } else {
                error.with_repair(format!(
                    "give it a size: truncate -s 10G {}; or let cleat do it with ?create=10G",
                    image.path
                ))
            });
        }
        Ok(image)
    }

    /// Opens the volume with the open file description of the process that still serves it. Both processes
    /// then have its lock, or O_EXCL.
    fn open_successor(spec: &FileSpec, files: HandoverFiles, options: &Options) -> Result<Self> {
        let read_only = options.read_only;
        let path = spec.path.display();
        let [file]: [OwnedFd; 1] = files.descriptors.try_into().map_err(|got: Vec<_>| {
            invalid(format!("the handover of {path} has {} descriptors instead of one", got.len()))
        })?;
        let failed =
            |e: nix::Error| Error::from_io(format!("cannot read the flags of {path}"), e.into());
        let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL).map_err(failed)?);
        let wanted = if read_only { OFlag::O_RDONLY } else { OFlag::O_RDWR };
        let direct = flags.contains(OFlag::O_DIRECT);
        if flags & OFlag::O_ACCMODE != wanted || direct != spec.direct {
            return Err(invalid(format!(
                "the handover of {path} has a file that is open in another mode"
            )));
        }
        let image = Self::of(spec, file.into(), options)?;
        image.refresh_size()?;
        Ok(image)
    }

    fn of(spec: &FileSpec, file: File, options: &Options) -> Result<Self> {
        let path = spec.path.display().to_string();
        let metadata = file.metadata().map_err(|e| Error::from_io(format!("stat {path}"), e))?;
        let device = metadata.file_type().is_block_device();
        if !device && !metadata.is_file() {
            return Err(invalid(format!("{path} is neither a file nor a block device")));
        }
        let blocks = block_sizes(&file, spec.direct, device, &path)?;
        let identity = identity(&file, device, &path)?;
        let file_system = file_system::of(&file, &path)?;
        let remote = !device && file_system::is_network(file_system);
        // A device may hang, for example without a path.
        let local = !device && file_system::is_local(file_system, &file);
        let mut abilities = Abilities::new(device, spec.direct, remote);
        abilities.space = FreeSpace::new(file_system, spec.direct);
        let file = Arc::new(file);
        let syncer = Arc::new(Syncer::new(Arc::clone(&file), path.clone()));
        if options.sync_failed {
            syncer.set_failed_before();
        }
        Ok(Self {
            file,
            path,
            identity,
            device,
            read_only: options.read_only,
            direct: spec.direct,
            size: AtomicU64::new(0),
            blocks,
            abilities: Arc::new(abilities),
            syncer,
            writes_at_once: local && at_once::pays(file_system, spec.direct),
            mapping: Mapping::new(file_system, spec.direct, options.read_only)
                .filter(|_| local)
                .map(Arc::new),
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
            // Direct access does not use pages that were read ahead.
            cache: !self.direct,
            multi_connection: true,
            keeps_acknowledged_writes: true,
        }
    }

    fn identity(&self) -> VolumeIdentity {
        self.identity.clone()
    }

    fn queue(&self, ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        self.syncer.start()?;
        let slot = ring.register(self.file.as_fd()).map_err(|e| {
            Error::from_io(format!("cannot register {} in the ring of the thread", self.path), e)
        })?;
        let (abilities, syncer) = (Arc::clone(&self.abilities), Arc::clone(&self.syncer));
        let block = self.blocks.minimum;
        let mut queue = FileQueue::new(slot, block, abilities, syncer, completer.clone());
        queue.writes_at_once =
            self.writes_at_once.then(|| WritesAtOnce::new(Arc::clone(&self.file)));
        let pages_at_once =
            |mapping: &Arc<Mapping>| PagesAtOnce::new(Arc::clone(&self.file), mapping.in_memory);
        queue.pages_at_once = self.mapping.as_ref().map(pages_at_once);
        let mapped =
            |mapping: &Arc<Mapping>| Mapped::new(Arc::clone(&self.file), Arc::clone(mapping));
        queue.mapped = self.mapping.as_ref().map(mapped);
        Ok(Box::new(queue))
    }

    fn refresh_size(&self) -> Result<u64> {
        let raw = if self.device {
            block::device_size(&self.file)
        } else {
            self.file.metadata().map(|metadata| metadata.len())
        }
        .map_err(|e| Error::from_io(format!("cannot read the size of {}", self.path), e))?;
        let size = raw - raw % u64::from(self.blocks.minimum);
        if size != raw && self.size() != size {
            tracing::warn!(
                path = %self.path, size = raw, block_size = self.blocks.minimum,
                "the size is not a multiple of the block size; the last {} bytes are not served",
                raw - size
            );
        }
        self.size.store(size, Ordering::Release);
        Ok(size)
    }

    fn watch_changes(&self, waker: Waker) {
        self.syncer.watch(waker);
    }

    fn sync_failed(&self) -> bool {
        self.syncer.has_failed()
    }

    #[cfg(feature = "fault")]
    fn fail_next_sync(&self) {
        self.syncer.inject_failure();
    }

    fn retries_no_space(&self) -> bool {
        !self.device
    }

    fn failure_reason(&self) -> Option<String> {
        self.abilities.space.failure_reason(&self.path)
    }

    #[cfg(feature = "fault")]
    fn set_drop_syncs(&self, drop: bool) {
        self.syncer.set_drops(drop);
    }

    /// The kernel sends no notification when a file or device grows, and the supervisor can see its size, too.
    fn size_checks(&self) -> SizeChecks {
        SizeChecks::OnRequest
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
            return Err(invalid(format!("cannot grow {} to {size}: it has {now}", self.path)));
        }
        self.set_length(size)
    }
}

impl Shrink for FileImage {
    fn shrink_to(&self, size: u64) -> Result<()> {
        self.check_resizable(size)?;
        if size == 0 {
            return Err(invalid(format!("cannot shrink {} to nothing", self.path)));
        }
        self.set_length(size)
    }
}

impl Extents for FileImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let range = offset..offset + length;
        let mut layout = Layout::new(range.clone(), self.blocks.minimum, limit);
        // Block devices and some file systems do not report holes.
        match extents::of_file(&self.file, range, 0, &mut layout) {
            Ok(known) => Ok(layout.finish(known)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(vec![Extent { length, hole: false }])
            }
            Err(e) => Err(Error::from_io(format!("cannot find the holes of {}", self.path), e)),
        }
    }
}

impl Handover for FileImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        let file = self.file.as_fd().try_clone_to_owned();
        let file = file.map_err(|e| {
            Error::from_io(format!("cannot duplicate the descriptor of {}", self.path), e)
        })?;
        Ok(HandoverFiles { descriptors: vec![file] })
    }

    fn release(&self) -> Result<HandoverState> {
        let sync_failed = self.syncer.has_failed();
        Ok(HandoverState { sync_failed, ..HandoverState::default() })
    }

    fn resume(&self) -> Result<()> {
        Ok(())
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        if state.sync_failed {
            self.syncer.set_failed_before();
        }
        // The file may have grown since this process opened it.
        self.refresh_size().map(drop)
    }
}

impl FileImage {
    fn check_resizable(&self, size: u64) -> Result<()> {
        if self.device {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} is a block device, which cleat cannot resize", self.path),
            )
            .with_repair(
                "resize the device with its own tool (lvextend, losetup -c, …); cleat then follows",
            ));
        }
        if self.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        if !size.is_multiple_of(u64::from(self.blocks.minimum)) {
            let block = self.blocks.minimum;
            return Err(invalid(format!("{size} is not a multiple of the block size, {block}")));
        }
        Ok(())
    }

    fn set_length(&self, size: u64) -> Result<()> {
        self.file
            .set_len(size)
            .map_err(|e| Error::from_io(format!("cannot resize {}", self.path), e))?;
        self.syncer.sync().map_err(|e| {
            let message = format!("the new size of {} is not durable: a sync failed", self.path);
            Error::from_io(message, e).with_repair("see the kernel's log (dmesg) for the cause")
        })?;
        self.refresh_size().map(drop)
    }
}

/// Returns what identifies an open file or device. Must be called before the process is confined, because it
/// reads `/sys` for a device.
fn identity(file: &File, device: bool, path: &str) -> Result<VolumeIdentity> {
    let text = if device {
        DeviceId::of(file).map(|id| id.to_string())
    } else {
        FileId::of(file).map(|id| format!("file with {id}"))
    };
    let failed = |e| Error::from_io(format!("cannot determine the identity of {path}"), e);
    text.map(VolumeIdentity::new).map_err(failed)
}

/// Returns the error for a volume that has been mapped and does not exist any more.
fn is_missing(spec: &FileSpec, error: Error) -> Error {
    let path = spec.path.display();
    let message = format!("{path} does not exist any more, and a new file is not its content");
    Error::new(ErrorKind::NotFound, message)
        .with_source(error)
        .with_repair(format!("move the volume's file back to {path}, or remove the mapping"))
}

/// Checks the type of the file before it is opened, because to open some types blocks (a FIFO) or has an
/// effect (a tape). Returns whether it is a block device, and whether it is missing and must be created.
fn inspect(spec: &FileSpec, read_only: bool) -> Result<(bool, bool)> {
    let path = spec.path.display();
    let kind = match std::fs::metadata(&spec.path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if has_no_directory(spec) {
                return Err(no_directory(spec));
            }
            if spec.create.is_some() && !read_only {
                return Ok((false, true));
            }
            return Err(Error::new(ErrorKind::NotFound, format!("{path} does not exist"))
                .with_repair(format!(
                    "create it: truncate -s 10G {path}; or let cleat do it with ?create=10G"
                )));
        }
        Err(error) => return Err(Error::from_io(format!("cannot stat {path}"), error)),
    };
    if kind.is_block_device() || kind.is_file() {
        return Ok((kind.is_block_device(), false));
    }
    let what = if kind.is_dir() { "a directory" } else { "a special file" };
    Err(invalid(format!("{path} is {what}, not a file or a block device")))
}

fn has_no_directory(spec: &FileSpec) -> bool {
    spec.path.parent().is_some_and(|directory| directory.try_exists().is_ok_and(|exists| !exists))
}

fn no_directory(spec: &FileSpec) -> Error {
    let path = spec.path.display();
    let directory = spec.path.parent().unwrap_or(Path::new("/")).display();
    Error::new(ErrorKind::NotFound, format!("the directory of {path} does not exist"))
        .with_repair(format!("correct the path, or create the directory: mkdir -p {directory}"))
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
    let error = match claim::retry_while_busy(open, |e| e.raw_os_error() == Some(libc::EBUSY)) {
        Ok(file) => return Ok(file),
        Err(error) => error,
    };
    Err(match error.raw_os_error() {
        Some(libc::EBUSY) => claim::device_in_use(&spec.path),
        Some(libc::EINVAL) if spec.direct => Error::new(
            ErrorKind::Unsupported,
            format!("the file system of {path} does not support direct I/O"),
        )
        .with_repair("remove direct=true from the URI")
        .with_source(error),
        // It was removed in the meantime.
        Some(libc::ENOENT) if spec.create.is_some() && !read_only => no_directory(spec),
        Some(libc::EROFS | libc::EACCES | libc::EPERM) if !read_only => {
            Error::new(ErrorKind::PermissionDenied, format!("{path} cannot be opened for writing"))
                .with_repair("map it read-only, or make it writable for the daemon's user")
                .with_source(error)
        }
        _ => Error::from_io(format!("cannot open {path}"), error),
    })
}

/// Sets the size of an empty file. A file that existed may be empty because an earlier call was killed
/// between its creation and this step.
fn create(spec: &FileSpec, file: &File) -> Result<()> {
    let Some(size) = spec.create else { return Ok(()) };
    let path = spec.path.display();
    let set_size = || -> io::Result<()> {
        if file.metadata()?.len() != 0 {
            return Ok(());
        }
        file.set_len(size)?;
        file.sync_all()?;
        // The name of the file must be durable before a FLUSH reports the content as durable.
        sync_directory(&spec.path)
    };
    set_size().map_err(|e| Error::from_io(format!("cannot create {path} with {}", Size(size)), e))
}

/// Makes the creation or removal of `path` durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

fn block_sizes(file: &File, direct: bool, device: bool, path: &str) -> Result<BlockSizes> {
    let failed = |e| Error::from_io(format!("cannot read the block size of {path}"), e);
    let (mut minimum, mut preferred) = (1, 4096);
    if device {
        minimum = block::logical_block_size(file).map_err(failed)?;
        preferred = block::physical_block_size(file).map_err(failed)?.max(preferred);
    } else if direct {
        // Before Linux 6.1 the kernel does not report the alignment; a page is sufficient everywhere.
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
            format!("{path} does not support direct I/O with an alignment that cleat can use"),
        )
        .with_repair("remove direct=true from the URI"));
    }
    let preferred = preferred.max(minimum).checked_next_power_of_two().unwrap_or(minimum);
    Ok(BlockSizes { minimum, preferred, maximum: MAX_PAYLOAD })
}
