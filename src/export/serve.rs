//! `cleat serve`: one volume behind a listening socket, for NBD clients.
//!
//! SIGTERM or SIGINT ends it: running requests are finished, and the socket's file is removed. A signal also
//! ends it before the volume is open.

mod listener;
mod open;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::End;
use super::log_limit::LogLimit;
use super::server::{Event, ExportName, Limits, Server, most_threads, reserve_rings};
use cleat_backend::connector::Connector;
use cleat_backend::uri::VolumeUri;
use cleat_backend::watch::CredentialWatch;
use cleat_backend::{Confinement, Image, OpenOptions, Waker};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, Result};
use cleat_core::policy::Policy;
use cleat_statistics::Page;
use cleat_sys::process::ignore_signal;
pub use listener::Address;
use listener::{Listener, is_exhausted, is_transient};
use open::open_unless_signalled;

/// How long running requests may take after a signal.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How long nothing is accepted when the process or the system has no descriptor left.
const EXHAUSTED_PAUSE_MS: u16 = 200;

/// The maximum number of log lines of one kind that clients can cause in the interval of [`LogLimit`].
const MAX_LOG_LINES: u32 = 10;

/// The volume to serve, and the address to serve it at.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The volume.
    pub uri: VolumeUri,
    /// The address at which clients connect.
    pub address: Address,
    /// How the volume is opened.
    pub open: OpenOptions,
    /// The maximum number of clients at one time.
    pub connections: usize,
    /// The export's name; the empty one works for every client.
    pub export_name: String,
    /// The outage policy and the rate limits.
    pub policy: Policy,
    /// A pipe. When its other end is closed, the server ends as after a signal.
    pub ends_with: Option<Arc<OwnedFd>>,
}

/// Serves until SIGTERM or SIGINT, or until the end of [`ServeOptions::ends_with`]. `confine` confines this process as the
/// backend allows; it is called while this process has one thread. `ready` is called with the address (the port that the system chose included)
/// once clients can connect.
///
/// # Errors
/// Returns the error of `confine`, an error if the volume cannot be opened or the address cannot be used, and
/// `Aborted` if a signal comes before that.
pub fn run(
    options: &ServeOptions,
    confine: impl Fn(&Confinement) -> Result<()>,
    ready: impl FnOnce(&Address),
) -> Result<()> {
    // Before any thread is made: each inherits the mask, so that only this thread receives the signals.
    let signals = catch_signals()?;
    // A write beyond the limit of the length of files (`ulimit -f`) fails, and ends no server.
    ignore_signal(Signal::SIGXFSZ)
        .map_err(|error| Error::from_io("cannot ignore SIGXFSZ", error))?;
    let credentials = options.uri.spec().credential_files();
    let watch = CredentialWatch::start(credentials)?;
    let (image, listener) = open_confined(options, &signals, confine)?;
    watch.map_or(Ok(()), |watch| watch.pass_to(Arc::clone(&image)))?;
    let (page, _) = Page::create()?;
    let export = ExportName { name: options.export_name.clone(), description: String::new() };
    let limits = limits(options);
    let (server, events) = Server::new(Arc::clone(&image), export, page.clone(), limits)?;
    server.set_policy(options.policy);
    let mut outages = Outages::watch(&server, page, Arc::clone(&image))?;
    let log = std::thread::Builder::new().name("events".into()).spawn(move || log_ends(events));
    log.map_err(|error| Error::from_io("cannot start a thread", error))?;
    let address = listener.address()?;
    if let Address::Tcp(tcp) = address
        && !tcp.ip().is_loopback()
    {
        tracing::warn!(
            "{tcp} can be reached from other machines, and there is neither encryption nor \
             authentication: every client that connects can read{} the volume",
            if options.open.read_only { "" } else { " and write" }
        );
    }
    tracing::info!(volume = %options.uri, %address, "serving");
    ready(&address);
    let stops = Stops { signals: &signals, pipe: options.ends_with.as_deref() };
    let accepted = accept_until_stop(&listener, &stops, &server, &mut outages);
    // Before the connections end: no client can connect to a server that stops.
    drop(listener);
    let ended = accepted.and(server.stop(STOP_LIMIT));
    drop(server);
    if !image.close() {
        tracing::warn!(volume = %options.uri, "the claim of the volume may not be released");
    }
    ended
}

fn limits(options: &ServeOptions) -> Limits {
    Limits { connections: options.connections, ..Limits::default() }
}

/// Opens the volume, listens, and confines this process, in the order that the backend requires.
fn open_confined(
    options: &ServeOptions,
    signals: &SignalFd,
    confine: impl Fn(&Confinement) -> Result<()>,
) -> Result<(Arc<dyn Image>, Listener)> {
    let (uri, mut how) = (options.uri.clone(), options.open.clone());
    let spec = options.uri.spec();
    // What a confined process cannot do: load libraries, read secrets, make rings.
    spec.prepare()?;
    let when = spec.confinement();
    // Before the secrets and the rings, because a second process gets a copy of the memory.
    how.connector = Connector::for_process(&when, &confine)?;
    how.credentials.complete(&spec.credential_files())?;
    let limits = limits(options);
    reserve_rings(most_threads(&limits), &limits)?;
    let open = || open_unless_signalled(signals, move || uri.open(&how));
    let listen = || -> Result<Listener> {
        let mut listener = Listener::bind(&options.address)?;
        listener.leave_removal_to_another_process()?;
        Ok(listener)
    };
    match when {
        Confinement::AfterOpen => {
            let image = open()?;
            let listener = listen()?;
            confine(&when)?;
            Ok((image, listener))
        }
        Confinement::BeforeOpen { .. } => {
            let listener = listen()?;
            confine(&when)?;
            Ok((open()?, listener))
        }
    }
}

fn log_ends(events: Receiver<Event>) {
    let mut limit = LogLimit::new(MAX_LOG_LINES);
    for Event::ConnectionEnded { id, end } in events {
        match &end {
            // While the server runs, only a client without a handshake is aborted: it gave way to another one.
            _ if end.is_orderly() || matches!(end, End::Aborted) => {
                tracing::debug!(connection = id, "{end}");
            }
            // A client cannot cause these at will.
            End::Ring(_) | End::Panicked(_) => {
                tracing::warn!(connection = id, "connection lost: {end}");
            }
            _ => {
                if let Some(unlogged_before) = limit.count(SystemClock.now()) {
                    tracing::warn!(connection = id, unlogged_before, "connection lost: {end}");
                }
            }
        }
    }
}

pub(super) fn catch_signals() -> Result<SignalFd> {
    let mut wanted = SigSet::empty();
    wanted.add(Signal::SIGTERM);
    wanted.add(Signal::SIGINT);
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    wanted
        .thread_block()
        .and_then(|()| SignalFd::with_flags(&wanted, flags))
        .map_err(|error| Error::from_io("cannot catch signals", error.into()))
}

/// Logs outages of the backend. A client only sees that no reply arrives.
struct Outages {
    waker: Waker,
    page: Page,
    image: Arc<dyn Image>,
    /// Whether the last log line reported the beginning of an outage.
    logged: bool,
}

impl Outages {
    fn watch(server: &Server, page: Page, image: Arc<dyn Image>) -> Result<Self> {
        let waker = Waker::new().map_err(|error| Error::from_io("no descriptor left", error))?;
        server.watch_outages(waker.clone());
        Ok(Self { waker, page, image, logged: false })
    }

    fn check(&mut self) {
        self.waker.take();
        let lasts = self.page.snapshot().outage_since_ns != 0;
        match (std::mem::replace(&mut self.logged, lasts), lasts) {
            (false, true) => tracing::warn!(
                reason = self.image.failure_reason().as_deref().unwrap_or("unknown"),
                "the backend does not answer"
            ),
            (true, false) => tracing::warn!("the backend answers again"),
            _ => {}
        }
    }
}

/// What ends a server.
struct Stops<'a> {
    signals: &'a SignalFd,
    /// See [`ServeOptions::ends_with`].
    pipe: Option<&'a OwnedFd>,
}

impl Stops<'_> {
    /// What to wait for. A closed pipe is reported without being asked for.
    fn waiting(&self) -> Vec<PollFd<'_>> {
        let pipe = self.pipe.map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::empty()));
        [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)].into_iter().chain(pipe).collect()
    }

    /// Whether a signal has arrived, or the pipe is closed.
    fn take(&self) -> bool {
        if let Ok(Some(signal)) = self.signals.read_signal() {
            tracing::info!(signal = signal.ssi_signo, "stopping");
            return true;
        }
        let Some(pipe) = self.pipe else { return false };
        let mut pipe = [PollFd::new(pipe.as_fd(), PollFlags::empty())];
        let is_closed = poll(&mut pipe, PollTimeout::ZERO).is_ok_and(|count| count > 0);
        if is_closed {
            tracing::info!("stopping: the process that has started the server has ended");
        }
        is_closed
    }
}

fn accept_until_stop(
    listener: &Listener,
    stops: &Stops<'_>,
    server: &Server,
    outages: &mut Outages,
) -> Result<()> {
    let failed = |error| Error::from_io("cannot wait for clients", error);
    let [mut refused, mut exhausted] = [(); 2].map(|()| LogLimit::new(MAX_LOG_LINES));
    loop {
        let mut waiting = vec![
            PollFd::new(outages.waker.descriptor(), PollFlags::POLLIN),
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        ];
        waiting.extend(stops.waiting());
        match poll(&mut waiting, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let woken = waiting[0].any().unwrap_or(true);
        if woken {
            outages.check();
        }
        if stops.take() {
            return Ok(());
        }
        match listener.accept() {
            Ok((client, address)) => {
                if let Err(error) = server.add_client(client, address)
                    && let Some(unlogged_before) = refused.count(server.clock().now())
                {
                    tracing::warn!(unlogged_before, "a client was refused: {}", error.report());
                }
            }
            Err(error) if is_exhausted(&error) => {
                if let Some(unlogged_before) = exhausted.count(server.clock().now()) {
                    tracing::warn!(unlogged_before, "cannot accept: {error}");
                }
                // Meanwhile only what ends the server ends the wait.
                let _ = poll(&mut stops.waiting(), EXHAUSTED_PAUSE_MS);
            }
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}
