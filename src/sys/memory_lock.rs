//! Locks the memory of a process, so that the kernel does not swap it out.

use std::io;

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall, munlockall};

/// Locks the current mappings of this process; each page is locked from its first use on. Later mappings,
/// stacks, and the address space that the allocator has reserved are not locked.
///
/// # Errors
/// Returns `EPERM` or `ENOMEM` if RLIMIT_MEMLOCK forbids it and CAP_IPC_LOCK is missing.
pub fn lock_touched_memory() -> io::Result<()> {
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT))?;
    unlock_reserves().inspect_err(|_| {
        // The first error is returned, not that of the cleanup.
        let _ = munlockall();
    })
}

/// From this length on, in bytes, a mapping without a file counts as reserved address space.
const RESERVE_LEN: usize = 1 << 20;

/// Unlocks stacks and the allocator's reserved address space.
///
/// A locked stack grows only up to RLIMIT_MEMLOCK (mm/mmap.c, acct_stack_growth), and all locked memory
/// counts towards that limit. Once CAP_IPC_LOCK is dropped, a growing stack would end in SIGSEGV. The
/// allocator reserves address space one GiB at a time; it could never return touched pages of it to the
/// system, because MADV_DONTNEED fails on locked pages.
fn unlock_reserves() -> io::Result<()> {
    for line in std::fs::read_to_string("/proc/self/maps")?.lines() {
        let Some((start, end)) = reserve(line) else { continue };
        // SAFETY: unlocking changes no content and no mapping.
        let result = unsafe { libc::munlock(start as *const libc::c_void, end - start) };
        Errno::result(result)?;
    }
    Ok(())
}

/// Returns the address range of a line of /proc/self/maps (proc_pid_maps(5)), if it is a stack or reserved
/// address space.
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
    use std::process::Command;

    use super::*;

    #[test]
    fn stacks_and_reserved_ranges_are_recognized() {
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

    /// Set in the process that runs only this test: threads of other tests change the mappings meanwhile.
    const ALONE: &str = "CLEAT_TEST_ALONE";

    #[test]
    fn code_is_locked_and_stacks_and_reserves_are_not() {
        if std::env::var_os(ALONE).is_none() {
            let mut test = Command::new(std::env::current_exe().unwrap());
            test.args([
                "--exact",
                "memory_lock::tests::code_is_locked_and_stacks_and_reserves_are_not",
            ]);
            let output = test.env(ALONE, "1").output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
            return;
        }
        if let Err(error) = lock_touched_memory() {
            // The test runs without the privilege.
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
        assert!(reserves.len() > 1, "the stack of this thread counts as well");
        assert!(!reserves.iter().any(|line| locked(line)));
    }
}
