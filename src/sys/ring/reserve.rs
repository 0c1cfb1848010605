//! Rings that are made in advance, for a process that may make none later.
//!
//! seccomp cannot check which operations a new ring permits. So a confined process must not call
//! io_uring_setup(2). It makes its restricted rings before, disabled and not mapped, and a thread enables one
//! when it needs it. From then on the kernel accepts the ring only from this thread (SINGLE_ISSUER), so the
//! thread keeps an unused ring for its next use.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use io_uring::{IoUring, Parameters};

use super::setup::{FILE_SLOTS, build, restrictions};

/// The rings of this process that no thread has taken; `None`: threads make their rings.
static RESERVE: Mutex<Option<Reserve>> = Mutex::new(None);

thread_local! {
    /// The ring that this thread has enabled and does not use.
    static SPARE: RefCell<Option<IoUring>> = const { RefCell::new(None) };
}

struct Reserve {
    entries: u32,
    rings: Vec<(OwnedFd, Parameters)>,
}

/// Makes `count` rings for at most `entries` operations in flight each. From now on, [`super::Ring::new`] takes
/// one of them, and makes none. A thread gets its ring again after it has dropped it, so each thread must have
/// one ring at a time, and a thread that ends takes its ring along.
///
/// # Errors
/// Returns the errors of [`super::Ring::new`], and `Unsupported` if the kernel has no restrictions (before
/// 5.10).
pub fn reserve(count: usize, entries: u32) -> io::Result<()> {
    let rings = (0..count).map(|_| prepared(entries)).collect::<io::Result<_>>()?;
    *lock() = Some(Reserve { entries, rings });
    Ok(())
}

/// Returns whether rings were reserved.
pub fn is_reserved() -> bool {
    lock().is_some()
}

/// Returns whether rings were reserved and all of them are taken.
pub fn is_exhausted() -> bool {
    lock().as_ref().is_some_and(|reserve| reserve.rings.is_empty())
}

/// Takes the spare ring of this thread, or enables one of the reserve. Returns `None` if nothing was reserved.
///
/// # Errors
/// Returns `EMFILE` if all rings are taken, and `InvalidInput` for more entries than they have.
pub(super) fn take(entries: u32) -> io::Result<Option<IoUring>> {
    let mut reserve = lock();
    let Some(reserve) = reserve.as_mut() else { return Ok(None) };
    if entries > reserve.entries {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if let Some(spare) = SPARE.take() {
        return Ok(Some(spare));
    }
    let exhausted = || io::Error::from_raw_os_error(libc::EMFILE);
    let (ring, parameters) = reserve.rings.pop().ok_or_else(exhausted)?;
    // SAFETY: the descriptor is that of a ring that was made with these parameters. Ownership passes on.
    let uring = unsafe { IoUring::from_fd(ring.into_raw_fd(), parameters) }?;
    uring.submitter().register_enable_rings()?;
    Ok(Some(uring))
}

/// Keeps a ring without operations in flight for the next [`take`] of this thread. Without a reserve, closes
/// it.
pub(super) fn give_back(uring: IoUring) {
    const NO_FILES: [i32; FILE_SLOTS as usize] = [-1; FILE_SLOTS as usize];
    if is_reserved() && uring.submitter().register_files_update(0, &NO_FILES).is_ok() {
        // It fails only while the thread ends.
        let _ = SPARE.try_with(|spare| spare.replace(Some(uring)));
    }
}

/// Makes a disabled ring with its restrictions. Its memory is mapped by the thread that takes it.
fn prepared(entries: u32) -> io::Result<(OwnedFd, Parameters)> {
    let (uring, restricted) = build(entries)?;
    if !restricted {
        return Err(io::ErrorKind::Unsupported.into());
    }
    uring.submitter().register_files_sparse(FILE_SLOTS)?;
    uring.submitter().register_restrictions(&mut restrictions())?;
    // SAFETY: the descriptor is open as long as `uring` lives, which is longer than this borrow.
    let descriptor = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) };
    Ok((descriptor.try_clone_to_owned()?, uring.params().clone()))
}

fn lock() -> MutexGuard<'static, Option<Reserve>> {
    RESERVE.lock().unwrap_or_else(PoisonError::into_inner)
}
