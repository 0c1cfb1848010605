//! What code inside a worker must not reach. All of it belongs to the test's process.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

use cleat_sys::escape_attempts::roads::{DATAGRAMS, SharedMemory};
use cleat_worker::protocol::FromWorker;
use tempfile::TempDir;
use test_kit::worker::failure;

pub(super) struct Surroundings {
    directory: TempDir,
    name: String,
    tcp: TcpListener,
    _listeners: (UnixListener, UnixListener, UnixDatagram),
    _shared_memory: SharedMemory,
}

impl Surroundings {
    pub(super) fn new() -> Self {
        let directory = TempDir::new().unwrap();
        std::fs::write(directory.path().join("secret"), "secret").unwrap();
        let name = directory.path().file_name().unwrap().to_str().unwrap().to_owned();
        let named =
            |end: &[u8]| SocketAddr::from_abstract_name([name.as_bytes(), end].concat()).unwrap();
        let listeners = (
            UnixListener::bind(directory.path().join("socket")).unwrap(),
            UnixListener::bind_addr(&named(b"")).unwrap(),
            UnixDatagram::bind_addr(&named(DATAGRAMS)).unwrap(),
        );
        Self {
            directory,
            name,
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            _listeners: listeners,
            _shared_memory: SharedMemory::make(),
        }
    }

    /// A port of 127.0.0.1 on which this process listens.
    pub(super) fn port(&self) -> u16 {
        self.tcp.local_addr().unwrap().port()
    }

    /// Returns the plan of faults that tries every road, with `port` as that over TCP.
    pub(super) fn plan(&self, port: u16) -> String {
        let (path, pid) = (self.directory.path().display(), std::process::id());
        format!("break-in {path}/secret {path}/socket {pid} {port} {}", self.name)
    }

    /// Returns the list of open roads from the worker's answer.
    pub(super) fn open_roads(&self, answer: FromWorker) -> String {
        failure(answer).1
    }
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let secret = std::fs::read(self.directory.path().join("secret")).unwrap();
            assert_eq!(secret, b"secret");
        }
    }
}
