//! Limits the memory of a process.
//!
//! RLIMIT_DATA works in every environment and needs no privilege, and no process without CAP_SYS_RESOURCE can
//! raise it again. The alternatives: RLIMIT_AS also counts the mapped files and memory files of a volume;
//! `memory.max` of a control group for each process needs a delegated group, which systemd's units without
//! `Delegate=` and most pods do not have.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Limits the private writable memory of this process: the heap, buffers and the stacks of threads, with
/// reserved address space. An allocation beyond the limit fails. Shared memory and memory files do not count.
/// A lower limit stays. Children inherit the limit.
///
/// # Errors
/// Returns the errors of getrlimit(2) and setrlimit(2).
pub fn limit_data(bytes: u64) -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_DATA)?;
    Ok(setrlimit(Resource::RLIMIT_DATA, bytes.min(soft), bytes.min(hard))?)
}

/// As [`limit_data`], but this process and its children may raise the limit again:
/// `process::make_ordinary` does so for a program.
///
/// # Errors
/// Returns the errors of getrlimit(2) and setrlimit(2).
pub fn limit_data_softly(bytes: u64) -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_DATA)?;
    Ok(setrlimit(Resource::RLIMIT_DATA, bytes.min(soft), hard)?)
}

/// The loader calls this before it initializes any library, and so before the allocator has its first page: with
/// `transparent_hugepage/enabled` set to `always`, that page would be a huge one, and the heap of each process 4 MiB
/// larger. Source: gABI, Initialization and Termination Functions, DT_PREINIT_ARRAY.
#[used]
#[unsafe(link_section = ".preinit_array")]
static BEFORE_ALL: extern "C" fn() = use_huge_pages_on_request;

/// Has the kernel use huge pages only where this process requests them with madvise(2), and before Linux 6.18 nowhere. Child
/// processes inherit this: workers and hooks. If the kernel refuses, the process only uses more memory.
extern "C" fn use_huge_pages_on_request() {
    // PR_THP_DISABLE_EXCEPT_ADVISED of <linux/prctl.h>.
    let except_advised: libc::c_ulong = 1 << 1;
    let on: libc::c_ulong = 1;
    let unused: libc::c_ulong = 0;
    // SAFETY: the call takes numbers and changes only where the kernel uses huge pages.
    let result =
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, on, except_advised, unused, unused) };
    if result != 0 {
        let _ = nix::sys::prctl::set_thp_disable(true);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::buffer::Buffer;

    /// Set in the process that runs only this test: the limit stays for the rest of the process.
    const ALONE: &str = "CLEAT_TEST_ALONE";

    #[test]
    fn huge_pages_are_off_before_main() {
        // SAFETY: the call takes numbers and only returns one.
        let disabled = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
        assert_eq!(disabled & 1, 1);
    }

    #[test]
    fn memory_beyond_the_limit_is_refused() {
        let Some(len) = std::env::var_os(ALONE) else {
            let succeeds = |len: &str| {
                let mut test = Command::new(std::env::current_exe().unwrap());
                let name = "memory_limit::tests::memory_beyond_the_limit_is_refused";
                test.args(["--exact", name]).env(ALONE, len);
                test.output().unwrap().status.success()
            };
            assert!(succeeds("67108864"));
            assert!(!succeeds("4294967296"));
            return;
        };
        limit_data(3 << 30).unwrap();
        limit_data(u64::MAX).unwrap();
        let limit = getrlimit(Resource::RLIMIT_DATA).unwrap();
        assert_eq!(limit, (3 << 30, 3 << 30), "a lower limit stays");
        let len: usize = len.to_str().unwrap().parse().unwrap();
        assert_eq!(Buffer::zeroed(len).len(), len);
    }
}
