//! One io_uring per thread, owning every buffer that is in flight on it.
//!
//! Comes in: an operation with the buffer it needs. Goes out: a [`Completion`] with the same
//! buffer. Between the two nobody else can touch the buffer, and dropping the ring cancels and
//! waits for what is in flight before it frees anything.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::buffer::Buffer;

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
}

/// A file in the ring's table. The kernel holds its own reference: closing the descriptor elsewhere
/// does not pull it from under an operation.
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
}

#[derive(Default)]
struct InFlight {
    token: Option<Token>,
    buffer: Option<Buffer>,
}

impl Ring {
    /// A ring for at most `entries` operations in flight.
    ///
    /// # Errors
    /// `EPERM`/`ENOSYS` where a seccomp profile or `kernel.io_uring_disabled` forbids io_uring.
    pub fn new(entries: u32) -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(entries)
            .or_else(|_| IoUring::builder().build(entries))?;
        uring.submitter().register_files_sparse(FILE_SLOTS)?;
        Ok(Self {
            uring,
            in_flight: (0..entries).map(|_| InFlight::default()).collect(),
            free: (0..entries).rev().collect(),
            files: 0,
        })
    }

    /// Puts a file into the ring's table.
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

    /// Reads at `offset` into `buffer[from..]` of the payload.
    ///
    /// # Errors
    /// Gives the buffer back when the ring is full.
    pub fn read(
        &mut self,
        file: FileSlot,
        buffer: Buffer,
        from: usize,
        offset: u64,
        token: Token,
    ) -> Result<(), Buffer> {
        let (start, len) = part(&buffer, from);
        let entry = opcode::Read::new(types::Fixed(file.0), start, len).offset(offset).build();
        self.push(entry, Some(buffer), token).map_err(give_back)
    }

    /// Writes `buffer[from..]` of the payload at `offset`; with `durable`, as by `O_DSYNC`.
    ///
    /// # Errors
    /// Gives the buffer back when the ring is full.
    pub fn write(
        &mut self,
        file: FileSlot,
        buffer: Buffer,
        from: usize,
        offset: u64,
        durable: bool,
        token: Token,
    ) -> Result<(), Buffer> {
        let (start, len) = part(&buffer, from);
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        let entry = opcode::Write::new(types::Fixed(file.0), start, len)
            .offset(offset)
            .rw_flags(flags)
            .build();
        self.push(entry, Some(buffer), token).map_err(give_back)
    }

    /// Makes the file's data durable (`fdatasync`). Returns whether there was room.
    #[must_use]
    pub fn fdatasync(&mut self, file: FileSlot, token: Token) -> bool {
        let entry =
            opcode::Fsync::new(types::Fixed(file.0)).flags(types::FsyncFlags::DATASYNC).build();
        self.push(entry, None, token).is_ok()
    }

    /// `fallocate(mode)` on a range. Returns whether there was room.
    #[must_use]
    pub fn fallocate(
        &mut self,
        file: FileSlot,
        mode: i32,
        offset: u64,
        len: u64,
        token: Token,
    ) -> bool {
        let entry =
            opcode::Fallocate::new(types::Fixed(file.0), len).offset(offset).mode(mode).build();
        self.push(entry, None, token).is_ok()
    }

    /// Hands over what was pushed and waits until at least one operation has completed.
    ///
    /// # Errors
    /// What `io_uring_enter` gives, except an interruption by a signal, which is no error.
    pub fn submit_and_wait(&mut self) -> io::Result<()> {
        match self.uring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes one completion, if one is there.
    pub fn next(&mut self) -> Option<Completion> {
        let entry: cqueue::Entry = self.uring.completion().next()?;
        let index = entry.user_data() as usize;
        let slot = &mut self.in_flight[index];
        let token = slot.token.take().expect("each slot completes once");
        let buffer = slot.buffer.take();
        self.free.push(index as u32);
        Some(Completion { token, result: entry.result(), buffer })
    }

    fn push(
        &mut self,
        entry: squeue::Entry,
        buffer: Option<Buffer>,
        token: Token,
    ) -> Result<(), Option<Buffer>> {
        let Some(index) = self.free.pop() else { return Err(buffer) };
        let entry = entry.user_data(u64::from(index));
        // SAFETY: the memory that the entry names belongs to `buffer`, which stays in
        // `in_flight[index]` until its completion is reaped, or until Drop has drained the ring.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        if pushed.is_err() {
            self.free.push(index);
            return Err(buffer);
        }
        self.in_flight[index as usize] = InFlight { token: Some(token), buffer };
        Ok(())
    }
}

/// Where an operation on `buffer[from..]` begins, and how long it is.
fn part(buffer: &Buffer, from: usize) -> (*mut u8, u32) {
    assert!(from <= buffer.len(), "from {from} in a payload of {}", buffer.len());
    let len = u32::try_from(buffer.len() - from).expect("payloads are below 4 GiB");
    // SAFETY: `from` is inside the payload, so inside the allocation.
    (unsafe { buffer.payload_ptr().add(from) }, len)
}

fn give_back(buffer: Option<Buffer>) -> Buffer {
    buffer.expect("the operation was pushed with a buffer")
}

impl Drop for Ring {
    fn drop(&mut self) {
        let all = types::CancelBuilder::any();
        // Where cancelling is not possible, waiting below still ends each operation.
        let _ = self.uring.submitter().register_sync_cancel(None, all);
        while self.free.len() < self.in_flight.len() {
            if self.submit_and_wait().is_err() {
                // The kernel may still write to these buffers: leak them rather than free them.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            while self.next().is_some() {}
        }
    }
}
