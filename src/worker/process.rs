//! `cleat worker`: from an inherited descriptor to a confined process with an open volume.
//!
//! What a worker is to the system:
//! - SIGTERM, SIGINT and SIGHUP are ignored: a service manager or a terminal that stops the
//!   supervisor must not take mapped devices along. A worker ends by `Stop`, by its device's
//!   disconnect, or by SIGKILL.
//! - The out-of-memory killer takes it late (-999): to free its memory, which is little, it would
//!   fail every write that waits to be cleaned.
//! - It is an I/O flusher: its allocations never wait for dirty pages that wait for it.
//! - Code and data that are mapped at the start are locked once touched, so that what the loop runs
//!   cannot be swapped out, to its own device for instance. Request buffers are not: they give
//!   pages back when idle, which locked memory cannot.
//! - No core dumps: they would hold users' data.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::socket::{getsockopt, sockopt};

use super::channel::Channel;
use super::protocol::{CHANNEL_FD, Start, ToWorker};
use super::sandbox::{self, Needs, Report};
use super::session::Session;
use super::version::{Spoken, binary_id};
use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_backend::uri::{MAX_NAME, VolumeUri};
use cleat_backend::{Confinement, HandoverFiles, Image, OpenOptions, Registry};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_sys::{descriptor, memory_lock, process};
use cleat_telemetry::Log;

/// How long a new worker waits to be told what to do, in milliseconds.
const START_PATIENCE_MS: u16 = 60_000;

const OOM_SCORE_ADJ: &str = "-999";

/// The whole life of a worker process; returns its exit code.
pub fn main(registry: Registry) -> u8 {
    let channel = match inherited_channel() {
        Ok(channel) => channel,
        Err(error) => {
            // Started by hand: there is nobody else to tell.
            let line = format!("cleat worker is started by cleat node only: {}\n", error.report());
            let _ = io::Write::write_all(&mut io::stderr(), line.as_bytes());
            return 2;
        }
    };
    let session = match start(&channel, registry) {
        Ok(session) => session,
        Err(error) => {
            tracing::error!(error = %error.report(), "the worker could not start");
            // The supervisor may be gone; the exit code says it too.
            let _ = channel.send_failure(&error);
            return 1;
        }
    };
    let image = session.image();
    let ended = session.run(channel);
    image.close();
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

fn start(channel: &Channel, registry: Registry) -> Result<Session> {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE] {
        process::ignore_signal(signal).map_err(|e| Error::from_io("cannot ignore signals", e))?;
    }
    let First { start, listener, page, inheritance } = first_message(channel)?;
    // Before the confinement, since it may open a socket.
    start.log.parse::<Log>()?.init()?;
    let uri = registry.volume(&start.uri)?;
    // What it loads is to be locked like the rest.
    uri.spec().prepare()?;
    settle(&start.name);
    let binary = binary_id(Path::new("/proc/self/exe"));
    let (image, report) = open_confined(&uri, &options(&start), inheritance)?;
    for (layer, reason) in &report.missing {
        tracing::warn!(layer, %reason, "a layer of the worker's confinement is missing");
    }
    tracing::info!(
        mapping = %start.name,
        mapping_id = %start.mapping_id,
        generation = start.generation,
        uri = %uri,
        size = image.size(),
        confinement = ?report.applied,
        "the volume is open"
    );
    Session::new(start, image, page, listener, binary)
}

/// What the volume is opened with. Of the process, before it may no longer look at itself.
fn options(start: &Start) -> OpenOptions {
    let claimant = Claimant {
        node: start.node.clone(),
        machine: start.machine.clone(),
        boot_id: start.boot_id.clone(),
        mapping_id: start.mapping_id.clone(),
        take_over: start.take_over,
        resumes: start.resumes,
        process: ProcessMark::own(),
    };
    OpenOptions { read_only: start.read_only, claimant, snapshots: start.quiesce }
}

/// Opens the volume and confines the process, in the order that the backend asks for.
fn open_confined(
    uri: &VolumeUri,
    options: &OpenOptions,
    inheritance: Option<HandoverFiles>,
) -> Result<(Arc<dyn Image>, Report)> {
    let when = uri.spec().confinement();
    let needs = Needs::from(&when);
    let open = || match inheritance {
        Some(inheritance) => uri.open_successor(options, inheritance),
        None => uri.open(options),
    };
    Ok(match when {
        Confinement::AfterOpen => {
            let image = open()?;
            (image, sandbox::confine(&needs))
        }
        Confinement::BeforeOpen { .. } => {
            let report = sandbox::confine(&needs);
            (open()?, report)
        }
    })
}

/// What a worker is told first.
struct First {
    start: Start,
    listener: UnixListener,
    page: Page,
    /// Of a successor.
    inheritance: Option<HandoverFiles>,
}

fn first_message(channel: &Channel) -> Result<First> {
    use std::os::fd::AsFd;
    let mut set = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut set, PollTimeout::from(START_PATIENCE_MS));
    if !ready.is_ok_and(|count| count > 0) {
        return Err(Error::new(ErrorKind::TimedOut, "the supervisor did not say what to do"));
    }
    let Some((command, descriptors)) = channel.receive()? else {
        return Err(Error::new(ErrorKind::Unavailable, "the supervisor is gone"));
    };
    let invalid = |message: &str| Error::new(ErrorKind::InvalidArgument, message);
    let ToWorker::Start(start) = command else {
        return Err(invalid("the first message must be start"));
    };
    let start = *start;
    let Start { version: newest, oldest, .. } = start;
    Spoken::here().common(&Spoken { newest, oldest, build: start.build.clone() })?;
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
    let short = |text: &str| !text.is_empty() && text.len() <= MAX_NAME && plain(text);
    if !short(&start.name) || !short(&start.mapping_id) {
        return Err(invalid("the mapping's name or id is not a plain word of 1 to 128 bytes"));
    }
    let mut descriptors = descriptors.into_iter();
    let (Some(listener), Some(page)) = (descriptors.next(), descriptors.next()) else {
        return Err(invalid("start needs 2 descriptors: control socket and page"));
    };
    let inheritance = HandoverFiles { descriptors: descriptors.collect() };
    if !start.successor && !inheritance.descriptors.is_empty() {
        return Err(invalid("start came with descriptors that only a successor has a use for"));
    }
    let listens = getsockopt(&listener, sockopt::AcceptConn).unwrap_or(false);
    let kind = getsockopt(&listener, sockopt::SockType);
    if !listens || kind != Ok(nix::sys::socket::SockType::SeqPacket) {
        return Err(invalid("the first descriptor is not a listening SOCK_SEQPACKET socket"));
    }
    let listener = UnixListener::from(listener);
    // A connection that is gone before it is accepted must not stop the control thread.
    listener.set_nonblocking(true).map_err(|e| Error::from_io("the control socket", e))?;
    let page = Page::from_fd(page)?;
    let inheritance = start.successor.then_some(inheritance);
    if inheritance.is_none() {
        // A worker that died left its connections in it. A predecessor serves on.
        page.take_over();
    }
    Ok(First { start, listener, page, inheritance })
}

/// Makes the process what the room's head says. Each failure costs robustness, not function.
fn settle(name: &str) {
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
    attempt("lock its memory (CAP_IPC_LOCK or RLIMIT_MEMLOCK)", memory_lock::lock_touched_memory());
}
