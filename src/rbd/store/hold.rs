//! Holds of images: has the writer of an image hold its requests while snapshots of several images are taken, and
//! detects every other writer.
//!
//! What proves that an image does not change between [`Hold::wait`] and [`Hold::check`]:
//!
//! - A writer with a claim has confirmed the hold, and has not withdrawn its confirmation. It withdraws it before
//!   it continues, and one that is taken over or replaced leaves another claim.
//! - Without a writer the claim is the same at the end, and no client watches the image. A client claims an image
//!   before its first write.
//!
//! A tool without claims that opens, writes and closes the image in between is not detected.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use librbd::{Image, Open};

use super::{RbdStore, Target};
use crate::claim::decision::Observation;
use crate::claim::header::{Header, ImageHeader};
use crate::claim::record::{Claim, SharedClaim};
use crate::hold::{KEY, Record, State};
use crate::timeouts::{CALL_TIMEOUT, answer, with_timeout};
use cleat_backend::group_snapshot::{GroupSnapshotStore, Hold};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_grants::object::Mode;

/// The interval at which the answer of the writer is read.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

impl GroupSnapshotStore for RbdStore {
    fn hold(&self, name: &str) -> Result<Box<dyn Hold>> {
        let target = self.target(name, None)?;
        let hold = with_timeout(CALL_TIMEOUT, &answer(&target.name), move || target.hold())?;
        Ok(Box::new(hold))
    }

    fn rename_snapshot(&self, name: &str, from: &str, to: &str) -> Result<bool> {
        let to = to.to_owned();
        self.call(name, Some(from), move |target| target.snapshot_rename(&to))
    }
}

impl Target {
    /// Requests a hold of the writer, or checks that there is none.
    fn hold(self) -> Result<HeldImage> {
        let image = self.open(Open::Write)?;
        let claim = self.seen(&image)?.claim;
        let record = match claim.as_ref().filter(|claim| !claim.released) {
            None => None,
            Some(claim) => {
                let record = Record::new(Random::from_kernel()?.next(), &claim.client);
                let text = record.text()?;
                // The holder of the lock makes the change, and so is notified of it.
                image.metadata_set(KEY, &text).map_err(|error| self.failed(error))?;
                Some(record)
            }
        };
        Ok(HeldImage(Arc::new(Requested { target: self, image, claim, record })))
    }

    /// Reads the claim and the clients of `image`.
    ///
    /// # Errors
    /// Returns `InUse` if a client may write to it that cannot hold its requests.
    fn seen(&self, image: &Image) -> Result<Observation> {
        let header = ImageHeader { image, name: &self.name };
        // Checks that the image has an exclusive lock.
        header.id()?;
        let (seen, own) = (header.observe()?, header.own_address()?);
        let writes = |shared: &&SharedClaim| shared.mode == Mode::SharedReadWrite;
        let writer = seen.claim.iter().flat_map(Claim::active_shared).find(writes);
        if let Some(error) = writer.map(|writer| self.claimed(&writer.client)) {
            return Err(error);
        }
        match seen.claim.as_ref().filter(|claim| !claim.released) {
            Some(claim) if !seen.watching.contains(&claim.client.address) => {
                Err(self.claimed(&claim.client))
            }
            Some(_) => Ok(seen),
            None => {
                let holder = seen.holder.iter().map(|holder| &holder.address);
                let other = holder.chain(&seen.watching).find(|address| **address != own);
                match other {
                    Some(address) => {
                        let by = format!("the client at {address}, which has made no claim");
                        Err(self.in_use(&by))
                    }
                    None => Ok(seen),
                }
            }
        }
    }
}

/// An image whose writer should hold its requests.
struct HeldImage(Arc<Requested>);

struct Requested {
    target: Target,
    image: Arc<Image>,
    /// The newest claim when the hold was requested.
    claim: Option<Claim>,
    /// The hold; `None` if the image has no writer.
    record: Option<Record>,
}

impl Hold for HeldImage {
    fn wait(&self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(SystemClock.now());
        self.0.clone().in_time(left + POLL_INTERVAL, move |this| this.wait(&SystemClock, deadline))
    }

    fn check(&self) -> Result<()> {
        self.0.clone().in_time(CALL_TIMEOUT, Requested::check)
    }

    /// Also closes the image, on a thread that does not delay the caller for longer.
    fn end(self: Box<Self>) -> Result<()> {
        self.0.in_time(CALL_TIMEOUT, Requested::end)
    }
}

impl Requested {
    fn in_time(
        self: Arc<Self>,
        timeout: Duration,
        work: impl FnOnce(&Self) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let what = answer(&self.target.name);
        with_timeout(timeout, &what, move || work(&self))
    }

    #[allow(clippy::disallowed_methods, reason = "it polls the cluster, on a thread of its own")]
    fn wait(&self, clock: &dyn Clock, deadline: Instant) -> Result<()> {
        let Some(record) = &self.record else { return Ok(()) };
        loop {
            let now = self.record_now()?.filter(|now| now.is_same(record));
            let now = now.ok_or_else(|| self.lost("another group snapshot was requested"))?;
            match now.state {
                State::Held => return Ok(()),
                State::Refused(reason) => return Err(self.refused(&reason)),
                State::Wanted if clock.now() >= deadline => return Err(self.silent()),
                State::Wanted => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    fn check(&self) -> Result<()> {
        let seen = self.target.seen(&self.image)?;
        if seen.claim != self.claim {
            return Err(self.lost("its claim has changed"));
        }
        let Some(record) = &self.record else { return Ok(()) };
        match self.record_now()?.filter(|now| now.is_same(record)).map(|now| now.state) {
            Some(State::Held) => Ok(()),
            Some(State::Refused(reason)) => Err(self.lost(&reason)),
            Some(State::Wanted) | None => Err(self.lost("another group snapshot was requested")),
        }
    }

    fn end(&self) -> Result<()> {
        let Some(record) = &self.record else { return Ok(()) };
        if !self.record_now()?.is_some_and(|now| now.is_same(record)) {
            return Ok(());
        }
        match self.image.metadata_remove(KEY) {
            Err(error) if error.errno() != Some(libc::ENOENT) => Err(self.target.failed(error)),
            _ => Ok(()),
        }
    }

    fn record_now(&self) -> Result<Option<Record>> {
        let text = self.image.metadata_get(KEY).map_err(|error| self.target.failed(error))?;
        Ok(text.as_deref().and_then(Record::parse))
    }

    fn writer(&self) -> String {
        self.claim.as_ref().map_or_else(String::new, |claim| claim.client.describe())
    }

    fn lost(&self, why: &str) -> Error {
        let name = &self.target.name;
        let message = format!("{name} may have changed during the group snapshot: {why}");
        Error::new(ErrorKind::Aborted, message).with_repair("repeat the call")
    }

    fn refused(&self, reason: &str) -> Error {
        let (name, writer) = (&self.target.name, self.writer());
        let message = format!("{writer} does not hold the requests of {name}: {reason}");
        Error::new(ErrorKind::InUse, message)
    }

    fn silent(&self) -> Error {
        let (name, writer) = (&self.target.name, self.writer());
        let message = format!("{writer} does not answer, so that {name} could change");
        Error::new(ErrorKind::TimedOut, message).with_repair(
            "check the volume there (cleat status); a worker of an earlier version needs cleat upgrade",
        )
    }
}
