//! A worker's part in a planned handover: the old worker pauses its connections and offers them, the new
//! worker takes them.
//!
//! Invariant: exactly one of the two reads the sockets. The handover word of the shared statistics page
//! decides which (`statistics::handover`). The old worker keeps its sockets and threads until the new one has
//! taken them, so that it can continue at once: when it gets `CancelHandover` or any other command, when its
//! supervisor is gone, or when it has got no message for [`OFFER_TIMEOUT`]. The new worker does everything
//! that may fail before it takes the connections.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::{Answer, Next, Session};
use crate::protocol::{FromWorker, MAX_DESCRIPTORS};
use cleat_backend::{Handover, HandoverState};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_export::handover::PausedConnection;
use cleat_sys::shared::SharedMemory;

/// How long connections stay paused without a message of the supervisor.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum time that pausing the connections may take.
const MAX_LIMIT_MS: u32 = 10_000;

/// The maximum number of bytes that a connection has received and not parsed.
const MAX_UNREAD: u64 = 1 << 20;

/// Paused connections that are offered to the worker of `generation` until `deadline`.
#[derive(Debug)]
pub(super) struct Offer {
    generation: u64,
    deadline: Instant,
}

impl Offer {
    /// Offers paused connections to the worker of `generation`, from now on.
    fn new(generation: u64, now: Instant) -> Self {
        Self { generation, deadline: now + OFFER_TIMEOUT }
    }

    /// The time until the offer expires.
    pub(super) fn timeout(&self, now: Instant) -> Duration {
        self.deadline.saturating_duration_since(now)
    }

    fn has_expired(&self, now: Instant) -> bool {
        self.deadline <= now
    }
}

impl Session {
    /// Returns the volume's capability to be handed over.
    fn handover(&self) -> Result<&dyn Handover> {
        self.image.handover().ok_or_else(|| {
            let message = "this kind of volume cannot be handed over to another process";
            Error::new(ErrorKind::Unsupported, message)
        })
    }

    /// Returns the descriptors that a successor opens the volume with.
    pub(super) fn prepare_handover(&self) -> Result<Answer> {
        let descriptors = self.handover()?.prepare()?.descriptors;
        // The start message also carries the control socket, the page, the tail file and the credential files. A volume
        // with a cache hands over no files.
        if descriptors.len() + self.start.credentials.len() > MAX_DESCRIPTORS - 3 {
            let message = format!(
                "the volume cannot be handed over: {} descriptors do not fit a message",
                descriptors.len()
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok((FromWorker::HandoverPrepared, descriptors))
    }

    /// Pauses the connections and offers them to the worker of `generation`.
    pub(super) fn offer_handover(&mut self, generation: u64, limit_ms: u32) -> Result<Answer> {
        if self.connections.count() == 0 || generation <= self.start.generation {
            let message = "no connection to hand over, or the successor is an older worker";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if self.quiesce.is_pending() {
            // The handover would have to wait for the supervisor's answer, and for the lock of the image.
            let message = "a snapshot of the volume is being made";
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("try again when the snapshot is complete"));
        }
        if self.hold.is_active() {
            let message = "the requests of the volume are held for a group snapshot";
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("try again when the snapshot is complete"));
        }
        if self.resizer.unanswered() > 0 {
            // The storage may execute it after the successor's first write.
            let message = "a change of the volume's size has not been answered";
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("hand the volume over when its backend answers again"));
        }
        let seen = self.page.snapshot();
        if seen.queued > 0 || seen.outage_since_ns != 0 {
            let message =
                format!("the backend does not answer: {} requests wait for it", seen.queued);
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("hand the volume over when its backend answers again"));
        }
        self.stop_background_for_handover()?;
        let released =
            self.pause_and_release(Duration::from_millis(limit_ms.min(MAX_LIMIT_MS).into()));
        if released.is_err() {
            self.restart_background();
            return released;
        }
        self.page.offer_handover(generation);
        self.offer = Some(Offer::new(generation, self.clock.now()));
        released
    }

    /// Pauses the connections within `limit` and releases the claim of the volume, or fails and resumes the
    /// connections.
    fn pause_and_release(&self, limit: Duration) -> Result<Answer> {
        let paused = self.connections.server.pause(limit)?;
        let packed = pack(paused).and_then(|(unread, descriptors)| {
            Ok((
                FromWorker::HandoverOffered { unread, state: self.handover()?.release()? },
                descriptors,
            ))
        });
        if packed.is_err() {
            self.connections.server.resume();
        }
        packed
    }

    /// Takes over the connections that the predecessor has offered.
    pub(super) fn take_over(
        &mut self,
        unread: &[u32],
        state: &HandoverState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<()> {
        if !self.start.successor || self.connections.have_been_served() {
            let message = "this worker has no predecessor to take over from";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let paused = unpack(unread, descriptors)?;
        let server = &self.connections.server;
        let added: Result<Vec<_>> = paused.into_iter().map(|one| server.add_paused(one)).collect();
        let taken = added.and_then(|ids| self.take(state).map(|()| ids));
        match taken {
            Ok(ids) => {
                self.connections.add(ids);
                tracing::info!("took over from the worker before");
                Ok(())
            }
            Err(error) => {
                // The connections still belong to the predecessor. This worker has read nothing from them.
                if let Err(error) = self.connections.server.leave() {
                    tracing::error!(error = %error.report(), "a connection does not end");
                }
                Err(error)
            }
        }
    }

    /// Takes the sockets, or fails and leaves them to the predecessor.
    fn take(&self, state: &HandoverState) -> Result<()> {
        let generation = self.start.generation;
        if !self.page.accept_handover(generation) {
            let message = "the predecessor has withdrawn its offer and serves the volume";
            return Err(Error::new(ErrorKind::Aborted, message));
        }
        if let Err(error) = self.handover().and_then(|handover| handover.take_over(state)) {
            self.page.decline_handover(generation);
            return Err(error);
        }
        self.page.take_over();
        self.connections.server.resume();
        Ok(())
    }

    /// Whether the offer has lasted for too long.
    pub(super) fn offer_has_expired(&self) -> bool {
        self.offer.as_ref().is_some_and(|offer| offer.has_expired(self.clock.now()))
    }

    /// Ends an offer. If the successor has not taken the connections, this worker continues to serve them;
    /// otherwise it leaves them, and exits.
    pub(super) fn end_offer(&mut self) -> Next {
        let Some(offer) = self.offer.take() else { return Next::Continue };
        if self.page.withdraw_handover(offer.generation) {
            if let Err(error) = self.handover().and_then(Handover::resume) {
                // Every later request fails with the same error.
                tracing::error!(error = %error.report(), "the volume cannot be claimed again");
            }
            self.restart_background();
            self.connections.server.resume();
            tracing::info!("the handover was cancelled; this worker continues to serve the device");
            return Next::Continue;
        }
        if let Err(error) = self.connections.server.leave() {
            tracing::error!(error = %error.report(), "a connection does not end");
        }
        tracing::info!(to = offer.generation, "handed over");
        Next::Exit
    }
}

/// Packs paused connections for a message: the lengths of their unread bytes, and the descriptors.
fn pack(paused: Vec<PausedConnection>) -> Result<(Vec<u32>, Vec<OwnedFd>)> {
    let failed = |e| Error::from_io("no memory for the unread bytes of the connections", e);
    let total: u64 = paused.iter().map(|one| one.unread.len() as u64).sum();
    let mut descriptors = Vec::with_capacity(paused.len() + 1);
    if total > 0 {
        let bytes = SharedMemory::create("cleat-unread", total).map_err(failed)?;
        let mut at = 0;
        for one in &paused {
            bytes.write_at(at, &one.unread);
            at += one.unread.len() as u64;
        }
        descriptors.push(bytes.file().try_clone_to_owned().map_err(failed)?);
    }
    let lengths = paused.iter().map(|one| u32::try_from(one.unread.len()).unwrap_or(u32::MAX));
    let unread = lengths.collect();
    descriptors.extend(paused.into_iter().map(|one| one.socket));
    if descriptors.len() > MAX_DESCRIPTORS {
        let message = format!("{} connections are too many for a message", descriptors.len());
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok((unread, descriptors))
}

/// Checks and unpacks what [`pack`] has packed.
fn unpack(unread: &[u32], descriptors: Vec<OwnedFd>) -> Result<Vec<PausedConnection>> {
    let invalid = |message: &str| Error::new(ErrorKind::InvalidArgument, message.to_owned());
    let total: u64 = unread.iter().map(|length| u64::from(*length)).sum();
    let mut descriptors = descriptors.into_iter();
    if unread.is_empty() || total > MAX_UNREAD * unread.len() as u64 {
        return Err(invalid("no connection was handed over, or too many unread bytes"));
    }
    let bytes = match (total, descriptors.as_slice()) {
        (0, _) => None,
        (_, []) => return Err(invalid("the unread bytes are missing")),
        (_, [file, ..]) => {
            let file = file.as_fd().try_clone_to_owned();
            descriptors.next();
            let whole = file.and_then(|file| SharedMemory::from_fd(file, total));
            Some(whole.map_err(|e| invalid("the unread bytes are missing").with_source(e))?)
        }
    };
    if descriptors.len() != unread.len() {
        return Err(invalid("the number of sockets differs from the number of connections"));
    }
    let mut at = 0;
    let paused = unread.iter().zip(descriptors).map(|(length, socket)| {
        let mut unread = vec![0; *length as usize];
        if let Some(bytes) = &bytes {
            bytes.read_at(at, &mut unread);
        }
        at += u64::from(*length);
        PausedConnection { socket, unread }
    });
    Ok(paused.collect())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;
    use cleat_core::clock::{Clock, ManualClock};

    #[test]
    fn an_offer_expires_after_a_second() {
        let clock = ManualClock::new();
        let offer = Offer::new(2, clock.now());
        assert_eq!(offer.timeout(clock.now()), OFFER_TIMEOUT);
        clock.advance(OFFER_TIMEOUT - Duration::from_millis(1));
        assert!(!offer.has_expired(clock.now()));
        clock.advance(Duration::from_millis(1));
        assert!(offer.has_expired(clock.now()));
        assert_eq!(offer.timeout(clock.now()), Duration::ZERO);
    }

    /// Makes connections with these numbers of unread bytes, and the other ends of their sockets.
    fn paused(unread: &[usize]) -> (Vec<PausedConnection>, Vec<UnixStream>) {
        let connections = unread.iter().zip(1..).map(|(length, content)| {
            let (socket, peer) = UnixStream::pair().unwrap();
            (PausedConnection { socket: socket.into(), unread: vec![content; *length] }, peer)
        });
        connections.unzip()
    }

    #[test]
    fn every_connection_gets_its_own_socket_and_unread_bytes() {
        for lengths in [vec![3, 0, 5000], vec![0, 0], vec![1]] {
            let (connections, mut peers) = paused(&lengths);
            let expected: Vec<_> = connections.iter().map(|one| one.unread.clone()).collect();
            let (unread, descriptors) = pack(connections).unwrap();
            // Without unread bytes there is no file for them.
            let files = usize::from(lengths.iter().any(|length| *length > 0));
            assert_eq!(descriptors.len(), lengths.len() + files);
            let unpacked = unpack(&unread, descriptors).unwrap();
            assert_eq!(unpacked.len(), lengths.len());
            for (index, (one, expected)) in unpacked.into_iter().zip(expected).enumerate() {
                assert_eq!(one.unread, expected);
                UnixStream::from(one.socket).write_all(&[7]).unwrap();
                peers[index].read_exact(&mut [0]).unwrap();
            }
        }
    }

    #[test]
    fn only_as_many_connections_are_packed_as_a_message_can_carry() {
        let mut lengths = vec![0; MAX_DESCRIPTORS];
        assert_eq!(pack(paused(&lengths).0).unwrap().1.len(), MAX_DESCRIPTORS);
        lengths[0] = 1;
        assert_eq!(pack(paused(&lengths).0).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn a_message_whose_parts_do_not_fit_each_other_is_refused() {
        let most = usize::try_from(MAX_UNREAD).unwrap();
        let (unread, descriptors) = pack(paused(&[most, most]).0).unwrap();
        assert_eq!(unpack(&unread, descriptors).unwrap()[1].unread.len(), most);
        let packed = |lengths: &[usize]| pack(paused(lengths).0).unwrap();
        let (too_long, files) = packed(&[most, most + 1]);
        let cases = [
            (too_long, files),
            (Vec::new(), packed(&[0]).1),
            (vec![0, 0], packed(&[0]).1),
            (vec![0], packed(&[0, 0]).1),
            // The unread bytes are missing, or the file is shorter than they are.
            (vec![1], Vec::new()),
            (vec![1], packed(&[0, 0]).1),
            (vec![4, 4], packed(&[3, 4]).1),
            (vec![3, 4], packed(&[3]).1),
        ];
        for (unread, descriptors) in cases {
            let number = descriptors.len();
            let error = unpack(&unread, descriptors).expect_err("it was accepted");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{unread:?}, {number}: {error:?}");
        }
    }
}
