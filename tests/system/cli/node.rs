//! The daemon process: its signals and its socket.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::unistd::Pid;

use crate::cli::cleat;

/// Starts a daemon that loads no module, with its directories under `root`.
fn start(root: &Path) -> Child {
    let config = root.join("cleat.toml");
    let text = format!(
        "runtime_dir = {:?}\nstate_dir = {:?}\nmodprobe = false\n",
        root.join("run"),
        root.join("state")
    );
    fs::write(&config, text).expect("a file");
    Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["node", "--config"])
        .arg(&config)
        .env_remove("CLEAT_SOCKET")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the daemon starts")
}

fn signal(daemon: &Child, which: Signal) {
    let pid = i32::try_from(daemon.id()).expect("a pid");
    kill(Pid::from_raw(pid), which).expect("the daemon runs");
}

#[test]
fn the_daemon_ignores_sighup_and_sigterm_removes_the_socket() {
    let root = tempfile::tempdir().expect("a directory");
    let socket = root.path().join("run/cleat.sock");
    let mut daemon = start(root.path());
    let until = Instant::now() + Duration::from_secs(20);
    while !socket.exists() {
        assert!(Instant::now() < until, "no socket");
        assert!(daemon.try_wait().expect("a child").is_none(), "the daemon has exited");
        std::thread::sleep(Duration::from_millis(10));
    }
    let kind = fs::metadata(&socket).expect("the socket exists");
    assert!(kind.file_type().is_socket());
    assert_eq!(kind.permissions().mode() & 0o777, 0o600);
    for _ in 0..3 {
        signal(&daemon, Signal::SIGHUP);
        assert_eq!(cleat("ls", &socket).code, 0);
    }
    signal(&daemon, Signal::SIGTERM);
    assert!(daemon.wait().expect("the daemon exits").success());
    assert!(!socket.exists());
}

#[test]
fn a_socket_that_another_daemon_serves_is_not_replaced() {
    let root = tempfile::tempdir().expect("a directory");
    let path = root.path().join("busy.sock");
    // A listener with a full queue that accepts no connection: connecting fails, but not with
    // ECONNREFUSED.
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .expect("a socket");
    let address = UnixAddr::new(&path).expect("a short path");
    bind(listener.as_raw_fd(), &address).expect("a free path");
    listen(&listener, Backlog::new(0).expect("a length")).expect("the socket listens");
    let _queued = UnixStream::connect(&path).expect("room for one");
    let (run, state) = (root.path().join("run"), root.path().join("state"));
    let line = format!("node --runtime-dir {} --state-dir {}", run.display(), state.display());
    let refused = cleat(&line, &path);
    assert_eq!(refused.code, 5, "{}", refused.stderr);
    assert!(refused.stderr.contains("another daemon serves"), "{}", refused.stderr);
}
