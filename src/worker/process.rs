//! `cleat worker`: from an inherited descriptor to a confined process that serves.
//!
//! A worker process has these properties:
//! - It ignores SIGTERM, SIGINT and SIGHUP: a service manager or a terminal that stops the supervisor must
//!   not end mapped devices. A worker ends by `Stop`, by the disconnect of its device, or by SIGKILL.
//! - The out-of-memory killer selects it late (`oom_score_adj` -999): it has little memory of its own, and
//!   every write that waits to be cleaned would fail with it.
//! - It is an I/O flusher: its allocations never wait for dirty pages that wait for this worker.
//! - Code and data that are mapped at the start are locked once touched, so that the kernel cannot swap the
//!   data path out, for example to its own device. Request buffers are not locked: they return pages to the
//!   system when idle, which locked memory cannot.
//! - Its private memory is limited ([`MAX_DATA`]): when the backend's library uses more, the worker ends, and a
//!   new one takes over. Without a limit it would take the memory that other writers need.
//! - It leaves no core dumps, which would contain users' data.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::socket::{Backlog, getsockopt, listen, sockopt};

use super::channel::Channel;
use super::isolation::Isolation;
use super::protocol::{CHANNEL_FD, FromWorker, MAX_CONNECTIONS, Refuse, Start, ToWorker};
use super::refuse::RefusingWorker;
use super::sandbox::{self, Needs, Report};
use super::session::Session;
use super::version::{ProtocolVersions, binary_id};
use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_backend::connector::Connector;
use cleat_backend::uri::{MAX_NAME, VolumeUri};
use cleat_backend::{
    CacheFiles, Confinement, CredentialSet, HandoverFiles, Image, MAX_CACHE_FILE_BYTES,
    OpenOptions, Registry, VolumeIdentity,
};
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_export::server::{Limits, reserve_rings};
use cleat_statistics::{Page, SLOTS};
use cleat_sys::{descriptor, memory_limit, memory_lock, process};
use cleat_telemetry::Log;

/// How long a new worker waits for its first message, in milliseconds.
const START_TIMEOUT_MS: u16 = 60_000;

/// Connections to the control socket that may wait to be accepted.
const CONTROL_BACKLOG: i32 = 8;

const OOM_SCORE_ADJ: &str = "-999";

/// The maximum private writable memory of a worker, in bytes. Request buffers take up to 1 GiB of it (64 MiB for
/// each of 16 connections), the allocator reserves 1 GiB at a time, and the stacks of librbd's threads take some
/// hundred MiB of address space. The content of a volume in memory is in memory files and does not count.
const MAX_DATA: u64 = 4 << 30;

/// What a worker process does after its start.
enum Role {
    /// It serves its volume.
    Volume(Box<Session>),
    /// It answers every request with an error.
    Refusing(Box<RefusingWorker>),
}

/// Runs a worker process from its start to its end, and returns its exit code. The arguments after the
/// command are those of [`Isolation`].
pub fn main(registry: Registry) -> u8 {
    let channel = match inherited_channel() {
        Ok(channel) => channel,
        Err(error) => {
            // A user started the process: there is no supervisor to report to.
            let line = format!("cleat worker is started by cleat node only: {}\n", error.report());
            let _ = io::Write::write_all(&mut io::stderr(), line.as_bytes());
            return 2;
        }
    };
    let started = Isolation::from_arguments(std::env::args().skip(2))
        .and_then(|isolation| start(&channel, registry, &isolation));
    let ended = match started {
        Ok(Role::Volume(session)) => {
            let image = session.image();
            let (ended, channel) = session.run(channel);
            if image.close()
                && let Some(channel) = channel
            {
                // An error means that the supervisor is gone.
                let _ = channel.send(&FromWorker::Closed, &[]);
            }
            ended
        }
        Ok(Role::Refusing(worker)) => worker.run(&channel),
        Err(error) => {
            tracing::error!(error = %error.report(), "the worker could not start");
            // The supervisor may be gone; the exit code reports the failure, too.
            let _ = channel.send_failure(&error);
            return 1;
        }
    };
    match ended {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(error = %error.report(), "the worker failed");
            1
        }
    }
}

fn inherited_channel() -> Result<Channel> {
    let descriptor = descriptor::inherited_descriptor(CHANNEL_FD)
        .map_err(|e| Error::from_io(format!("descriptor {CHANNEL_FD} is not a channel"), e))?;
    Channel::new(descriptor)
}

fn start(channel: &Channel, registry: Registry, isolation: &Isolation) -> Result<Role> {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE] {
        process::ignore_signal(signal).map_err(|e| Error::from_io("cannot ignore signals", e))?;
    }
    match first_message(channel)? {
        (ToWorker::Start(start), descriptors) => {
            let session = start_session(*start, descriptors, registry, isolation)?;
            Ok(Role::Volume(Box::new(session)))
        }
        (ToWorker::Refuse(refuse), descriptors) => {
            let worker = start_refusing(*refuse, descriptors, isolation)?;
            Ok(Role::Refusing(Box::new(worker)))
        }
        _ => Err(invalid("the first message must be start or refuse")),
    }
}

/// Opens the volume of a worker and confines the process.
fn start_session(
    start: Start,
    descriptors: Vec<OwnedFd>,
    registry: Registry,
    isolation: &Isolation,
) -> Result<Session> {
    ProtocolVersions::of_this_build().common(&start.versions)?;
    check_names(&start.name, &start.mapping_id)?;
    let Inherited { listener, page, tail_file, cache, credentials, handover } =
        inherited(&start, descriptors)?;
    // Before the confinement, because it may open a socket.
    start.log.parse::<Log>()?.init()?;
    let uri = registry.volume(&start.uri)?;
    // Before the memory is locked, so that the libraries that it loads are locked, too.
    uri.spec().prepare()?;
    prepare_process(&start.name);
    ignore_length_signal()?;
    if tail_file.is_some() || !cache.files.is_empty() {
        limit_files(start.tail_bytes.max(cache.file_bytes))?;
    }
    let binary = binary_id(Path::new("/proc/self/exe"));
    // Before the rings and the secrets, because a second process gets a copy of the memory.
    let connector = Connector::for_process(&uri.spec().confinement(), |its| {
        sandbox::confine(&Needs::from(its), isolation).map(drop)
    })?;
    reserve(start.connections)?;
    let credentials = read_credentials(&uri, &start, credentials)?;
    let options = OpenOptions { tail_file, cache, connector, ..options(&start, credentials) };
    let (image, report) = open_confined(&uri, options, handover, isolation)?;
    // Backends check this before they change anything. Here it is checked for every backend, and for the
    // files of a predecessor.
    VolumeIdentity::check(&image.identity(), start.expected.as_ref(), &uri.to_string())?;
    log_missing_layers(&report);
    tracing::info!(
        mapping = %start.name,
        mapping_id = %start.mapping_id,
        generation = start.generation,
        uri = %uri,
        identity = %image.identity(),
        size = image.size(),
        confinement = ?report.applied,
        "the volume is open"
    );
    let credential_files = uri.spec().credential_files();
    Session::new(start, image, credential_files, page, listener, binary, Arc::new(SystemClock))
}

/// Confines the process of a worker without a volume. It opens no file and needs no storage.
fn start_refusing(
    start: Refuse,
    descriptors: Vec<OwnedFd>,
    isolation: &Isolation,
) -> Result<RefusingWorker> {
    ProtocolVersions::of_this_build().common(&start.versions)?;
    check_names(&start.name, &start.mapping_id)?;
    let Ok([page]) = <[OwnedFd; 1]>::try_from(descriptors) else {
        return Err(invalid("refuse needs 1 descriptor: the statistics page"));
    };
    let page = Page::from_fd(page)?;
    start.log.parse::<Log>()?.init()?;
    prepare_process(&start.name);
    reserve(MAX_CONNECTIONS)?;
    log_missing_layers(&sandbox::confine(&Needs::default(), isolation)?);
    tracing::info!(mapping = %start.name, "every request of the device fails");
    RefusingWorker::new(start, page)
}

/// Reserves rings for the old and the new connections of a device, and two more for threads that are about to
/// end.
fn reserve(connections: u32) -> Result<()> {
    let connections = connections.clamp(1, MAX_CONNECTIONS) as usize;
    reserve_rings((2 * connections + 2).min(SLOTS), &Limits::default())
}

fn log_missing_layers(report: &Report) {
    for (layer, reason) in &report.missing {
        tracing::warn!(layer, %reason, "a layer of the worker's confinement is missing");
    }
}

/// Returns the options that the volume is opened with. Must be called before the confinement, after which the
/// process cannot read its own entry in /proc.
fn options(start: &Start, credentials: CredentialSet) -> OpenOptions {
    let claimant = Claimant {
        node: start.node.clone(),
        machine: start.machine.clone(),
        boot_id: start.boot_id.clone(),
        mapping_id: start.mapping_id.clone(),
        take_over: start.take_over,
        resumes: start.resumes,
        process: ProcessMark::own(),
        grant: Some(start.grant),
    };
    OpenOptions {
        read_only: start.read_only,
        claimant,
        snapshots: start.quiesce,
        sync_failed: start.sync_failed,
        credentials,
        expected: start.expected.clone(),
        tail_file: None,
        cache: CacheFiles::default(),
        connector: None,
        claim_only: start.claim_only,
    }
}

/// Reads the credential files from their descriptors. A supervisor of an older build passes none, or not all;
/// the process, which is not confined yet, then opens the others by their paths.
fn read_credentials(
    uri: &VolumeUri,
    start: &Start,
    descriptors: Vec<OwnedFd>,
) -> Result<CredentialSet> {
    let files = uri.spec().credential_files();
    let mut credentials = CredentialSet::receive(&files, &start.credentials, descriptors)?;
    credentials.complete(&files)?;
    Ok(credentials)
}

/// Opens the volume and confines the process, in the order that the backend requires. Takes the options by
/// value, so that the secrets in them are wiped as soon as the volume is open.
fn open_confined(
    uri: &VolumeUri,
    options: OpenOptions,
    handover: Option<HandoverFiles>,
    isolation: &Isolation,
) -> Result<(Arc<dyn Image>, Report)> {
    let when = uri.spec().confinement();
    let needs = Needs::from(&when);
    let open = || match handover {
        Some(files) => uri.open_successor(&options, files),
        None => uri.open(&options),
    };
    Ok(match when {
        Confinement::AfterOpen => {
            let image = open()?;
            (image, sandbox::confine(&needs, isolation)?)
        }
        Confinement::BeforeOpen { .. } => {
            let report = sandbox::confine(&needs, isolation)?;
            (open()?, report)
        }
    })
}

/// The descriptors of a start message.
struct Inherited {
    /// The control socket, on which later supervisors connect.
    listener: UnixListener,
    /// The statistics page.
    page: Page,
    /// The tail file, if the supervisor passes one.
    tail_file: Option<Arc<OwnedFd>>,
    /// The files of the cache.
    cache: CacheFiles,
    /// The credential files.
    credentials: Vec<OwnedFd>,
    /// For a successor, the files of its predecessor.
    handover: Option<HandoverFiles>,
}

/// Waits for the first message of the supervisor.
fn first_message(channel: &Channel) -> Result<(ToWorker, Vec<OwnedFd>)> {
    let mut set = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut set, PollTimeout::from(START_TIMEOUT_MS));
    if !ready.is_ok_and(|count| count > 0) {
        let message = format!("no message came from the supervisor for {START_TIMEOUT_MS} ms");
        return Err(Error::new(ErrorKind::TimedOut, message));
    }
    let gone = || Error::new(ErrorKind::Unavailable, "the supervisor has closed the channel");
    channel.receive()?.ok_or_else(gone)
}

fn check_names(name: &str, mapping_id: &str) -> Result<()> {
    let printable = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
    let valid = |text: &str| (1..=MAX_NAME).contains(&text.len()) && printable(text);
    if valid(name) && valid(mapping_id) {
        return Ok(());
    }
    Err(invalid("the mapping's name or id is not a plain word of 1 to 128 bytes"))
}

/// Checks the descriptors of a start message.
fn inherited(start: &Start, descriptors: Vec<OwnedFd>) -> Result<Inherited> {
    let mut descriptors = descriptors.into_iter();
    let (Some(listener), Some(page)) = (descriptors.next(), descriptors.next()) else {
        return Err(invalid("start needs 2 descriptors: control socket and page"));
    };
    let tail_file = match start.tail_bytes {
        0 => None,
        _ => Some(descriptors.next().ok_or_else(|| invalid("start has no tail file"))?),
    };
    if descriptors.len() < start.cache_files {
        return Err(invalid("start has fewer descriptors than files of the cache"));
    }
    let cache = CacheFiles {
        files: descriptors.by_ref().take(start.cache_files).map(Arc::new).collect(),
        file_bytes: start.cache_file_bytes.min(MAX_CACHE_FILE_BYTES),
    };
    if descriptors.len() < start.credentials.len() {
        return Err(invalid("start has fewer descriptors than credential files"));
    }
    let credentials = descriptors.by_ref().take(start.credentials.len()).collect();
    let files = HandoverFiles { descriptors: descriptors.collect() };
    if !start.successor && !files.descriptors.is_empty() {
        return Err(invalid("start has descriptors that only a successor uses"));
    }
    let listens = getsockopt(&listener, sockopt::AcceptConn).unwrap_or(false);
    let kind = getsockopt(&listener, sockopt::SockType);
    if !listens || kind != Ok(nix::sys::socket::SockType::SeqPacket) {
        return Err(invalid("the first descriptor is not a listening SOCK_SEQPACKET socket"));
    }
    // Supervisors that connect later see from the kernel that this process listens (SO_PEERCRED, unix(7)).
    Backlog::new(CONTROL_BACKLOG)
        .and_then(|backlog| listen(&listener, backlog))
        .map_err(|e| Error::from_io("cannot listen on the control socket", e.into()))?;
    let listener = UnixListener::from(listener);
    // A connection that is closed before it is accepted must not stop the control thread.
    listener.set_nonblocking(true).map_err(|e| Error::from_io("the control socket", e))?;
    let page = Page::from_fd(page)?;
    let handover = start.successor.then_some(files);
    if handover.is_none() {
        // A dead worker has left its connections in the page. A predecessor still serves its own.
        page.take_over();
    }
    let tail_file = tail_file.map(Arc::new);
    Ok(Inherited { listener, page, tail_file, cache, credentials, handover })
}

/// Limits the length of files that the process writes. The tail file is in the runtime directory of the supervisor, and
/// the files of the cache are on a disk of the node. A compromised worker must not fill their file systems. Objects of a
/// store are shorter. Without privileges the limit cannot be raised.
fn limit_files(bytes: u64) -> Result<()> {
    let failed = |error| Error::from_io("cannot limit the length of files", error);
    let limited = setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes);
    limited.map_err(|error| failed(error.into()))
}

/// Makes a write beyond the limit of the length of files fail (EFBIG) instead of ending the process. The limit may also be
/// one of the service.
fn ignore_length_signal() -> Result<()> {
    process::ignore_signal(Signal::SIGXFSZ)
        .map_err(|error| Error::from_io("cannot ignore SIGXFSZ", error))
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// Applies the process properties that the module's documentation lists. A failure makes the process less
/// robust, but it can serve.
fn prepare_process(name: &str) {
    let attempt = |what: &str, outcome: io::Result<()>| {
        if let Err(error) = outcome {
            tracing::warn!(%error, "the worker could not {what}");
        }
    };
    // The kernel keeps 15 bytes.
    let title: String = format!("cleat:{name}").chars().take(15).collect();
    let title = std::ffi::CString::new(title).unwrap_or_default();
    attempt("set its name", nix::sys::prctl::set_name(&title).map_err(io::Error::from));
    attempt("forbid core dumps", setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(io::Error::from));
    attempt("lower its OOM score", std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ));
    attempt("become an I/O flusher (CAP_SYS_RESOURCE)", process::set_io_flusher());
    attempt("limit its memory", memory_limit::limit_data(MAX_DATA));
    attempt("lock its memory (CAP_IPC_LOCK or RLIMIT_MEMLOCK)", memory_lock::lock_touched_memory());
}
