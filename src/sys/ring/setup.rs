//! The setup of a ring: the flags that the kernel supports, and the restrictions.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};

/// The number of files that one ring can hold.
pub(super) const FILE_SLOTS: u32 = 16;

/// Makes a ring with the best flags that this kernel supports. Also returns whether the ring is disabled
/// until its restrictions are registered. DEFER_TASKRUN and SINGLE_ISSUER exist since Linux 6.1, but a
/// kernel may be older or patched.
pub(super) fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let mut best = IoUring::builder();
    best.setup_submit_all().setup_single_issuer().setup_defer_taskrun();
    best.setup_taskrun_flag().setup_r_disabled();
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

/// Returns the operations that the ring permits.
pub(super) fn restrictions() -> [Restriction; 13] {
    // From <linux/io_uring.h>; the io-uring crate does not export them.
    const REGISTER_FILES_UPDATE: u8 = 6;
    const REGISTER_SYNC_CANCEL: u8 = 24;
    [
        Restriction::register_op(REGISTER_FILES_UPDATE),
        Restriction::register_op(REGISTER_SYNC_CANCEL),
        Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Fallocate::CODE),
        Restriction::sqe_op(opcode::Fadvise::CODE),
        Restriction::sqe_op(opcode::Recv::CODE),
        Restriction::sqe_op(opcode::SendMsg::CODE),
        Restriction::sqe_op(opcode::PollAdd::CODE),
        Restriction::sqe_op(opcode::Splice::CODE),
        Restriction::sqe_op(opcode::Timeout::CODE),
        Restriction::sqe_op(opcode::AsyncCancel::CODE),
    ]
}
