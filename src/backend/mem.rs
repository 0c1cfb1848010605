//! Volumes in memory: for tests, scratch space and measurements. Every request completes at once.
//!
//! The volume uses memory only for ranges that were written. Its content is lost when the worker dies, so it
//! reports `keeps_acknowledged_writes: false`: its device then fails and never gets another worker. A
//! planned handover keeps the content, because the next worker receives the memory files. The first of these
//! files identifies the volume, so a volume that is opened anew is always another one.

mod spec;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::extents::{self, Layout};
use super::uri::{Size, invalid};
use super::{Completer, ImageQueue, Outcome, RequestId, Started, index};
use super::{Extents, Handover, HandoverFiles, HandoverState, Image, Resize, VolumeIdentity};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use cleat_sys::shared::{SharedMemory, SharedPart};
use cleat_sys::volume_id::FileId;
pub use spec::BACKEND;

/// The maximum number of memory files of a volume. The size of a memory file is sealed, so that no access
/// to it can fault; each time the volume grows, it gets one more file.
const SEGMENTS: usize = 64;

/// The length in bytes from which punching a hole is cheaper than writing zeroes. Below it, freeing the
/// pages and faulting new ones costs more.
const PUNCH_FROM: u64 = 64 << 10;

/// A volume in memory.
struct MemImage {
    memory: Arc<Memory>,
    identity: VolumeIdentity,
    read_only: bool,
}

/// The memory of a volume: segments in order, without gaps. Segments are only added, so readers need no
/// lock.
struct Memory {
    segments: [OnceLock<Segment>; SEGMENTS],
    size: AtomicU64,
    /// The number of segments. Locked while a segment is added.
    growing: Mutex<usize>,
}

struct Segment {
    start: u64,
    memory: Arc<SharedMemory>,
}

impl MemImage {
    /// Creates a volume of `size` zero bytes.
    fn create(size: u64, read_only: bool) -> Result<Self> {
        let memory = Memory::empty();
        memory.grow(size)?;
        Self::of(memory, read_only)
    }

    /// Opens the volume of another process, which passes its memory files.
    fn open_successor(files: HandoverFiles, read_only: bool) -> Result<Self> {
        let memory = Memory::empty();
        for file in files.descriptors {
            let foreign = |e| invalid("a descriptor is not the memory of a volume").with_source(e);
            memory.add(&mut memory.lock(), SharedMemory::whole(file).map_err(foreign)?)?;
        }
        if memory.size.load(Ordering::Acquire) == 0 {
            return Err(invalid("a volume in memory was handed over without its memory"));
        }
        Self::of(memory, read_only)
    }

    fn of(memory: Memory, read_only: bool) -> Result<Self> {
        let identity = memory.identity()?;
        Ok(Self { memory: Arc::new(memory), identity, read_only })
    }
}

impl Image for MemImage {
    fn size(&self) -> u64 {
        self.memory.size.load(Ordering::Acquire)
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }

    fn features(&self) -> Features {
        Features {
            read_only: self.read_only,
            // A completed write is as durable as it can be here, so both are free.
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            // The whole volume is in memory already.
            cache: false,
            multi_connection: true,
            keeps_acknowledged_writes: false,
        }
    }

    fn identity(&self) -> VolumeIdentity {
        self.identity.clone()
    }

    fn queue(&self, _ring: &mut Ring, _completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(MemQueue { memory: Arc::clone(&self.memory) }))
    }

    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn extents(&self) -> Option<&dyn Extents> {
        Some(self)
    }

    fn handover(&self) -> Option<&dyn Handover> {
        Some(self)
    }
}

impl Resize for MemImage {
    fn grow(&self, size: u64) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        self.memory.grow(size)
    }
}

impl Extents for MemImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let mut layout = Layout::new(offset..offset + length, 1, limit);
        let mut known = offset;
        for segment in self.memory.segments.iter().map_while(OnceLock::get) {
            let (start, memory) = (segment.start, &segment.memory);
            let from = offset.max(start) - start;
            let to = (offset + length).saturating_sub(start).min(memory.len() as u64);
            if from < to && !layout.is_complete() {
                known =
                    extents::of_file(memory.file(), from..to, start, &mut layout).map_err(|e| {
                        Error::from_io("cannot find the holes in the volume's memory", e)
                    })?;
            }
        }
        Ok(layout.finish(known))
    }
}

impl Handover for MemImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        let segments = self.memory.segments.iter().map_while(OnceLock::get);
        let files = segments.map(|segment| segment.memory.file().try_clone_to_owned());
        let descriptors = files
            .collect::<std::io::Result<_>>()
            .map_err(|e| Error::from_io("cannot share the volume's memory", e))?;
        Ok(HandoverFiles { descriptors })
    }

    fn release(&self) -> Result<HandoverState> {
        Ok(HandoverState::default())
    }

    fn resume(&self) -> Result<()> {
        Ok(())
    }

    fn take_over(&self, _state: &HandoverState) -> Result<()> {
        Ok(())
    }
}

impl Memory {
    fn empty() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
            size: AtomicU64::new(0),
            growing: Mutex::new(0),
        }
    }

    fn grow(&self, size: u64) -> Result<()> {
        let mut count = self.lock();
        let start = self.size.load(Ordering::Acquire);
        if size < start {
            let (size, now) = (Size(size), Size(start));
            return Err(invalid(format!("the volume has {now}, which is more than {size}")));
        }
        if size == start {
            return Ok(());
        }
        let memory = SharedMemory::create("cleat-mem", size - start).map_err(|e| {
            Error::new(
                ErrorKind::NoSpace,
                format!("cannot allocate memory for {} more", Size(size - start)),
            )
            .with_source(e)
        })?;
        self.add(&mut count, memory)
    }

    /// Returns the identity of the first segment's file, which every process with the volume has.
    fn identity(&self) -> Result<VolumeIdentity> {
        let first = self.segments[0].get().ok_or_else(|| invalid("the volume has no memory"))?;
        let id = FileId::of(first.memory.file())
            .map_err(|e| Error::from_io("cannot determine the identity of the memory", e))?;
        Ok(VolumeIdentity::new(format!("memory with {id}")))
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, count: &mut usize, memory: SharedMemory) -> Result<()> {
        let Some(segment) = self.segments.get(*count) else {
            let message = format!("a volume in memory can grow at most {} times", SEGMENTS - 1);
            return Err(Error::new(ErrorKind::NoSpace, message));
        };
        let start = self.size.load(Ordering::Acquire);
        let size = start + memory.len() as u64;
        if segment.set(Segment { start, memory: Arc::new(memory) }).is_err() {
            return Err(Error::new(
                ErrorKind::Internal,
                "internal: a memory segment was added twice",
            ));
        }
        *count += 1;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Returns a range that lies in one segment.
    fn part(&self, offset: u64, length: u64) -> Option<SharedPart> {
        let segments = self.segments.iter().map_while(OnceLock::get);
        let mut segments =
            segments.skip_while(|segment| offset >= segment.start + segment.memory.len() as u64);
        let Segment { start, memory } = segments.next()?;
        let at = offset - start;
        (at + length <= memory.len() as u64).then(|| SharedPart::new(memory, at, length))
    }

    /// Splits the range at the bounds of segments and calls `act` with each piece: its segment, the offset
    /// in the segment, and the position in the range.
    fn pieces(
        &self,
        offset: u64,
        length: u64,
        mut act: impl FnMut(&SharedMemory, u64, std::ops::Range<u64>) -> Result<(), IoError>,
    ) -> Result<(), IoError> {
        let mut done = 0;
        for segment in self.segments.iter().map_while(OnceLock::get) {
            let at = offset + done;
            let end = segment.start + segment.memory.len() as u64;
            if at >= end {
                continue;
            }
            let len = (end - at).min(length - done);
            act(&segment.memory, at - segment.start, done..done + len)?;
            done += len;
            if done == length {
                return Ok(());
            }
        }
        // Requests were checked against the size, which only grows.
        Err(IoError::Invalid)
    }

    fn write(&self, request: &Request, payload: &[u8]) -> Result<(), IoError> {
        self.pieces(request.offset, request.length, |memory, at, range| {
            memory.write_at(at, &payload[indices(range)]);
            Ok(())
        })
    }

    fn zero(&self, request: &Request, keep: bool) -> Result<(), IoError> {
        self.pieces(request.offset, request.length, |memory, offset, range| {
            let length = range.end - range.start;
            if keep || length < PUNCH_FROM {
                memory.fill_zero(offset, length);
                return Ok(());
            }
            memory
                .punch_hole(offset, length)
                .map_err(|e| e.raw_os_error().map_or(IoError::Broken, IoError::from_errno))
        })
    }
}

struct MemQueue {
    memory: Arc<Memory>,
}

impl MemQueue {
    fn run(&self, request: &Request, buffer: Option<&mut Buffer>) -> Result<(), IoError> {
        let Request { op, flags, offset, length } = *request;
        match (op, buffer) {
            (Op::Read, Some(buffer)) => self.memory.pieces(offset, length, |memory, at, range| {
                memory.read_at(at, &mut buffer.payload_mut()[indices(range)]);
                Ok(())
            }),
            (Op::Write, Some(buffer)) => self.memory.write(request, buffer.payload()),
            (Op::Read | Op::Write, None) => Err(IoError::Invalid),
            (Op::Trim, _) => self.memory.zero(request, false),
            // To keep a large range allocated, every page of it is touched, which is not fast.
            (Op::WriteZeroes, _) if flags.fast_zero && flags.no_hole && length >= PUNCH_FROM => {
                Err(IoError::Unsupported)
            }
            (Op::WriteZeroes, _) => self.memory.zero(request, flags.no_hole),
            (Op::Flush | Op::Cache, _) => Ok(()),
        }
    }
}

impl ImageQueue for MemQueue {
    fn start(
        &mut self,
        _id: RequestId,
        request: Request,
        mut buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let result = self.run(&request, buffer.as_mut());
        Started::Done(Outcome { result, buffer })
    }

    fn lend(&mut self, request: &Request) -> Option<SharedPart> {
        self.memory.part(request.offset, request.length)
    }

    fn store(&mut self, request: &Request, payload: &[u8]) -> bool {
        self.memory.write(request, payload).is_ok()
    }

    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}

fn indices(range: std::ops::Range<u64>) -> std::ops::Range<usize> {
    index(range.start)..index(range.end)
}
