//! The capabilities of an open volume.

use std::time::Instant;

use cleat_backend::uri::{Size, invalid};
use cleat_backend::{
    BackgroundWork, CredentialSet, Extents, Handover, HandoverFiles, HandoverState,
    RenewCredentials, Resize, RunningTask, SnapshotQuiesce, Waker,
};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::Extent;

use super::ObjectImage;
use crate::claim::decision::Purpose;
use crate::errors::wait;
use crate::timeouts::{CALL_TIMEOUT, after};

/// The work in the background, for logs.
const LOG: &str = "object-log";

impl Resize for ObjectImage {
    fn grow(&self, size: u64) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        let now = self.shared.size();
        if size < now {
            let (size, now) = (Size(size), Size(now));
            return Err(invalid(format!("the volume has {now}, which is more than {size}")));
        }
        let volume = self.shared.volume().ok_or_else(|| self.closed())?;
        wait(&self.shared.name, after(CALL_TIMEOUT), volume.grow(size))?;
        self.shared.set_size(volume.size());
        Ok(())
    }
}

impl Extents for ObjectImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let volume = self.shared.volume().ok_or_else(|| self.closed())?;
        let found = volume.extents(offset..offset + length, limit);
        let found = wait(&self.shared.name, after(CALL_TIMEOUT), found)?;
        let extent = |(range, has_data): (std::ops::Range<u64>, bool)| Extent {
            length: range.end - range.start,
            hole: !has_data,
        };
        Ok(found.into_iter().map(extent).collect())
    }
}

/// A successor executes no request of a command before it has taken the volume over, so it announces no snapshot.
impl SnapshotQuiesce for ObjectImage {
    fn watch(&self, waker: Waker, _active: bool) -> Result<()> {
        if self.read_only {
            let message = format!("{} is read-only: there is nothing to quiesce", self.shared.name);
            return Err(invalid(message).with_repair("map it without --quiesce"));
        }
        self.shared.quiesce.watch(waker);
        Ok(())
    }

    fn pending(&self) -> Option<u64> {
        self.shared.quiesce.pending()
    }

    fn answer(&self, number: u64, result: std::result::Result<(), i32>) -> bool {
        self.shared.quiesce.answer(number, result)
    }
}

/// Puts that are in progress may take as long as an outage of the store.
impl BackgroundWork for ObjectImage {
    fn stop(&self, deadline: Instant) -> Vec<RunningTask> {
        let serving = self.serving();
        let Some(serving) = &*serving else { return Vec::new() };
        match serving.settle(&self.shared.name, deadline) {
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                vec![RunningTask { name: LOG, may_write: true }]
            }
            // A volume that has failed starts nothing more.
            _ => Vec::new(),
        }
    }

    fn restart(&self) {
        if let Some(serving) = &*self.serving() {
            serving.volume().resume();
        }
    }
}

impl RenewCredentials for ObjectImage {
    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        self.connection.renew(credentials)
    }
}

impl Handover for ObjectImage {
    /// The successor opens the volume by itself. A checkpoint makes its replay short.
    fn prepare(&self) -> Result<HandoverFiles> {
        if let Some(serving) = &*self.serving() {
            serving.volume().request_checkpoint();
        }
        Ok(HandoverFiles { descriptors: Vec::new() })
    }

    fn release(&self) -> Result<HandoverState> {
        let serving = self.serving().take();
        if let Some(serving) = serving
            && let Err(error) = serving.stop(&self.shared, after(CALL_TIMEOUT))
        {
            // The claim stands, so this mapping may open the volume again.
            let place = self.place()?;
            self.serve(place, Purpose::Open)?;
            return Err(error);
        }
        Ok(HandoverState { fenced: self.shared.is_fenced(), ..HandoverState::default() })
    }

    fn resume(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        if self.shared.is_fenced() {
            let message = format!("another client may have written to {}", self.shared.name);
            return Err(Error::new(ErrorKind::Fenced, message));
        }
        let taken = self.place().and_then(|place| self.serve(place, Purpose::Handover));
        if taken.as_ref().is_err_and(|error| error.kind() == ErrorKind::InUse) {
            self.shared.set_fenced();
        }
        taken
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        if state.fenced {
            self.shared.set_fenced();
            return Ok(());
        }
        self.serve(self.place()?, Purpose::Handover)
    }
}

impl ObjectImage {
    fn closed(&self) -> Error {
        let message = format!("{} is not open", self.shared.name);
        Error::new(ErrorKind::Unavailable, message)
    }
}
