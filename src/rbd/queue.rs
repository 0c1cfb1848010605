//! The data half: converts requests into operations of librbd. librbd's threads convert the results and
//! return them through the connection's completer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use librbd::{Completion, Io, Refused, Submitter};

use crate::shared::Shared;
use cleat_backend::{Completer, ImageQueue, Outcome, RequestId, Started};
use cleat_core::request::{IoError, Op, Request};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion as RingCompletion, Ring};

/// The maximum number of operations in flight. A connection has fewer requests, and each has one operation.
const MAX_OPERATIONS: usize = 1024;

/// The maximum number of pieces of zeroes that are encrypted and written at the same time. The library holds
/// their ciphertext in memory.
const ZEROES_AT_ONCE: usize = 4;

pub(crate) struct RbdQueue {
    submitter: Submitter<Step, Buffer>,
    shared: Arc<Shared>,
    can_write_zeroes: bool,
    /// The requests in flight, by request id.
    tasks: Vec<Option<Task>>,
    /// Requests whose next piece of encrypted zeroes waits for one of `ZEROES_AT_ONCE` places.
    waiting: VecDeque<(RequestId, Io)>,
    encrypting_zeroes: usize,
}

/// A request in flight.
#[derive(Debug, Clone, Copy)]
struct Task {
    request: Request,
    /// The number of bytes that are finished.
    progress: u64,
    /// The number of bytes of the running operation.
    attempted: u64,
    /// Whether no further operation may start.
    abandoned: bool,
}

/// The data about an operation that librbd's thread needs to convert the result.
#[derive(Debug, Clone, Copy)]
struct Step {
    id: RequestId,
    /// The request's operation.
    op: Op,
    /// The number of bytes that a read must return.
    length: u64,
}

/// The next step of a request: an operation, or the end of the request.
type Next = Result<Option<Io>, IoError>;

impl RbdQueue {
    pub(crate) fn new(
        image: &Arc<librbd::Image>,
        shared: Arc<Shared>,
        completer: Completer,
    ) -> Self {
        let state = Arc::clone(&shared);
        let submitter = image.submitter(MAX_OPERATIONS, move |completion| {
            let Completion { token, result, buffer } = completion;
            let result = state.outcome(token, result);
            completer.complete(token.id, Outcome { result, buffer });
        });
        Self {
            submitter,
            shared,
            can_write_zeroes: image.can_write_zeroes(),
            tasks: Vec::new(),
            waiting: VecDeque::new(),
            encrypting_zeroes: 0,
        }
    }

    /// Returns the operation with which a request starts or continues.
    fn operation(&self, task: &mut Task) -> Next {
        let Request { op, flags, length, .. } = task.request;
        let offset = task.request.offset + task.progress;
        let left = length - task.progress;
        task.attempted = left;
        Ok(Some(match op {
            Op::Read => Io::Read { offset },
            Op::Write => Io::Write { offset },
            Op::Flush => Io::Flush,
            Op::Cache => return Ok(None),
            Op::Trim => {
                task.attempted = self.piece(offset, left);
                Io::Discard { offset, length: task.attempted }
            }
            Op::WriteZeroes => {
                // Encrypted zeroes are written, like allocated ones.
                let allocate = flags.no_hole || self.shared.luks_header.is_some();
                if flags.fast_zero && allocate || !self.can_write_zeroes {
                    return Err(IoError::Unsupported);
                }
                task.attempted = self.piece(offset, left);
                let length = usize::try_from(task.attempted).map_err(|_| IoError::Invalid)?;
                Io::WriteZeroes { offset, length, allocate }
            }
        }))
    }

    /// Returns whether a request writes encrypted zeroes. On an encrypted image librbd also does this for a
    /// discard: removed ciphertext would read as the decryption of zeroes as soon as another part of the
    /// object is written.
    fn encrypts_zeroes(&self, request: &Request) -> bool {
        matches!(request.op, Op::Trim | Op::WriteZeroes) && self.shared.luks_header.is_some()
    }

    /// Returns the length of the next piece of a long range. Pieces end at object boundaries, so that librbd
    /// removes whole objects and does not overwrite them.
    fn piece(&self, offset: u64, left: u64) -> u64 {
        left.min(self.shared.piece - offset % self.shared.piece)
    }

    /// Returns what follows an operation that has ended with `result`. An abandoned request starts no
    /// other operation.
    fn next(&self, task: &mut Task, result: Result<(), IoError>) -> Next {
        result?;
        match self.advance(task) {
            Ok(Some(_)) if task.abandoned => Err(IoError::Broken),
            next => next,
        }
    }

    /// Returns what follows an operation that has succeeded.
    fn advance(&self, task: &mut Task) -> Next {
        if !task.request.op.modifies() {
            return Ok(None);
        }
        task.progress += task.attempted;
        if task.progress < task.request.length {
            return self.operation(task);
        }
        Ok(None)
    }

    fn submit(&mut self, id: RequestId, io: Io, buffer: Option<Buffer>) -> Option<Outcome> {
        if self.shared.fenced.load(Ordering::Acquire) {
            return Some(Outcome { result: Err(IoError::Fenced), buffer });
        }
        let Some(Task { request: Request { op, length, .. }, .. }) = self.task(id) else {
            return Some(Outcome { result: Err(IoError::Broken), buffer });
        };
        match self.submitter.start(Step { id, op, length }, io, buffer) {
            Ok(()) => None,
            Err(Refused { errno, buffer }) => {
                let error = match errno {
                    libc::EAGAIN => IoError::NoMemory,
                    errno => self.shared.error(op, errno),
                };
                Some(Outcome { result: Err(error), buffer })
            }
        }
    }

    fn task(&self, id: RequestId) -> Option<Task> {
        self.tasks.get(id as usize).copied().flatten()
    }

    /// Continues a request with `next`, or ends it.
    fn proceed(&mut self, id: RequestId, next: Next, buffer: Option<Buffer>) -> Option<Outcome> {
        let ended = match next {
            Ok(Some(io @ (Io::Discard { .. } | Io::WriteZeroes { .. })))
                if self.shared.luks_header.is_some() =>
            {
                // At the end of the queue, so that a long range does not delay the other requests.
                self.waiting.push_back((id, io));
                None
            }
            Ok(Some(io)) => self.submit(id, io, buffer),
            Ok(None) => Some(Outcome { result: Ok(()), buffer }),
            Err(error) => Some(Outcome { result: Err(error), buffer }),
        };
        if ended.is_some() {
            self.tasks[id as usize] = None;
        }
        ended
    }

    /// Starts waiting pieces of zeroes while places are free. Returns the first request that ended because
    /// its piece was refused.
    fn start_zeroes(&mut self) -> Option<(RequestId, Outcome)> {
        while self.encrypting_zeroes < ZEROES_AT_ONCE {
            let (id, io) = self.waiting.pop_front()?;
            if let Some(outcome) = self.submit(id, io, None) {
                self.tasks[id as usize] = None;
                return Some((id, outcome));
            }
            self.encrypting_zeroes += 1;
        }
        None
    }
}

impl ImageQueue for RbdQueue {
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let mut task = Task { request, progress: 0, attempted: 0, abandoned: false };
        let next = self.operation(&mut task);
        let index = id as usize;
        if self.tasks.len() <= index {
            self.tasks.resize(index + 1, None);
        }
        self.tasks[index] = Some(task);
        let mut ended = self.proceed(id, next, buffer);
        if ended.is_none() && self.encrypts_zeroes(&request) {
            // If a place is free, no other request waits, so an ended request is this one.
            ended = self.start_zeroes().map(|(_, outcome)| outcome);
        }
        ended.map_or(Started::Pending, Started::Done)
    }

    fn on_ring(
        &mut self,
        _completion: RingCompletion,
        _ring: &mut Ring,
    ) -> Option<(RequestId, Outcome)> {
        // This queue submits nothing to the ring.
        None
    }

    fn abandon(&mut self, done: &mut Vec<(RequestId, Outcome)>) {
        self.tasks.iter_mut().flatten().for_each(|task| task.abandoned = true);
        for (id, _) in self.waiting.drain(..) {
            self.tasks[id as usize] = None;
            done.push((id, Outcome { result: Err(IoError::Broken), buffer: None }));
        }
    }

    fn on_completion(
        &mut self,
        id: RequestId,
        outcome: Outcome,
        _ring: &mut Ring,
        done: &mut Vec<(RequestId, Outcome)>,
    ) {
        let Some(mut task) = self.task(id) else { return };
        let zeroes = self.encrypts_zeroes(&task.request);
        let next = self.next(&mut task, outcome.result);
        self.tasks[id as usize] = Some(task);
        if let Some(outcome) = self.proceed(id, next, outcome.buffer) {
            done.push((id, outcome));
        }
        if zeroes {
            self.encrypting_zeroes -= 1;
            while let Some(ended) = self.start_zeroes() {
                done.push(ended);
            }
        }
    }
}

impl Shared {
    /// Converts librbd's `result` of an operation.
    fn outcome(&self, step: Step, result: i64) -> Result<(), IoError> {
        if result < 0 {
            let errno = i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO);
            return Err(self.error(step.op, errno));
        }
        // A short read means that the image was shrunk. The rest of the buffer must not be used as zeroes.
        if step.op == Op::Read && result.unsigned_abs() != step.length {
            return Err(IoError::Broken);
        }
        Ok(())
    }

    /// Returns the error of a request with the operation `op` for an errno of librbd, and records what the
    /// errno means for the whole image.
    fn error(&self, op: Op, errno: i32) -> IoError {
        let error = match errno {
            // The lock is lost. librbd does not report which client has it.
            libc::EROFS if !self.read_only => IoError::Fenced,
            libc::EPERM | libc::EACCES => {
                self.missing_caps.report_once();
                IoError::Broken
            }
            errno => IoError::from_errno(errno),
        };
        match error {
            IoError::Fenced => self.fenced.store(true, Ordering::Release),
            IoError::NoSpace => self.pool_space.record_no_space(errno),
            // The request may still be in flight, and would then take effect after its repetition.
            IoError::Retry if op.modifies() => return IoError::Broken,
            IoError::Retry => self.pool_space.clear(),
            _ => {}
        }
        error
    }
}
