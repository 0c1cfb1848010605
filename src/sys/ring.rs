//! One io_uring per thread, owning every buffer that is in flight on it.
//!
//! Comes in: an operation with the buffer it needs. Goes out: a [`Completion`] with the same
//! buffer. Between the two nobody else can touch the buffer, and dropping the ring cancels and
//! waits for what is in flight before it frees anything.
//!
//! The ring permits only the operations below: io_uring executes them without the checks that
//! seccomp makes, so a ring that could open files or sockets would be a way around it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, squeue, types};

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
        self.push_buffer(entry, buffer, token)
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
        self.push_buffer(entry, buffer, token)
    }

    /// Makes the file's data durable (`fdatasync`). Returns whether there was room.
    #[must_use]
    pub fn fdatasync(&mut self, file: FileSlot, token: Token) -> bool {
        let entry =
            opcode::Fsync::new(types::Fixed(file.0)).flags(types::FsyncFlags::DATASYNC).build();
        self.push(entry, Owned::Nothing, token).is_ok()
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
        self.push(entry, Owned::Nothing, token).is_ok()
    }

    /// Lets the kernel read a range ahead (`POSIX_FADV_WILLNEED`). Returns whether there was room.
    #[must_use]
    pub fn read_ahead(&mut self, file: FileSlot, offset: u64, len: u32, token: Token) -> bool {
        let advice = libc::POSIX_FADV_WILLNEED;
        let entry = opcode::Fadvise::new(types::Fixed(file.0), len.into(), advice);
        self.push(entry.offset(offset).build(), Owned::Nothing, token).is_ok()
    }

    /// Receives from a stream socket into `buffer[from..]`: what is there, at least one byte (zero
    /// at its end); with `whole`, all of it unless the stream ends.
    ///
    /// # Errors
    /// Gives the buffer back when the ring is full.
    pub fn receive(
        &mut self,
        socket: FileSlot,
        buffer: Buffer,
        from: usize,
        whole: bool,
        token: Token,
    ) -> Result<(), Buffer> {
        let (start, len) = part(&buffer, from);
        let flags = if whole { libc::MSG_WAITALL } else { 0 };
        let entry = opcode::Recv::new(types::Fixed(socket.0), start, len).flags(flags).build();
        self.push_buffer(entry, buffer, token)
    }

    /// Sends what is left of `send_list` to a stream socket. May end short.
    ///
    /// # Errors
    /// Gives the pieces back when the ring is full.
    pub fn send(
        &mut self,
        socket: FileSlot,
        mut send_list: Box<SendList>,
        token: Token,
    ) -> Result<(), Box<SendList>> {
        // On a stream, MSG_WAITALL makes io_uring go on after a partial send by itself.
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned();
        let message = send_list.message();
        let entry = opcode::SendMsg::new(types::Fixed(socket.0), message).flags(flags).build();
        self.push(entry, Owned::SendList(send_list), token).map_err(|owned| match owned {
            Owned::SendList(send_list) => send_list,
            _ => unreachable!("what was pushed comes back"),
        })
    }

    /// Completes once when `file` is readable. Returns whether there was room.
    #[must_use]
    pub fn poll_readable(&mut self, file: FileSlot, token: Token) -> bool {
        let events = libc::POLLIN.cast_unsigned();
        let entry = opcode::PollAdd::new(types::Fixed(file.0), u32::from(events)).build();
        self.push(entry, Owned::Nothing, token).is_ok()
    }

    /// Completes with `-ETIME` after `time`. Returns whether there was room.
    #[must_use]
    pub fn timeout(&mut self, time: Duration, token: Token) -> bool {
        let time = Box::new(types::Timespec::from(time));
        let entry = opcode::Timeout::new(&raw const *time).build();
        self.push(entry, Owned::Time { _time: time }, token).is_ok()
    }

    /// Asks the kernel to end the operation with token `target`, which then completes with
    /// `-ECANCELED` unless it was faster. The request itself completes under `token`. Returns
    /// whether there was such an operation, and room.
    #[must_use]
    pub fn cancel(&mut self, target: Token, token: Token) -> bool {
        let index = self.in_flight.iter().position(|slot| slot.token == Some(target));
        let Some(index) = index else { return false };
        let entry = opcode::AsyncCancel::new(index as u64).build();
        self.push(entry, Owned::Nothing, token).is_ok()
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

    fn push_buffer(
        &mut self,
        entry: squeue::Entry,
        buffer: Buffer,
        token: Token,
    ) -> Result<(), Buffer> {
        self.push(entry, Owned::Buffer(buffer), token).map_err(|owned| match owned {
            Owned::Buffer(buffer) => buffer,
            _ => unreachable!("what was pushed comes back"),
        })
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

/// The best kind of ring that this kernel has, and whether it waits for its restrictions.
/// DEFER_TASKRUN and SINGLE_ISSUER are in 6.1, but a kernel may be older, or patched.
fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let mut best = IoUring::builder();
    best.setup_submit_all().setup_single_issuer().setup_defer_taskrun().setup_r_disabled();
    let mut plainer = IoUring::builder();
    plainer.setup_submit_all().setup_r_disabled();
    for builder in [best, plainer] {
        match builder.build(entries) {
            Ok(uring) => return Ok((uring, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((IoUring::new(entries)?, false))
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

fn restrictions() -> [Restriction; 13] {
    // From <linux/io_uring.h>; the io-uring crate keeps them to itself.
    const REGISTER_FILES_UPDATE: u8 = 6;
    const REGISTER_SYNC_CANCEL: u8 = 24;
    [
        Restriction::register_op(REGISTER_FILES_UPDATE),
        Restriction::register_op(REGISTER_SYNC_CANCEL),
        Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Fsync::CODE),
        Restriction::sqe_op(opcode::Fallocate::CODE),
        Restriction::sqe_op(opcode::Fadvise::CODE),
        Restriction::sqe_op(opcode::Recv::CODE),
        Restriction::sqe_op(opcode::SendMsg::CODE),
        Restriction::sqe_op(opcode::PollAdd::CODE),
        Restriction::sqe_op(opcode::Timeout::CODE),
        Restriction::sqe_op(opcode::AsyncCancel::CODE),
    ]
}

/// Where an operation on `buffer[from..]` begins, and how long it is.
fn part(buffer: &Buffer, from: usize) -> (*mut u8, u32) {
    assert!(from <= buffer.len(), "from {from} in a payload of {}", buffer.len());
    let len = u32::try_from(buffer.len() - from).expect("payloads are below 4 GiB");
    // SAFETY: `from` is inside the payload, so inside the allocation.
    (unsafe { buffer.payload_ptr().add(from) }, len)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn file_operations_carry_their_buffers_and_tokens() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = Ring::new(8).unwrap();
        let slot = ring.register(file.as_fd()).unwrap();
        let mut buffer = Buffer::zeroed(5);
        buffer.payload_mut().copy_from_slice(b"abcde");
        ring.write(slot, buffer, 1, 100, true, Token(1)).unwrap();
        let done = wait(&mut ring);
        assert_eq!((done.token, done.result), (Token(1), 4));
        ring.read(slot, done.buffer.unwrap(), 0, 99, Token(2)).unwrap();
        let done = wait(&mut ring);
        assert_eq!(done.result, 5);
        assert_eq!(done.buffer.unwrap().payload(), b"\0bcde");
        assert!(ring.fdatasync(slot, Token(3)));
        assert_eq!(wait(&mut ring).result, 0);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert!(ring.fallocate(slot, mode, 0, 102, Token(4)));
        assert_eq!(wait(&mut ring).result, 0);
        assert_eq!(ring.room(), 8);
    }

    #[test]
    fn sockets_receive_what_is_there_or_the_whole() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(4).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        ring.receive(socket, Buffer::zeroed(100), 10, false, Token(1)).unwrap();
        theirs.write_all(b"some").unwrap();
        let done = wait(&mut ring);
        assert_eq!(done.result, 4);
        assert_eq!(&done.buffer.as_ref().unwrap().payload()[10..14], b"some");
        ring.receive(socket, Buffer::zeroed(6), 0, true, Token(2)).unwrap();
        theirs.write_all(b"who").unwrap();
        let writer = std::thread::spawn(move || {
            theirs.write_all(b"le.").unwrap();
            theirs
        });
        let done = wait(&mut ring);
        assert_eq!((done.result, done.buffer.unwrap().payload()), (6, &b"whole."[..]));
        drop(writer.join().unwrap());
        ring.receive(socket, Buffer::zeroed(6), 0, false, Token(3)).unwrap();
        assert_eq!(wait(&mut ring).result, 0, "the end of the stream");
    }

    #[test]
    fn pieces_leave_in_order_and_in_full() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(4).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        let mut send_list = Box::new(SendList::new(8));
        send_list.push_small(b"first ");
        send_list.push_small(b"second ");
        let mut large = Buffer::zeroed(1 << 20);
        large.payload_mut().fill(7);
        large.set_header(b"third ");
        send_list.push_buffer(large);
        send_list.push_small(b"end");
        let total = send_list.unsent();
        let reader = std::thread::spawn(move || {
            let mut all = vec![0; total];
            theirs.read_exact(&mut all).unwrap();
            all
        });
        while send_list.unsent() > 0 {
            ring.send(socket, send_list, Token(9)).unwrap();
            let done = wait(&mut ring);
            send_list = done.send_list.unwrap();
            send_list.advance(usize::try_from(done.result).unwrap());
        }
        let all = reader.join().unwrap();
        assert!(all.starts_with(b"first second third \x07"));
        assert!(all.ends_with(b"\x07end"));
        assert_eq!(send_list.take_buffers().count(), 1);
    }

    #[test]
    fn a_full_ring_gives_the_buffer_back() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(2).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        for token in 0..2 {
            ring.receive(socket, Buffer::zeroed(9), 0, false, Token(token)).unwrap();
        }
        let back = ring.receive(socket, Buffer::zeroed(9), 0, false, Token(2)).unwrap_err();
        assert_eq!((back.len(), ring.room()), (9, 0));
        assert!(!ring.poll_readable(socket, Token(3)));
    }

    #[test]
    fn dropping_the_ring_ends_what_would_never_end_by_itself() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(8).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        for token in 0..3 {
            ring.receive(socket, Buffer::zeroed(64), 0, false, Token(token)).unwrap();
        }
        assert!(ring.poll_readable(socket, Token(3)));
        assert!(ring.timeout(Duration::from_millis(1), Token(4)));
        assert_eq!(wait(&mut ring).token, Token(4));
        ring.receive(socket, Buffer::zeroed(64), 0, false, Token(5)).unwrap();
        drop(ring);
    }

    #[test]
    fn timeouts_and_cancellation_complete_as_said() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(8).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        assert!(ring.timeout(Duration::from_millis(5), Token(1)));
        let done = wait(&mut ring);
        assert_eq!((done.token, done.result), (Token(1), -libc::ETIME));
        ring.receive(socket, Buffer::zeroed(64), 0, false, Token(2)).unwrap();
        assert!(ring.cancel(Token(2), Token(3)));
        assert!(!ring.cancel(Token(77), Token(3)));
        let mut done = [wait(&mut ring), wait(&mut ring)];
        done.sort_by_key(|done| done.token.0);
        assert_eq!((done[0].token, done[0].result), (Token(2), -libc::ECANCELED));
        assert!(done[0].buffer.is_some());
        assert_eq!((done[1].token, done[1].result), (Token(3), 0));
    }

    #[test]
    fn waiting_has_its_limit() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(8).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        ring.receive(socket, Buffer::zeroed(64), 0, false, Token(1)).unwrap();
        ring.submit_and_wait_for(Duration::from_millis(5)).unwrap();
        assert!(ring.next().is_none());
        // What comes later is not lost in the timeout.
        theirs.write_all(b"x").unwrap();
        ring.submit_and_wait_for(Duration::from_secs(60)).unwrap();
        assert_eq!(ring.next().unwrap().token, Token(1));
    }

    #[test]
    fn the_kernel_refuses_what_this_type_does_not_offer() {
        let mut ring = Ring::new(4).unwrap();
        assert!(ring.is_restricted(), "restrictions are in every kernel since 5.10");
        let entry = opcode::Nop::new().build();
        ring.push(entry, Owned::Nothing, Token(1)).ok().unwrap();
        assert_eq!(wait(&mut ring).result, -libc::EACCES);
    }

    #[test]
    fn more_operations_than_the_ring_holds_pass_through_it() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = Ring::new(3).unwrap();
        let slot = ring.register(file.as_fd()).unwrap();
        let (mut started, mut ended) = (0, 0);
        while ended < 1000 {
            while started < 1000 && ring.room() > 0 {
                let buffer = Buffer::zeroed(8);
                ring.write(slot, buffer, 0, started * 8, false, Token(started)).unwrap();
                started += 1;
            }
            ring.submit_and_wait().unwrap();
            while let Some(done) = ring.next() {
                assert_eq!(done.result, 8);
                ended += 1;
            }
        }
        assert_eq!(file.metadata().unwrap().len(), 8000);
    }

    fn wait(ring: &mut Ring) -> Completion {
        loop {
            if let Some(done) = ring.next() {
                return done;
            }
            ring.submit_and_wait().unwrap();
        }
    }
}
