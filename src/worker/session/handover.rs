//! A worker's part in a planned hand-over: the old one brings its connections to rest and offers them,
//! the new one takes them.
//!
//! The handover word of the shared statistics page decides who has them (`statistics::handover`). The old worker
//! keeps its sockets and threads until they were taken for certain, so that it can go on at once: when
//! it is told to, when anything else is said to it, when its supervisor is gone, or when nobody has
//! said anything for [`PATIENCE`]. The new one does everything that may fail before it takes.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::{Answer, Next, Session};
use crate::protocol::{FromWorker, MAX_DESCRIPTORS};
use cleat_backend::{Handover, HandoverState};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_export::handover::PausedConnection;
use cleat_sys::shared::SharedMemory;

/// How long connections rest at most while nobody says how it goes on.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest that connections may be brought to rest.
const MAX_LIMIT_MS: u32 = 10_000;

/// The most bytes that a connection has received and not understood.
const MAX_UNREAD: u64 = 1 << 20;

/// Connections at rest, offered to a worker.
#[derive(Debug)]
pub(super) struct Offer {
    generation: u64,
    until: Instant,
}

impl Offer {
    /// Until it is over, rounded up to what `poll` counts in.
    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()) + Duration::from_millis(1)
    }
}

impl Session {
    /// The volume's capability to be handed over.
    fn handover(&self) -> Result<&dyn Handover> {
        self.image.handover().ok_or_else(|| {
            let message = "this kind of volume cannot be handed over to another process";
            Error::new(ErrorKind::Unsupported, message)
        })
    }

    /// Gives what a successor opens the volume with.
    pub(super) fn prepare_handover(&self) -> Result<Answer> {
        let descriptors = self.handover()?.prepare()?.descriptors;
        // Beside the control socket and the page.
        if descriptors.len() > MAX_DESCRIPTORS - 2 {
            let message = format!("the volume is open in {} pieces: too many", descriptors.len());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok((FromWorker::HandoverPrepared, descriptors))
    }

    /// Brings the connections to rest and offers them to the worker of `generation`.
    pub(super) fn offer_handover(&mut self, generation: u64, limit_ms: u32) -> Result<Answer> {
        if self.live.is_empty() || generation <= self.start.generation {
            let message = "there is nothing to hand over, or not to an older worker";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if self.quiesce.is_wanted() {
            // Its answer would have to be waited for, and its lock.
            let message = "a snapshot of the volume is just being made";
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("try again when it has been"));
        }
        let seen = self.page.snapshot();
        if seen.queued > 0 || seen.outage_since_ns != 0 {
            let message =
                format!("{} requests wait for a backend that is out of reach", seen.queued);
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("hand the volume over when its backend is there again"));
        }
        let limit = Duration::from_millis(limit_ms.min(MAX_LIMIT_MS).into());
        let rests = self.server.pause(limit)?;
        let packed = pack(rests).and_then(|(unread, descriptors)| {
            Ok((
                FromWorker::HandoverOffered { unread, state: self.handover()?.release()? },
                descriptors,
            ))
        });
        if packed.is_err() {
            self.server.resume();
            return packed;
        }
        self.page.offer_handover(generation);
        self.offer = Some(Offer { generation, until: Instant::now() + PATIENCE });
        packed
    }

    /// Takes over the connections that the predecessor has offered.
    pub(super) fn take_over(
        &mut self,
        unread: &[u32],
        state: &HandoverState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<()> {
        if !self.start.successor || self.served {
            let message = "this worker has no predecessor to take over from";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let rests = unpack(unread, descriptors)?;
        let added: Result<Vec<_>> =
            rests.into_iter().map(|rest| self.server.add_paused(rest)).collect();
        let taken = added.and_then(|ids| self.take(state).map(|()| ids));
        match taken {
            Ok(ids) => {
                self.live.extend(ids);
                self.served = true;
                tracing::info!("took over from the worker before");
                Ok(())
            }
            Err(error) => {
                // Theirs still; nothing was read.
                if let Err(error) = self.server.leave() {
                    tracing::error!(error = %error.report(), "a connection does not end");
                }
                Err(error)
            }
        }
    }

    /// From here on the sockets are ours, or never were.
    fn take(&self, state: &HandoverState) -> Result<()> {
        let generation = self.start.generation;
        if !self.page.accept_handover(generation) {
            let message = "the worker before went on by itself";
            return Err(Error::new(ErrorKind::Aborted, message));
        }
        if let Err(error) = self.handover().and_then(|handover| handover.take_over(state)) {
            self.page.decline_handover(generation);
            return Err(error);
        }
        self.page.take_over();
        self.server.resume();
        Ok(())
    }

    /// Whether the connections have rested for too long.
    pub(super) fn offer_has_expired(&self) -> bool {
        self.offer.as_ref().is_some_and(|offer| offer.until <= Instant::now())
    }

    /// Goes on where nobody has taken the connections, and else lets go of them for good.
    pub(super) fn end_offer(&mut self) -> Next {
        let Some(offer) = self.offer.take() else { return Next::Continue };
        if self.page.withdraw_handover(offer.generation) {
            if let Err(error) = self.handover().and_then(Handover::resume) {
                // Every request will say so, too.
                tracing::error!(error = %error.report(), "the volume cannot be claimed again");
            }
            self.server.resume();
            tracing::info!("not handed over; the device stays served by this worker");
            return Next::Continue;
        }
        if let Err(error) = self.server.leave() {
            tracing::error!(error = %error.report(), "a connection does not end");
        }
        tracing::info!(to = offer.generation, "handed over");
        Next::Exit
    }
}

/// Connections at rest as a message carries them.
fn pack(rests: Vec<PausedConnection>) -> Result<(Vec<u32>, Vec<OwnedFd>)> {
    let failed = |e| Error::from_io("no memory for what the connections have received", e);
    let total: u64 = rests.iter().map(|rest| rest.unread.len() as u64).sum();
    let mut descriptors = Vec::with_capacity(rests.len() + 1);
    if total > 0 {
        let bytes = SharedMemory::create("cleat-unread", total).map_err(failed)?;
        let mut at = 0;
        for rest in &rests {
            bytes.write_at(at, &rest.unread);
            at += rest.unread.len() as u64;
        }
        descriptors.push(bytes.file().try_clone_to_owned().map_err(failed)?);
    }
    let lengths = rests.iter().map(|rest| u32::try_from(rest.unread.len()).unwrap_or(u32::MAX));
    let unread = lengths.collect();
    descriptors.extend(rests.into_iter().map(|rest| rest.socket));
    if descriptors.len() > MAX_DESCRIPTORS {
        let message = format!("{} connections are too many for a message", descriptors.len());
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok((unread, descriptors))
}

/// The other way; everything is checked.
fn unpack(unread: &[u32], descriptors: Vec<OwnedFd>) -> Result<Vec<PausedConnection>> {
    let invalid = |message: &str| Error::new(ErrorKind::InvalidArgument, message.to_owned());
    let total: u64 = unread.iter().map(|length| u64::from(*length)).sum();
    let mut descriptors = descriptors.into_iter();
    if unread.is_empty() || total > MAX_UNREAD * unread.len() as u64 {
        return Err(invalid("no connection was handed over, or more bytes than one can hold"));
    }
    let bytes = match (total, descriptors.as_slice()) {
        (0, _) => None,
        (_, []) => return Err(invalid("bytes that were received are missing")),
        (_, [file, ..]) => {
            let file = file.as_fd().try_clone_to_owned();
            descriptors.next();
            let whole = file.and_then(|file| SharedMemory::from_fd(file, total));
            Some(
                whole
                    .map_err(|e| invalid("bytes that were received are missing").with_source(e))?,
            )
        }
    };
    if descriptors.len() != unread.len() {
        return Err(invalid("the number of sockets is not that of the connections"));
    }
    let mut at = 0;
    let rests = unread.iter().zip(descriptors).map(|(length, socket)| {
        let mut unread = vec![0; *length as usize];
        if let Some(bytes) = &bytes {
            bytes.read_at(at, &mut unread);
        }
        at += u64::from(*length);
        PausedConnection { socket, unread }
    });
    Ok(rests.collect())
}
