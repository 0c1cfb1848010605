//! The roads by which code inside a worker could reach something else, and one attempt for each.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use io_uring::{opcode, types};
use libc::{c_long, pid_t, sockaddr_un, socklen_t};

use super::{connect_by_ring, run};

/// What a worker must not reach. All of it belongs to root and exists.
#[derive(Debug, Clone)]
pub struct Targets {
    /// A file.
    pub file: PathBuf,
    /// A unix socket on which a process listens.
    pub socket: PathBuf,
    /// The name of an abstract unix socket on which a process listens.
    pub abstract_name: Vec<u8>,
    /// A process.
    pub pid: pid_t,
    /// A TCP port of 127.0.0.1 on which a process listens.
    pub port: u16,
}

/// One road and the result of its attempt: a negated errno, or at least 0 if the road is open.
pub type Tried = (&'static str, i32);

/// Tries every road. With `filter`, also those that only the system call filter closes. An open road changes
/// nothing outside of this process, except that it may remove or change `targets.file`. Must be called only by a
/// confined process: it mounts over its root, and executes another program, if it can.
pub fn try_all(targets: &Targets, filter: bool) -> Vec<Tried> {
    let mut tried = [paths(targets), sockets(targets), processes(targets), privileges()].concat();
    tried.extend(rings(targets));
    if filter {
        tried.extend(only_filtered(targets));
    }
    tried
}

fn paths(targets: &Targets) -> Vec<Tried> {
    let file = c_text(&targets.file);
    let new = c_text(&targets.file.with_extension("new"));
    let (in_root, program, name) = (c"/new", c"/bin/true", c"user.cleat");
    let (path, flags) = (file.as_ptr(), libc::O_RDONLY);
    let create = libc::O_CREAT | libc::O_WRONLY;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: every pointer is to a string or an empty list that outlives its call. A successful execve replaces
    // this process, and the test sees no result.
    unsafe {
        vec![
            ("open a file", call(libc::open(path, flags).into())),
            ("write a file", call(libc::open(path, libc::O_WRONLY).into())),
            ("create a file", call(libc::open(new.as_ptr(), create, 0o600).into())),
            ("create a file in the root", call(libc::open(in_root.as_ptr(), create, 0o600).into())),
            ("create a directory", call(libc::mkdir(new.as_ptr(), 0o700).into())),
            ("make a link", call(libc::link(path, new.as_ptr()).into())),
            ("change a mode", call(libc::chmod(path, 0o666).into())),
            ("change an owner", call(libc::chown(path, 4711, 4711).into())),
            (
                "set an attribute",
                call(libc::setxattr(path, name.as_ptr(), none.cast(), 0, 0).into()),
            ),
            ("truncate a file", call(libc::truncate(path, 0).into())),
            (
                "list the root of process 1",
                call(libc::open(c"/proc/1/root".as_ptr(), flags).into()),
            ),
            (
                "write to another process",
                call(libc::open(c"/proc/1/mem".as_ptr(), libc::O_RDWR).into()),
            ),
            ("open a device", call(libc::open(c"/dev/mem".as_ptr(), libc::O_RDWR).into())),
            ("remove a file", call(libc::unlink(path).into())),
            ("execute a program", call(libc::execve(program.as_ptr(), &none, &none).into())),
        ]
    }
}

fn sockets(targets: &Targets) -> Vec<Tried> {
    vec![
        ("connect to a unix socket", connect(targets.socket.as_os_str().as_bytes())),
        ("connect to an abstract socket", connect(&[&b"\0"[..], &targets.abstract_name].concat())),
        ("connect over TCP", connect_tcp(targets.port)),
    ]
}

fn processes(targets: &Targets) -> Vec<Tried> {
    let pid = targets.pid;
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the calls get integers, null, and one buffer of a byte that outlives them. SIGURG is ignored by
    // default.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        let send = libc::SYS_pidfd_send_signal;
        vec![
            ("send a signal", call(libc::kill(pid, libc::SIGURG).into())),
            (
                "send a signal by descriptor",
                call(libc::syscall(send, pidfd, libc::SIGURG, nothing, 0)),
            ),
            ("take a descriptor", call(libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0))),
            ("trace a process", call(libc::ptrace(libc::PTRACE_SEIZE, pid, nothing, nothing))),
            (
                "read another process",
                call(libc::process_vm_readv(pid, &raw const local, 1, &raw const local, 1, 0)
                    as c_long),
            ),
            ("change a priority", call(libc::setpriority(libc::PRIO_PROCESS, pid as _, 1).into())),
            ("limit another process", call(limit(pid))),
        ]
    }
}

fn privileges() -> Vec<Tried> {
    let none = std::ptr::null::<libc::c_char>();
    let (root, here) = (c"/", c".");
    // Version 3 of the capability interface, for this thread; then all capabilities.
    let header: [u32; 2] = [0x2008_0522, 0];
    let all = [u32::MAX; 6];
    // A handle with 8 bytes of type 1 (FILEID_INO32_GEN).
    let handle: [u32; 4] = [8, 1, 2, 0];
    // SAFETY: every pointer is to memory that outlives its call.
    unsafe {
        vec![
            ("become root", call(libc::setuid(0).into())),
            ("become group 0", call(libc::setgid(0).into())),
            ("join groups", call(libc::setgroups(1, &0).into())),
            (
                "gain capabilities",
                call(libc::syscall(libc::SYS_capset, header.as_ptr(), all.as_ptr())),
            ),
            (
                "mount",
                call(libc::mount(none, root.as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()).into()),
            ),
            ("unmount", call(libc::umount2(root.as_ptr(), libc::MNT_DETACH).into())),
            ("change the root", call(libc::chroot(root.as_ptr()).into())),
            (
                "exchange the root",
                call(libc::syscall(libc::SYS_pivot_root, here.as_ptr(), here.as_ptr())),
            ),
            (
                "open by handle",
                call(libc::syscall(
                    libc::SYS_open_by_handle_at,
                    libc::AT_FDCWD,
                    handle.as_ptr(),
                    0,
                )),
            ),
            ("load a module", call(libc::syscall(libc::SYS_init_module, none, 0, root.as_ptr()))),
            ("set the host name", call(libc::sethostname(root.as_ptr(), 1).into())),
        ]
    }
}

/// Operations of a new ring.
fn rings(targets: &Targets) -> Vec<Tried> {
    let file = c_text(&targets.file);
    let new = c_text(&targets.file.with_extension("new"));
    let (path, here) = (file.as_ptr(), types::Fd(libc::AT_FDCWD));
    let attribute = opcode::SetXattr::new(c"user.cleat".as_ptr(), path.cast(), path, 0).build();
    vec![
        ("open a file by ring", run(&opcode::OpenAt::new(here, path).build())),
        ("create a directory by ring", run(&opcode::MkDirAt::new(here, new.as_ptr()).build())),
        ("set an attribute by ring", run(&attribute)),
        ("remove a file by ring", run(&opcode::UnlinkAt::new(here, path).build())),
        ("connect to a unix socket by ring", connect_to_path_by_ring(&targets.socket)),
        ("connect over TCP by ring", connect_by_ring(targets.port)),
    ]
}

/// Roads that lead nowhere without privileges, but are closed because they reach much code of the kernel.
fn only_filtered(targets: &Targets) -> Vec<Tried> {
    let none = std::ptr::null::<libc::c_char>();
    let zeroes = [0_u64; 16];
    let pid = c_long::from(targets.pid);
    let flags = c_long::from(libc::SIGCHLD);
    // SAFETY: the calls get integers, null, and zeroed memory that is longer than what they read. A child that
    // a clone makes exits at once.
    unsafe {
        let child = libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0);
        if child == 0 {
            libc::_exit(0);
        }
        let child = call(child);
        let family = |family| call(libc::socket(family, libc::SOCK_RAW, 0).into());
        vec![
            ("start a process", child),
            ("make a user namespace", call(libc::unshare(libc::CLONE_NEWUSER).into())),
            ("join a namespace", call(libc::setns(0, 0).into())),
            ("make a netlink socket", family(libc::AF_NETLINK)),
            ("make a packet socket", family(libc::AF_PACKET)),
            ("make a socket of the kernel's crypto", family(libc::AF_ALG)),
            ("make a vsock socket", family(libc::AF_VSOCK)),
            ("make a ring", call(libc::syscall(libc::SYS_io_uring_setup, 2, zeroes.as_ptr()))),
            ("make a message queue", call(libc::msgget(libc::IPC_PRIVATE, 0o600).into())),
            ("make shared memory", call(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600).into())),
            ("load a BPF program", call(libc::syscall(libc::SYS_bpf, 5, zeroes.as_ptr(), 128))),
            (
                "count events",
                call(libc::syscall(libc::SYS_perf_event_open, zeroes.as_ptr(), pid, -1, -1, 0)),
            ),
            ("use keys", call(libc::syscall(libc::SYS_keyctl, 0, -3, 0))),
            ("handle page faults", call(libc::syscall(libc::SYS_userfaultfd, 0))),
            ("watch files", call(libc::inotify_init1(0).into())),
            ("change its personality", call(libc::personality(0x0040_0000).into())),
            ("execute a descriptor", call(libc::syscall(libc::SYS_execveat, 0, none, 0, 0, 0))),
        ]
    }
}

/// Reads a limit of another process, which needs the same right as setting it.
fn limit(pid: pid_t) -> c_long {
    let mut old = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes to `old`, which outlives the call.
    let result = unsafe { libc::prlimit64(pid, libc::RLIMIT_CORE, std::ptr::null(), &raw mut old) };
    result.into()
}

fn connect(name: &[u8]) -> i32 {
    let (address, length) = unix_address(name);
    // SAFETY: the address outlives the call, and `length` is within it.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
        call(libc::connect(socket, (&raw const address).cast(), length).into())
    }
}

fn connect_tcp(port: u16) -> i32 {
    match std::net::TcpStream::connect_timeout(
        &([127, 0, 0, 1], port).into(),
        std::time::Duration::from_secs(1),
    ) {
        Ok(_) => 0,
        Err(error) => -error.raw_os_error().unwrap_or(libc::ETIMEDOUT),
    }
}

fn connect_to_path_by_ring(path: &Path) -> i32 {
    let socket = run(&opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build());
    if socket < 0 {
        return socket;
    }
    let (address, length) = unix_address(path.as_os_str().as_bytes());
    run(&opcode::Connect::new(types::Fd(socket), (&raw const address).cast(), length).build())
}

fn unix_address(name: &[u8]) -> (sockaddr_un, socklen_t) {
    let family = libc::AF_UNIX as libc::sa_family_t;
    let mut address = sockaddr_un { sun_family: family, sun_path: [0; 108] };
    for (target, byte) in address.sun_path.iter_mut().zip(name) {
        *target = *byte as libc::c_char;
    }
    let length = std::mem::offset_of!(sockaddr_un, sun_path) + name.len();
    (address, length as socklen_t)
}

fn c_text(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// Returns the result of a call that has just ended: 0, or a negated errno.
fn call(result: c_long) -> i32 {
    if result < 0 { -nix::errno::Errno::last_raw() } else { 0 }
}
