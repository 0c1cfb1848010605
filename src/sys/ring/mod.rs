//! An io_uring for one thread. It owns every buffer that is in flight on it.
//!
//! Input: an operation with the buffer that it needs. Output: a [`Completion`] with the same buffer. In
//! between only the ring owns the buffer. Dropping the ring cancels the operations in flight and waits for
//! them before it frees any memory.
//!
//! The ring permits only the operations of this module. seccomp does not check what io_uring executes, so
//! a ring that could open files or sockets would bypass the worker's confinement. For the same reason a
//! confined process makes no ring; see [`reserve()`].

mod operations;
mod reserve;
mod setup;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::{IoUring, cqueue, squeue, types};

pub use self::reserve::{is_exhausted, is_reserved, reserve};
use self::setup::{FILE_SLOTS, build, restrictions};
use super::buffer::Buffer;
use super::send_list::SendList;

/// A number that the submitter chooses and gets back with the completion. The upper half identifies the
/// owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Set in tokens of backends, clear in those of the connection's own loop.
    pub const BACKEND: u64 = 1 << 63;

    /// Makes the token of a backend. `layer` distinguishes a wrapping backend from the wrapped one (0 is
    /// the innermost).
    pub fn backend(layer: u8, value: u32) -> Self {
        Self(Self::BACKEND | u64::from(layer) << 32 | u64::from(value))
    }

    /// Returns the layer of the backend that submitted the operation.
    pub fn layer(self) -> u8 {
        (self.0 >> 32 & 0xff) as u8
    }

    /// Returns the lower half: the value that the owner chose.
    #[expect(clippy::cast_possible_truncation, reason = "only the lower half is wanted")]
    pub fn value(self) -> u32 {
        self.0 as u32
    }

    /// Returns whether a backend submitted the operation.
    pub fn is_backend(self) -> bool {
        self.0 & Self::BACKEND != 0
    }
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The submitter's token.
    pub token: Token,
    /// The result of io_uring: a number of bytes, zero, or a negated errno.
    pub result: i32,
    /// The operation's buffer, if it had one.
    pub buffer: Option<Buffer>,
    /// The list that was passed to [`Ring::send`].
    pub send_list: Option<Box<SendList>>,
}

/// A file or socket in the ring's table. The kernel holds its own reference, so that closing the
/// descriptor does not affect operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSlot(u32);

/// An io_uring for one thread. It is not `Send`, because only the thread that made it may use it
/// (SINGLE_ISSUER).
pub struct Ring {
    /// Taken only by Drop.
    uring: ManuallyDrop<IoUring>,
    in_flight: Vec<InFlight>,
    free: Vec<u32>,
    files: u32,
    restricted: bool,
}

#[derive(Default)]
struct InFlight {
    token: Option<Token>,
    owned: Owned,
}

/// Memory that the kernel may use until the operation completes.
#[derive(Default)]
enum Owned {
    #[default]
    Nothing,
    Buffer(Buffer),
    SendList(Box<SendList>),
    /// The kernel reads the time when the operation is submitted.
    Time {
        _time: Box<types::Timespec>,
    },
}

impl Ring {
    /// Makes a ring for at most `entries` operations in flight; after a call of [`reserve()`], takes one that
    /// was made then.
    ///
    /// # Errors
    /// Returns `EPERM`/`ENOSYS` if a seccomp profile or `kernel.io_uring_disabled` forbids io_uring, and
    /// `EMFILE` if every reserved ring is taken.
    pub fn new(entries: u32) -> io::Result<Self> {
        let (uring, restricted) = match reserve::take(entries)? {
            Some(uring) => (uring, true),
            None => make(entries)?,
        };
        Ok(Self {
            uring: ManuallyDrop::new(uring),
            in_flight: (0..entries).map(|_| InFlight::default()).collect(),
            free: (0..entries).rev().collect(),
            files: 0,
            restricted,
        })
    }

    /// Returns whether the kernel refuses every operation that this type does not offer.
    pub fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// Adds a file or socket to the ring's table.
    ///
    /// # Errors
    /// Returns `ENOSPC` if the table is full.
    pub fn register(&mut self, file: BorrowedFd<'_>) -> io::Result<FileSlot> {
        if self.files == FILE_SLOTS {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let slot = self.files;
        self.uring.submitter().register_files_update(slot, &[file.as_raw_fd()])?;
        self.files += 1;
        Ok(FileSlot(slot))
    }

    /// Returns the number of operations that can be started before one in flight has to complete.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Submits the new operations without waiting. Operations that need not wait complete during the
    /// call. Makes no system call if there is no new operation.
    ///
    /// # Errors
    /// Returns the errors of [`Ring::submit_and_wait`].
    pub fn submit(&mut self) -> io::Result<()> {
        if !self.has_unsubmitted() {
            return Ok(());
        }
        entered(self.uring.submit())
    }

    /// Returns whether operations were started that have not been submitted.
    pub fn has_unsubmitted(&mut self) -> bool {
        !self.uring.submission().is_empty()
    }

    /// Submits the new operations, and waits until at least one operation has completed. After a signal
    /// or a temporary lack of memory it returns early, with or without a completion.
    ///
    /// # Errors
    /// Returns the other errors of `io_uring_enter`.
    pub fn submit_and_wait(&mut self) -> io::Result<()> {
        entered(self.uring.submit_and_wait(1))
    }

    /// Like [`Ring::submit_and_wait`], but waits no longer than `limit`. An expired limit is not an error.
    ///
    /// # Errors
    /// Returns the errors of [`Ring::submit_and_wait`].
    pub fn submit_and_wait_for(&mut self, limit: Duration) -> io::Result<()> {
        let limit = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&limit);
        entered(self.uring.submitter().submit_with_args(1, &arguments))
    }

    /// Returns whether a completion can be taken, or will be after [`Ring::submit_and_wait`] without a wait. Reads
    /// memory that the kernel shares; makes no system call.
    pub fn has_completions(&mut self) -> bool {
        self.has_next() || self.uring.submission().taskrun()
    }

    /// Returns whether [`Ring::next`] would return a completion.
    pub fn has_next(&mut self) -> bool {
        !self.uring.completion().is_empty()
    }

    /// Takes one completion, if there is one. Does not wait.
    #[expect(clippy::should_implement_trait, reason = "more completions may follow a None")]
    pub fn next(&mut self) -> Option<Completion> {
        let entry: cqueue::Entry = self.uring.completion().next()?;
        let index =
            u32::try_from(entry.user_data()).expect("`push` stores a slot's number as user data");
        let slot = &mut self.in_flight[index as usize];
        let token = slot.token.take().expect("each slot completes once");
        let (buffer, send_list) = match std::mem::take(&mut slot.owned) {
            Owned::Buffer(buffer) => (Some(buffer), None),
            Owned::SendList(send_list) => (None, Some(send_list)),
            Owned::Nothing | Owned::Time { .. } => (None, None),
        };
        self.free.push(index);
        Some(Completion { token, result: entry.result(), buffer, send_list })
    }

    /// Adds an entry to the submission queue. Returns `owned` when no slot is free.
    ///
    /// The submission queue has at least as many entries as there are slots, and an entry holds its slot
    /// from here to its completion. So the queue has room whenever a slot is free. The completion queue
    /// has twice as many entries and cannot overflow.
    fn push(&mut self, entry: squeue::Entry, owned: Owned, token: Token) -> Result<(), Owned> {
        let Some(index) = self.free.pop() else { return Err(owned) };
        let entry = entry.user_data(u64::from(index));
        // SAFETY: the memory that the entry names belongs to `owned`, which stays in
        // `in_flight[index]` until its completion is reaped, or until Drop has drained the ring.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        if pushed.is_err() {
            self.free.push(index);
            return Err(owned);
        }
        self.in_flight[index as usize] = InFlight { token: Some(token), owned };
        Ok(())
    }
}

/// Makes and enables a ring. Also returns whether it is restricted.
fn make(entries: u32) -> io::Result<(IoUring, bool)> {
    let (uring, restricted) = build(entries)?;
    uring.submitter().register_files_sparse(FILE_SLOTS)?;
    if restricted {
        uring.submitter().register_restrictions(&mut restrictions())?;
        uring.submitter().register_enable_rings()?;
    }
    Ok((uring, restricted))
}

impl Drop for Ring {
    fn drop(&mut self) {
        let idle = self.cancel_all();
        // SAFETY: `uring` is taken once, and nothing uses it afterwards.
        let uring = unsafe { ManuallyDrop::take(&mut self.uring) };
        if idle {
            reserve::give_back(uring);
        }
    }
}

impl Ring {
    /// Cancels all operations and waits for them. Returns whether none is in flight any more.
    fn cancel_all(&mut self) -> bool {
        while self.free.len() < self.in_flight.len() {
            // An entry must be submitted before it can be cancelled. When memory is short, one call may
            // not submit all entries.
            let _ = self.uring.submit();
            // If an operation cannot be cancelled, the wait below lasts until it completes.
            let _ = self.uring.submitter().register_sync_cancel(None, types::CancelBuilder::any());
            if self.submit_and_wait().is_err() {
                // The kernel may still write to these buffers, so they must not be freed.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return false;
            }
            while self.next().is_some() {}
        }
        true
    }
}

/// Converts the result of `io_uring_enter`: conditions that pass by themselves are no errors.
fn entered(result: io::Result<usize>) -> io::Result<()> {
    let Err(error) = result else { return Ok(()) };
    match error.raw_os_error() {
        // EBUSY: completions have to be taken first. ETIME: the limit of the wait has expired.
        Some(libc::EINTR | libc::EBUSY | libc::ETIME) => Ok(()),
        Some(libc::EAGAIN) => {
            // The kernel has no memory for a request at the moment: yield before the next attempt.
            std::thread::yield_now();
            Ok(())
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests;
