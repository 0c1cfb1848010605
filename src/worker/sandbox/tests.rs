//! A confined process tries what it must not be able to do, and what it must be able to do.
//!
//! Each attempt runs in a process of its own, which is this test binary with one test selected.

use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket, socketpair};

use caps::CapSet;

use super::*;
use cleat_backend::{OpenOptions, Registry, Started, Waker, channel};
use cleat_sys::buffer::Buffer;
use cleat_sys::escape_attempts::roads::{
    DATAGRAMS, SharedMemory, Targets, Tried, try_all, try_without_execution,
};
use cleat_sys::escape_attempts::{
    connect_by_ring, notify_owner, open_by_ring, send_signals_to, trace,
};
use cleat_sys::ring::{Ring, Token};

const PROBE: &str = "CLEAT_TEST_CONFINED";

/// Called by the test `test`: runs that test in a process of its own and returns `true`. In that process, it
/// returns `false`.
fn in_a_process_of_its_own(test: &str) -> bool {
    if std::env::var_os(PROBE).is_some() {
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg(format!("sandbox::tests::{test}"))
        .env(PROBE, "1")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{stderr}");
    true
}

/// Confines the process. A missing layer fails the test, except for layers that need root or a newer kernel,
/// and for the single thread, because the test harness has another one. Returns the layers that are in place.
fn confined(needs: &Needs) -> Vec<&'static str> {
    confine(needs, &isolation()).unwrap().applied
}

fn isolation() -> Isolation {
    let mut excused = vec![layer::SINGLE_THREAD, layer::LANDLOCK];
    let is_root = nix::unistd::geteuid().is_root();
    let may_make_namespaces =
        caps::has_cap(None, CapSet::Effective, caps::Capability::CAP_SYS_ADMIN);
    if !is_root || !may_make_namespaces.unwrap() {
        excused.extend([layer::EMPTY_NETWORK, layer::OWN_IPC, layer::EMPTY_ROOT, layer::OWN_USER]);
    }
    let allow_missing = excused.into_iter().map(str::to_owned).collect();
    Isolation { user: is_root.then_some(USER), allow_missing }
}

/// A user that exists on no machine.
const USER: u32 = 2_100_070_000;

#[test]
fn a_confined_process_can_reach_nothing() {
    if in_a_process_of_its_own("a_confined_process_can_reach_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap().keep();
    let secret = directory.join("secret");
    std::fs::write(&secret, b"secret").unwrap();
    let listener = UnixListener::bind(directory.join("socket")).unwrap();
    let parent = nix::unistd::Pid::parent();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(connect_by_ring(tcp.local_addr().unwrap().port()), 0);
    let (own, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(send_signals_to(own.as_fd(), std::process::id().cast_signed()), [0, 0]);
    let applied = confined(&Needs::default());

    if applied.contains(&layer::OWN_USER) {
        let ids = [nix::unistd::getuid().as_raw(), nix::unistd::geteuid().as_raw()];
        assert_eq!(ids, [USER; 2]);
        assert_eq!(nix::unistd::getegid().as_raw(), USER);
    }
    assert!(File::open(&secret).is_err());
    assert!(File::open("/etc/hostname").is_err());
    assert!(File::create(directory.join("new")).is_err());
    assert!(std::fs::remove_file(&secret).is_err());
    assert!(std::fs::read_dir("/proc/self/fd").is_err());
    assert!(std::fs::metadata(&secret).is_err());
    // io_uring bypasses the filter, so no ring can be made.
    assert_eq!(open_by_ring(&secret), -libc::EPERM);
    for family in [AddressFamily::Netlink, AddressFamily::Unix, AddressFamily::Inet] {
        let raw = socket(family, SockType::Raw, SockFlag::empty(), None);
        assert_eq!(raw.err(), Some(nix::Error::EPERM), "{family:?}");
    }
    assert_eq!(connect_by_ring(tcp.local_addr().unwrap().port()), -libc::EPERM);
    let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::empty());
    assert_eq!(pair.err(), Some(nix::Error::EPERM));
    assert!(TcpListener::bind("127.0.0.1:0").is_err());
    assert!(UdpSocket::bind("127.0.0.1:0").is_err());
    assert!(Command::new("/bin/true").status().is_err());
    assert_eq!(Command::new("/bin/true").exec().raw_os_error(), Some(libc::EPERM));
    assert_eq!(trace(parent.as_raw()), -libc::EPERM);
    assert_eq!(send_signals_to(own.as_fd(), parent.as_raw()), [-libc::EPERM; 2]);
    assert!(own.try_clone().is_ok(), "a descriptor can be copied");
    assert_eq!(nix::sys::signal::kill(parent, None).err(), Some(nix::Error::EPERM));
    assert_eq!(unshare(CloneFlags::CLONE_NEWUSER).err(), Some(nix::Error::EPERM));
    assert_eq!(nix::unistd::setuid(1.into()).err(), Some(nix::Error::EPERM));
    assert!(nix::mount::umount("/proc").is_err());
    assert!(std::env::set_current_dir("/").is_err());
    assert!(caps::read(None, CapSet::Effective).is_err(), "reading is refused, too");
    drop(listener);
}

#[test]
fn a_confined_process_can_serve() {
    if in_a_process_of_its_own("a_confined_process_can_serve") {
        return;
    }
    let directory = tempfile::tempdir().unwrap().keep();
    let open = |text: &str| {
        let backends = Registry::new(&[cleat_backend::mem::BACKEND, cleat_backend::file::BACKEND]);
        backends.volume(text).unwrap().open(&OpenOptions::default()).unwrap()
    };
    let image = open(&format!("file:{}?create=1M", directory.join("a.img").display()));
    let memory = open("mem:1M");
    cleat_sys::ring::reserve(1, 8).unwrap();
    confined(&Needs::default());

    // A thread, a ring, and the file that was opened before.
    let work = move || {
        let mut ring = Ring::new(8).unwrap();
        assert!(ring.is_restricted());
        assert!(cleat_sys::ring::is_exhausted());
        let waker = Waker::new().unwrap();
        let (completer, completions) = channel(waker.clone(), 1);
        let mut queue = image.queue(&mut ring, &completer).unwrap();
        let flags = cleat_core::request::Flags { fua: true, ..Default::default() };
        let op = cleat_core::request::Op::Write;
        // A short write may need no ring.
        let length = 128 << 10;
        let request = cleat_core::request::Request { op, flags, offset: 0, length };
        queue.start(0, request, Some(Buffer::zeroed(128 << 10)), &mut ring);
        ring.submit_and_wait().unwrap();
        let completion = ring.next().unwrap();
        assert_eq!(completion.token, Token::backend(0, 0));
        // The file's own thread syncs the write.
        assert!(queue.on_ring(completion, &mut ring).is_none());
        let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
        assert!(poll(&mut set, PollTimeout::from(10_000_u16)).unwrap() > 0);
        completions.accept();
        let (id, outcome) = completions.next().unwrap();
        assert_eq!((id, outcome.result), (0, Ok(())));
        let flags = cleat_core::request::Flags::default();
        let short = cleat_core::request::Request { op, flags, offset: 0, length: 4096 };
        match queue.start(1, short, Some(Buffer::zeroed(4096)), &mut ring) {
            Started::Done(outcome) => assert_eq!(outcome.result, Ok(())),
            Started::Pending => {
                ring.submit_and_wait().unwrap();
                let (_, outcome) = queue.on_ring(ring.next().unwrap(), &mut ring).unwrap();
                assert_eq!(outcome.result, Ok(()));
            }
        }
        image.resize().unwrap().grow(2 << 20).unwrap();
        assert_eq!(image.refresh_size().unwrap(), 2 << 20);
        // The thread gets its ring again; another thread gets none.
        drop((queue, ring));
        let mut ring = Ring::new(4).unwrap();
        let again = waker.descriptor();
        ring.register(again).unwrap();
        assert!(ring.timeout(Duration::ZERO, Token(9)));
        ring.submit_and_wait().unwrap();
        assert_eq!(ring.next().unwrap().token, Token(9));
        let other = std::thread::spawn(|| Ring::new(4).err().unwrap().raw_os_error());
        assert_eq!(other.join().unwrap(), Some(libc::EMFILE));
    };
    std::thread::Builder::new().name("work".to_owned()).spawn(work).unwrap().join().unwrap();
    memory.resize().unwrap().grow(2 << 20).unwrap();
    // A panic is reported and caught.
    assert!(std::panic::catch_unwind(|| panic!("as expected")).is_err());
    #[allow(clippy::disallowed_methods, reason = "the call itself is tested")]
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn a_process_with_needs_gets_only_these() {
    if in_a_process_of_its_own("a_process_with_needs_gets_only_these") {
        return;
    }
    let directory = tempfile::tempdir().unwrap().keep();
    let (config, secret) = (directory.join("config"), directory.join("secret"));
    std::fs::write(&config, b"config").unwrap();
    std::fs::write(&secret, b"secret").unwrap();
    std::fs::create_dir(directory.join("files")).unwrap();
    let of_root = directory.join("files/of-root");
    std::fs::write(&of_root, b"key").unwrap();
    std::fs::set_permissions(&of_root, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Called before the filter: the standard library then knows that statx(2) exists, and takes EPERM for an
    // error of the file.
    assert!(!directory.join("missing").exists());
    let needs = Needs {
        paths: vec!["/dev/null".into(), "/proc/self".into()],
        copies: vec![config.clone(), directory.join("files")],
        network: Network::Any,
        ..Needs::default()
    };
    let applied = confined(&needs);

    assert!(config.try_exists().unwrap());
    assert_eq!(std::fs::read(&config).unwrap(), b"config");
    assert!(File::options().write(true).open(&config).is_err());
    if applied.contains(&layer::EMPTY_ROOT) {
        assert_eq!(std::fs::read(directory.join("files/of-root")).unwrap(), b"key");
        assert!(File::open("/dev/null").is_ok());
        assert!(!std::path::Path::new("/etc/passwd").exists());
        assert!(File::create("/new").is_err());
        let own = format!("/proc/{}/status", std::process::id());
        assert!(File::open(own).is_ok() && File::open("/proc/self/status").is_ok());
        assert!(!std::path::Path::new("/proc/1").exists());
    }
    if applied.contains(&layer::EMPTY_ROOT) || applied.contains(&layer::LANDLOCK) {
        assert!(File::open(&secret).is_err());
    }
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(stream.as_fd().try_clone_to_owned().is_ok());
    for family in [AddressFamily::Netlink, AddressFamily::Unix] {
        let other = socket(family, SockType::Raw, SockFlag::empty(), None);
        assert_eq!(other.err(), Some(nix::Error::EPERM), "{family:?}");
    }
    assert!(Command::new("/bin/true").status().is_err());
}

#[test]
fn a_writable_directory_and_a_port_are_open_and_their_surroundings_are_not() {
    if in_a_process_of_its_own(
        "a_writable_directory_and_a_port_are_open_and_their_surroundings_are_not",
    ) {
        return;
    }
    let directory = tempfile::tempdir().unwrap().keep();
    let (open, beside) = (directory.join("open"), directory.join("beside"));
    for path in [&open, &beside] {
        std::fs::create_dir(path).unwrap();
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(path, everyone).unwrap();
    }
    assert!(!directory.join("missing").exists());
    let [listener, other] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let needs = Needs {
        writable: vec![open.clone()],
        network: Network::Ports(vec![listener.local_addr().unwrap().port()]),
        ..Needs::default()
    };
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let applied = confined(&needs);

    std::fs::create_dir(open.join("a")).unwrap();
    std::fs::write(open.join("file"), b"content").unwrap();
    std::fs::hard_link(open.join("file"), open.join("a/link")).unwrap();
    File::open(open.join("a")).unwrap().sync_all().unwrap();
    std::fs::remove_file(open.join("file")).unwrap();
    assert_eq!(std::fs::read(open.join("a/link")).unwrap(), b"content");
    assert_eq!(std::fs::read_dir(&open).unwrap().count(), 1);
    assert!(std::os::unix::fs::symlink("/", open.join("root")).is_err());
    assert!(Command::new(open.join("a/link")).status().is_err());
    if applied.contains(&layer::EMPTY_ROOT) || applied.contains(&layer::LANDLOCK) {
        assert!(std::fs::write(beside.join("file"), b"content").is_err());
        assert!(std::fs::create_dir(directory.join("c")).is_err());
    }
    std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    if applied.contains(&layer::LANDLOCK) {
        let refused = std::net::TcpStream::connect(other.local_addr().unwrap()).err();
        let refused = refused.and_then(|error| error.raw_os_error());
        // Landlock knows TCP since Linux 6.7.
        let mut version = release.split('.').map_while(|part| part.parse::<u32>().ok());
        if (version.next(), version.next()) >= (Some(6), Some(7)) {
            assert_eq!(refused, Some(libc::EACCES));
        }
    }
}

/// What a worker must not reach: all of it belongs to this process, or is its parent.
struct Surroundings {
    targets: Targets,
    _listeners: (UnixListener, UnixListener, UnixDatagram, TcpListener),
    _shared_memory: SharedMemory,
}

impl Surroundings {
    fn new() -> Self {
        use std::os::linux::net::SocketAddrExt;
        let directory = tempfile::tempdir().unwrap().keep();
        let (file, socket) = (directory.join("file"), directory.join("socket"));
        std::fs::write(&file, b"secret").unwrap();
        let abstract_name = format!("cleat-roads-{}", std::process::id()).into_bytes();
        let named = |name: &[u8]| std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let address = named(&abstract_name);
        let datagrams = named(&[&abstract_name[..], DATAGRAMS].concat());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let listeners = (
            UnixListener::bind(&socket).unwrap(),
            UnixListener::bind_addr(&address).unwrap(),
            UnixDatagram::bind_addr(&datagrams).unwrap(),
            tcp,
        );
        let pid = nix::unistd::Pid::parent().as_raw();
        Self {
            targets: Targets { file, socket, abstract_name, pid, port },
            _listeners: listeners,
            _shared_memory: SharedMemory::make(),
        }
    }

    /// Tries every road, and returns those that are open.
    fn open_roads(&self, filter: bool) -> Vec<Tried> {
        let tried = try_all(&self.targets, filter);
        assert!(tried.len() >= if filter { 90 } else { 57 }, "{}", tried.len());
        tried.into_iter().filter(|(_, result)| *result >= 0).collect()
    }
}

/// Each attempt succeeds where nothing closes its road, so that the other tests can fail. The list names those that
/// depend on the machine.
#[test]
fn the_roads_are_open_to_an_unconfined_process() {
    const OF_THE_MACHINE: [&str; 11] = [
        "list the root of process 1",
        "write to another process",
        "open a device",
        "connect to systemd",
        "connect to D-Bus",
        "send to journald by path",
        "load a module",
        "make a vsock socket",
        "make a packet socket",
        "make a socket of the kernel's crypto",
        "count events",
    ];
    if in_a_process_of_its_own("the_roads_are_open_to_an_unconfined_process") {
        return;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mut needed = caps::all();
    // No attempt needs this one, which some machines lack.
    needed.remove(&caps::Capability::CAP_SYS_RESOURCE);
    let has = |one| caps::has_cap(None, CapSet::Effective, one).unwrap();
    let all = needed.into_iter().all(has);
    if !all || !status.contains("Seccomp:\t0\n") {
        // In a container some roads are closed.
        return;
    }
    let surroundings = Surroundings::new();
    // The attempts change mounts and the host name.
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS).unwrap();
    let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
    nix::mount::mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    let tried = try_without_execution(&surroundings.targets, true);
    let closed: Vec<_> = tried
        .into_iter()
        .filter(|(name, result)| *result < 0 && !OF_THE_MACHINE.contains(name))
        .collect();
    assert!(closed.is_empty(), "{closed:?}");
}

#[test]
fn no_road_leads_out_of_a_confined_process() {
    if in_a_process_of_its_own("no_road_leads_out_of_a_confined_process") {
        return;
    }
    let surroundings = Surroundings::new();
    confined(&Needs::default());
    let open = surroundings.open_roads(true);
    assert!(open.is_empty(), "{open:?}");
}

/// What seccomp cannot see, such as the operations of a ring, must be closed by another layer, too.
#[test]
fn no_road_leads_out_even_without_the_system_call_filter() {
    if in_a_process_of_its_own("no_road_leads_out_even_without_the_system_call_filter") {
        return;
    }
    let surroundings = Surroundings::new();
    let isolation = isolation();
    let applied = apply_layers(&Needs::default(), &isolation).applied;
    if isolation.allow_missing.iter().any(|name| name == layer::EMPTY_ROOT) {
        // Without root and CAP_SYS_ADMIN the other layers cannot be had.
        return;
    }
    for needed in [layer::EMPTY_NETWORK, layer::EMPTY_ROOT, layer::OWN_USER, layer::NO_CAPABILITIES]
    {
        assert!(applied.contains(&needed), "{needed}");
    }
    let open = surroundings.open_roads(false);
    assert!(open.is_empty(), "{open:?}");
    // A signal through an owned descriptor is not sent to a process of another user. Its delivery is not an error
    // of this process, so the parent, which reads the output, proves it by its life.
    let (own, mut peer) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(send_signals_to(own.as_fd(), surroundings.targets.pid), [0, 0]);
    notify_owner(own.as_fd());
    std::io::Write::write_all(&mut peer, b"x").unwrap();
}

#[test]
fn a_missing_layer_is_an_error_unless_it_is_allowed_by_name() {
    let reason = "this kernel has no Landlock".to_owned();
    let report = Report { missing: vec![(layer::LANDLOCK, reason)], ..Report::default() };
    let error = check(&report, &Isolation::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("landlock (this kernel has no Landlock)"), "{error}");
    assert!(error.repair().unwrap().contains("allow_missing = [\"landlock\"]"), "{error}");
    let other = Isolation { user: None, allow_missing: vec![layer::OWN_USER.to_owned()] };
    check(&report, &other).unwrap_err();
    let allowed = Isolation { user: None, allow_missing: vec![layer::LANDLOCK.to_owned()] };
    check(&report, &allowed).unwrap();
}
