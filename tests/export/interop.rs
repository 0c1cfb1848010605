//! `cleat serve` with common NBD clients: the tools of libnbd and qemu, and fio.
//!
//! The amount of data per transfer is CLEAT_INTEROP_MIB (default 128); the figures in
//! `ARCHITECTURE.md` were taken with 1024.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use test_kit::memory;
use test_kit::nbd::wire::{self, Request};
use test_kit::wait::wait_until;

#[test]
fn nbdinfo_shows_the_export_and_its_properties() {
    let dir = TempDir::new().unwrap();
    let server = Server::start(&dir, "mem:64M", &["--export-name", "disk"]);
    let info = run("nbdinfo", &[&server.uri]);
    assert!(info.contains("export=\"disk\""), "{info}");
    for line in ["export-size: 67108864", "can_multi_conn: true", "can_fua: true"] {
        assert!(info.contains(line), "{line} in {info}");
    }
    let list = run("nbdinfo", &["--list", &server.uri]);
    assert!(list.contains("export=\"disk\""), "{list}");
    let other = server.uri.replace("disk", "other");
    assert!(!command("nbdinfo", &[&other]).status.success());
}

#[test]
fn nbdinfo_shows_data_and_holes() {
    for backend in Backend::ALL {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, &backend.uri(&dir), &[]);
        let size = mib() << 20;
        let map = || extents(&run("nbdinfo", &["--map", &server.uri]));
        assert_eq!(map(), [(0, size, true)]);
        run("qemu-io", &["-f", "raw", "-c", "write -P 1 16M 1M", &server.uri]);
        let (at, length) = (16 << 20, 1 << 20);
        let written = [(0, at, true), (at, length, false), (at + length, size - at - length, true)];
        assert_eq!(map(), written, "{}", server.uri);
        run("qemu-io", &["-f", "raw", "-c", "discard 16M 1M", &server.uri]);
        assert_eq!(map(), [(0, size, true)]);
        // This check comes last: nbdinfo reads content here, which allocates memory.
        assert!(run("nbdinfo", &[&server.uri]).contains("base:allocation"));
    }
}

/// Parses the output of `nbdinfo --map`: offset, length, whether the extent is a hole.
fn extents(map: &str) -> Vec<(u64, u64, bool)> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let mut number = || words.next().unwrap().parse().unwrap();
        (number(), number(), number() == 3)
    };
    map.lines().map(line).collect()
}

#[test]
fn a_read_only_export_refuses_writes() {
    let dir = TempDir::new().unwrap();
    let server = Server::start(&dir, "mem:1M", &["--read-only"]);
    assert!(run("nbdinfo", &[&server.uri]).contains("is_read_only: true"));
    let written = command("qemu-io", &["-f", "raw", "-c", "write 0 4k", &server.uri]);
    assert!(!written.status.success());
    assert!(
        run("qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 1M", &server.uri]).contains("read")
    );
}

#[test]
fn nbdcopy_copies_to_and_from_a_volume() {
    for backend in Backend::ALL {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, &backend.uri(&dir), &[]);
        let (source, back) = (random_file(&dir), dir.path().join("back"));
        run("nbdcopy", &[path(&source), &server.uri]);
        run("nbdcopy", &[&server.uri, path(&back)]);
        assert_same(&source, &back);
    }
}

#[test]
fn nbdcopy_works_with_many_connections_and_tcp() {
    let dir = TempDir::new().unwrap();
    let volume = format!("mem:{}M", mib());
    let server = Server::start_tcp(&dir, &volume);
    assert!(server.uri.starts_with("nbd://127.0.0.1:"), "{}", server.uri);
    let (source, back) = (random_file(&dir), dir.path().join("back"));
    run("nbdcopy", &["--connections=4", path(&source), &server.uri]);
    run("nbdcopy", &["--connections=4", "--requests=64", &server.uri, path(&back)]);
    assert_same(&source, &back);
}

#[test]
fn qemu_img_converts_both_ways_and_compares() {
    for backend in Backend::ALL {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, &backend.uri(&dir), &[]);
        let (source, back) = (random_file(&dir), dir.path().join("back"));
        let raw = ["-f", "raw", "-O", "raw"];
        let convert = |more: &[&str]| run("qemu-img", &[&["convert"], &raw[..], more].concat());
        convert(&["-n", path(&source), &server.uri]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", path(&source), &server.uri]);
        // Its reads and questions for holes come in any order beside large replies that fill the socket.
        for _ in 0..8 {
            convert(&[&server.uri, path(&back)]);
            assert_same(&source, &back);
        }
    }
}

#[test]
fn qemu_io_writes_zeroes_trims_and_checks_patterns() {
    for backend in Backend::ALL {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, &backend.uri(&dir), &[]);
        let steps = [
            "write -P 0xab 0 1M",
            "write -P 0xcd -f 4k 64k",
            "write -z 512 4k",
            "write -z -u 128k 64k",
            "read -P 0xab 0 512",
            "read -P 0 512 4k",
            "read -P 0xcd 8k 60k",
            "read -P 0 128k 64k",
            "discard 256k 256k",
            "read -P 0xab 512k 512k",
            "flush",
        ];
        let mut arguments = vec!["-f", "raw"];
        steps.iter().for_each(|step| arguments.extend(["-c", step]));
        arguments.push(&server.uri);
        let printed = run("qemu-io", &arguments);
        assert!(!printed.contains("failed") && !printed.contains("verification"), "{printed}");
    }
}

#[test]
fn qemu_img_bench_writes_with_flushes() {
    let dir = TempDir::new().unwrap();
    let server = Server::start(&dir, &Backend::File.uri(&dir), &[]);
    let writes = ["-w", "-c", "2000", "-d", "16", "-s", "4096", "--flush-interval=64"];
    run("qemu-img", &[&["bench", "-f", "raw"], &writes[..], &[&server.uri]].concat());
}

#[test]
fn fio_verifies_what_it_wrote() {
    for backend in Backend::ALL {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, &backend.uri(&dir), &[]);
        let uri = format!("--uri={}", server.uri);
        let size = format!("--size={}M", mib());
        let sizes = ["--bsrange=4k-256k", "--iodepth=32", "--trim_backlog=64"];
        let kind = ["--name=verify", "--ioengine=nbd", "--rw=randwrite", "--verify=crc32c"];
        // Without this option fio leaves a file in the working directory.
        let state = "--verify_state_save=0";
        let more = ["--verify_fatal=1", state, "--fsync=32", &uri, &size];
        let output = TempDir::new().unwrap();
        let report = output.path().join("fio.json");
        let out = format!("--output={}", path(&report));
        run("fio", &[&kind[..], &sizes, &more, &["--output-format=json", &out]].concat());
        let report = std::fs::read_to_string(report).unwrap();
        assert!(report.contains("\"error\" : 0"), "{report}");
    }
}

#[test]
fn sigterm_stops_the_server_with_exit_0_and_removes_the_socket() {
    let dir = TempDir::new().unwrap();
    let mut server = Server::start(&dir, "mem:1M", &[]);
    let idle = UnixStream::connect(dir.path().join("s")).unwrap();
    server.signal(libc::SIGTERM);
    assert!(server.wait().success());
    assert!(!dir.path().join("s").exists());
    drop(idle);
}

#[test]
fn the_server_is_confined() {
    for backend in ["mem:1M", "file:"] {
        let dir = TempDir::new().unwrap();
        let server = Server::start(&dir, backend, &[]);
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.trim().to_owned()
        };
        assert_eq!((field("Seccomp:"), field("NoNewPrivs:")), ("2".to_owned(), "1".to_owned()));
        assert_eq!(field("CapPrm:"), "0000000000000000");
        if nix::unistd::geteuid().is_root() {
            assert!(!field("Uid:").split_whitespace().any(|id| id == "0"), "{status}");
            let root = format!("/proc/{}/root", server.child.id());
            assert_eq!(std::fs::read_dir(root).unwrap().count(), 0);
        }
        run("nbdinfo", &[&server.uri]);
    }
}

#[test]
fn serving_on_a_network_address_prints_a_warning() {
    for (address, warned) in [("127.0.0.1:0", false), ("0.0.0.0:0", true)] {
        let mut child = Command::new(CLEAT)
            .args(["serve", "mem:1M", "--read-only", "--listen", address])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut String::new()).unwrap();
        let mut server = Server { child, uri: String::new() };
        server.signal(libc::SIGTERM);
        assert!(server.wait().success());
        let mut printed = String::new();
        server.child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
        assert_eq!(printed.contains("neither encryption nor authentication"), warned, "{printed}");
    }
}

#[test]
fn a_server_ends_with_the_process_that_holds_its_input() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("s");
    let mut child = Command::new(CLEAT)
        .args(["serve", "mem:1M", "--socket", path(&socket), "--end-with-stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut server = Server { child, uri: String::new() };
    input.write_all(b"what is sent has no effect").unwrap();
    UnixStream::connect(&socket).unwrap().read_exact(&mut [0; 18]).unwrap();
    assert!(server.child.try_wait().unwrap().is_none());
    drop(input);
    assert!(server.wait().success());
    assert!(!socket.exists());
}

#[test]
fn an_outage_of_the_backend_is_logged() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("s");
    let mut child = Command::new(CLEAT)
        .args(["serve", "fault:mem:1M?fault.error=retry", "--socket", path(&socket)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut uri = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut uri).unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut server = Server { child, uri };
    let read = ["20", "qemu-io", "-f", "raw", "-c", "read 0 512", server.uri.trim_end()];
    let mut client = Command::new("timeout").args(read).spawn().unwrap();
    let line = std::thread::scope(|scope| {
        // When the client has given up or was killed, the server has logged everything.
        scope.spawn(|| {
            assert!(!client.wait().unwrap().success());
            server.signal(libc::SIGTERM);
        });
        let line = log.next();
        server.signal(libc::SIGTERM);
        line
    });
    assert!(server.wait().success());
    let line = line.unwrap().unwrap();
    assert!(line.contains("the backend does not answer") && line.contains("retry"), "{line}");
}

#[test]
fn the_socket_of_a_dead_server_is_replaced_and_of_a_live_one_is_not() {
    let dir = TempDir::new().unwrap();
    let mut dead = Server::start(&dir, "mem:1M", &[]);
    dead.signal(libc::SIGKILL);
    dead.wait();
    let socket = dir.path().join("s");
    // A process that the server has left behind removes its socket. It may end without having done so.
    let gone = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !socket.exists()
    });
    assert!(gone, "the socket of a killed server stays");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let alive = Server::start(&dir, "mem:1M", &[]);
    let second = command(CLEAT, &["serve", "mem:1M", "--socket", path(&socket)]);
    assert!(!second.status.success());
    let printed = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(printed.contains("another server listens on"), "{printed}");
    run("nbdinfo", &[&alive.uri]);
}

#[test]
fn a_client_that_does_not_read_uses_a_limited_amount_of_memory() {
    let dir = TempDir::new().unwrap();
    let server = Server::start(&dir, "file:", &[]);
    let mut client = raw_client(&dir);
    // The replies have 50 GiB, and the client reads none of them yet.
    let requests: Vec<u8> = (0..1600u32).flat_map(read_32_mib).collect();
    client.write_all(&requests).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // The budget of one connection is 64 MiB.
    let used_kib = server.used_kib();
    assert!(used_kib < 80 * 1024, "{used_kib} KiB in use");
    let mut payload = vec![0; 32 << 20];
    for _ in 0..4 {
        client.read_exact(&mut [0; 16]).unwrap();
        client.read_exact(&mut payload).unwrap();
    }
}

#[test]
fn an_idle_server_frees_its_buffers_after_large_requests() {
    let dir = TempDir::new().unwrap();
    memory::without_huge_pages();
    let server = Server::start(&dir, "file:", &[]);
    let mut client = raw_client(&dir);
    let mut payload = vec![0; 32 << 20];
    for cookie in 0..4 {
        client.write_all(&read_32_mib(cookie)).unwrap();
        client.read_exact(&mut [0; 16]).unwrap();
        client.read_exact(&mut payload).unwrap();
    }
    // The server frees the buffers after a second without requests.
    let deadline = Instant::now() + Duration::from_secs(10);
    let limit_kib = 6 * 1024;
    loop {
        let used_kib = server.used_kib();
        if used_kib < limit_kib {
            break;
        }
        assert!(Instant::now() < deadline, "{used_kib} KiB in use");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Opens a connection in the transmission phase, for requests that no correct client sends.
fn raw_client(dir: &TempDir) -> UnixStream {
    let mut client = UnixStream::connect(dir.path().join("s")).unwrap();
    wire::handshake(&mut client);
    client
}

fn read_32_mib(cookie: u32) -> [u8; 28] {
    Request::new(wire::READ, cookie.into(), 0, 32 << 20).encode()
}

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

#[derive(Clone, Copy)]
enum Backend {
    Memory,
    File,
}

impl Backend {
    const ALL: [Self; 2] = [Self::Memory, Self::File];

    fn uri(self, dir: &TempDir) -> String {
        match self {
            Self::Memory => format!("mem:{}M", mib()),
            Self::File => {
                let image = dir.path().join("image");
                File::create(&image).unwrap().set_len(mib() << 20).unwrap();
                format!("file:{}", path(&image))
            }
        }
    }
}

/// A running `cleat serve`; killed when dropped.
/// Each session costs a line at the level WARN, up to a bound.
#[test]
fn junk_sessions_do_not_fill_the_log() {
    const SESSIONS: usize = 200;
    let dir = TempDir::new().unwrap();
    let (socket, log) = (dir.path().join("s"), dir.path().join("log"));
    let mut child = Command::new(CLEAT)
        .args(["serve", "mem:1M", "--socket", path(&socket)])
        .stdout(Stdio::piped())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let server = Server { child, uri: String::new() };
    for _ in 0..SESSIONS {
        let mut client = UnixStream::connect(&socket).unwrap();
        client.read_exact(&mut [0; 18]).unwrap();
        // Handshake flags that no server offers; the server then closes the connection.
        client.write_all(&[0xff; 4]).unwrap();
        assert_eq!(client.read(&mut [0; 1]).unwrap_or(0), 0);
    }
    // The thread that writes the log may not have run yet.
    wait_until("a line in the log", || {
        std::fs::read_to_string(&log).unwrap().contains("connection lost")
    });
    drop(server);
    let log = std::fs::read_to_string(&log).unwrap();
    let lines = log.lines().filter(|line| line.contains("connection lost")).count();
    assert!((1..=10).contains(&lines), "{lines} lines for {SESSIONS} sessions:\n{log}");
}

struct Server {
    child: Child,
    uri: String,
}

impl Server {
    fn start(dir: &TempDir, volume: &str, options: &[&str]) -> Self {
        let socket = dir.path().join("s");
        let mut volume = volume.to_owned();
        if volume == "file:" {
            let image = dir.path().join("image");
            File::create(&image).unwrap().set_len(64 << 20).unwrap();
            volume.push_str(path(&image));
        }
        Self::spawn(&[&[&volume, "--socket", path(&socket)], options].concat())
    }

    fn start_tcp(_dir: &TempDir, volume: &str) -> Self {
        Self::spawn(&[volume, "--listen", "127.0.0.1:0"])
    }

    fn spawn(arguments: &[&str]) -> Self {
        let mut child = Command::new(CLEAT)
            .arg("serve")
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The server prints the URI when clients can connect.
        let mut uri = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut uri).unwrap();
        assert!(!uri.is_empty(), "the server did not start");
        Self { child, uri: uri.trim_end().to_owned() }
    }

    fn signal(&self, signal: i32) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let signal = nix::sys::signal::Signal::try_from(signal).unwrap();
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    fn used_kib(&self) -> u64 {
        memory::own_kib(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn mib() -> u64 {
    std::env::var("CLEAT_INTEROP_MIB").map_or(128, |mib| mib.parse().unwrap())
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Creates a file of the volumes' size with random content and holes.
fn random_file(dir: &TempDir) -> PathBuf {
    let name = dir.path().join("source");
    let file = File::create(&name).unwrap();
    file.set_len(mib() << 20).unwrap();
    let mut random = File::open("/dev/urandom").unwrap();
    let mut block = vec![0; 1 << 20];
    for at in (0..mib()).filter(|at| at % 8 != 3) {
        random.read_exact(&mut block).unwrap();
        file.write_all_at(&block, at << 20).unwrap();
    }
    name
}

fn assert_same(left: &Path, right: &Path) {
    run("cmp", &[path(left), path(right)]);
}

/// Runs a tool, checks that it succeeds, and returns its standard output.
fn run(tool: &str, arguments: &[&str]) -> String {
    let output = command(tool, arguments);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {printed}{complained}");
    printed
}

fn command(tool: &str, arguments: &[&str]) -> Output {
    Command::new("timeout").arg("120").arg(tool).args(arguments).output().unwrap_or_else(|error| {
        panic!("{tool}: {error}; apt install libnbd-bin qemu-utils fio coreutils")
    })
}
