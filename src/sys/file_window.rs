//! Address space in which parts of files are mapped, so that bytes that the page cache has are copied without a system
//! call.
//!
//! A page fault waits for the disk if the page cache no longer has the page. mincore(2) does not help: its answer is that
//! every page is there if the user of the process may not write to the file (`can_do_mincore` in mm/mincore.c). So a page is
//! copied from the window only if a write, or a read with `RWF_NOWAIT`, has proved in the last minute that the page cache has
//! it. If a fault has read the disk nevertheless, all proofs end: after one copy that took long, or after a few others.
//!
//! A file may become shorter, and its disk may fail. The kernel then sends SIGBUS to the thread that copies, and the part
//! reads as zeroes from then on. So a caller must know the right bytes, for example by their hash.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

use crate::shared::foreign_copy;

/// The length of a part in bytes.
pub const PART_BYTES: usize = 512 << 10;

/// The parts that are mapped at the same time. The page tables of all of them take 8 MiB.
const PARTS: usize = 8192;

const WINDOW_BYTES: usize = PARTS * PART_BYTES;

/// What a proof is about, in bytes. Pages of the kernel are not shorter.
const BLOCK_BYTES: usize = 4096;

/// The length of a line of the processor's cache, and how many are loaded ahead. The processor then loads the next ones itself.
const LINE_BYTES: usize = 64;
const LINES: usize = 4;

/// How long a proof is valid, in milliseconds.
const PROOF_MS: u64 = 60_000;

/// A copy that takes longer, in milliseconds, has waited for the disk. The clock may have steps of 10 ms.
const SLOW_MS: u64 = 20;

/// The copies of a thread between two looks at the number of its page faults that have read the disk.
const COPIES: u32 = 16;

/// In place of the number of a part: the place is not used again.
const LOST: u64 = u64::MAX;

/// The windows that a process may have. A full one has up to 16,384 of the 65,530 mappings that Linux allows
/// (vm.max_map_count).
const MAX_WINDOWS: usize = 4;

/// The first addresses of all windows of the process; 0 for none.
static WINDOWS: [AtomicUsize; MAX_WINDOWS] = [const { AtomicUsize::new(0) }; MAX_WINDOWS];

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
    places: Vec<Place>,
    /// Held while a place changes.
    change: Mutex<()>,
    /// Proofs up to this time have ended.
    ended_ms: AtomicU64,
}

/// A place for a part, with the proofs for its blocks.
#[derive(Debug, Default)]
struct Place {
    /// The number of the part, plus 1; 0 if no part is mapped here.
    part: AtomicU64,
    /// When the first of the proofs was given.
    since_ms: AtomicU64,
    /// A bit for each block.
    proofs: [AtomicU64; 2],
}

// SAFETY: the mapping lives as long as the value and is not tied to a thread, and copies from it tolerate changes.
unsafe impl Send for FileWindow {}
// SAFETY: as above.
unsafe impl Sync for FileWindow {}

impl FileWindow {
    /// Reserves the address space of a window, 4 GiB, and prepares the process for SIGBUS.
    ///
    /// # Errors
    /// Returns `Unsupported` if the pages of the kernel have another length than blocks: a proof is about a block, and a fault
    /// about a page. Returns `ENOMEM` if the address space is limited, and `ENOSPC` if the process has four windows.
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
        let length = NonZeroUsize::new(WINDOW_BYTES).expect("a window is not empty");
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }?.cast();
        let places = (0..PARTS).map(|_| Place::default()).collect();
        let window = Self { base, places, change: Mutex::new(()), ended_ms: AtomicU64::new(0) };
        let address = base.as_ptr() as usize;
        let is_free = |entry: &&AtomicUsize| {
            entry.compare_exchange(0, address, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        match WINDOWS.iter().find(is_free) {
            Some(_) => Ok(window),
            None => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
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
    /// Returns false otherwise. The bytes may be wrong.
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
        true
    }

    /// Records that the page cache has `length` bytes of a part from `skip` on, because they were just written, or a read
    /// with `RWF_NOWAIT` returned them. Maps the part, which begins at byte `at` of the file, if its place is free, or if the proofs
    /// of the part there are at least two minutes old.
    pub fn prove(&self, part: u64, file: impl AsFd, at: u64, skip: u64, length: usize) {
        let (index, place) = self.place(part);
        let Some((_, blocks)) = blocks(skip, length) else { return };
        let Ok(_guard) = self.change.try_lock() else { return };
        let now_ms = now_ms();
        let holder = place.part.load(Ordering::Acquire);
        if holder != part + 1 {
            // While a part is read, the age of its proofs is at most their validity. So no thread copies from it now.
            let since_ms = place.since_ms.load(Ordering::Relaxed);
            if since_ms > 0 && now_ms.saturating_sub(since_ms) < 2 * PROOF_MS {
                return;
            }
            // The kernel may have removed the old mapping when it has no memory for the new one. Others may map something there
            // then.
            place.part.store(LOST, Ordering::Release);
            if holder == LOST || self.map(index, file, at).is_err() {
                return;
            }
        }
        if holder != part + 1 || !self.is_valid(place, now_ms) {
            place.proofs.iter().for_each(|proofs| proofs.store(0, Ordering::Relaxed));
            place.since_ms.store(now_ms, Ordering::Relaxed);
            place.part.store(part + 1, Ordering::Release);
        }
        for (proofs, blocks) in place.proofs.iter().zip(blocks) {
            proofs.fetch_or(blocks, Ordering::Relaxed);
        }
    }

    /// Forgets the mapping of a part that had wrong bytes where the file has the right ones. It can be mapped again two minutes
    /// after the first of its proofs.
    pub fn forget(&self, part: u64) {
        let (_, place) = self.place(part);
        let _ = place.part.compare_exchange(part + 1, 0, Ordering::AcqRel, Ordering::Acquire);
    }

    fn place(&self, part: u64) -> (usize, &Place) {
        let index = usize::try_from(part % PARTS as u64).unwrap_or(0);
        (index, &self.places[index])
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

    fn map(&self, index: usize, file: impl AsFd, at: u64) -> io::Result<()> {
        let length = NonZeroUsize::new(PART_BYTES).expect("a part is not empty");
        let at = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the range is in the mapping that the window owns. Other threads read it only in `copy`, which
        // tolerates that its bytes change; the kernel replaces a mapping at once.
        unsafe {
            let address = self.base.as_ptr().add(index * PART_BYTES);
            let address = NonZeroUsize::new(address as usize);
            let mapped = mmap(address, length, ProtFlags::PROT_READ, flags, file, at)?;
            // If a fault must read the disk, it reads no other pages.
            let _ = madvise(mapped, PART_BYTES, MmapAdvise::MADV_RANDOM);
        }
        Ok(())
    }
}

impl Place {
    fn has(&self, blocks: [u64; 2]) -> bool {
        let has =
            |(proofs, blocks): (&AtomicU64, u64)| proofs.load(Ordering::Relaxed) & blocks == blocks;
        self.proofs.iter().zip(blocks).all(has)
    }
}

impl Drop for FileWindow {
    fn drop(&mut self) {
        let address = self.base.as_ptr() as usize;
        for entry in &WINDOWS {
            let _ = entry.compare_exchange(address, 0, Ordering::AcqRel, Ordering::Acquire);
        }
        if self.places.iter().any(|place| place.part.load(Ordering::Acquire) == LOST) {
            return;
        }
        // SAFETY: mapped in `new` with this length, and no copy from it is in progress.
        let unmapped = unsafe { munmap(self.base.cast(), WINDOW_BYTES) };
        debug_assert!(unmapped.is_ok(), "the arguments are those of the mapping");
    }
}

/// Makes the part of a window at which a thread got SIGBUS read as zeroes. The access is repeated when this returns.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO, the kernel passes a valid pointer.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let is_in = |base: usize| base != 0 && (base..base + WINDOW_BYTES).contains(&address);
    let mut windows = WINDOWS.iter().map(|base| base.load(Ordering::Acquire));
    // The signals of kill(2) have no address.
    let window = windows.find(|base| code > 0 && is_in(*base));
    let is_replaced = window.is_some_and(|base| {
        let part = base + (address - base) / PART_BYTES * PART_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the range is in the mapping of a window, from which a thread is copying.
        let mapped =
            unsafe { libc::mmap(part as *mut _, PART_BYTES, libc::PROT_READ, flags, -1, 0) };
        mapped != libc::MAP_FAILED
    });
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

    /// A file of two parts on the disk of the test, with other bytes in each block.
    fn file() -> File {
        let executable = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(executable.parent().unwrap()).unwrap();
        let blocks = 2 * PART_BYTES / BLOCK_BYTES;
        let bytes: Vec<u8> =
            (1..=blocks).flat_map(|block| [block.to_le_bytes()[0]; BLOCK_BYTES]).collect();
        file.write_all_at(&bytes, 0).unwrap();
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
        window.prove(5, &file, PART_BYTES as u64, 0, PART_BYTES);
        assert_eq!(copied(&window, 5, PART_BYTES as u64 - 1, 1), Some(vec![0]));
        file.write_all_at(&[9; 4096], PART_BYTES as u64).unwrap();
        assert_eq!(copied(&window, 5, 0, 1), Some(vec![9]), "a write to the file is seen");
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
    fn a_file_that_becomes_shorter_reads_as_zeroes_until_the_part_is_mapped_again() {
        let (window, file) = (FileWindow::new().unwrap(), file());
        window.prove(0, &file, 0, 0, PART_BYTES);
        assert_eq!(copied(&window, 0, 4096, 1), Some(vec![2]));
        file.set_len(4096).unwrap();
        assert_eq!(copied(&window, 0, 0, 1), Some(vec![1]));
        assert_eq!(copied(&window, 0, 4096, 8192), Some(vec![0; 8192]), "no signal ends the test");
        file.write_all_at(&[7; 8192], 0).unwrap();
        assert_eq!(copied(&window, 0, 0, 1), Some(vec![0]));
        window.forget(1);
        window.prove(0, &file, 0, 0, 4096);
        assert_eq!(copied(&window, 0, 0, 1), Some(vec![0]));
        window.forget(0);
        window.prove(0, &file, 0, 0, 8192);
        assert_eq!(copied(&window, 0, 0, 1), None, "a thread may still copy from it");
        window.place(0).1.since_ms.fetch_sub(2 * PROOF_MS, Ordering::Relaxed);
        window.prove(0, &file, 0, 0, 8192);
        assert_eq!(copied(&window, 0, 4096, 4096), Some(vec![7; 4096]));
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
        // A proof of the same millisecond has ended as well.
        let ended_ms = now_ms();
        while now_ms() == ended_ms {
            std::thread::yield_now();
        }
        window.prove(1, &file, 0, 0, 4096);
        assert!(copies(COPIES + 1));
        assert_eq!(copied(&window, 0, 0, 1), None);
    }
}
