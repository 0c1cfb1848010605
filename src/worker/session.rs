//! The control thread of a worker with an open volume: commands in, events out.
//!
//! The worker ends when the supervisor sends `Stop`, when the kernel has disconnected the device, or when the
//! supervisor closes the channel before any connection was served. Otherwise it outlives its supervisor.
//! Without a supervisor and without connections it ends after 10 minutes.

mod adoption;
mod background;
#[cfg(feature = "fault")]
mod break_in;
mod commands;
mod connections;
mod fence_monitor;
mod handover;
mod monitors;
mod orphan_timer;
mod supervisors;
mod sync_monitor;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::channel::Channel;
use super::protocol::{FromWorker, Start};
use super::quiesce::SnapshotQuiesce;
use super::resize::Resizer;
use super::write_hold::WriteHold;
use cleat_backend::{CredentialFile, Image, Waker};
use cleat_core::clock::Clock;
use cleat_core::error::{Error, Result};
use cleat_export::server::{ExportName, Limits, Server};
use cleat_statistics::{Page, SLOTS};
use connections::Connections;
use handover::Offer;
use monitors::Monitors;
use orphan_timer::OrphanTimer;
use supervisors::{Readable, Supervisors};

/// A worker that serves a volume. Its parts own their fields; each file states the invariants of its part.
pub(super) struct Session {
    start: Start,
    /// The identity of the worker's executable, see `version::binary_id`. Read before the confinement.
    binary: String,
    clock: Arc<dyn Clock>,
    image: Arc<dyn Image>,
    /// The files of the volume's secrets, which a renewal names.
    credential_files: Vec<CredentialFile>,
    page: Page,
    /// Wakes this thread: for the ends of connections, outages, snapshots and sizes.
    waker: Waker,
    supervisors: Supervisors,
    connections: Connections,
    /// The paused connections, while they are offered to a successor.
    offer: Option<Offer>,
    resizer: Resizer,
    monitors: Monitors,
    quiesce: SnapshotQuiesce,
    hold: WriteHold,
    orphan: OrphanTimer,
}

/// What the loop does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Exit,
}

/// The answer to a command, with descriptors.
type Answer = (FromWorker, Vec<OwnedFd>);

/// What became readable.
#[derive(Debug, Default)]
struct Woken {
    /// The waker.
    events: bool,
    supervisors: Readable,
}

impl Session {
    /// Makes the control thread of a worker that has opened `image` and is confined.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started, if no descriptor is left, or if `start` requires
    /// announcements of snapshots and the volume has none.
    pub(super) fn new(
        start: Start,
        image: Arc<dyn Image>,
        credential_files: Vec<CredentialFile>,
        page: Page,
        listener: UnixListener,
        binary: String,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let limits = Limits { connections: SLOTS, ..Limits::default() };
        let export = ExportName::default();
        let (server, source) = Server::with_clock(
            Arc::clone(&image),
            export,
            page.clone(),
            limits,
            Arc::clone(&clock),
        )?;
        let (unsaved, space) = (page.clone(), page.clone());
        image.report_unsaved(Box::new(move |bytes| unsaved.set_unsaved(bytes)));
        image.report_space(Box::new(move |used| space.set_space(used)));
        let waker = Waker::new().map_err(|e| Error::from_io("no descriptor left", e))?;
        server.set_policy(start.policy);
        server.watch_outages(waker.clone());
        let connections = Connections::new(server, source, waker.clone())?;
        let resizer = Resizer::start(Arc::clone(&image), waker.clone())?;
        let quiesce = SnapshotQuiesce::new(Arc::clone(&image), Arc::clone(&clock));
        if start.quiesce {
            quiesce.watch(waker.clone(), !start.successor)?;
        }
        let hold = WriteHold::new(Arc::clone(&image), Arc::clone(&clock), waker.clone());
        Ok(Self {
            monitors: Monitors::new(&page, Arc::clone(&clock)),
            supervisors: Supervisors::new(listener),
            start,
            binary,
            clock,
            image,
            credential_files,
            page,
            waker,
            connections,
            offer: None,
            resizer,
            quiesce,
            hold,
            orphan: OrphanTimer::default(),
        })
    }

    /// The volume, to be closed after the session.
    pub(super) fn image(&self) -> Arc<dyn Image> {
        Arc::clone(&self.image)
    }

    /// Serves the volume until the worker should end. Returns the channel to the supervisor in charge, too.
    ///
    /// # Errors
    /// Returns an error if `Ready` cannot be sent, or if poll(2) fails.
    pub(super) fn run(mut self, channel: Channel) -> (Result<()>, Option<Channel>) {
        if let Err(error) = channel.send(&FromWorker::Ready(Box::new(self.ready())), &[]) {
            return (Err(error), None);
        }
        self.supervisors.put_in_charge(channel);
        let ended = self.serve_until_the_end();
        // However this worker ends: sockets that a successor has taken stay open.
        self.end_offer();
        (ended, self.supervisors.take_current())
    }

    fn serve_until_the_end(&mut self) -> Result<()> {
        loop {
            let woken = self.wait()?;
            if self.turn(woken) == Next::Exit {
                return Ok(());
            }
        }
    }

    fn turn(&mut self, woken: Woken) -> Next {
        if self.offer_has_expired() && self.end_offer() == Next::Exit {
            return Next::Exit;
        }
        // Events first: an answer must not be older than what happened before the command.
        if woken.events && self.on_events() == Next::Exit {
            self.send(&FromWorker::Disconnected);
            return Next::Exit;
        }
        self.report_changes();
        self.follow_hold();
        if woken.supervisors.current && self.on_channel() == Next::Exit {
            return Next::Exit;
        }
        for index in woken.supervisors.pending {
            if self.on_pending(index) == Next::Exit {
                return Next::Exit;
            }
        }
        if woken.supervisors.listener {
            self.supervisors.accept();
        }
        self.end_if_orphan()
    }

    /// Waits for events, messages and timeouts.
    fn wait(&self) -> Result<Woken> {
        let mut set = vec![PollFd::new(self.waker.descriptor(), PollFlags::POLLIN)];
        self.supervisors.add_to(&mut set);
        match poll(&mut set, self.timeout()) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(Error::from_io("cannot wait for events", error.into())),
        }
        // Any event, the end of a connection and errors included: reading returns which it is.
        let mut woken = set.iter().map(|fd| fd.revents().is_some_and(|got| !got.is_empty()));
        let events = woken.next().unwrap_or(false);
        Ok(Woken { events, supervisors: self.supervisors.readable(woken) })
    }

    /// The time until the next check that no event triggers.
    fn timeout(&self) -> PollTimeout {
        let now = self.clock.now();
        let offer = self.offer.as_ref().map(|offer| offer.timeout(now));
        let waits = [
            offer,
            self.monitors.timeout(),
            self.quiesce.timeout(now),
            self.hold.timeout(now),
            self.orphan.timeout(now),
        ];
        let next = waits.into_iter().flatten().min();
        // poll(2) counts in milliseconds: rounded up, so that the loop does not spin.
        let rounded = next.map(|next| next + Duration::from_millis(1));
        rounded.map_or(PollTimeout::NONE, |next| {
            PollTimeout::try_from(next).unwrap_or(PollTimeout::MAX)
        })
    }

    fn on_events(&mut self) -> Next {
        self.waker.take();
        if self.connections.take_events() {
            tracing::info!("the device was disconnected");
            return Next::Exit;
        }
        Next::Continue
    }

    /// Reports to the supervisor what has changed without a command.
    fn report_changes(&mut self) {
        for message in self.monitors.check(&self.page, self.image.as_ref()) {
            self.send(&message);
        }
        if let Some(message) = self.quiesce.check(self.supervisors.has_current()) {
            self.send(&message);
        }
        match self.resizer.answer() {
            Some(Ok(size)) => self.send(&FromWorker::Size { size }),
            Some(Err(error)) => self.send_failure(&error),
            None => {}
        }
        if let Some(size) = self.resizer.change() {
            self.send(&FromWorker::SizeChanged { size });
        }
    }

    /// Holds all requests of the volume while another client wants it, or refuses that.
    fn follow_hold(&mut self) {
        let seen = self.page.snapshot();
        let obstacle = if self.start.quiesce {
            Some(
                "each snapshot of the volume freezes its file systems (quiesce), which a held volume cannot do",
            )
        } else if self.offer.is_some() {
            Some("the volume is being handed over to another worker")
        } else if seen.queued > 0 || seen.outage_since_ns != 0 {
            Some("the backend does not answer its requests")
        } else {
            None
        };
        self.hold.check(&self.connections.server, obstacle);
    }

    fn end_if_orphan(&mut self) -> Next {
        let is_orphan = !self.supervisors.has_current() && self.connections.count() == 0;
        if self.orphan.check(is_orphan, self.clock.now()) {
            tracing::warn!(
                "the worker ends: it has no supervisor and no connection for 10 minutes"
            );
            return Next::Exit;
        }
        Next::Continue
    }

    fn send(&mut self, message: &FromWorker) {
        self.send_with(message, &[]);
    }

    fn send_with(&mut self, message: &FromWorker, descriptors: &[OwnedFd]) {
        let sent = self.supervisors.send(message, descriptors);
        self.after_send(sent);
    }

    fn send_failure(&mut self, error: &Error) {
        let sent = self.supervisors.send_failure(error);
        self.after_send(sent);
    }

    /// Drops a channel that has failed. A worker that has served nothing keeps it: its end then ends the
    /// worker.
    fn after_send(&mut self, sent: Result<()>) {
        if let Err(error) = sent {
            tracing::warn!(error = %error.report(), "no message could be sent to the supervisor");
            if self.connections.have_been_served() {
                self.supervisors.drop_current();
            }
        }
    }
}
