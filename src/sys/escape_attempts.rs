//! Attempts to escape a worker's confinement, for its tests: what a compromised process could try with
//! raw io_uring and ptrace.
#![allow(clippy::cast_possible_truncation, clippy::unwrap_used)]

pub mod roads;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use io_uring::{IoUring, opcode, squeue, types};

use crate::process::PidFd;

/// Opens a file for reading through io_uring. Returns a descriptor or a negated errno.
pub fn open_by_ring(path: &Path) -> i32 {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let entry = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).build();
    run(&entry)
}

/// Connects to a TCP port of this machine through io_uring. Returns zero or a negated errno.
pub fn connect_by_ring(port: u16) -> i32 {
    let socket = run(&opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build());
    if socket < 0 {
        return socket;
    }
    let address = loopback(port);
    let length = size_of_val(&address) as libc::socklen_t;
    run(&opcode::Connect::new(types::Fd(socket), (&raw const address).cast(), length).build())
}

fn loopback(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(std::net::Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    }
}

/// Makes `pid` the process that gets a signal when `file` becomes ready, and selects SIGKILL as that signal.
/// Returns the results of the two steps: zero or a negated errno.
pub fn send_signals_to(file: BorrowedFd<'_>, pid: libc::pid_t) -> [i32; 2] {
    let file = file.as_raw_fd();
    [(libc::F_SETOWN, pid), (F_SETSIG, libc::SIGKILL)].map(|(command, value)| {
        // SAFETY: both commands take an integer.
        let result = unsafe { libc::fcntl(file, command, value) };
        if result == 0 { 0 } else { -nix::errno::Errno::last_raw() }
    })
}

/// Makes the kernel send the signal of [`send_signals_to`] when `file` becomes ready.
pub fn notify_owner(file: BorrowedFd<'_>) {
    // SAFETY: the command takes an integer.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_ASYNC) };
}

/// From <linux/fcntl.h>; the same on every architecture that cleat runs on.
const F_SETSIG: libc::c_int = 10;

/// Returns a copy of a descriptor of another process.
///
/// # Errors
/// Returns the errors of pidfd_getfd(2).
pub fn take_descriptor(process: &PidFd, number: RawFd) -> io::Result<OwnedFd> {
    let flags = rustix::process::PidfdGetfdFlags::empty();
    Ok(rustix::process::pidfd_getfd(process, number, flags)?)
}

fn run(entry: &squeue::Entry) -> i32 {
    let mut ring = match IoUring::new(2) {
        Ok(ring) => ring,
        Err(error) => return -error.raw_os_error().unwrap(),
    };
    // SAFETY: the callers own what the entry points to, and this function waits for the completion.
    unsafe { ring.submission().push(entry).unwrap() };
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

/// Attaches to another process as a debugger. Returns zero or a negated errno.
pub fn trace(pid: libc::pid_t) -> i32 {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: PTRACE_SEIZE uses no memory of this process.
    let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, nothing, nothing) };
    if result == 0 { 0 } else { -nix::errno::Errno::last_raw() }
}
