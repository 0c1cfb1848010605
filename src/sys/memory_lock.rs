//! Keeps the memory of a process from being swapped out.

use std::io;

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall, munlockall};

/// Keeps what is mapped now in memory, page by page from its first use on; memory that is mapped
/// later is not concerned, nor are stacks and the allocator's reserves.
///
/// # Errors
/// EPERM or ENOMEM where RLIMIT_MEMLOCK forbids it and CAP_IPC_LOCK is missing.
pub fn lock_touched_memory() -> io::Result<()> {
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT))?;
    unlock_reserves().inspect_err(|_| {
        // The caller learns of the first failure.
        let _ = munlockall();
    })
}

/// From this length on, in bytes, a mapping without a file is taken for a reserve of address space.
const RESERVE_LEN: usize = 1 << 20;

/// A locked stack grows only as far as RLIMIT_MEMLOCK allows (mm/mmap.c, acct_stack_growth), and all
/// that is locked counts. Once CAP_IPC_LOCK is gone, growing ends in SIGSEGV. What the allocator has
/// reserved, a GiB at a time, it could never give back once it was touched: MADV_DONTNEED fails on locked
/// pages.
fn unlock_reserves() -> io::Result<()> {
    for line in std::fs::read_to_string("/proc/self/maps")?.lines() {
        let Some((start, end)) = reserve(line) else { continue };
        // SAFETY: unlocking changes no content and no mapping.
        let result = unsafe { libc::munlock(start as *const libc::c_void, end - start) };
        Errno::result(result)?;
    }
    Ok(())
}

/// The range of a line of /proc/self/maps (proc_pid_maps(5)), if it is a reserve.
fn reserve(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let (start, end) = (address(start)?, address(end)?);
    let inode = fields.nth(3)?;
    let name = fields.next().unwrap_or_default();
    let anonymous = inode == "0" && (name.is_empty() || name.starts_with("[anon:"));
    (name == "[stack]" || anonymous && end - start >= RESERVE_LEN).then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserves_are_told_from_what_the_process_needs() {
        let reserved = |line: &str| reserve(line).is_some();
        assert!(reserved("7ffc0000-7ffc1000 rw-p 00000000 00:00 0    [stack]"));
        assert!(reserved("7f0000000000-7f0040000000 rw-p 00000000 00:00 0 "));
        assert!(reserved("7f0000000000-7f0040000000 rw-p 00000000 00:00 0 [anon:mimalloc]"));
        assert!(!reserved("7f0000000000-7f0000010000 rw-p 00000000 00:00 0 "));
        assert!(!reserved(
            "7f0000000000-7f0040000000 r-xp 00000000 fe:00 1234    /usr/lib/librbd.so.1"
        ));
        assert!(!reserved("7f0000000000-7f0040000000 r-xp 00000000 00:00 0    [vdso]"));
        assert!(!reserved("nothing of the kind"));
    }

    #[test]
    fn code_is_locked_and_the_stack_is_free_to_grow() {
        if let Err(error) = lock_touched_memory() {
            // Unprivileged.
            assert!(matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOMEM)), "{error}");
            return;
        }
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        munlockall().unwrap();
        let locked = |name: &str| {
            let start = maps.find(name).unwrap();
            let flags = maps[start..].lines().find(|line| line.starts_with("VmFlags:")).unwrap();
            flags.split_whitespace().any(|flag| flag == "lo")
        };
        assert!(locked("libc.so"));
        assert!(!locked("[stack]"));
        let reserves: Vec<&str> = maps.lines().filter(|line| reserve(line).is_some()).collect();
        assert!(reserves.len() > 1, "of this thread, too");
        assert!(!reserves.iter().any(|line| locked(line)));
    }
}
