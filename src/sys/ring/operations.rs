//! The operations that a ring offers.

use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{opcode, squeue, types};

use super::{FileSlot, Owned, Ring, Token};
use crate::buffer::Buffer;
use crate::send_list::SendList;

impl Ring {
    /// Starts a read at `offset` into the payload from `from` to its end.
    ///
    /// # Errors
    /// Returns the buffer when the ring is full.
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

    /// Starts to put a range of a file at `offset` into the buffer's pipe: as many bytes as the payload has from `from`
    /// to its end. The pages are read from the disk where they are not in memory, by a thread of the kernel.
    /// Completes with `-EAGAIN` if the pipe is full.
    ///
    /// # Errors
    /// Returns the buffer when the ring is full.
    ///
    /// # Panics
    /// Panics if the buffer has no pipe.
    pub fn splice(
        &mut self,
        file: FileSlot,
        buffer: Buffer,
        from: usize,
        offset: u64,
        token: Token,
    ) -> Result<(), Buffer> {
        let (_, len) = part(&buffer, from);
        let pipe = buffer.pipe().expect("the caller has attached a pipe").input().as_raw_fd();
        let offset = i64::try_from(offset).expect("no file is longer than i64::MAX");
        let entry = opcode::Splice::new(types::Fixed(file.0), offset, types::Fd(pipe), -1, len)
            .flags(libc::SPLICE_F_NONBLOCK)
            .build();
        self.push_buffer(entry, buffer, token)
    }

    /// Starts a poll, which completes once when `file` takes bytes. Returns false when the ring is full.
    #[must_use]
    pub fn poll_writable(&mut self, file: FileSlot, token: Token) -> bool {
        self.poll(file, libc::POLLOUT, token)
    }

    /// Starts a write of the payload from `from` to its end at `offset`; with `durable`, as with
    /// `O_DSYNC`.
    ///
    /// # Errors
    /// Returns the buffer when the ring is full.
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

    /// Starts `fallocate` with `mode` on a range. Returns false when the ring is full.
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

    /// Starts read-ahead of a range (`POSIX_FADV_WILLNEED`). Returns false when the ring is full.
    #[must_use]
    pub fn read_ahead(&mut self, file: FileSlot, offset: u64, len: u32, token: Token) -> bool {
        let advice = libc::POSIX_FADV_WILLNEED;
        let entry = opcode::Fadvise::new(types::Fixed(file.0), len.into(), advice);
        self.push(entry.offset(offset).build(), Owned::Nothing, token).is_ok()
    }

    /// Starts a receive from a stream socket into the payload from `from` to its end. It completes with the
    /// first available bytes, or with zero at the end of the stream; with `whole`, only when that part of
    /// the payload is full or the stream ends.
    ///
    /// # Errors
    /// Returns the buffer when the ring is full.
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

    /// Starts a send of the unsent part of `send_list` to a stream socket. The send may be partial.
    ///
    /// # Errors
    /// Returns the list when the ring is full.
    pub fn send(
        &mut self,
        socket: FileSlot,
        mut send_list: Box<SendList>,
        token: Token,
    ) -> Result<(), Box<SendList>> {
        // On a stream, MSG_WAITALL makes io_uring continue after a partial send by itself.
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned();
        let message = send_list.message();
        let entry = opcode::SendMsg::new(types::Fixed(socket.0), message).flags(flags).build();
        self.push(entry, Owned::SendList(send_list), token).map_err(|owned| match owned {
            Owned::SendList(send_list) => send_list,
            _ => unreachable!("`push` returns what it was given"),
        })
    }

    /// Starts a poll, which completes once when `file` is readable. Returns false when the ring is full.
    #[must_use]
    pub fn poll_readable(&mut self, file: FileSlot, token: Token) -> bool {
        self.poll(file, libc::POLLIN, token)
    }

    fn poll(&mut self, file: FileSlot, events: i16, token: Token) -> bool {
        let events = u32::from(events.cast_unsigned());
        let entry = opcode::PollAdd::new(types::Fixed(file.0), events).build();
        self.push(entry, Owned::Nothing, token).is_ok()
    }

    /// Starts a timer, which completes with `-ETIME` after `time`. Returns false when the ring is full.
    #[must_use]
    pub fn timeout(&mut self, time: Duration, token: Token) -> bool {
        let time = Box::new(types::Timespec::from(time));
        let entry = opcode::Timeout::new(&raw const *time).build();
        self.push(entry, Owned::Time { _time: time }, token).is_ok()
    }

    /// Cancels the operation with token `target`, which then completes with `-ECANCELED` unless it
    /// completed before. The cancellation itself completes with `token`. Returns false when there is no
    /// such operation or the ring is full.
    #[must_use]
    pub fn cancel(&mut self, target: Token, token: Token) -> bool {
        let index = self.in_flight.iter().position(|slot| slot.token == Some(target));
        let Some(index) = index else { return false };
        let entry = opcode::AsyncCancel::new(index as u64).build();
        self.push(entry, Owned::Nothing, token).is_ok()
    }

    fn push_buffer(
        &mut self,
        entry: squeue::Entry,
        buffer: Buffer,
        token: Token,
    ) -> Result<(), Buffer> {
        self.push(entry, Owned::Buffer(buffer), token).map_err(|owned| match owned {
            Owned::Buffer(buffer) => buffer,
            _ => unreachable!("`push` returns what it was given"),
        })
    }
}

/// Returns the address and the length of the payload from `from` to its end.
fn part(buffer: &Buffer, from: usize) -> (*mut u8, u32) {
    assert!(from <= buffer.len(), "from {from} in a payload of {} bytes", buffer.len());
    let len = u32::try_from(buffer.len() - from).expect("a payload is always smaller than 4 GiB");
    // SAFETY: `from` is at most the payload's length, so the result is inside the allocation or one past
    // its end.
    (unsafe { buffer.payload_ptr().add(from) }, len)
}
