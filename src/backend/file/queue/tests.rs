//! Tests of the queue of a file: single steps of a request, and requests on a ring (`on_a_ring`).

mod on_a_ring;

use std::os::fd::AsFd;

use super::*;
use crate::{Waker, channel};
use cleat_core::request::Flags;

fn queue(abilities: &Arc<Abilities>, block: u32) -> FileQueue {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let syncer = Arc::new(Syncer::new(Arc::clone(&file), "test".to_owned()));
    let slot = Ring::new(2).unwrap().register(file.as_fd()).unwrap();
    let (completer, _) = channel(Waker::new().unwrap(), 2);
    FileQueue::new(slot, block, Arc::clone(abilities), syncer, completer)
}

fn task(op: Op, flags: Flags, step: Step, length: u64) -> Task {
    let request = Request { op, flags, offset: 0, length };
    Task { request, step, progress: 0, attempted: length, abandoned: false, buffer: None }
}

const FUA: Flags = Flags { fua: true, no_hole: false, fast_zero: false };

#[test]
fn after_a_failed_sync_every_flush_and_durable_write_fails() {
    let queue = queue(&Arc::new(Abilities::new(false, false, false)), 1);
    let flush = task(Op::Flush, Flags::default(), Step::Sync, 0).request;
    assert_eq!(queue.first(&flush), Ok(Some(Step::Sync)));
    queue.syncer.set_failed(libc::EIO);
    assert_eq!(queue.first(&flush), Err(IoError::Broken));
    for op in [Op::Write, Op::Trim, Op::WriteZeroes] {
        let durable = task(op, FUA, Step::Transfer, 512).request;
        assert_eq!(queue.first(&durable), Err(IoError::Broken), "{op:?}");
        let plain = task(op, Flags::default(), Step::Transfer, 512).request;
        assert!(queue.first(&plain).is_ok(), "{op:?}");
    }
    let read = task(Op::Read, FUA, Step::Transfer, 512).request;
    assert_eq!(queue.first(&read), Ok(Some(Step::Transfer)), "FUA has no effect on a read");
}

#[test]
fn a_durable_write_is_a_write_and_a_sync_except_with_direct_access() {
    let cached = queue(&Arc::new(Abilities::new(false, false, false)), 1);
    let mut write = task(Op::Write, FUA, Step::Transfer, 512);
    assert_eq!(cached.advance(&mut write, 512), Ok(Some(Step::Sync)));
    // The error is that of the write alone, which has lost no page.
    for (errno, error) in [
        (libc::ENOSPC, IoError::NoSpace),
        (libc::EDQUOT, IoError::NoSpace),
        (libc::EIO, IoError::Broken),
    ] {
        let mut write = task(Op::Write, FUA, Step::Transfer, 512);
        assert_eq!(cached.advance(&mut write, -errno), Err(error));
        assert!(!cached.syncer.has_failed(), "{error:?}");
    }
    let direct = queue(&Arc::new(Abilities::new(false, true, false)), 512);
    let mut write = task(Op::Write, FUA, Step::Transfer, 512);
    assert_eq!(direct.advance(&mut write, 512), Ok(None));
    let mut write = task(Op::Write, FUA, Step::Transfer, 512);
    assert_eq!(direct.advance(&mut write, -libc::ENOSPC), Err(IoError::NoSpace));
    assert_eq!(direct.advance(&mut write, -libc::ENOLINK), Err(IoError::Retry));
    assert!(!direct.syncer.has_failed());
    assert_eq!(direct.advance(&mut write, -libc::EROFS), Err(IoError::Broken));
    assert!(direct.syncer.has_failed());
}

#[test]
fn a_lack_of_space_on_nfs_is_a_loss_of_earlier_writes() {
    let nfs = FreeSpace::new(super::super::file_system::NFS, false);
    let abilities = Abilities { space: nfs, ..Abilities::new(false, false, true) };
    let queue = queue(&Arc::new(abilities), 1);
    let mut write = task(Op::Write, Flags::default(), Step::Transfer, 512);
    assert_eq!(queue.advance(&mut write, -libc::ENOSPC), Err(IoError::Broken));
    assert!(queue.syncer.has_failed());
}

#[test]
fn a_lost_transport_is_retried_unless_a_write_may_still_take_effect() {
    for (remote, op, expected) in [
        (false, Op::Write, IoError::Retry),
        (false, Op::Read, IoError::Retry),
        (true, Op::Read, IoError::Retry),
        (true, Op::Write, IoError::Broken),
    ] {
        for errno in [libc::ETIMEDOUT, libc::EHOSTDOWN, libc::ENOLINK] {
            let queue = queue(&Arc::new(Abilities::new(false, true, remote)), 512);
            let mut transfer = task(op, Flags::default(), Step::Transfer, 512);
            assert_eq!(queue.advance(&mut transfer, -errno), Err(expected), "{remote} {op:?}");
            assert!(!queue.syncer.has_failed());
        }
    }
    let queue = queue(&Arc::new(Abilities::new(false, true, true)), 512);
    for (op, step) in [(Op::Trim, Step::Punch), (Op::WriteZeroes, Step::ZeroRange)] {
        let mut zero = task(op, Flags::default(), step, 512);
        assert_eq!(queue.advance(&mut zero, -libc::ETIMEDOUT), Err(IoError::Broken));
    }
}

#[test]
fn an_unsupported_operation_is_replaced_by_another_from_then_on() {
    let none = Flags::default();
    let fast = Flags { fast_zero: true, ..none };
    let abilities = Arc::new(Abilities::new(false, false, false));
    let queue = queue(&abilities, 1);
    let mut zero = task(Op::WriteZeroes, none, Step::Punch, 4096);
    assert_eq!(queue.first(&zero.request), Ok(Some(Step::Punch)));
    assert_eq!(queue.advance(&mut zero, -libc::EOPNOTSUPP), Ok(Some(Step::ZeroRange)));
    zero.step = Step::ZeroRange;
    assert_eq!(queue.advance(&mut zero, -libc::EOPNOTSUPP), Ok(Some(Step::WriteZeroes)));
    assert_eq!(queue.first(&zero.request), Ok(Some(Step::WriteZeroes)));
    let refused = task(Op::WriteZeroes, fast, Step::Punch, 4096);
    assert_eq!(queue.first(&refused.request), Err(IoError::Unsupported));
    let mut trim = task(Op::Trim, none, Step::Punch, 4096);
    assert_eq!(queue.first(&trim.request), Ok(None));
    // A trim is only advice: nothing is written instead.
    assert_eq!(queue.advance(&mut trim, -libc::EOPNOTSUPP), Ok(None));
    let mut cache = task(Op::Cache, none, Step::ReadAhead, 4096);
    assert_eq!(queue.advance(&mut cache, -libc::EINVAL), Ok(None));
}

#[test]
fn a_device_refuses_fast_zeroing_that_keeps_the_range() {
    let device = queue(&Arc::new(Abilities::new(true, false, false)), 512);
    let flags = Flags { no_hole: true, fast_zero: true, fua: false };
    let mut zero = task(Op::WriteZeroes, flags, Step::Punch, 1 << 30);
    assert_eq!(device.first(&zero.request), Err(IoError::Unsupported));
    zero.request.flags.fast_zero = false;
    assert_eq!(device.first(&zero.request), Ok(Some(Step::ZeroRange)));
    zero.step = Step::ZeroRange;
    zero.attempted = SLOW_ALLOCATION;
    assert_eq!(device.advance(&mut zero, 0), Ok(Some(Step::ZeroRange)), "piece by piece");
    assert_eq!(zero.progress, SLOW_ALLOCATION);
    zero.abandoned = true;
    assert_eq!(device.next(&mut zero, 0), Err(IoError::Broken), "the request was abandoned");
}

#[test]
fn short_transfers_continue_at_a_block_and_fail_without_progress() {
    let abilities = Arc::new(Abilities::new(false, false, false));
    let direct = queue(&abilities, 512);
    let mut read = task(Op::Read, Flags::default(), Step::Transfer, 4096);
    assert_eq!(direct.advance(&mut read, 1000), Ok(Some(Step::Transfer)));
    assert_eq!(read.progress, 512);
    let at = |progress| Task { progress, ..task(Op::Read, Flags::default(), Step::Transfer, 4096) };
    assert_eq!(direct.advance(&mut at(512), 488), Err(IoError::Broken));
    assert_eq!(direct.advance(&mut at(512), 0), Err(IoError::Broken));
    assert_eq!(direct.advance(&mut read, 3584), Ok(None));
    let durable = Flags { fua: true, ..Flags::default() };
    let mut trim = task(Op::Trim, durable, Step::Punch, 4096);
    assert_eq!(direct.advance(&mut trim, 0), Ok(Some(Step::Sync)));
}

/// Punched ranges lose their blocks, so only zeroing that may do so punches.
#[test]
fn zeroes_that_keep_the_range_allocated_are_no_hole() {
    let file = queue(&Arc::new(Abilities::new(false, false, false)), 1);
    let first = |no_hole, fast_zero| {
        let flags = Flags { no_hole, fast_zero, fua: false };
        file.first(&task(Op::WriteZeroes, flags, Step::Punch, 4096).request)
    };
    assert_eq!(first(false, true), Ok(Some(Step::Punch)));
    assert_eq!(first(true, false), Ok(Some(Step::ZeroRange)));
    assert_eq!(first(true, true), Ok(Some(Step::ZeroRange)), "it is fast on a file");
    let trim = task(Op::Trim, Flags::default(), Step::Punch, 4096).request;
    assert_eq!(file.first(&trim), Ok(Some(Step::Punch)));
}

#[test]
fn an_interrupted_operation_is_repeated() {
    let file = queue(&Arc::new(Abilities::new(false, false, false)), 1);
    for (op, step) in [(Op::Write, Step::Transfer), (Op::Trim, Step::Punch)] {
        let mut interrupted = task(op, Flags::default(), step, 4096);
        assert_eq!(file.advance(&mut interrupted, -libc::EINTR), Ok(Some(step)));
        assert_eq!(interrupted.progress, 0);
    }
}

/// Only a write with RWF_DSYNC writes more than its own data.
#[test]
fn an_error_with_direct_access_is_that_of_a_sync_only_for_a_durable_write() {
    for (op, flags) in [(Op::Write, Flags::default()), (Op::Read, FUA)] {
        let direct = queue(&Arc::new(Abilities::new(false, true, false)), 512);
        let mut failed = task(op, flags, Step::Transfer, 512);
        assert_eq!(direct.advance(&mut failed, -libc::EIO), Err(IoError::Broken));
        assert!(!direct.syncer.has_failed(), "{op:?}");
    }
}
