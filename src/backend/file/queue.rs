//! The data half of a file: a small state machine for each request, on the ring of the thread.
//!
//! Each request has at most one operation in the ring. A request that finds the ring full waits here, in
//! order, for the next completion. The connection's limit of requests in flight bounds the waiting ones.
//!
//! The thread of `sync` makes data durable for all queues: after a FLUSH, and as the last step of a request
//! with FUA. With direct access a write with FUA is one operation with RWF_DSYNC instead: its error is its
//! own, because no page holds the data, and ENOSPC means that the file system has no room for this write.
//! Through the page cache an error of RWF_DSYNC could be that of another request's page.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::{Completer, ImageQueue, Outcome, RequestId, Started, index};
use super::at_once::{PagesAtOnce, WritesAtOnce};
use super::mapped::{Mapped, Waiting};
use super::space::FreeSpace;
use super::sync::Syncer;
use cleat_core::request::{IoError, Op, Request};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, FileSlot, Ring, Token};

/// The length in bytes of one write of zeroes, if zeroes have to be written.
const ZEROES: usize = 256 << 10;

/// The length in bytes of one `fallocate` that may have to write zeroes: it occupies a kernel thread and
/// cannot be cancelled, so it must be short.
const SLOW_ALLOCATION: u64 = 32 << 20;

/// The maximum length in bytes of the read-ahead for one CACHE, which also occupies a kernel thread.
const MAX_READ_AHEAD: u64 = 8 << 20;

/// The length in bytes of a read from which on the ring puts it into a pipe. A thread of the kernel does it, which costs more than a
/// copy of less.
const RING_SPLICE: u64 = 128 << 10;

const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// The properties of a file that all its queues share, and that failed attempts have shown.
#[derive(Debug)]
pub(super) struct Abilities {
    device: bool,
    /// The file is open with O_DIRECT.
    direct: bool,
    /// The file is on a network file system, where a write that has timed out may still take effect.
    remote: bool,
    punch: AtomicBool,
    zero_range: AtomicBool,
    /// Pages of the file can be put into a pipe.
    splice: AtomicBool,
    pub(super) space: FreeSpace,
}

impl Abilities {
    /// Assumes that every operation is supported until an attempt fails.
    pub(super) fn new(device: bool, direct: bool, remote: bool) -> Self {
        let [punch, zero_range] = [(); 2].map(|()| AtomicBool::new(true));
        // Only the page cache has pages that can be passed on.
        let splice = AtomicBool::new(!direct);
        Self { device, direct, remote, punch, zero_range, splice, space: FreeSpace::default() }
    }
}

/// The next operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Transfer,
    /// A read into the pipe of its buffer.
    Splice,
    Punch,
    ZeroRange,
    WriteZeroes,
    Sync,
    ReadAhead,
}

#[derive(Debug)]
struct Task {
    request: Request,
    step: Step,
    /// The number of bytes that are done.
    progress: u64,
    /// The number of bytes that the operation in the ring covers.
    attempted: u64,
    /// The request starts no further step.
    abandoned: bool,
    /// The buffer of a write, while the request waits for a sync.
    buffer: Option<Buffer>,
}

/// The next step of a request, or its end (`Ok(None)` or an error).
type Next = Result<Option<Step>, IoError>;

/// The queue of a file on one thread.
pub(super) struct FileQueue {
    file: FileSlot,
    block: u32,
    abilities: Arc<Abilities>,
    syncer: Arc<Syncer>,
    /// Writes that need no ring.
    pub(super) writes_at_once: Option<WritesAtOnce>,
    /// Reads into pipes that need no ring.
    pub(super) pages_at_once: Option<PagesAtOnce>,
    /// Reads that need no ring.
    pub(super) mapped: Option<Mapped>,
    completer: Completer,
    tasks: Vec<Option<Task>>,
    /// The operations in the ring.
    in_ring: usize,
    /// Requests that found the ring full, with their buffers.
    waiting: VecDeque<(RequestId, Option<Buffer>)>,
    /// Requests that wait for the buffer of zeroes.
    waiting_for_zeroes: VecDeque<RequestId>,
    zeroes: Zeroes,
}

/// The buffer of zeroes of a queue, which is allocated at its first use.
enum Zeroes {
    Unmade,
    Here(Buffer),
    InUse,
}

impl FileQueue {
    pub(super) fn new(
        file: FileSlot,
        block: u32,
        abilities: Arc<Abilities>,
        syncer: Arc<Syncer>,
        completer: Completer,
    ) -> Self {
        Self {
            file,
            block,
            abilities,
            syncer,
            writes_at_once: None,
            pages_at_once: None,
            mapped: None,
            completer,
            tasks: Vec::new(),
            in_ring: 0,
            waiting: VecDeque::new(),
            waiting_for_zeroes: VecDeque::new(),
            zeroes: Zeroes::Unmade,
        }
    }

    /// Begins a request with its first step. Returns its end if that needs no operation that completes later.
    fn begin(
        &mut self,
        id: RequestId,
        request: Request,
        step: Step,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Option<Outcome> {
        let index = id as usize;
        if self.tasks.len() <= index {
            self.tasks.resize_with(index + 1, || None);
        }
        let attempted = request.length;
        let mut task =
            Task { request, step, progress: 0, attempted, abandoned: false, buffer: None };
        if matches!(step, Step::Punch | Step::ZeroRange) {
            // Also before: the copy of a page would wait for the end of a long operation.
            self.tell_mapping(&task, 0);
        }
        let done = buffer.as_ref().and_then(|buffer| self.at_once(&task, buffer));
        if done.is_none() && step == Step::Splice && request.length < RING_SPLICE {
            task.step = Step::Transfer;
        }
        let outcome = match done {
            Some(result) => self.after(id, task, result, buffer, ring),
            None => {
                self.tasks[index] = Some(task);
                self.proceed(id, buffer, ring)
            }
        };
        outcome.inspect(|_| self.tasks[index] = None)
    }

    /// Executes the first step of a request on this thread, if that pays. Returns its result.
    fn at_once(&mut self, task: &Task, buffer: &Buffer) -> Option<i32> {
        match task.step {
            Step::Splice if task.request.length >= RING_SPLICE => None,
            Step::Splice => self.pages_at_once.as_mut()?.splice(&task.request, buffer.pipe()?),
            _ if self.in_ring > 0 => None,
            _ => self.writes_at_once.as_mut()?.write(&task.request, buffer.payload()),
        }
    }

    /// Informs the mapping of the result of an operation.
    fn tell_mapping(&self, task: &Task, result: i32) {
        let Some(mapped) = &self.mapped else { return };
        let is_whole = u64::from(result.max(0).unsigned_abs()) == task.request.length;
        match task.step {
            Step::Transfer if is_whole => mapped.was_read(&task.request),
            Step::Punch | Step::ZeroRange => mapped.was_emptied(&task.request),
            _ => {}
        }
    }

    /// Returns the first step of a request, or its end.
    fn first(&self, request: &Request) -> Next {
        let syncs = request.op == Op::Flush || request.flags.fua && request.op.modifies();
        if syncs && self.syncer.has_failed() {
            return Err(IoError::Broken);
        }
        match request.op {
            Op::Read | Op::Write => Ok(Some(Step::Transfer)),
            Op::Flush => Ok(Some(Step::Sync)),
            Op::Trim if self.abilities.punch.load(Ordering::Relaxed) => Ok(Some(Step::Punch)),
            Op::Trim => Ok(None),
            Op::WriteZeroes => self.zeroing(request),
            Op::Cache => Ok(Some(Step::ReadAhead)),
        }
    }

    /// Returns the best way to zero a range that has not failed so far.
    fn zeroing(&self, request: &Request) -> Next {
        let Request { flags, .. } = request;
        // Only a punched hole is known to be fast on a device; zeroing that keeps the range may write.
        let zero_range_is_fast = !self.abilities.device;
        if !flags.no_hole && self.abilities.punch.load(Ordering::Relaxed) {
            return Ok(Some(Step::Punch));
        }
        let may = zero_range_is_fast || !flags.fast_zero;
        if may && self.abilities.zero_range.load(Ordering::Relaxed) {
            return Ok(Some(Step::ZeroRange));
        }
        if flags.fast_zero { Err(IoError::Unsupported) } else { Ok(Some(Step::WriteZeroes)) }
    }

    /// Submits the next operation of the task to the ring, or queues the request if the ring is full. The
    /// step of a sync is not an operation of the ring, see [`FileQueue::proceed`].
    fn submit(&mut self, id: RequestId, buffer: Option<Buffer>, ring: &mut Ring) {
        let Some(task) = self.tasks[id as usize].as_mut() else { return };
        let token = Token::backend(0, id);
        let offset = task.request.offset + task.progress;
        let left = task.request.length - task.progress;
        task.attempted = left;
        let mut returned = None;
        let started = match task.step {
            Step::Transfer => {
                let Some(buffer) = buffer else { return };
                let from = index(task.progress);
                let submitted = if task.request.op == Op::Read {
                    ring.read(self.file, buffer, from, offset, token)
                } else {
                    let durable = task.request.flags.fua && self.abilities.direct;
                    let durable = durable && !self.syncer.drops();
                    ring.write(self.file, buffer, from, offset, durable, token)
                };
                submitted.map_err(|buffer| returned = Some(buffer)).is_ok()
            }
            Step::Splice => {
                let Some(buffer) = buffer else { return };
                let submitted = ring.splice(self.file, buffer, index(task.progress), offset, token);
                submitted.map_err(|buffer| returned = Some(buffer)).is_ok()
            }
            Step::Punch => ring.fallocate(self.file, PUNCH_HOLE, offset, left, token),
            Step::ZeroRange => {
                if self.abilities.device {
                    task.attempted = left.min(SLOW_ALLOCATION);
                }
                ring.fallocate(self.file, ZERO_RANGE, offset, task.attempted, token)
            }
            Step::WriteZeroes => {
                let Some(mut zeroes) = self.zeroes.take() else {
                    self.waiting_for_zeroes.push_back(id);
                    return;
                };
                task.attempted = left.min(ZEROES as u64);
                zeroes.set_len(index(task.attempted));
                match ring.write(self.file, zeroes, 0, offset, false, token) {
                    Ok(()) => true,
                    Err(zeroes) => {
                        self.zeroes = Zeroes::Here(zeroes);
                        false
                    }
                }
            }
            Step::Sync => unreachable!("`proceed` passes a sync to the syncer"),
            Step::ReadAhead => {
                let len = u32::try_from(left.min(MAX_READ_AHEAD)).unwrap_or(0);
                ring.read_ahead(self.file, offset, len, token)
            }
        };
        if started {
            self.in_ring += 1;
        } else {
            // The ring has more entries than the connection needs for itself, so operations of this queue
            // fill it: the completion of one of them resumes this request.
            self.waiting.push_back((id, returned));
        }
    }

    /// Begins the task's present step. Returns the end of the request if the step cannot begin.
    fn proceed(
        &mut self,
        id: RequestId,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Option<Outcome> {
        let task = self.tasks[id as usize].as_mut()?;
        match task.step {
            Step::Sync => match self.syncer.request(&self.completer, id) {
                Ok(()) => {
                    task.buffer = buffer;
                    return None;
                }
                Err(error) => return Some(Outcome { result: Err(error), buffer }),
            },
            // At the end of the queue, so that a long range does not starve the other requests.
            Step::WriteZeroes if task.progress > 0 => self.waiting_for_zeroes.push_back(id),
            _ => self.submit(id, buffer, ring),
        }
        None
    }

    /// Takes the result of an operation, and begins the next step of its task. Returns the end of the request.
    fn after(
        &mut self,
        id: RequestId,
        mut task: Task,
        result: i32,
        mut buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Option<Outcome> {
        let next = match task.step {
            Step::Splice => self.spliced(&mut task, result, buffer.as_mut()),
            _ => self.next(&mut task, result),
        };
        match next {
            Ok(Some(step)) => {
                task.step = step;
                self.tasks[id as usize] = Some(task);
                self.proceed(id, buffer, ring)
            }
            Ok(None) => Some(Outcome { result: Ok(()), buffer }),
            Err(error) => Some(Outcome { result: Err(error), buffer }),
        }
    }

    /// Submits requests that wait for an entry of the ring or for the buffer of zeroes.
    fn resume(&mut self, ring: &mut Ring) {
        for _ in 0..self.waiting.len() {
            if ring.free_slots() == 0 {
                return;
            }
            if let Some((id, buffer)) = self.waiting.pop_front() {
                self.submit(id, buffer, ring);
            }
        }
        if !matches!(self.zeroes, Zeroes::InUse)
            && ring.free_slots() > 0
            && let Some(id) = self.waiting_for_zeroes.pop_front()
        {
            self.submit(id, None, ring);
        }
    }

    /// Returns the next step after an operation with `result`, or the end of the request. An abandoned
    /// request has no next step.
    fn next(&self, task: &mut Task, result: i32) -> Next {
        match self.advance(task, result) {
            Ok(Some(_)) if task.abandoned => Err(IoError::Broken),
            next => next,
        }
    }

    /// Whether a read goes through the pipe of its buffer.
    fn splices(&self, request: &Request, buffer: Option<&Buffer>) -> bool {
        let pipe = buffer.and_then(Buffer::pipe);
        request.op == Op::Read
            && self.abilities.splice.load(Ordering::Relaxed)
            && pipe.is_some_and(|pipe| pipe.fits(request.offset, index(request.length)))
    }

    /// Applies the result of a read into a pipe. If it has failed, the request reads into memory, which shows the
    /// cause: a page that cannot be read, the end of the file, or a file system without splice(2).
    fn spliced(&self, task: &mut Task, result: i32, buffer: Option<&mut Buffer>) -> Next {
        let Some(pipe) = buffer.and_then(Buffer::pipe_mut) else { return Err(IoError::Broken) };
        let moved = u64::from(result.max(0).unsigned_abs());
        pipe.filled(index(moved));
        task.progress += moved;
        if task.progress == task.request.length {
            return Ok(None);
        }
        if moved > 0 && !task.abandoned {
            return Ok(Some(Step::Splice));
        }
        if matches!(-result, libc::EINVAL | libc::EOPNOTSUPP | libc::EACCES | libc::EPERM) {
            self.abilities.splice.store(false, Ordering::Relaxed);
        }
        if pipe.drain().is_err() || task.abandoned {
            return Err(IoError::Broken);
        }
        task.progress = 0;
        Ok(Some(Step::Transfer))
    }

    /// Applies the result of an operation to its task.
    fn advance(&self, task: &mut Task, result: i32) -> Next {
        if result < 0 {
            return self.failed(task, -result);
        }
        match task.step {
            Step::Transfer | Step::WriteZeroes => {
                let moved = u64::from(result.unsigned_abs());
                task.progress += moved;
                if task.progress < task.request.length {
                    if moved == task.attempted {
                        return Ok(Some(task.step));
                    }
                    // Direct I/O continues at the boundary of a block. Without progress, the end of the file
                    // is reached: another process has truncated it, and the missing part must not read as
                    // zeroes.
                    let cut = task.progress % u64::from(self.block);
                    if moved <= cut {
                        return Err(IoError::Broken);
                    }
                    task.progress -= cut;
                    return Ok(Some(task.step));
                }
            }
            Step::Punch | Step::ZeroRange => {
                task.progress += task.attempted;
                if task.progress < task.request.length {
                    return Ok(Some(task.step));
                }
            }
            Step::Sync | Step::ReadAhead => return Ok(None),
            Step::Splice => unreachable!("`spliced` takes its results"),
        }
        let durable = task.step == Step::Transfer && self.abilities.direct;
        let syncs = task.request.flags.fua && task.request.op.modifies() && !durable;
        Ok(syncs.then_some(Step::Sync))
    }

    fn failed(&self, task: &mut Task, errno: i32) -> Next {
        let error = IoError::from_errno(errno);
        match task.step {
            // The kernel did not take the advice, which is no failure.
            Step::ReadAhead => return Ok(None),
            _ if errno == libc::EINTR => return Ok(Some(task.step)),
            Step::Punch | Step::ZeroRange if error == IoError::Unsupported => {
                let ability = if task.step == Step::Punch {
                    &self.abilities.punch
                } else {
                    &self.abilities.zero_range
                };
                ability.store(false, Ordering::Relaxed);
                return if task.request.op == Op::Trim {
                    Ok(None)
                } else {
                    self.zeroing(&task.request)
                };
            }
            // The server may execute a request after the client has given it up, and overwrite newer data
            // then.
            _ if error == IoError::Retry && self.abilities.remote && task.request.op.modifies() => {
                return Err(IoError::Broken);
            }
            // A write with RWF_DSYNC also syncs the metadata of the file system and the cache of the device.
            Step::Transfer
                if task.request.flags.fua
                    && task.request.op == Op::Write
                    && self.abilities.direct
                    && matches!(error, IoError::Broken | IoError::ReadOnly) =>
            {
                self.syncer.set_failed(errno);
                return Err(IoError::Broken);
            }
            Step::Transfer | Step::WriteZeroes if self.abilities.space.is_loss(errno) => {
                self.syncer.set_failed(errno);
                return Err(IoError::Broken);
            }
            _ => {}
        }
        Err(self.abilities.space.record(errno, error))
    }
}

impl ImageQueue for FileQueue {
    fn fills_pipes(&self) -> bool {
        self.abilities.splice.load(Ordering::Relaxed)
    }

    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Started {
        let step = match self.first(&request) {
            Ok(Some(Step::Transfer)) if self.splices(&request, buffer.as_ref()) => Step::Splice,
            Ok(Some(step)) => step,
            Ok(None) => return Started::Done(Outcome { result: Ok(()), buffer }),
            Err(error) => return Started::Done(Outcome { result: Err(error), buffer }),
        };
        match (&mut self.mapped, buffer) {
            (Some(mapped), Some(buffer)) if step == Step::Transfer && mapped.takes(&request) => {
                mapped.hold(id, request, buffer);
                Started::Pending
            }
            (_, buffer) => {
                let outcome = self.begin(id, request, step, buffer, ring);
                outcome.map_or(Started::Pending, Started::Done)
            }
        }
    }

    /// Copies the data of the reads that were held back.
    fn end_batch(&mut self, ring: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        let Some(mapped) = &mut self.mapped else { return };
        let mut batch = mapped.copy();
        for Waiting { id, request, buffer, is_copied } in batch.drain(..) {
            let outcome = match is_copied {
                true => Some(Outcome { result: Ok(()), buffer: Some(buffer) }),
                false => self.begin(id, request, Step::Transfer, Some(buffer), ring),
            };
            done.extend(outcome.map(|outcome| (id, outcome)));
        }
        if let Some(mapped) = &mut self.mapped {
            mapped.reuse(batch);
        }
    }

    fn on_ring(&mut self, completion: Completion, ring: &mut Ring) -> Option<(RequestId, Outcome)> {
        let id = completion.token.value();
        self.in_ring = self.in_ring.saturating_sub(1);
        let task = self.tasks.get_mut(id as usize)?.take()?;
        let mut buffer = completion.buffer;
        if task.step == Step::WriteZeroes
            && let Some(zeroes) = buffer.take()
        {
            self.zeroes = Zeroes::Here(zeroes);
        }
        self.tell_mapping(&task, completion.result);
        let ended = self.after(id, task, completion.result, buffer, ring);
        if ended.is_some() {
            self.tasks[id as usize] = None;
        }
        self.resume(ring);
        ended.map(|outcome| (id, outcome))
    }

    /// Takes the end of a sync, the only operation on a foreign thread.
    fn on_completion(
        &mut self,
        id: RequestId,
        outcome: Outcome,
        _ring: &mut Ring,
        done: &mut Vec<(RequestId, Outcome)>,
    ) {
        let task = self.tasks.get_mut(id as usize).and_then(Option::take);
        debug_assert!(task.as_ref().is_some_and(|task| task.step == Step::Sync), "{id}");
        let buffer = task.and_then(|task| task.buffer);
        done.push((id, Outcome { buffer, ..outcome }));
    }

    fn abandon(&mut self, done: &mut Vec<(RequestId, Outcome)>) {
        self.tasks.iter_mut().flatten().for_each(|task| task.abandoned = true);
        let zeroes = self.waiting_for_zeroes.drain(..).map(|id| (id, None));
        for (id, buffer) in self.waiting.drain(..).chain(zeroes) {
            self.tasks[id as usize] = None;
            done.push((id, Outcome { result: Err(IoError::Broken), buffer }));
        }
        for id in self.syncer.forget(&self.completer) {
            let buffer = self.tasks[id as usize].take().and_then(|task| task.buffer);
            done.push((id, Outcome { result: Err(IoError::Broken), buffer }));
        }
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        // Their connection has ended.
        let _ = self.syncer.forget(&self.completer);
    }
}

impl Zeroes {
    /// The buffer, unless it is in use.
    fn take(&mut self) -> Option<Buffer> {
        match std::mem::replace(self, Self::InUse) {
            Self::Unmade => Some(Buffer::zeroed(ZEROES)),
            Self::Here(buffer) => Some(buffer),
            Self::InUse => None,
        }
    }
}

#[cfg(test)]
mod tests;
