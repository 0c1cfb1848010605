//! The connections of the volume that this worker serves.
//!
//! Invariants: `live` contains every connection that was added and whose end has not been taken from the
//! server; a connection that is paused for a handover still counts. `served` never becomes false again.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;

use crossbeam_channel::Receiver;

use cleat_backend::Waker;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_export::End;
use cleat_export::server::{ConnectionId, Event, Server};

/// Events that may wait for the control thread.
const EVENTS: usize = 64;

/// The connections of the volume. See the file's comment.
pub(super) struct Connections {
    pub(super) server: Server,
    events: Receiver<Event>,
    live: HashSet<ConnectionId>,
    served: bool,
    /// The kernel has sent a disconnect on a connection.
    disconnecting: bool,
}

impl Connections {
    /// Makes the connections of `server`, whose events are `source`. Each event wakes `waker`.
    pub(super) fn new(server: Server, source: Receiver<Event>, waker: Waker) -> Result<Self> {
        let events = forward(source, waker)?;
        Ok(Self { server, events, live: HashSet::new(), served: false, disconnecting: false })
    }

    /// How many connections are being served.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.live.len()).unwrap_or(u32::MAX)
    }

    /// Whether this worker has served a connection at any time.
    pub(super) fn have_been_served(&self) -> bool {
        self.served
    }

    /// Serves the kernel's ends of `sockets`. If one socket cannot be served, those before it are; the
    /// supervisor gets the error and ends the worker or the device.
    pub(super) fn serve(&mut self, sockets: Vec<OwnedFd>) -> Result<()> {
        if sockets.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "serve came without a socket"));
        }
        self.disconnecting = false;
        for socket in sockets {
            let id = self.server.add_kernel_connection(socket)?;
            self.add([id]);
        }
        Ok(())
    }

    /// Counts connections that were added to the server.
    pub(super) fn add(&mut self, ids: impl IntoIterator<Item = ConnectionId>) {
        self.live.extend(ids);
        self.served = true;
    }

    /// Takes the events that have arrived. Returns whether the device is disconnected: the kernel has sent a
    /// disconnect, and no connection is left.
    pub(super) fn take_events(&mut self) -> bool {
        while let Ok(Event::ConnectionEnded { id, end }) = self.events.try_recv() {
            self.live.remove(&id);
            match end {
                End::Disconnected => {
                    self.disconnecting = true;
                    tracing::debug!(id, "a connection was disconnected");
                }
                End::HandedOver => tracing::debug!(id, "a connection was handed over"),
                end => tracing::warn!(id, %end, "a connection ended"),
            }
        }
        self.disconnecting && self.live.is_empty()
    }
}

/// Starts a thread that passes events on and wakes a poll with each. It ends with the server.
fn forward(source: Receiver<Event>, waker: Waker) -> Result<Receiver<Event>> {
    let (sender, receiver) = crossbeam_channel::bounded(EVENTS);
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
