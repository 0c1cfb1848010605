//! The system calls that a worker may use, on x86_64 and aarch64.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use super::Needs;
use cleat_backend::Network;

/// Restricts all threads of this process to the lists below.
pub(super) fn apply(needs: &Needs) -> Result<(), String> {
    let text = |e: seccompiler::Error| e.to_string();
    // clone3 takes its flags in memory, which no filter can read. ENOSYS makes the C library use clone, whose
    // flags are checked.
    let refusals: Rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let refuse =
        compile(refusals, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS.unsigned_abs()))?;
    let allow = compile(
        rules(needs).map_err(|e| e.to_string())?,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        SeccompAction::Allow,
    )?;
    apply_filter_all_threads(&refuse).map_err(text)?;
    apply_filter_all_threads(&allow).map_err(text)
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;
type Backend<T> = Result<T, seccompiler::BackendError>;

fn compile(
    rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, String> {
    std::env::consts::ARCH
        .try_into()
        .and_then(|arch| SeccompFilter::new(rules, otherwise, matched, arch))
        .and_then(BpfProgram::try_from)
        .map_err(|e| e.to_string())
}

fn rules(needs: &Needs) -> Backend<Rules> {
    let mut rules: Rules = ANY.iter().map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(X86_64.iter().map(|call| (*call, Vec::new())));
    // Only threads: no process and no namespace.
    rules.insert(libc::SYS_clone, vec![when(0, all_bits(libc::CLONE_THREAD as u64))?]);
    let mut ioctls = vec![when(1, is(BLKGETSIZE64))?, when(1, is(SIOCOUTQ))?];
    rules.insert(
        libc::SYS_prctl,
        PRCTLS.iter().map(|n| when(0, is(n.unsigned_abs().into()))).collect::<Backend<_>>()?,
    );
    // Only with rings that exist, which are restricted: io_uring_setup is missing. A ring is enabled, its files
    // are exchanged, and its operations are cancelled.
    rules.insert(
        libc::SYS_io_uring_register,
        RING_REGISTRATIONS.iter().map(|n| when(1, is(*n))).collect::<Backend<_>>()?,
    );
    // Copies, flags and seals of descriptors. F_SETOWN and F_SETSIG are missing: the kernel would send any
    // signal to any process of the same user, also where kill(2) is refused (before Linux 6.12, Landlock does
    // not check these signals). F_SETLEASE and F_NOTIFY could delay or watch other users of a file.
    rules.insert(
        libc::SYS_fcntl,
        FCNTLS.iter().map(|n| when(1, is(n.unsigned_abs().into()))).collect::<Backend<_>>()?,
    );
    // Only for an open file. A path could not be opened, but its metadata could be read.
    rules.insert(
        libc::SYS_statx,
        vec![when(2, all_bits(libc::AT_EMPTY_PATH.unsigned_abs().into()))?],
    );
    rules.insert(
        libc::SYS_newfstatat,
        vec![when(3, all_bits(libc::AT_EMPTY_PATH.unsigned_abs().into()))?],
    );
    // Only to read the limits of this process.
    let own = condition(0, is(0))?;
    let read = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![own, read])?]);
    // abort() sends a signal to its own process; tgkill must not name another one.
    rules.insert(libc::SYS_tgkill, vec![when(0, is(std::process::id().into()))?]);
    let has_paths = [&needs.paths, &needs.copies, &needs.writable].iter().any(|p| !p.is_empty());
    if has_paths {
        rules.extend(PATHS.iter().map(|call| (*call, Vec::new())));
    }
    if !needs.writable.is_empty() {
        rules.extend(WRITABLE.iter().map(|call| (*call, Vec::new())));
        #[cfg(target_arch = "x86_64")]
        rules.extend(WRITABLE_X86_64.iter().map(|call| (*call, Vec::new())));
    }
    let reaches_a_store = needs.network != Network::None;
    if reaches_a_store || !needs.writable.is_empty() {
        // Only signal 0, which checks whether a process exists and sends nothing: the claims on volumes name
        // processes.
        rules.insert(libc::SYS_kill, vec![when(1, is(0))?]);
    }
    if reaches_a_store {
        // A connected pair of streams reaches nothing else; tokio makes one for signals.
        let stream = SeccompCmpOp::MaskedEq(SOCKET_TYPES);
        let stream = condition(1, (stream, libc::SOCK_STREAM.unsigned_abs().into()))?;
        let pair = vec![condition(0, is(libc::AF_UNIX.unsigned_abs().into()))?, stream];
        rules.insert(libc::SYS_socketpair, vec![SeccompRule::new(pair)?]);
    }
    if needs.has_network() {
        ioctls.push(when(1, is(FIONBIO))?);
        rules.extend(NETWORK.iter().map(|call| (*call, Vec::new())));
        // Not AF_UNIX: its abstract sockets belong to the network. Nothing needs it: the C library does without
        // the name service cache, and librados without an admin socket.
        let families = [libc::AF_INET, libc::AF_INET6];
        let family = |family: &i32| when(0, is(family.unsigned_abs().into()));
        rules.insert(libc::SYS_socket, families.iter().map(family).collect::<Backend<_>>()?);
    }
    rules.insert(libc::SYS_ioctl, ioctls);
    Ok(rules)
}

fn when(argument: u8, test: (SeccompCmpOp, u64)) -> Backend<SeccompRule> {
    SeccompRule::new(vec![condition(argument, test)?])
}

fn condition(argument: u8, (operator, value): (SeccompCmpOp, u64)) -> Backend<SeccompCondition> {
    // The kernel reads only the lower half of these arguments, so the filter must do the same.
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

fn is(value: u64) -> (SeccompCmpOp, u64) {
    (SeccompCmpOp::Eq, value)
}

fn all_bits(mask: u64) -> (SeccompCmpOp, u64) {
    (SeccompCmpOp::MaskedEq(mask), mask)
}

/// IORING_REGISTER_FILES_UPDATE, IORING_REGISTER_ENABLE_RINGS and IORING_REGISTER_SYNC_CANCEL of
/// <linux/io_uring.h>.
const RING_REGISTRATIONS: [u64; 3] = [6, 12, 24];

/// The new size of a device (<linux/fs.h>).
const BLKGETSIZE64: u64 = 0x8008_1272;

/// How much of a socket's buffer is in use (<asm-generic/ioctls.h>).
const SIOCOUTQ: u64 = libc::TIOCOUTQ;

/// The standard library makes a socket non-blocking with it, to connect with a timeout (<asm-generic/ioctls.h>).
const FIONBIO: u64 = 0x5421;

/// What the standard library, the channels, memory files, pipes and librados do with descriptors.
const FCNTLS: [i32; 10] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_SETPIPE_SZ,
    libc::F_GETPIPE_SZ,
];

/// The name of the thread, and the names of memory areas, which newer C libraries set.
const PRCTLS: [i32; 2] = [libc::PR_SET_NAME, libc::PR_SET_VMA];

const ANY: &[c_long] = &[
    // The data path.
    libc::SYS_io_uring_enter,
    libc::SYS_eventfd2,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_shutdown,
    // Pages of a file go to the socket through a pipe.
    libc::SYS_pipe2,
    libc::SYS_splice,
    // The tail file and the files of the cache.
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    // What the page cache has of a mapped file.
    cleat_sys::page_cache::SYS_CACHESTAT,
    // Sizes and holes.
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    // The channels.
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_dup,
    libc::SYS_dup3,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads and time.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_restart_syscall,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_getrandom,
    // mimalloc reads the NUMA node if there are several.
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // Signals to this process.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
];

/// Older forms that only this architecture has.
#[cfg(target_arch = "x86_64")]
const X86_64: &[c_long] =
    &[libc::SYS_poll, libc::SYS_epoll_create, libc::SYS_epoll_wait, libc::SYS_time];

/// For backends that read configuration while they open a volume. Landlock restricts which files they read,
/// but not the check whether a file exists.
const PATHS: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_faccessat,
    libc::SYS_getcwd,
    // For libcryptsetup: memory that must not be swapped out, and its own locks.
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_fstatfs,
    libc::SYS_flock,
];

/// For backends that keep a volume in a directory. Landlock restricts in which one.
const WRITABLE: &[c_long] = &[
    libc::SYS_openat2,
    libc::SYS_renameat2,
    libc::SYS_mkdirat,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    // The mode of a directory that it has made.
    libc::SYS_fchmod,
];

#[cfg(target_arch = "x86_64")]
const WRITABLE_X86_64: &[c_long] = &[libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_unlink];

/// The bits of a socket's type that are not flags.
const SOCKET_TYPES: u64 = 0xf;

/// For backends that use a network.
const NETWORK: &[c_long] =
    &[libc::SYS_connect, libc::SYS_bind, libc::SYS_sendmmsg, libc::SYS_recvmmsg];
