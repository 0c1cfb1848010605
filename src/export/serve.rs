//! `cleat serve`: one volume behind a listening socket, for NBD clients.
//!
//! Comes in: a volume and an address. Goes out: the volume's data path, until SIGTERM or SIGINT;
//! then running requests are finished, and the socket's file is removed. Before the volume is open they
//! end it, too.

mod listener;
mod open;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::server::{Event, ExportName, Limits, Server};
use cleat_backend::uri::VolumeUri;
use cleat_backend::{Image, OpenOptions, Waker};
use cleat_core::error::{Error, Result};
use cleat_core::policy::Policy;
use cleat_statistics::Page;
pub use listener::Address;
use listener::{Listener, is_exhausted, is_transient};
use open::open_unless_told;

/// How long running requests may take once the end is asked for.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How long nothing is accepted when the process or the system has no descriptor left.
const EXHAUSTED_PAUSE_MS: u16 = 200;

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The volume.
    pub uri: VolumeUri,
    /// Where clients connect.
    pub address: Address,
    /// How the volume is opened.
    pub open: OpenOptions,
    /// Clients at one time.
    pub connections: usize,
    /// The export's name; the empty one works for every client.
    pub export_name: String,
    /// What happens in an outage of the backend, and how fast the volume may go.
    pub policy: Policy,
}

/// Serves until SIGTERM or SIGINT. `ready` is called with the address (the port that the system
/// chose included) once clients can connect.
///
/// # Errors
/// When the volume cannot be opened, or the address not be used; `Aborted` for a signal before that.
pub fn run(options: &ServeOptions, ready: impl FnOnce(&Address)) -> Result<()> {
    // Before any thread is made: each inherits the mask, and the signals arrive here alone.
    let signals = catch_signals()?;
    let (uri, how) = (options.uri.clone(), options.open.clone());
    let image = open_unless_told(&signals, move || uri.open(&how))?;
    let (page, _) = Page::create()?;
    let export = ExportName { name: options.export_name.clone(), description: String::new() };
    let limits = Limits { connections: options.connections, ..Limits::default() };
    let (server, events) = Server::new(Arc::clone(&image), export, page.clone(), limits)?;
    server.set_policy(options.policy);
    let mut outages = Outages::watch(&server, page, Arc::clone(&image))?;
    let listener = Listener::bind(&options.address)?;
    let log = std::thread::Builder::new().name("events".into()).spawn(move || {
        for Event::ConnectionEnded { id, end } in events {
            if end.is_orderly() {
                tracing::debug!(connection = id, "{end}");
            } else {
                tracing::warn!(connection = id, "connection lost: {end}");
            }
        }
    });
    log.map_err(|error| Error::from_io("cannot start a thread", error))?;
    let address = listener.address()?;
    if let Address::Tcp(tcp) = address
        && !tcp.ip().is_loopback()
    {
        tracing::warn!(
            "{tcp} can be reached from other machines, and there is neither encryption nor \
             authentication: whoever connects can read{} the volume",
            if options.open.read_only { "" } else { " and write" }
        );
    }
    tracing::info!(volume = %options.uri, %address, "serving");
    ready(&address);
    let accepted = accept_until_signal(&listener, &signals, &server, &mut outages);
    // No more clients, and nobody who finds a socket that nobody serves.
    drop(listener);
    let ended = accepted.and(server.stop(STOP_LIMIT));
    drop(server);
    image.close();
    ended
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

/// Tells of outages of the backend: a client only sees that nothing comes.
struct Outages {
    waker: Waker,
    page: Page,
    image: Arc<dyn Image>,
    told: bool,
}

impl Outages {
    fn watch(server: &Server, page: Page, image: Arc<dyn Image>) -> Result<Self> {
        let waker = Waker::new().map_err(|error| Error::from_io("no descriptor left", error))?;
        server.watch_outages(waker.clone());
        Ok(Self { waker, page, image, told: false })
    }

    fn look(&mut self) {
        self.waker.take();
        let lasts = self.page.snapshot().outage_since_ns != 0;
        match (std::mem::replace(&mut self.told, lasts), lasts) {
            (false, true) => tracing::warn!(
                reason = self.image.failure_reason().as_deref().unwrap_or("unknown"),
                "the backend does not answer"
            ),
            (true, false) => tracing::warn!("the backend answers again"),
            _ => {}
        }
    }
}

fn accept_until_signal(
    listener: &Listener,
    signals: &SignalFd,
    server: &Server,
    outages: &mut Outages,
) -> Result<()> {
    let failed = |error| Error::from_io("cannot wait for clients", error);
    loop {
        let mut waiting = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(outages.waker.descriptor(), PollFlags::POLLIN),
        ];
        match poll(&mut waiting, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let woken = waiting[2].any().unwrap_or(true);
        if woken {
            outages.look();
        }
        if let Ok(Some(signal)) = signals.read_signal() {
            tracing::info!(signal = signal.ssi_signo, "stopping");
            return Ok(());
        }
        match listener.accept() {
            Ok(client) => {
                if let Err(error) = server.add_client(client) {
                    tracing::warn!("client turned away: {}", error.report());
                }
            }
            Err(error) if is_exhausted(&error) => {
                tracing::warn!("cannot accept: {error}");
                // Only the end is looked out for meanwhile.
                let mut waiting = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut waiting, EXHAUSTED_PAUSE_MS);
            }
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}
