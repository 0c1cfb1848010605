//! One io_uring per thread, owning every buffer that is in flight on it.
//!
//! Comes in: an operation with the buffer it needs. Goes out: a [`Completion`] with the same
//! buffer. Between the two nobody else can touch the buffer, and dropping the ring cancels and
//! waits for what is in flight before it frees anything.
//!
//! The ring permits only the operations below: io_uring executes them without the checks that
//! seccomp makes, so a ring that could open files or sockets would be a way around it.

mod operations;
mod setup;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::{IoUring, cqueue, squeue, types};

use self::setup::{build, restrictions};
use super::buffer::Buffer;
use super::send_list::SendList;

/// What a submitter gets back with the completion. The upper half tells owners apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Set in tokens of backends, clear in those of the connection's own loop.
    pub const BACKEND: u64 = 1 << 63;

    /// A backend's token. `layer` tells a wrapping backend from the wrapped one (0 innermost).
    pub fn backend(layer: u8, value: u32) -> Self {
        Self(Self::BACKEND | u64::from(layer) << 32 | u64::from(value))
    }

    /// The layer of a backend's token.
    pub fn layer(self) -> u8 {
        (self.0 >> 32 & 0xff) as u8
    }

    /// The lower half: what the owner put in.
    #[expect(clippy::cast_possible_truncation, reason = "the upper half is meant to go")]
    pub fn value(self) -> u32 {
        self.0 as u32
    }

    /// Whether a backend submitted it.
    pub fn is_backend(self) -> bool {
        self.0 & Self::BACKEND != 0
    }
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The submitter's token.
    pub token: Token,
    /// Bytes, or zero, or a negated errno, as io_uring gives it.
    pub result: i32,
    /// The operation's buffer, if it had one.
    pub buffer: Option<Buffer>,
    /// What [`Ring::send`] was given.
    pub send_list: Option<Box<SendList>>,
}

/// A file or socket in the ring's table. The kernel holds its own reference: closing the descriptor
/// elsewhere does not pull it from under an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSlot(u32);

/// Files that one ring can hold.
const FILE_SLOTS: u32 = 16;

/// A per-thread ring. Not `Send`: it is made and used on one thread (SINGLE_ISSUER).
pub struct Ring {
    uring: IoUring,
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
    /// Held for the kernel, which reads it when the operation is submitted.
    Time {
        _time: Box<types::Timespec>,
    },
}

impl Ring {
    /// A ring for at most `entries` operations in flight.
    ///
    /// # Errors
    /// `EPERM`/`ENOSYS` where a seccomp profile or `kernel.io_uring_disabled` forbids io_uring.
    pub fn new(entries: u32) -> io::Result<Self> {
        let (uring, restricted) = build(entries)?;
        uring.submitter().register_files_sparse(FILE_SLOTS)?;
        if restricted {
            uring.submitter().register_restrictions(&mut restrictions())?;
            uring.submitter().register_enable_rings()?;
        }
        Ok(Self {
            uring,
            in_flight: (0..entries).map(|_| InFlight::default()).collect(),
            free: (0..entries).rev().collect(),
            files: 0,
            restricted,
        })
    }

    /// Whether the kernel refuses every operation that this type does not offer.
    pub fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// Puts a file or socket into the ring's table.
    ///
    /// # Errors
    /// `ENOSPC` when the table is full.
    pub fn register(&mut self, file: BorrowedFd<'_>) -> io::Result<FileSlot> {
        if self.files == FILE_SLOTS {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let slot = self.files;
        self.uring.submitter().register_files_update(slot, &[file.as_raw_fd()])?;
        self.files += 1;
        Ok(FileSlot(slot))
    }

    /// Operations that can still be started before one must complete.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Hands over what was pushed, and waits for nothing. What can end at once, ends in here.
    ///
    /// # Errors
    /// As [`Ring::submit_and_wait`].
    pub fn submit(&mut self) -> io::Result<()> {
        entered(self.uring.submit())
    }

    /// Hands over what was pushed and waits until at least one operation has completed.
    ///
    /// # Errors
    /// What `io_uring_enter` gives, except for an interruption by a signal and a moment's lack of
    /// memory: then it returns early, with or without a completion.
    pub fn submit_and_wait(&mut self) -> io::Result<()> {
        entered(self.uring.submit_and_wait(1))
    }

    /// As [`Ring::submit_and_wait`], but no longer than `limit`.
    ///
    /// # Errors
    /// As [`Ring::submit_and_wait`].
    pub fn submit_and_wait_for(&mut self, limit: Duration) -> io::Result<()> {
        let limit = types::Timespec::from(limit);
        let arguments = types::SubmitArgs::new().timespec(&limit);
        entered(self.uring.submitter().submit_with_args(1, &arguments))
    }

    /// Takes one completion, if one is there.
    #[expect(clippy::should_implement_trait, reason = "the ring goes on after None")]
    pub fn next(&mut self) -> Option<Completion> {
        let entry: cqueue::Entry = self.uring.completion().next()?;
        let index = u32::try_from(entry.user_data()).expect("`push` gave it a slot's number");
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

    /// The submission queue has at least as many entries as there are slots, and an entry holds its
    /// slot from here to its completion, so where a slot is free there is room in the queue; the
    /// completion queue has twice as many and cannot overflow.
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

impl Drop for Ring {
    fn drop(&mut self) {
        while self.free.len() < self.in_flight.len() {
            // What was only pushed must be submitted before it can be cancelled; without memory, not
            // all of it is at the first attempt.
            let _ = self.uring.submit();
            // Where cancelling is not possible, waiting still ends each operation.
            let _ = self.uring.submitter().register_sync_cancel(None, types::CancelBuilder::any());
            if self.submit_and_wait().is_err() {
                // The kernel may still write to these buffers: leak them rather than free them.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            while self.next().is_some() {}
        }
    }
}

/// What an enter's result means for the one who waits.
fn entered(result: io::Result<usize>) -> io::Result<()> {
    let Err(error) = result else { return Ok(()) };
    match error.raw_os_error() {
        // EBUSY: completions have to be taken first. ETIME: the limit of the wait.
        Some(libc::EINTR | libc::EBUSY | libc::ETIME) => Ok(()),
        Some(libc::EAGAIN) => {
            // No memory for a request just now: let others run before the next attempt.
            std::thread::yield_now();
            Ok(())
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests;
