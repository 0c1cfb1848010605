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
    let mut tried = try_without_execution(targets, filter);
    let (program, none) = (c"/bin/true", std::ptr::null::<libc::c_char>());
    // SAFETY: the pointers are to a string and empty lists. If it succeeds, it replaces this process, and the test
    // sees no result.
    let executed = unsafe { libc::execve(program.as_ptr(), &raw const none, &raw const none) };
    tried.push(("execute a program", call(executed.into())));
    tried
}

/// Tries every road but the execution of a program.
pub fn try_without_execution(targets: &Targets, filter: bool) -> Vec<Tried> {
    let groups = [paths, sockets, processes, other_views, rings];
    let mut tried: Vec<Tried> = groups.iter().flat_map(|group| group(targets)).collect();
    tried.extend(privileges());
    if filter {
        tried.extend(only_filtered(targets));
        tried.extend(only_filtered_calls());
        tried.extend(signals_of_files(targets));
    }
    // It takes all others from a process that has them.
    tried.push(("gain a capability", gain_capability()));
    tried
}

fn gain_capability() -> i32 {
    // Version 3 of the capability interface, for this thread; then CAP_CHOWN, effective and permitted.
    let header: [u32; 2] = [0x2008_0522, 0];
    let one = [1_u32, 1, 0, 0, 0, 0];
    // SAFETY: both pointers are to memory that outlives the call.
    call(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), one.as_ptr()) })
}

fn paths(targets: &Targets) -> Vec<Tried> {
    let file = c_text(&targets.file);
    let new = c_text(&targets.file.with_extension("new"));
    let directory = c_text(&targets.file.with_extension("directory"));
    let link = c_text(&targets.file.with_extension("link"));
    let (in_root, name) = (c"/new", c"user.cleat");
    let (path, flags) = (file.as_ptr(), libc::O_RDONLY);
    let create = libc::O_CREAT | libc::O_WRONLY;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: every pointer is to a string that outlives its call.
    unsafe {
        vec![
            ("open a file", call(libc::open(path, flags).into())),
            ("write a file", call(libc::open(path, libc::O_WRONLY).into())),
            ("create a file", call(libc::open(new.as_ptr(), create, 0o600).into())),
            ("create a file in the root", call(libc::open(in_root.as_ptr(), create, 0o600).into())),
            ("create a directory", call(libc::mkdir(directory.as_ptr(), 0o700).into())),
            ("make a link", call(libc::link(path, link.as_ptr()).into())),
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
        ]
    }
}

fn sockets(targets: &Targets) -> Vec<Tried> {
    let name = [&b"\0"[..], &targets.abstract_name].concat();
    vec![
        ("connect to a unix socket", connect(targets.socket.as_os_str().as_bytes())),
        ("connect to systemd", connect(b"/run/systemd/private")),
        ("connect to D-Bus", connect(b"/run/dbus/system_bus_socket")),
        ("connect to an abstract socket", connect(&name)),
        ("send to an abstract socket", send(&[&name[..], DATAGRAMS].concat())),
        ("send to journald by path", send(b"/run/systemd/journal/dev-log")),
        (CONNECT_OVER_TCP, connect_tcp(targets.port)),
    ]
}

/// The road that is open to the worker of a volume that is reached over a network.
pub const CONNECT_OVER_TCP: &str = "connect over TCP";

/// The end of the abstract name on which a process receives datagrams. The rest is [`Targets::abstract_name`].
pub const DATAGRAMS: &[u8] = b"-datagrams";

/// Tries to send a datagram with a new socket, and with every socket for datagrams that this process has.
fn send(name: &[u8]) -> i32 {
    let (address, length) = unix_address(name);
    // SAFETY: the option and the address outlive the calls, and `length` is within the address.
    let results = unsafe {
        let new = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0);
        [new].into_iter().chain(0..1024).filter_map(|socket| {
            let mut kind: libc::c_int = 0;
            let mut size = size_of_val(&kind) as socklen_t;
            let value = (&raw mut kind).cast();
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_TYPE, value, &raw mut size);
            let to = (&raw const address).cast();
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            (kind == libc::SOCK_DGRAM).then(|| {
                call(libc::sendto(socket, c"x".as_ptr().cast(), 1, flags, to, length) as _)
            })
        })
    };
    results.max().unwrap_or(-libc::ENOTSOCK)
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
                reached(
                    libc::process_vm_readv(pid, &raw const local, 1, &raw const local, 1, 0)
                        as c_long,
                    libc::EFAULT,
                ),
            ),
            ("change a priority", call(libc::setpriority(libc::PRIO_PROCESS, pid as _, 1).into())),
            (
                "write another process",
                reached(
                    libc::process_vm_writev(pid, &raw const local, 1, &raw const local, 1, 0) as _,
                    libc::EFAULT,
                ),
            ),
            ("limit another process", call(limit(pid))),
        ]
    }
}

/// What else shows or changes something of another process.
fn other_views(targets: &Targets) -> Vec<Tried> {
    let pid = c_long::from(targets.pid);
    let mut cpus = [0_u8; 128];
    cpus[0] = 1;
    let (mut head, mut length) = (0_usize, 0_usize);
    let directory = CString::new(format!("/proc/{pid}/fd")).unwrap();
    let first = CString::new("/proc/1/status").unwrap();
    let idle = libc::sched_param { sched_priority: 0 };
    // SAFETY: every pointer is to memory that outlives its call.
    unsafe {
        let list = libc::SYS_get_robust_list;
        vec![
            ("list descriptors", call(libc::open(directory.as_ptr(), libc::O_RDONLY).into())),
            ("see processes", call(libc::open(first.as_ptr(), libc::O_RDONLY).into())),
            (
                "compare with another process",
                call(libc::syscall(libc::SYS_kcmp, pid, libc::getpid(), 0, 0, 0)),
            ),
            (
                "find memory of another process",
                call(libc::syscall(list, pid, &raw mut head, &raw mut length)),
            ),
            (
                "move another process",
                call(libc::syscall(libc::SYS_sched_setaffinity, pid, cpus.len(), cpus.as_ptr())),
            ),
            (
                "schedule another process",
                call(
                    libc::sched_setscheduler(targets.pid, libc::SCHED_IDLE, &raw const idle).into(),
                ),
            ),
            (
                "change the I/O priority of another process",
                call(libc::syscall(libc::SYS_ioprio_set, 1, pid, 3 << 13)),
            ),
            ("attach shared memory", call(libc::shmget(SHARED_MEMORY, 0, 0).into())),
        ]
    }
}

/// The key of System V shared memory that tests make.
pub const SHARED_MEMORY: libc::key_t = 0x636c_6561;

/// Shared memory that another process must not find. It is removed on drop.
#[derive(Debug)]
pub struct SharedMemory(libc::c_int);

impl SharedMemory {
    /// Makes shared memory with the key [`SHARED_MEMORY`], or finds it.
    pub fn make() -> Self {
        // SAFETY: the call takes integers.
        let id = unsafe { libc::shmget(SHARED_MEMORY, 4096, libc::IPC_CREAT | 0o600) };
        assert!(id >= 0, "shmget");
        Self(id)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the command uses no memory of this process.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

fn privileges() -> Vec<Tried> {
    let none = std::ptr::null::<libc::c_char>();
    let (root, here) = (c"/", c".");
    // A handle with 8 bytes of type 1 (FILEID_INO32_GEN).
    let handle: [u32; 4] = [8, 1, 2, 0];
    // SAFETY: every pointer is to memory that outlives its call.
    unsafe {
        vec![
            ("become root", call(libc::setuid(0).into())),
            ("become group 0", call(libc::setgid(0).into())),
            ("join groups", call(libc::setgroups(1, &0).into())),
            (
                "mount",
                call(libc::mount(none, root.as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()).into()),
            ),
            ("unmount", call(libc::umount2(root.as_ptr(), libc::MNT_DETACH).into())),
            ("change the root", call(libc::chroot(root.as_ptr()).into())),
            (
                "exchange the root",
                reached(
                    libc::syscall(libc::SYS_pivot_root, here.as_ptr(), here.as_ptr()),
                    libc::EBUSY,
                ),
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
            (
                "load a module",
                reached(libc::syscall(libc::SYS_init_module, none, 0, root.as_ptr()), libc::EFAULT),
            ),
            ("set the host name", call(libc::sethostname(root.as_ptr(), 1).into())),
            ("open a file system", call(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0))),
            (
                "copy a mount",
                call(libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, root.as_ptr(), 1)),
            ),
        ]
    }
}

/// Operations of a new ring; at last, files are removed.
fn rings(targets: &Targets) -> Vec<Tried> {
    let (file, socket) = (c_text(&targets.file), c_text(&targets.socket));
    let new = c_text(&targets.file.with_extension("ring"));
    let (path, here) = (file.as_ptr(), types::Fd(libc::AT_FDCWD));
    let attribute = opcode::SetXattr::new(c"user.cleat".as_ptr(), path.cast(), path, 0).build();
    vec![
        ("open a file by ring", run(&opcode::OpenAt::new(here, path).build())),
        ("create a directory by ring", run(&opcode::MkDirAt::new(here, new.as_ptr()).build())),
        ("set an attribute by ring", run(&attribute)),
        ("connect to a unix socket by ring", connect_to_path_by_ring(&targets.socket)),
        ("connect over TCP by ring", connect_by_ring(targets.port)),
        ("remove a file by ring", run(&opcode::UnlinkAt::new(here, socket.as_ptr()).build())),
        // SAFETY: the path outlives the call.
        ("remove a file", call(unsafe { libc::unlink(path) }.into())),
    ]
}

/// Roads that lead nowhere without privileges, but are closed because they reach much code of the kernel.
fn only_filtered(targets: &Targets) -> Vec<Tried> {
    let none = std::ptr::null::<libc::c_char>();
    let zeroes = [0_u64; 16];
    // An array of one element of 8 bytes (union bpf_attr), and the software event "CPU clock" (perf_event_attr).
    let mut map = [0_u32; 32];
    map[..4].copy_from_slice(&[2, 4, 8, 1]);
    let mut event = [0_u64; 16];
    event[0] = 112 << 32 | 1;
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
            (
                "make a user namespace",
                reached(libc::unshare(libc::CLONE_NEWUSER).into(), libc::EINVAL),
            ),
            ("join a namespace", reached(libc::setns(0, 0).into(), libc::EINVAL)),
            ("make a netlink socket", family(libc::AF_NETLINK)),
            ("make a packet socket", family(libc::AF_PACKET)),
            ("make a socket of the kernel's crypto", family(libc::AF_ALG)),
            ("make a vsock socket", family(libc::AF_VSOCK)),
            ("make a ring", call(libc::syscall(libc::SYS_io_uring_setup, 2, zeroes.as_ptr()))),
            ("make a message queue", call(libc::msgget(libc::IPC_PRIVATE, 0o600).into())),
            ("make shared memory", call(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600).into())),
            ("make a BPF map", call(libc::syscall(libc::SYS_bpf, 0, map.as_ptr(), 128))),
            (
                "count events",
                call(libc::syscall(libc::SYS_perf_event_open, event.as_ptr(), pid, -1, -1, 0)),
            ),
            ("watch files", call(libc::inotify_init1(0).into())),
            (
                "watch file systems",
                call(libc::syscall(libc::SYS_fanotify_init, libc::FAN_REPORT_FID, 0)),
            ),
            ("see a process", call(libc::syscall(libc::SYS_pidfd_open, pid, 0))),
            ("see whether a process exists", call(libc::kill(targets.pid, 0).into())),
            ("change its personality", call(libc::personality(0x0040_0000).into())),
            (
                "execute a descriptor",
                reached(libc::syscall(libc::SYS_execveat, 0, none, 0, 0, 0), libc::EFAULT),
            ),
        ]
    }
}

/// More of them, which have no target.
fn only_filtered_calls() -> Vec<Tried> {
    let name = c"cleat";
    // SAFETY: every pointer is to a string that outlives its call, or null.
    unsafe {
        let none = std::ptr::null::<libc::c_char>();
        let attributes = std::ptr::null::<libc::c_void>();
        let kind = c"user".as_ptr();
        vec![
            ("make semaphores", call(libc::semget(libc::IPC_PRIVATE, 1, 0o600).into())),
            (
                "open a message queue",
                call(libc::syscall(
                    libc::SYS_mq_open,
                    name.as_ptr(),
                    libc::O_CREAT | libc::O_RDWR,
                    0o600,
                    attributes,
                )),
            ),
            ("use keys", call(libc::syscall(libc::SYS_keyctl, 0, -3, 0))),
            ("add a key", call(libc::syscall(libc::SYS_add_key, kind, name.as_ptr(), kind, 4, -3))),
            (
                "request a key",
                call(libc::syscall(libc::SYS_request_key, kind, name.as_ptr(), none, -3)),
            ),
            ("handle page faults", call(libc::syscall(libc::SYS_userfaultfd, 0))),
            ("read the kernel's log", call(libc::syscall(libc::SYS_syslog, 10, none, 0))),
            ("leave a core dump", call(libc::prctl(libc::PR_SET_DUMPABLE, 1).into())),
            (
                "let another process trace",
                reached(libc::prctl(PR_SET_PTRACER, -1).into(), libc::EINVAL),
            ),
            ("listen", call(libc::listen(3, 1).into())),
            (
                "type into a terminal",
                reached(libc::ioctl(0, libc::TIOCSTI as _, name.as_ptr()).into(), libc::ENOTTY),
            ),
        ]
    }
}

/// From <linux/prctl.h>, with Yama.
const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;

/// Makes the kernel send signals in the name of this process, by every descriptor that may do it.
fn signals_of_files(targets: &Targets) -> Vec<Tried> {
    let pid = targets.pid;
    // From <asm-generic/sockios.h> and <linux/fcntl.h>.
    const FIOSETOWN: u64 = 0x8901;
    const F_SETOWN_EX: libc::c_int = 15;
    let owner = [1_i32, pid];
    // SAFETY: the calls get integers, and pointers to memory that outlives them.
    unsafe {
        let file = libc::eventfd(0, 0);
        let all = |command, value: libc::c_int| {
            let results = (0..64).map(|file| call(libc::fcntl(file, command, value).into()));
            results.max().unwrap_or(0)
        };
        vec![
            ("choose who gets signals", call(libc::fcntl(file, libc::F_SETOWN, pid).into())),
            (
                "choose a thread that gets signals",
                call(libc::fcntl(file, F_SETOWN_EX, owner.as_ptr()).into()),
            ),
            ("choose a signal", all(super::F_SETSIG, libc::SIGURG)),
            ("take a lease", all(libc::F_SETLEASE, libc::F_RDLCK)),
            ("watch a directory", all(libc::F_NOTIFY, 1)),
            (
                "choose who gets signals of a socket",
                call(libc::ioctl(3, FIOSETOWN as _, &raw const pid).into()),
            ),
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

/// Uses no more system calls than it must: the standard library would also use one that a worker of an image may
/// not use.
fn connect_tcp(port: u16) -> i32 {
    let address = super::loopback(port);
    let length = size_of_val(&address) as socklen_t;
    // SAFETY: the address outlives the call.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        call(libc::connect(socket, (&raw const address).cast(), length).into())
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

/// Like [`call`], where `errno` shows that the kernel would have done more with other arguments.
fn reached(result: c_long, errno: i32) -> i32 {
    match call(result) {
        refused if refused == -errno => 0,
        other => other,
    }
}
