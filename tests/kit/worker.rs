//! A minimal supervisor: starts the real worker binary and exchanges messages with it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_core::policy::Policy;
use cleat_statistics::Page;
use cleat_sys::host::boot_id;
use cleat_sys::process::spawn_with_channel;
use cleat_sys::seqpacket;
use cleat_worker::isolation::Isolation;
use cleat_worker::protocol::{
    CHANNEL_FD, Failure, FromWorker, MAX_PACKET, PROTOCOL_VERSION, ProtocolVersions, Ready, Start,
    ToWorker,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket, socketpair,
};
use tempfile::TempDir;

/// A worker process and the test's end of its channel.
pub struct Worker {
    pub child: Child,
    pub channel: Option<OwnedFd>,
    pub page: Page,
    directory: TempDir,
}

/// Returns a start message for the volume `uri`, for tests to modify.
pub fn start_message(uri: &str) -> Start {
    Start {
        versions: versions(),
        mapping_id: "0123abcd".to_owned(),
        name: "test-volume".to_owned(),
        generation: 7,
        uri: uri.to_owned(),
        connections: 16,
        read_only: false,
        log: String::new(),
        successor: false,
        policy: Policy::default(),
        node: "node-a".to_owned(),
        machine: String::new(),
        boot_id: boot_id().unwrap(),
        take_over: false,
        resumes: false,
        expected: None,
        quiesce: false,
        sync_failed: false,
        credentials: Vec::new(),
        grant: 0,
        tail_bytes: 0,
        cache_files: 0,
        cache_file_bytes: 0,
        claim_only: false,
    }
}

/// Returns the protocol versions of a test's supervisor.
pub fn versions() -> ProtocolVersions {
    let build = "the supervisor of a test".to_owned();
    ProtocolVersions { build, ..ProtocolVersions::of_this_build() }
}

/// Returns a pair of connected sequential-packet sockets.
pub fn seqpacket_pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
}

impl Worker {
    /// Starts a worker process and sends it nothing.
    pub fn launch() -> Self {
        Self::launch_with(&[])
    }

    /// Starts a worker process with these environment variables and sends it nothing.
    pub fn launch_with(environment: &[(&str, &str)]) -> Self {
        Self::launch_isolated(environment, &crate::isolation::of_this_machine())
    }

    /// Starts a worker process with this isolation and sends it nothing.
    pub fn launch_isolated(environment: &[(&str, &str)], isolation: &Isolation) -> Self {
        let (ours, theirs) = seqpacket_pair();
        let mut command = Command::new(crate::binary::cleat());
        command.envs(environment.iter().copied()).arg("worker").args(isolation.arguments());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = spawn_with_channel(&mut command, &theirs, CHANNEL_FD, None).unwrap();
        let (page, _) = Page::create().unwrap();
        let directory = tempfile::tempdir().unwrap();
        Self { child, channel: Some(ours), page, directory }
    }

    /// Starts a worker process that has opened the volume `uri`.
    pub fn ready(uri: &str) -> (Self, Ready) {
        let worker = Self::launch();
        worker.send_start(&start_message(uri));
        match worker.receive() {
            FromWorker::Ready(ready) => (worker, *ready),
            other => panic!("{uri}: {other:?}"),
        }
    }

    /// Starts a worker process that serves `count` connections, and returns the test's ends of them.
    pub fn serving(uri: &str, count: usize) -> (Self, Vec<UnixStream>) {
        let (mut worker, _) = Self::ready(uri);
        let sockets = worker.serve(count);
        (worker, sockets)
    }

    /// Sends the worker `count` connections, waits until it serves them, and returns the test's ends.
    pub fn serve(&mut self, count: usize) -> Vec<UnixStream> {
        let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair().unwrap()).collect();
        let theirs: Vec<_> = pairs.iter().map(|(_, theirs)| theirs.as_fd()).collect();
        self.send(&ToWorker::Serve, &theirs);
        // A mapping that another client has replaced reports it as soon as it is ready.
        let answers = std::iter::repeat_with(|| self.receive());
        let answer = answers.into_iter().find(|answer| !matches!(answer, FromWorker::Fenced));
        assert_eq!(answer, Some(FromWorker::Serving));
        pairs.into_iter().map(|(ours, _)| ours).collect()
    }

    /// Sends a start message with a listening socket and the statistics page.
    pub fn send_start(&self, start: &Start) {
        self.send_start_with(start, &[]);
    }

    /// Sends a start message with a listening socket, the statistics page and the descriptors of the
    /// credential files.
    pub fn send_start_with(&self, start: &Start, credentials: &[BorrowedFd<'_>]) {
        let listener = self.listener();
        let page = self.page.file().unwrap();
        let descriptors = [&[listener.as_fd(), page.as_fd()], credentials].concat();
        self.send(&ToWorker::Start(Box::new(start.clone())), &descriptors);
    }

    /// Returns a listening socket, for the worker to accept new supervisors on.
    pub fn listener(&self) -> OwnedFd {
        let listener = seqpacket();
        bind(listener.as_raw_fd(), &self.address()).unwrap();
        listen(&listener, Backlog::new(8).unwrap()).unwrap();
        listener
    }

    /// Returns the address of the worker's listening socket.
    fn address(&self) -> UnixAddr {
        UnixAddr::new(&self.directory.path().join("control.sock")).unwrap()
    }

    /// Sends a command with descriptors.
    pub fn send(&self, command: &ToWorker, descriptors: &[BorrowedFd<'_>]) {
        self.send_text(&serde_json::to_vec(command).unwrap(), descriptors);
    }

    /// Sends a packet with any content and descriptors.
    pub fn send_text(&self, text: &[u8], descriptors: &[BorrowedFd<'_>]) {
        seqpacket::send(self.channel.as_ref().unwrap().as_fd(), text, descriptors).unwrap();
    }

    /// Waits for the next message, for at most 60 s. Panics at the end of the channel.
    pub fn receive(&self) -> FromWorker {
        receive(self.channel.as_ref().unwrap()).expect("the channel is open").0
    }

    /// Sends a command and returns the next message.
    pub fn call(&self, command: &ToWorker) -> FromWorker {
        self.send(command, &[]);
        self.receive()
    }

    /// Closes the channel without a message, and connects as a new supervisor does.
    pub fn connect(&self) -> OwnedFd {
        let socket = seqpacket();
        connect(socket.as_raw_fd(), &self.address()).unwrap();
        socket
    }

    /// Adopts the worker as a new supervisor does.
    pub fn adopt(&mut self) -> Ready {
        let channel = self.connect();
        let (answer, mut descriptors) = adopt(&channel, "0123abcd");
        let FromWorker::Ready(ready) = answer else { panic!("{answer:?}") };
        self.page = Page::from_fd(descriptors.pop().unwrap()).unwrap();
        self.channel = Some(channel);
        *ready
    }

    /// Waits until the process exits, for at most 60 s, and returns its status.
    pub fn exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the worker did not exit");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns what the worker wrote to stderr. Call it after the process has exited.
    pub fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }

    /// Returns the value of `key` in `/proc/PID/status`.
    pub fn status(&self, key: &str) -> String {
        let status = std::fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{key}:")));
        line.unwrap_or_else(|| panic!("no {key}")).trim().to_owned()
    }

    /// Returns the path of `file` in `/proc/PID` of the worker.
    pub fn proc(&self, file: &str) -> String {
        format!("/proc/{}/{file}", self.child.id())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking()
            && let Some(mut stderr) = self.child.stderr.take()
        {
            let mut log = Vec::new();
            let _ = stderr.read_to_end(&mut log);
            let _ = std::io::stderr().write_all(&log);
        }
    }
}

/// Sends an adopt message and returns the answer with its descriptors.
pub fn adopt(channel: &OwnedFd, mapping_id: &str) -> (FromWorker, Vec<OwnedFd>) {
    let adopt = ToWorker::Adopt {
        version: PROTOCOL_VERSION,
        oldest: PROTOCOL_VERSION,
        build: String::new(),
        mapping_id: mapping_id.to_owned(),
        keeps_tail: true,
    };
    seqpacket::send(channel.as_fd(), &serde_json::to_vec(&adopt).unwrap(), &[]).unwrap();
    receive(channel).unwrap()
}

/// Waits for the next message, for at most 60 s. Returns `None` at the end of the channel.
pub fn receive(channel: &OwnedFd) -> Option<(FromWorker, Vec<OwnedFd>)> {
    let mut set = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut set, PollTimeout::from(60_000_u16)), Ok(1), "no answer in time");
    let mut buffer = vec![0; MAX_PACKET];
    let (length, descriptors) = match seqpacket::receive(channel.as_fd(), &mut buffer) {
        Ok(received) => received,
        Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => return None,
        Err(error) => panic!("{error}"),
    };
    (length > 0).then(|| (serde_json::from_slice(&buffer[..length]).unwrap(), descriptors))
}

/// Returns the kind and the message of a failure. Panics on any other message.
pub fn failure(message: FromWorker) -> (ErrorKind, String) {
    match message {
        FromWorker::Failed(Failure { kind, message, .. }) => (kind, message),
        other => panic!("{other:?}"),
    }
}

fn seqpacket() -> OwnedFd {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap()
}
