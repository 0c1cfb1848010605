//! The control thread of a worker that is open for business: commands in, events out.
//!
//! The worker ends when it is told to, when the kernel has disconnected the device, or when the
//! supervisor vanished before anything was served. It outlives its supervisor otherwise; only when
//! nobody speaks to it and no connection is left either, it waits for [`ORPHAN_PATIENCE`] and ends.

mod handover;

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::channel::Channel;
use super::outage_monitor::OutageMonitor;
use super::protocol::{FromWorker, Ready, Start, ToWorker};
use super::quiesce::SnapshotQuiesce;
use super::resize::{Resizer, SizeRequest};
use super::version::ProtocolVersions;
use cleat_backend::{Image, Waker};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::IoError;
use cleat_export::End;
use cleat_export::server::{ConnectionId, Event, ExportName, Limits, Server};
use cleat_nbd::wire::transmission_flags;
use cleat_statistics::Page;
use handover::Offer;

/// How long a worker without supervisor and without connections waits for either.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(600);

/// How long `Stop` waits for running requests before it cuts them off.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// How long `FailIo` waits for the connections, and for what they have at the backend.
const FAIL_PATIENCE: Duration = Duration::from_millis(250);

/// How often the reason of an outage is asked for while it lasts.
const OUTAGE_INTERVAL: Duration = Duration::from_secs(1);

/// Connections to the control socket that have not said `Adopt` yet.
const MAX_STRANGERS: usize = 4;

/// A worker at work.
pub(super) struct Session {
    start: Start,
    image: Arc<dyn Image>,
    page: Page,
    resizer: Resizer,
    listener: UnixListener,
    server: Server,
    events: Receiver<Event>,
    /// Woken with every event.
    waker: Waker,
    channel: Option<Channel>,
    strangers: Vec<Channel>,
    live: HashSet<ConnectionId>,
    served: bool,
    /// The connections rest, offered to a successor.
    offer: Option<Offer>,
    /// See `version::binary_id`; looked at before the confinement.
    binary: String,
    /// The kernel has said goodbye on some connection.
    disconnecting: bool,
    fenced: bool,
    /// Requests that were fenced before this worker: the page keeps what its predecessors counted.
    fenced_before: u64,
    outage: OutageMonitor,
    quiesce: SnapshotQuiesce,
    /// Since when there is neither a supervisor nor a connection.
    alone_since: Option<Instant>,
}

/// What the loop does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Exit,
}

/// What a command leads to, with descriptors.
type Answer = (FromWorker, Vec<OwnedFd>);

/// What became readable.
#[derive(Debug, Default)]
struct Turn {
    channel: bool,
    listener: bool,
    events: bool,
    /// In descending order, so that each can be removed.
    strangers: Vec<usize>,
}

impl Session {
    pub(super) fn new(
        start: Start,
        image: Arc<dyn Image>,
        page: Page,
        listener: UnixListener,
        binary: String,
    ) -> Result<Self> {
        let limits = Limits { connections: cleat_statistics::SLOTS, ..Limits::default() };
        let export = ExportName::default();
        let (server, source) = Server::new(Arc::clone(&image), export, page.clone(), limits)?;
        let waker = Waker::new().map_err(|e| Error::from_io("no descriptor left", e))?;
        let events = forward(source, waker.clone())?;
        server.set_policy(start.policy);
        server.watch_outages(waker.clone());
        let resizer = Resizer::start(Arc::clone(&image), waker.clone())?;
        let (wanted, in_charge) = (start.quiesce, !start.successor);
        let quiesce = SnapshotQuiesce::start(Arc::clone(&image), waker.clone(), wanted, in_charge)?;
        let fenced_before = page.snapshot().errors_of(IoError::Fenced);
        Ok(Self {
            start,
            image,
            page,
            resizer,
            listener,
            server,
            events,
            waker,
            channel: None,
            strangers: Vec::new(),
            live: HashSet::new(),
            served: false,
            offer: None,
            binary,
            disconnecting: false,
            fenced: false,
            fenced_before,
            outage: OutageMonitor::default(),
            quiesce,
            alone_since: None,
        })
    }

    /// What it serves, to be closed after its end.
    pub(super) fn image(&self) -> Arc<dyn Image> {
        Arc::clone(&self.image)
    }

    /// Serves until the end.
    pub(super) fn run(mut self, channel: Channel) -> Result<()> {
        channel.send(&FromWorker::Ready(self.ready()), &[])?;
        self.channel = Some(channel);
        let ended = self.serve_until_the_end();
        // Whatever ends this worker: sockets that have gone on to another one stay as they are.
        self.end_offer();
        ended
    }

    fn serve_until_the_end(&mut self) -> Result<()> {
        loop {
            let turn = self.wait()?;
            if self.offer_has_expired() && self.end_offer() == Next::Exit {
                return Ok(());
            }
            // Events first: an answer must not be older than what happened before the question.
            if turn.events && self.on_events() == Next::Exit {
                self.tell(&FromWorker::Disconnected);
                return Ok(());
            }
            self.look_for_fence();
            if let Some(message) = self.outage.look(&self.page, self.image.as_ref()) {
                self.tell(&message);
            }
            if let Some(message) = self.quiesce.look(self.channel.is_some()) {
                self.tell(&message);
            }
            self.report_size();
            if turn.channel && self.on_channel() == Next::Exit {
                return Ok(());
            }
            for index in turn.strangers {
                if self.on_stranger(index) == Next::Exit {
                    return Ok(());
                }
            }
            if turn.listener {
                self.on_listener();
            }
            if self.is_orphan() {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> Result<Turn> {
        let readable = PollFlags::POLLIN;
        let mut set = vec![
            PollFd::new(self.waker.descriptor(), readable),
            PollFd::new(self.listener.as_fd(), readable),
        ];
        set.extend(self.strangers.iter().map(|channel| PollFd::new(channel.as_fd(), readable)));
        set.extend(self.channel.iter().map(|channel| PollFd::new(channel.as_fd(), readable)));
        let patience = match (&self.offer, self.alone_since) {
            (Some(offer), _) => Some(offer.left()),
            (None, _) if self.outage.lasts() => Some(OUTAGE_INTERVAL),
            (None, Some(_)) => Some(ORPHAN_PATIENCE),
            (None, None) => None,
        };
        let timeout = match patience {
            Some(patience) => PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX),
            None => PollTimeout::NONE,
        };
        match poll(&mut set, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(Error::from_io("cannot wait for events", error.into())),
        }
        // Anything at all, an end or an error included: reading tells which.
        let woken: Vec<bool> =
            set.iter().map(|fd| fd.revents().is_some_and(|got| !got.is_empty())).collect();
        let strangers = 2..2 + self.strangers.len();
        Ok(Turn {
            events: woken[0],
            listener: woken[1],
            channel: woken.get(strangers.end).copied().unwrap_or(false),
            strangers: strangers.rev().filter(|i| woken[*i]).map(|i| i - 2).collect(),
        })
    }

    fn on_events(&mut self) -> Next {
        self.waker.take();
        while let Ok(Event::ConnectionEnded { id, end }) = self.events.try_recv() {
            self.live.remove(&id);
            if matches!(end, End::Disconnected) {
                self.disconnecting = true;
                tracing::debug!(id, "a connection was disconnected");
            } else if matches!(end, End::HandedOver) {
                tracing::debug!(id, "a connection was handed over");
            } else {
                tracing::warn!(id, %end, "a connection ended");
            }
        }
        if self.disconnecting && self.live.is_empty() {
            tracing::info!("the device was disconnected");
            return Next::Exit;
        }
        Next::Continue
    }

    fn on_channel(&mut self) -> Next {
        let Some(channel) = self.channel.as_ref() else { return Next::Continue };
        let received = channel.receive();
        // Whatever is said to a worker whose connections rest: it is not that they were taken.
        let other = !matches!(received, Ok(Some((ToWorker::Ping, _))));
        if other && self.end_offer() == Next::Exit {
            return Next::Exit;
        }
        match received {
            Ok(Some((ToWorker::Stop, _))) => {
                tracing::info!("told to stop");
                if let Err(error) = self.server.stop(STOP_PATIENCE) {
                    tracing::warn!(error = %error.report(), "connections were cut off");
                }
                Next::Exit
            }
            Ok(Some((ToWorker::RefreshSize, _))) => self.order(SizeRequest::Refresh),
            Ok(Some((ToWorker::Resize { size, shrink }, _))) => {
                let smaller = shrink && size < self.image.size();
                self.order(if smaller {
                    SizeRequest::Shrink(size)
                } else {
                    SizeRequest::Resize(size)
                })
            }
            Ok(Some((command, descriptors))) => {
                match self.execute(command, descriptors) {
                    Ok((answer, descriptors)) => self.tell_with(&answer, &descriptors),
                    Err(error) => self.tell_failure(&error),
                }
                Next::Continue
            }
            Ok(None) => self.on_channel_end(),
            Err(error)
                if matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported) =>
            {
                tracing::warn!(error = %error.report(), "the supervisor sent what is no command");
                self.tell_failure(&error);
                Next::Continue
            }
            Err(error) => {
                tracing::warn!(error = %error.report(), "the channel broke");
                self.on_channel_end()
            }
        }
    }

    /// Answered once the backend has.
    fn order(&mut self, order: SizeRequest) -> Next {
        if let Err(error) = self.resizer.order(order) {
            self.tell_failure(&error);
        }
        Next::Continue
    }

    fn on_channel_end(&mut self) -> Next {
        self.channel = None;
        if self.served {
            tracing::warn!("the supervisor is gone; the device stays served");
            // One that waits for it.
            self.waker.wake();
            return Next::Continue;
        }
        tracing::info!("the supervisor is gone before anything was served");
        Next::Exit
    }

    fn report_size(&mut self) {
        match self.resizer.answer() {
            Some(Ok(size)) => self.tell(&FromWorker::Size { size }),
            Some(Err(error)) => self.tell_failure(&error),
            None => {}
        }
        if let Some(size) = self.resizer.change() {
            self.tell(&FromWorker::SizeChanged { size });
        }
    }

    fn execute(&mut self, command: ToWorker, descriptors: Vec<OwnedFd>) -> Result<Answer> {
        match command {
            ToWorker::PrepareHandover => self.prepare_handover(),
            ToWorker::OfferHandover { generation, limit_ms } => {
                self.offer_handover(generation, limit_ms)
            }
            other => self.execute_plain(other, descriptors).map(|answer| (answer, Vec::new())),
        }
    }

    fn execute_plain(
        &mut self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
    ) -> Result<FromWorker> {
        match command {
            ToWorker::Serve => self.serve(descriptors).map(|()| FromWorker::Serving),
            ToWorker::SetPolicy(policy) => {
                policy.limits.check()?;
                self.server.set_policy(policy);
                self.start.policy = policy;
                Ok(FromWorker::Done)
            }
            #[cfg(feature = "fault")]
            ToWorker::SetFault { plan } => {
                set_fault(&*self.image, &plan).map(|()| FromWorker::Done)
            }
            ToWorker::FailIo { fail: true } => {
                tracing::warn!("told to fail every request");
                let at_backend = self.server.fail_all_io(FAIL_PATIENCE)?;
                // A change of the volume's size reaches it as well.
                Ok(FromWorker::IoFails { at_backend: at_backend + self.resizer.under_way() })
            }
            ToWorker::FailIo { fail: false } => {
                self.server.set_fail_io(false);
                Ok(FromWorker::Done)
            }
            ToWorker::Quiesced { snapshot, errno } => {
                self.quiesce.answer(snapshot, errno).map(|()| FromWorker::Done)
            }
            // With every command, `CancelHandover` too, an offer has ended already.
            ToWorker::Ping | ToWorker::CancelHandover => Ok(FromWorker::Done),
            ToWorker::TakeOver { unread, state } => {
                self.take_over(&unread, &state, descriptors).map(|()| FromWorker::Serving)
            }
            // What is answered elsewhere, or with descriptors, never comes here.
            ToWorker::Start(_)
            | ToWorker::Refuse(_)
            | ToWorker::Adopt { .. }
            | ToWorker::Stop
            | ToWorker::RefreshSize
            | ToWorker::Resize { .. }
            | ToWorker::PrepareHandover
            | ToWorker::OfferHandover { .. } => {
                let message = "only the first message on a channel can be start, refuse or adopt";
                Err(Error::new(ErrorKind::InvalidArgument, message))
            }
        }
    }

    /// Where one socket cannot be served, the ones before it are; the supervisor, told of the
    /// failure, ends the worker or the device.
    fn serve(&mut self, sockets: Vec<OwnedFd>) -> Result<()> {
        if sockets.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "serve came without a socket"));
        }
        self.disconnecting = false;
        for socket in sockets {
            let id = self.server.add_kernel_connection(socket)?;
            self.live.insert(id);
            self.served = true;
        }
        Ok(())
    }

    fn on_listener(&mut self) {
        match Channel::accept(&self.listener) {
            Ok(Some(channel)) => {
                if self.strangers.len() == MAX_STRANGERS {
                    self.strangers.remove(0);
                }
                self.strangers.push(channel);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = %error.report(), "a connection could not be accepted");
                // Out of descriptors, say: the listener stays readable, and must not spin.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// A new connection has spoken, or gone.
    fn on_stranger(&mut self, index: usize) -> Next {
        let channel = self.strangers.remove(index);
        let adopted = match channel.receive() {
            Ok(Some((ToWorker::Adopt { version, oldest, build, mapping_id }, _))) => {
                // A new supervisor knows nothing of what the one before was about to do.
                if self.end_offer() == Next::Exit {
                    return Next::Exit;
                }
                self.adopt(
                    &channel,
                    &ProtocolVersions { newest: version, oldest, build },
                    &mapping_id,
                )
            }
            Ok(Some(_)) => Err(Error::new(
                ErrorKind::InvalidArgument,
                "the first message on the control socket must be adopt",
            )),
            Ok(None) => return Next::Continue,
            Err(error) => Err(error),
        };
        match adopted {
            Ok(()) => self.channel = Some(channel),
            Err(error) => {
                tracing::warn!(error = %error.report(), "an adoption was refused");
                let _ = channel.send_failure(&error);
            }
        }
        Next::Continue
    }

    fn adopt(
        &mut self,
        channel: &Channel,
        supervisor: &ProtocolVersions,
        mapping_id: &str,
    ) -> Result<()> {
        ProtocolVersions::of_this_build().common(supervisor)?;
        if mapping_id != self.start.mapping_id {
            let message = format!("this worker serves the mapping {}", self.start.mapping_id);
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let page = self.page.file().map_err(|e| Error::from_io("the statistics page", e))?;
        let ready = self.ready();
        self.resizer.start_over(ready.size);
        channel.send(&FromWorker::Ready(ready), &[page.as_fd()])?;
        tracing::info!("adopted by a supervisor");
        if self.fenced {
            channel.send(&FromWorker::Fenced, &[])?;
        }
        if self.outage.lasts() {
            channel.send(&self.outage.message(), &[])?;
        }
        if let Some(message) = self.quiesce.start_over() {
            channel.send(&message, &[])?;
        }
        Ok(())
    }

    fn ready(&self) -> Ready {
        let blocks = self.image.block_sizes();
        let features = self.image.features();
        let ProtocolVersions { newest, oldest, build } = ProtocolVersions::of_this_build();
        Ready {
            version: newest,
            oldest,
            build,
            binary: self.binary.clone(),
            mapping_id: self.start.mapping_id.clone(),
            generation: self.start.generation,
            pid: std::process::id(),
            size: self.image.size(),
            minimum_block: blocks.minimum,
            preferred_block: blocks.preferred,
            transmission_flags: transmission_flags(features),
            outlives_worker: features.keeps_acknowledged_writes,
            connections: u32::try_from(self.live.len()).unwrap_or(u32::MAX),
        }
    }

    /// Looked for whenever the loop turns, which it does every few seconds (`resize`). Nothing waits
    /// for it: the backend refuses every request by itself.
    fn look_for_fence(&mut self) {
        let refused = || self.page.snapshot().errors_of(IoError::Fenced) != self.fenced_before;
        if !self.fenced && (self.image.is_fenced() || refused()) {
            tracing::error!("the volume belongs to somebody else now; nothing more is written");
            self.fenced = true;
            self.tell(&FromWorker::Fenced);
        }
    }

    fn is_orphan(&mut self) -> bool {
        if self.channel.is_some() || !self.live.is_empty() {
            self.alone_since = None;
            return false;
        }
        let since = *self.alone_since.get_or_insert_with(Instant::now);
        let over = since.elapsed() >= ORPHAN_PATIENCE;
        if over {
            tracing::warn!("no supervisor and no connection for too long; ending");
        }
        over
    }

    fn tell(&mut self, message: &FromWorker) {
        self.tell_with(message, &[]);
    }

    fn tell_with(&mut self, message: &FromWorker, descriptors: &[OwnedFd]) {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let sent = self.channel.as_ref().map_or(Ok(()), |channel| channel.send(message, &borrowed));
        self.forget_if_broken(sent);
    }

    fn tell_failure(&mut self, error: &Error) {
        let sent = self.channel.as_ref().map_or(Ok(()), |channel| channel.send_failure(error));
        self.forget_if_broken(sent);
    }

    fn forget_if_broken(&mut self, sent: Result<()>) {
        if let Err(error) = sent {
            tracing::warn!(error = %error.report(), "the supervisor could not be told");
            if self.served {
                self.channel = None;
            }
        }
    }
}

/// Replaces the injected faults of a volume that can inject faults.
#[cfg(feature = "fault")]
fn set_fault(image: &dyn Image, plan: &str) -> Result<()> {
    let faults = image.set_fault().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "this volume injects no faults")
            .with_repair("map the volume as fault:URI")
    })?;
    faults.set_fault(plan)
}

/// Makes events of the data path wake a poll. The thread ends with the server.
fn forward(source: Receiver<Event>, waker: Waker) -> Result<Receiver<Event>> {
    let (sender, receiver) = crossbeam_channel::bounded(64);
    let run = move || {
        for event in source {
            if sender.send(event).is_err() {
                return;
            }
            waker.wake();
        }
    };
    let started: io::Result<_> = std::thread::Builder::new().name("events".to_owned()).spawn(run);
    started.map_err(|e| Error::from_io("cannot start the thread for events", e))?;
    Ok(receiver)
}
