//! Address space in which parts of files are mapped, so that bytes that the page cache has are copied without a system
//! call.
//!
//! A page fault waits for the disk if the page cache no longer has the page. mincore(2) does not help: its answer is that
//! every page is there if the user of the process may not write to the file (`can_do_mincore` in mm/mincore.c). So a page is
//! copied from the window only if it was proved in the last minute that the page cache has it: by a read of the page, or
//! because the page cache had all pages of the part. If a fault has read the disk nevertheless, all proofs end, after one copy
//! that took long, or after a few others; and for a second there are no new ones.
//!
//! A file may become shorter, and its disk may fail. The kernel then sends SIGBUS to the thread that copies. The handler puts
//! zeroes in place of the part, so that the copy ends, and forgets the part before, so that the copy counts as failed. But what
//! a page has behind the end of the file reads as zeroes without a signal: the caller compares with the length of the file.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

use crate::page_cache::cached_pages;
use crate::shared::foreign_copy;
use crate::words::Words;

/// The length of a part in bytes.
pub const PART_BYTES: usize = 512 << 10;

/// The parts that are mapped at the same time. The page tables of all of them take 16 MiB.
const PARTS: usize = 16 << 10;

const WINDOW_BYTES: usize = PARTS * PART_BYTES;

/// What a proof is about, in bytes. Pages of the kernel are not shorter.
const BLOCK_BYTES: usize = 4096;

/// The blocks of a part.
const PART_BLOCKS: u64 = (PART_BYTES / BLOCK_BYTES) as u64;

/// The length of a line of the processor's cache, and how many are loaded ahead. The processor then loads the next ones itself.
const LINE_BYTES: usize = 64;
const LINES: usize = 4;

/// How long a proof is valid, in milliseconds.
const PROOF_MS: u64 = 60_000;

/// The time without new proofs after all have ended, in milliseconds. A volume that is larger than the memory would have faults
/// all the time otherwise.
const PAUSE_MS: u64 = 1_000;

/// A copy that takes longer, in milliseconds, has waited for the disk. The clock may have steps of 10 ms.
const SLOW_MS: u64 = 20;

/// The copies of a thread between two looks at the number of its page faults that have read the disk.
const COPIES: u32 = 16;

/// In place of the number of a part: the place is not used again.
const LOST: u64 = u64::MAX;

/// The windows that a process may have.
const MAX_WINDOWS: usize = 64;

/// The parts that all windows of a process may have mapped. Linux allows a process 65,530 mappings (vm.max_map_count).
const MAX_MAPPED: usize = 32 << 10;

/// The windows of the process.
static WINDOWS: [Registered; MAX_WINDOWS] = [const { Registered::none() }; MAX_WINDOWS];

/// What the handler of SIGBUS knows of a window.
struct Registered {
    /// The first address; 0 if there is no window.
    base: AtomicUsize,
    places: AtomicPtr<Place>,
}

/// The parts that are mapped, in all windows.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// What SIGBUS did before there was a window.
static PREVIOUS: OnceLock<SigAction> = OnceLock::new();

thread_local! {
    /// The copies since the last look at the page faults, and how many had read the disk by then.
    static FAULTS: Cell<(u32, i64)> = const { Cell::new((0, i64::MAX)) };
}

/// A window. All methods may be called by several threads at the same time.
#[derive(Debug)]
pub struct FileWindow {
    base: NonNull<u8>,
    /// A [`Place`] for each part. They take memory from their first use on.
    places: Words,
    /// Held while a place changes.
    change: Mutex<()>,
    /// Proofs up to this time have ended.
    ended_ms: AtomicU64,
}

/// A place for a part, with the proofs for its blocks. It consists of words.
#[derive(Debug)]
#[repr(C)]
struct Place {
    /// The number of the part, plus 1; 0 if no part is mapped here.
    part: AtomicU64,
    /// When the first of the proofs was given; 0 if nothing was ever mapped here.
    since_ms: AtomicU64,
    /// A bit for each block.
    proofs: [AtomicU64; 2],
}

// SAFETY: the mapping lives as long as the value and is not tied to a thread, and copies from it tolerate changes.
unsafe impl Send for FileWindow {}
// SAFETY: as above.
unsafe impl Sync for FileWindow {}

impl FileWindow {
    /// Reserves the address space of a window, 8 GiB, and prepares the process for SIGBUS.
    ///
    /// # Errors
    /// Returns `Unsupported` if the pages of the kernel have another length than blocks: a proof is about a block, and a fault
    /// about a page. Returns `ENOMEM` if the address space is limited, and `ENOSPC` if the process has 64 windows.
    pub fn new() -> io::Result<Self> {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().map(usize::try_from);
        if page != Some(Ok(BLOCK_BYTES)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let previous = || {
            let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK | SaFlags::SA_RESTART;
            let action = SigAction::new(SigHandler::SigAction(on_sigbus), flags, SigSet::empty());
            // SAFETY: the handler only makes system calls and reads atomics.
            let previous = unsafe { sigaction(Signal::SIGBUS, &action) };
            previous.unwrap_or_else(|_| default_action())
        };
        PREVIOUS.get_or_init(previous);
        let places = Words::new(PARTS * size_of::<Place>() / size_of::<AtomicU64>())?;
        let length = NonZeroUsize::new(WINDOW_BYTES).expect("a window is not empty");
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }?.cast();
        let window = Self { base, places, change: Mutex::new(()), ended_ms: AtomicU64::new(0) };
        match WINDOWS.iter().any(|entry| entry.take(&window)) {
            true => Ok(window),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// Whether there is a valid proof for `length` bytes of a part from `skip` on.
    pub fn has(&self, part: u64, skip: u64, length: usize) -> bool {
        let place = self.place(part).1;
        blocks(skip, length).is_some_and(|(_, blocks)| {
            place.part.load(Ordering::Acquire) == part + 1
                && place.has(blocks)
                && self.is_valid(place, now_ms())
        })
    }

    /// Has the processor load the first bytes of a part from `skip` on into its cache, and where their page is.
    pub fn prefetch(&self, part: u64, skip: u64) {
        let (index, place) = self.place(part);
        let Some((skip, blocks)) = blocks(skip, LINE_BYTES) else { return };
        if place.part.load(Ordering::Acquire) == part + 1 && place.has(blocks) {
            let source = self.base.as_ptr().wrapping_add(index * PART_BYTES + skip);
            (0..LINES).for_each(|line| crate::prefetch(source.wrapping_add(line * LINE_BYTES)));
        }
    }

    /// Copies the bytes of a part from `skip` on to `target`, if there is a valid proof that the page cache has them.
    /// Returns false otherwise; `target` may have changed then.
    pub fn copy(&self, part: u64, skip: u64, target: &mut [u8]) -> bool {
        let (index, place) = self.place(part);
        let Some((skip, blocks)) = blocks(skip, target.len()) else { return false };
        let began_ms = now_ms();
        if place.part.load(Ordering::Acquire) != part + 1
            || !place.has(blocks)
            || !self.is_valid(place, began_ms)
        {
            return false;
        }
        // SAFETY: `blocks` has checked that the range is in the part, and the mapping of the window cannot overlap an exclusive
        // slice. The part is readable, because it was mapped before its number was stored. Others may change its bytes.
        unsafe {
            let source = self.base.as_ptr().add(index * PART_BYTES + skip);
            foreign_copy(target.as_mut_ptr(), source, target.len());
        }
        self.look_at_faults(began_ms);
        // The bytes were read before it is asked whether they were those of the part.
        fence(Ordering::Acquire);
        place.part.load(Ordering::Acquire) == part + 1
    }

    /// Records that the page cache has `length` bytes of a part from `skip` on, because they were just written or read. If the
    /// page cache has all of the part, this proves all of it. Maps the part, which begins at byte `at` of the file, if its place
    /// is free, or if the proofs of the part there are at least two minutes old.
    pub fn prove(&self, part: u64, file: impl AsFd, at: u64, skip: u64, length: usize) {
        let (index, place) = self.place(part);
        let Some((_, blocks)) = blocks(skip, length) else { return };
        let Ok(_guard) = self.change.try_lock() else { return };
        let now_ms = now_ms();
        if now_ms < self.ended_ms.load(Ordering::Relaxed) + PAUSE_MS {
            return;
        }
        let is_new = place.part.load(Ordering::Acquire) != part + 1;
        if is_new && !self.replace(index, place, &file, at, now_ms) {
            return;
        }
        if is_new || !self.is_valid(place, now_ms) {
            place.proofs.iter().for_each(|proofs| proofs.store(0, Ordering::Relaxed));
            place.since_ms.store(now_ms, Ordering::Relaxed);
        }
        // The handler of SIGBUS may have put zeroes in place of a part that was there. It is not made valid again.
        let number = &place.part;
        if is_new
            && number.compare_exchange(LOST, part + 1, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return;
        }
        let before = place.count();
        place.add(blocks);
        // Rarely, because a part may never be there as a whole.
        let count = place.count();
        let has_all = || cached_pages(&file, at, PART_BYTES as u64) == Some(PART_BLOCKS);
        if count > before && count.is_power_of_two() && has_all() {
            place.add([u64::MAX; 2]);
        }
    }

    /// Ends the proofs for some parts, because the file has new holes there: the page cache does not have them.
    pub fn forget(&self, parts: Range<u64>) {
        let Ok(_guard) = self.change.lock() else { return };
        let count = parts.end.saturating_sub(parts.start).min(PARTS as u64);
        for place in (0..count).map(|number| self.place(parts.start + number).1) {
            // The number of the part that is there is not compared: proofs of another one are given again.
            place.proofs.iter().for_each(|proofs| proofs.store(0, Ordering::Relaxed));
        }
    }

    fn place(&self, part: u64) -> (usize, &Place) {
        let index = usize::try_from(part % PARTS as u64).unwrap_or(0);
        (index, &self.places()[index])
    }

    fn places(&self) -> &[Place] {
        let words = self.places.get();
        // SAFETY: a place consists of words, for which any content is valid, and there are enough for `PARTS` places.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), PARTS) }
    }

    fn is_valid(&self, place: &Place, now_ms: u64) -> bool {
        let since_ms = place.since_ms.load(Ordering::Relaxed);
        since_ms > self.ended_ms.load(Ordering::Relaxed)
            && now_ms.saturating_sub(since_ms) < PROOF_MS
    }

    /// Ends all proofs if a page fault of this thread has read the disk. `began_ms` is when the last copy began.
    fn look_at_faults(&self, began_ms: u64) {
        let now_ms = now_ms();
        if now_ms.saturating_sub(began_ms) > SLOW_MS {
            self.ended_ms.store(now_ms, Ordering::Relaxed);
        }
        let (copies, before) = FAULTS.get();
        if copies < COPIES && before < i64::MAX {
            return FAULTS.set((copies + 1, before));
        }
        let faults =
            getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.major_page_faults());
        if faults > before {
            self.ended_ms.store(now_ms, Ordering::Relaxed);
        }
        FAULTS.set((0, faults));
    }

    /// Maps a part in place of another one, or at a free place. Returns false if that is not possible yet, or never again. The
    /// place has no number afterwards.
    fn replace(&self, index: usize, place: &Place, file: impl AsFd, at: u64, now_ms: u64) -> bool {
        // While a part is read, the age of its proofs is at most their validity. So no thread copies from it now.
        let since_ms = place.since_ms.load(Ordering::Relaxed);
        let is_free = since_ms == 0;
        if !is_free && now_ms.saturating_sub(since_ms) < 2 * PROOF_MS {
            return false;
        }
        if is_free && MAPPED.fetch_add(1, Ordering::Relaxed) >= MAX_MAPPED {
            MAPPED.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        // The kernel may have removed the old mapping when it has no memory for the new one. Others may map something there
        // then.
        let holder = place.part.swap(LOST, Ordering::AcqRel);
        place.since_ms.store(now_ms, Ordering::Relaxed);
        holder != LOST && self.map(index, file, at).is_ok()
    }

    fn map(&self, index: usize, file: impl AsFd, at: u64) -> io::Result<()> {
        let length = NonZeroUsize::new(PART_BYTES).expect("a part is not empty");
        let at = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the range is in the mapping that the window owns. Other threads read it only in `copy`, which
        // tolerates that its bytes change; the kernel replaces a mapping at once.
        unsafe {
            let address = self.base.as_ptr().add(index * PART_BYTES);
            let address = NonZeroUsize::new(address as usize);
            mmap(address, length, ProtFlags::PROT_READ, flags, file, at)?;
        }
        Ok(())
    }
}

impl Place {
    /// Adds proofs.
    fn add(&self, blocks: [u64; 2]) {
        for (proofs, blocks) in self.proofs.iter().zip(blocks) {
            proofs.fetch_or(blocks, Ordering::Relaxed);
        }
    }

    /// The number of proofs.
    fn count(&self) -> u32 {
        self.proofs.iter().map(|proofs| proofs.load(Ordering::Relaxed).count_ones()).sum()
    }

    fn has(&self, blocks: [u64; 2]) -> bool {
        let has =
            |(proofs, blocks): (&AtomicU64, u64)| proofs.load(Ordering::Relaxed) & blocks == blocks;
        self.proofs.iter().zip(blocks).all(has)
    }
}

impl Drop for FileWindow {
    fn drop(&mut self) {
        WINDOWS.iter().for_each(|entry| entry.release(self));
        let is_mapped = |place: &&Place| place.since_ms.load(Ordering::Relaxed) > 0;
        MAPPED.fetch_sub(self.places().iter().filter(is_mapped).count(), Ordering::Relaxed);
        if self.places().iter().any(|place| place.part.load(Ordering::Acquire) == LOST) {
            return;
        }
        // SAFETY: mapped in `new` with this length, and no copy from it is in progress.
        let unmapped = unsafe { munmap(self.base.cast(), WINDOW_BYTES) };
        debug_assert!(unmapped.is_ok(), "the arguments are those of the mapping");
    }
}

impl Registered {
    const fn none() -> Self {
        Self { base: AtomicUsize::new(0), places: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Registers a window, unless there is another one here. Nothing is read from it yet.
    fn take(&self, window: &FileWindow) -> bool {
        let base = window.base.as_ptr() as usize;
        let is_free =
            self.base.compare_exchange(0, base, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if is_free {
            self.places.store(window.places().as_ptr().cast_mut(), Ordering::Release);
        }
        is_free
    }

    /// Ends the registration of a window from which nothing is read any more.
    fn release(&self, window: &FileWindow) {
        let base = window.base.as_ptr() as usize;
        let _ = self.base.compare_exchange(base, 0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Puts zeroes in place of the part at an address, if it is in this window. Returns whether it has done so.
    fn replace(&self, address: usize) -> bool {
        let base = self.base.load(Ordering::Acquire);
        if base == 0 || !(base..base + WINDOW_BYTES).contains(&address) {
            return false;
        }
        let index = (address - base) / PART_BYTES;
        // SAFETY: a thread is copying from the window, so its places exist. The index is below `PARTS`.
        let place = unsafe { &*self.places.load(Ordering::Acquire).add(index) };
        // Before the zeroes are there, so that each copy of them counts as failed.
        place.part.store(0, Ordering::SeqCst);
        let part = (base + index * PART_BYTES) as *mut libc::c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the range is in the mapping of the window.
        let mapped = unsafe { libc::mmap(part, PART_BYTES, libc::PROT_READ, flags, -1, 0) };
        mapped != libc::MAP_FAILED
    }
}

/// Lets a copy from a window end that got SIGBUS. The access is repeated when this returns.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO, the kernel passes a valid pointer.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // The signals of kill(2) have no address.
    let is_replaced = code > 0 && WINDOWS.iter().any(|window| window.replace(address));
    if !is_replaced {
        let previous = PREVIOUS.get().copied().unwrap_or_else(default_action);
        // SAFETY: the action was that of the process before.
        let _ = unsafe { sigaction(Signal::SIGBUS, &previous) };
        // An access is repeated when this returns, and then gets the signal again.
        if code <= 0 {
            let _ = raise(Signal::SIGBUS);
        }
    }
}

fn default_action() -> SigAction {
    SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty())
}

/// Returns `skip`, and the bits of the blocks of a range; `None` if the range is not in a part.
fn blocks(skip: u64, length: usize) -> Option<(usize, [u64; 2])> {
    let skip = usize::try_from(skip).ok()?;
    let end = skip.checked_add(length).filter(|end| *end <= PART_BYTES && length > 0)?;
    let (first, end) = (skip / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
    let bits = (u128::MAX >> (128 - (end - first))) << first;
    let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or(0);
    Some((skip, [half(bits), half(bits >> 64)]))
}

/// The time since two minutes before the system started, so that no proof is too old to have a time, in milliseconds. It has the
/// resolution of the kernel's timer.
fn now_ms() -> u64 {
    let now =
        clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(0).saturating_add(2 * PROOF_MS)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{Advice, fadvise};

    use super::*;

    const LAST: u64 = (PART_BYTES - BLOCK_BYTES) as u64;

    /// A file of two parts on the disk of the test, with other bytes in each block. The last block of each part is a hole, so
    /// the page cache does not have it.
    fn file() -> File {
        let executable = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(executable.parent().unwrap()).unwrap();
        let blocks = PART_BYTES / BLOCK_BYTES;
        for part in 0..2 {
            let numbers = (1..blocks).map(|block| (block + part * blocks).to_le_bytes()[0]);
            let bytes: Vec<u8> = numbers.flat_map(|number| [number; BLOCK_BYTES]).collect();
            file.write_all_at(&bytes, (part * PART_BYTES) as u64).unwrap();
        }
        file.set_len(2 * PART_BYTES as u64).unwrap();
        file.sync_all().unwrap();
        file
    }

    fn copied(window: &FileWindow, part: u64, skip: u64, length: usize) -> Option<Vec<u8>> {
        let mut target = vec![0xee; length];
        window.copy(part, skip, &mut target).then_some(target)
    }

    #[test]
    fn blocks_are_copied_once_they_are_proved() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        assert_eq!(copied(&window, 5, 0, 100), None);
        window.prove(5, &file, PART_BYTES as u64, 8192, 4097);
        assert_eq!(copied(&window, 5, 8192, 4096), Some(vec![131; 4096]));
        assert_eq!(copied(&window, 5, 12_288, 4096), Some(vec![132; 4096]));
        assert_eq!(copied(&window, 5, 12_287, 2), Some(vec![131, 132]));
        let not_proved = [(8191, 2), (16_383, 2), (PART_BYTES as u64 - 1, 2), (u64::MAX, 1)];
        for (skip, length) in not_proved {
            assert_eq!(copied(&window, 5, skip, length), None, "{skip} {length}");
        }
        window.prove(5, &file, PART_BYTES as u64, 0, 1);
        file.write_all_at(&[9; 4096], PART_BYTES as u64).unwrap();
        assert_eq!(copied(&window, 5, 0, 1), Some(vec![9]), "a write to the file is seen");
    }

    #[test]
    fn a_part_is_proved_as_a_whole_if_the_page_cache_has_all_of_it() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        if cached_pages(&file, 0, 4096) != Some(1) {
            return;
        }
        window.prove(0, &file, 0, 0, 4096);
        assert!(!window.has(0, 4096, 1), "its last block is not there");
        file.write_all_at(&[8; BLOCK_BYTES], LAST).unwrap();
        window.prove(0, &file, 0, 0, 4096);
        assert!(!window.has(0, 4096, 1), "a proof that was there before is no reason to ask");
        window.prove(0, &file, 0, 4096, 4096);
        assert!(window.has(0, 0, PART_BYTES));
        assert_eq!(copied(&window, 0, LAST, BLOCK_BYTES), Some(vec![8; BLOCK_BYTES]));
        assert!(!window.has(1, 0, 1), "another part");
    }

    #[test]
    fn parts_with_new_holes_have_no_proofs() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        let prove_both = || [0, 1].map(|part| window.prove(part, &file, 0, 0, 4096));
        prove_both();
        window.forget(0..1);
        assert_eq!([0, 1].map(|part| window.has(part, 0, 1)), [false, true]);
        prove_both();
        assert_eq!([0, 1].map(|part| window.has(part, 0, 1)), [true, true]);
        window.forget(1..u64::MAX);
        assert_eq!([0, 1].map(|part| window.has(part, 0, 1)), [false, false], "all places");
    }

    #[test]
    fn a_place_changes_its_part_when_the_old_one_is_not_read_any_more() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        let (one, other) = (1, 1 + PARTS as u64);
        window.prove(one, &file, 0, 0, 4096);
        window.prove(other, &file, PART_BYTES as u64, 0, 4096);
        assert_eq!(copied(&window, other, 0, 1), None, "the place is taken");
        let place = window.place(one).1;
        place.since_ms.fetch_sub(PROOF_MS, Ordering::Relaxed);
        assert_eq!(copied(&window, one, 0, 1), None, "the proof is old");
        window.prove(one, &file, 0, 4096, 4096);
        assert_eq!(copied(&window, one, 0, 1), None, "it was not proved again");
        assert_eq!(copied(&window, one, 4096, 1), Some(vec![2]));
        place.since_ms.fetch_sub(2 * PROOF_MS, Ordering::Relaxed);
        window.prove(other, &file, PART_BYTES as u64, 0, 4096);
        assert_eq!(copied(&window, one, 4096, 1), None);
        assert_eq!(copied(&window, other, 0, 1), Some(vec![129]));
        place.part.store(LOST, Ordering::Relaxed);
        place.since_ms.fetch_sub(2 * PROOF_MS, Ordering::Relaxed);
        window.prove(other, &file, 0, 0, 4096);
        assert_eq!(copied(&window, other, 0, 1), None);
    }

    #[test]
    fn a_copy_from_a_file_that_became_shorter_fails() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        window.prove(0, &file, 0, 0, PART_BYTES);
        assert_eq!(copied(&window, 0, 4096, 1), Some(vec![2]));
        file.set_len(4096).unwrap();
        assert_eq!(copied(&window, 0, 0, 1), Some(vec![1]));
        assert_eq!(copied(&window, 0, 4096, 8192), None, "no signal ends the test");
        assert!(!window.has(0, 0, 1), "the part is forgotten");
        file.write_all_at(&[7; 8192], 0).unwrap();
        window.prove(0, &file, 0, 0, 8192);
        assert_eq!(copied(&window, 0, 0, 1), None, "a thread may still copy from it");
        window.place(0).1.since_ms.fetch_sub(2 * PROOF_MS, Ordering::Relaxed);
        window.prove(0, &file, 0, 0, 8192);
        assert_eq!(copied(&window, 0, 4096, 4096), Some(vec![7; 4096]));
    }

    /// Each copy of another thread fails as well, or has the bytes of the file.
    #[test]
    fn no_thread_copies_zeroes_of_a_file_that_becomes_shorter() {
        for _ in 0..50 {
            let (window, file) = (FileWindow::new().unwrap(), file());
            window.prove(0, &file, 0, 0, PART_BYTES);
            std::thread::scope(|scope| {
                for thread in 0..3_usize {
                    let window = &window;
                    scope.spawn(move || {
                        for number in 0..2000 {
                            let block = (number + thread * 40) % 120;
                            let bytes =
                                copied(window, 0, (block * BLOCK_BYTES) as u64, BLOCK_BYTES);
                            let right = u8::try_from(block + 1).unwrap();
                            assert!(bytes.is_none_or(|bytes| bytes == [right; BLOCK_BYTES]));
                        }
                    });
                }
                file.set_len(0).unwrap();
            });
        }
    }

    #[test]
    fn a_fault_that_reads_the_disk_ends_all_proofs() {
        let (window, file, other) = (FileWindow::new().unwrap(), file(), file());
        let copies = |count: u32| (0..count).all(|_| copied(&window, 1, 0, 1).is_some());
        window.prove(1, &file, 0, 0, 4096);
        assert!(copies(COPIES + 1), "this also counts the faults of the thread until now");
        window.prove(0, &other, 0, 0, 4096);
        fadvise(&other, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(copied(&window, 0, 0, 1), Some(vec![1]));
        assert!(!copies(COPIES + 1));
        window.prove(1, &file, 0, 0, 4096);
        assert!(!copies(1), "it is too early for proofs");
        assert_eq!(copied(&window, 0, 0, 1), None);
        window.ended_ms.fetch_sub(PAUSE_MS, Ordering::Relaxed);
        window.prove(1, &file, 0, 0, 4096);
        assert!(copies(COPIES + 1));
    }
}
