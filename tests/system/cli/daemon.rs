//! A scripted daemon in this process, on a real unix socket.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc;

use cleat_api::v1::node_server::{Node, NodeServer};
use cleat_api::v1::{self, MappingState};
use tempfile::TempDir;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Code, Request, Response, Status};

/// The repair hint of every error.
pub(crate) const REPAIR: &str = "umount /mnt";

/// The answers of the daemon.
#[derive(Default)]
pub(crate) struct Script {
    pub mappings: Vec<v1::Mapping>,
    pub refuse: Option<(Code, &'static str)>,
}

/// A request that the daemon received.
#[derive(Debug)]
pub(crate) enum Seen {
    Map(v1::MapRequest),
    Unmap(v1::UnmapRequest),
    Resize(v1::ResizeRequest),
    SetOptions(v1::SetOptionsRequest),
}

/// A running daemon. Its thread ends with the process.
pub(crate) struct Daemon {
    pub directory: TempDir,
    pub socket: PathBuf,
    seen: mpsc::Receiver<Seen>,
}

impl Daemon {
    pub(crate) fn start(script: Script) -> Self {
        let directory = TempDir::new().expect("a directory");
        let socket = directory.path().join("cleat.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        listener.set_nonblocking(true).expect("the socket is non-blocking");
        let (sender, seen) = mpsc::channel();
        std::thread::spawn(move || serve(listener, Fake { script, sender }));
        Self { directory, socket, seen }
    }

    /// Returns the oldest request that was not returned yet. Waits for one.
    pub(crate) fn seen(&self) -> Seen {
        self.seen.recv().expect("the daemon received a request")
    }
}

fn serve(listener: UnixListener, fake: Fake) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
        tonic::transport::Server::builder()
            .serve_with_incoming(NodeServer::new(fake), UnixListenerStream::new(listener))
            .await
            .expect("the server runs until the process exits");
    });
}

/// Returns a mapping as the daemon reports it.
pub(crate) fn mapping(name: &str, index: u32) -> v1::Mapping {
    v1::Mapping {
        name: name.into(),
        uri: "mem:1G".into(),
        state: MappingState::Mapped.into(),
        device: format!("/dev/nbd{index}"),
        symlink: format!("/dev/disk/by-id/cleat-{name}"),
        size_bytes: 1 << 30,
        block_size: 4096,
        worker_pid: 42,
        mapping_id: "0123456789abcdef".into(),
        generation: 1,
        mapped_at_s: 1_700_000_000,
        ..Default::default()
    }
}

fn mount() -> v1::Holder {
    let mount =
        v1::holder::Mount { path: "/mnt".into(), filesystem: "ext4".into(), namespace_pid: 0 };
    v1::Holder { kind: Some(v1::holder::Kind::Mount(mount)) }
}

struct Fake {
    script: Script,
    sender: mpsc::Sender<Seen>,
}

impl Fake {
    fn refused(&self) -> Result<(), Status> {
        let Some((code, message)) = self.script.refuse else { return Ok(()) };
        let mut status = Status::new(code, message);
        status.metadata_mut().insert("cleat-repair", REPAIR.parse().expect("ASCII"));
        Err(status)
    }

    fn note(&self, seen: Seen) {
        // Sending fails only if the test has ended.
        let _ = self.sender.send(seen);
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Node for Fake {
    type WatchStream = ReceiverStream<Result<v1::WatchEvent, Status>>;
    type StatsStream = ReceiverStream<Result<v1::StatsResponse, Status>>;
    type UpgradeStream = ReceiverStream<Result<v1::UpgradeEvent, Status>>;

    async fn map(&self, request: Request<v1::MapRequest>) -> Answer<v1::Mapping> {
        self.refused()?;
        self.note(Seen::Map(request.into_inner()));
        Ok(Response::new(mapping("data", 0)))
    }

    async fn unmap(&self, request: Request<v1::UnmapRequest>) -> Answer<v1::UnmapResponse> {
        self.refused()?;
        let request = request.into_inner();
        let was_mapped = request.target == "data";
        let plain = v1::UnmapResponse { was_mapped, ..v1::UnmapResponse::default() };
        let step = v1::ForcedStep { step: "fail I/O".into(), took_ms: 7, note: "late".into() };
        let forced = v1::UnmapResponse {
            remaining_holders: vec![mount()],
            steps: vec![step],
            unmounted: vec![mount()],
            device_left: "/dev/nbd7".into(),
            ..plain.clone()
        };
        let response = if request.force { forced } else { plain };
        self.note(Seen::Unmap(request));
        Ok(Response::new(response))
    }

    async fn list(&self, _: Request<v1::ListRequest>) -> Answer<v1::ListResponse> {
        Ok(Response::new(v1::ListResponse { mappings: self.script.mappings.clone() }))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Answer<v1::Mapping> {
        let request = request.into_inner();
        if request.target != "data" {
            return Err(Status::not_found(format!("{} is not mapped", request.target)));
        }
        let holders = if request.with_holders { vec![mount()] } else { Vec::new() };
        if let Some(scripted) = self.script.mappings.iter().find(|m| m.name == request.target) {
            return Ok(Response::new(v1::Mapping { holders, ..scripted.clone() }));
        }
        Ok(Response::new(v1::Mapping { holders, ..mapping("data", 0) }))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        Err(Status::unimplemented("no command uses Watch"))
    }

    async fn resize(&self, request: Request<v1::ResizeRequest>) -> Answer<v1::Mapping> {
        self.refused()?;
        let request = request.into_inner();
        let size_bytes = request.size_bytes;
        self.note(Seen::Resize(request));
        Ok(Response::new(v1::Mapping { size_bytes, ..mapping("data", 0) }))
    }

    /// Sends readings as fast as the client receives them, with 50 reads of 4 KiB and 100 us between two.
    async fn stats(&self, request: Request<v1::StatsRequest>) -> Answer<Self::StatsStream> {
        let interval_ms = u64::from(request.into_inner().interval_ms);
        let (send, receive) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            for reading in 0_u64.. {
                let count = reading * 50;
                let (bytes, total_ns) = (count * 4096, count * 100_000);
                let latency_buckets = vec![0, count];
                let read = v1::OpStats {
                    op: "read".into(),
                    count,
                    bytes,
                    total_ns,
                    latency_buckets,
                    ..Default::default()
                };
                let ops = vec![read];
                let volume = v1::VolumeStats { name: "data".into(), ops, ..Default::default() };
                let at_ms = reading * interval_ms;
                let response = v1::StatsResponse {
                    volumes: vec![volume],
                    at_ms,
                    latency_bounds_ns: vec![64_000, 128_000],
                };
                if send.send(Ok(response)).await.is_err() || interval_ms == 0 {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receive)))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthResponse> {
        use v1::check::Verdict;
        let check = |name: &str, verdict: Verdict, finding: &str, repair: &str| v1::Check {
            name: name.into(),
            verdict: verdict.into(),
            finding: finding.into(),
            repair: repair.into(),
        };
        let checks = vec![
            check("module", Verdict::Ok, "nbd is loaded", ""),
            check("udev", Verdict::Warning, "rules are missing", "make install"),
        ];
        let version = "0.1.0".into();
        let (build, binary) = (String::new(), "the new one".into());
        let (pid, started_at_s) = (1, 0);
        let health = v1::HealthResponse { version, pid, started_at_s, checks, build, binary };
        Ok(Response::new(health))
    }

    /// The daemon has an old build. One of its workers can be handed over.
    async fn upgrade(
        &self,
        request: Request<v1::UpgradeRequest>,
    ) -> Answer<ReceiverStream<Result<v1::UpgradeEvent, Status>>> {
        use v1::upgrade_event::Outcome;
        self.refused()?;
        let event = |name: &str, outcome: Outcome, message: &str| v1::UpgradeEvent {
            name: name.into(),
            outcome: outcome.into(),
            from_version: "1 (a)".into(),
            to_version: if message.is_empty() { "2 (b)".into() } else { String::new() },
            paused_us: 12_300,
            message: message.into(),
            repair: String::new(),
            binary: if name.is_empty() { "the new one".into() } else { String::new() },
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let events = match request.into_inner().workers_only {
            false => vec![event("", Outcome::Restarting, "")],
            true => vec![
                event("data", Outcome::HandedOver, ""),
                event("other", Outcome::Failed, "its backend hangs"),
            ],
        };
        for event in events {
            sender.send(Ok(event)).await.expect("the receiver exists");
        }
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn set_options(&self, request: Request<v1::SetOptionsRequest>) -> Answer<v1::Mapping> {
        self.refused()?;
        self.note(Seen::SetOptions(request.into_inner()));
        Ok(Response::new(mapping("data", 0)))
    }
}
