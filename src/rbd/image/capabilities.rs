//! The capabilities of an open image: resize, shrink, extents, snapshot quiesce, holds, background work and
//! handover.

use std::ops::ControlFlow;
use std::time::Instant;

use cleat_backend::uri::{Size, invalid};
use cleat_backend::{BackgroundWork, CredentialSet, Extents, Handover, HandoverFiles};
use cleat_backend::{HandoverState, RenewCredentials, Resize, RunningTask, Shrink};
use cleat_backend::{SnapshotQuiesce, Waker, WriteHold};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::Extent;
use cleat_grants::object::Mode;

use super::RbdImage;
use crate::claim::decision::Purpose;
use crate::hold::{self, State};
use crate::quiesce::Snapshots;
use crate::{background, claim, encryption, extents};

impl RbdImage {
    fn change_size(&self, size: u64, shrink: bool) -> Result<()> {
        if self.shared.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        let now = self.read_size()?;
        if size < now && !shrink {
            let (size, now) = (Size(size), Size(now));
            let message = format!("{} has {now}; {size} would remove data at its end", self.name);
            return Err(invalid(message));
        }
        if size == 0 {
            return Err(invalid(format!("{} cannot be resized to 0 bytes", self.name)));
        }
        let (image, mut ignore) = (self.image()?, |_, _| ControlFlow::Continue(()));
        let resized =
            encryption::resize(&image, self.shared.luks_header, size, shrink, &mut ignore);
        resized.map_err(|error| self.failed(error))?;
        self.read_size().map(drop)
    }
}

impl Resize for RbdImage {
    fn grow(&self, size: u64) -> Result<()> {
        self.change_size(size, false)
    }
}

impl Shrink for RbdImage {
    fn shrink_to(&self, size: u64) -> Result<()> {
        self.change_size(size, true)
    }
}

impl Extents for RbdImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let extents = extents::extents(&*self.image()?, offset..offset + length, limit);
        extents.map_err(|error| self.failed(error))
    }
}

impl SnapshotQuiesce for RbdImage {
    fn watch(&self, waker: Waker, active: bool) -> Result<()> {
        if self.shared.read_only {
            let message = format!("{} is read-only: there is nothing to quiesce", self.name);
            return Err(invalid(message).with_repair("map it without --quiesce"));
        }
        self.with_snapshots(|snapshots| snapshots.set_waker(waker, active)).ok_or_else(|| {
            let message = format!("{} was not opened with snapshot notifications", self.name);
            Error::new(ErrorKind::Internal, message)
        })
    }

    fn pending(&self) -> Option<u64> {
        self.with_snapshots(Snapshots::pending).flatten()
    }

    fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        self.with_snapshots(|snapshots| snapshots.answer(number, result)).unwrap_or(false)
    }
}

impl WriteHold for RbdImage {
    fn watch(&self, waker: Waker) {
        self.shared.hold.watch(waker);
    }

    fn wanted(&self) -> Option<u64> {
        self.shared.hold.number()
    }

    fn confirm(&self, number: u64) -> Result<()> {
        self.shared.hold.answer(number, State::Held, &self.image()?, &self.name)
    }

    fn refuse(&self, number: u64, reason: &str) -> Result<()> {
        self.shared.hold.answer(number, hold::refused(reason), &self.image()?, &self.name)
    }
}

impl BackgroundWork for RbdImage {
    fn stop(&self, deadline: Instant) -> Vec<RunningTask> {
        // The callbacks for snapshots and changes only set numbers. Only the background thread calls
        // librbd, and it only reads.
        let stopped = self.shared.pause.stop(deadline);
        let running = RunningTask { name: background::THREAD, may_write: false };
        if stopped { Vec::new() } else { vec![running] }
    }

    fn restart(&self) {
        self.shared.pause.resume();
    }
}

/// librados reads the key of its client once, when it connects (`MonClient::init`), and has no function that
/// replaces it. A connected client continues with its tickets when the monitors get another key, until it
/// must renew them with the key (`auth_mon_ticket_ttl`, 3 days by default). A changed key is therefore
/// refused here; a new worker connects with it. A passphrase is used only to unlock the image.
impl RenewCredentials for RbdImage {
    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        let unsupported = |message: String| {
            Err(Error::new(ErrorKind::Unsupported, message).with_repair(
                "hand the volume over to a new worker, which connects with the new key: cleat upgrade \
                 --workers-only --force NAME",
            ))
        };
        match &self.key {
            None => unsupported(format!(
                "{} names no keyring: librados read the key when it connected",
                self.name
            )),
            Some(key) if key.is_in(credentials)? => Ok(()),
            Some(_) => unsupported(format!(
                "the key of {} has changed, and librados cannot replace the key of a connected client",
                self.name
            )),
        }
    }
}

impl Handover for RbdImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        Ok(HandoverFiles { descriptors: Vec::new() })
    }

    fn release(&self) -> Result<HandoverState> {
        let fenced = self.shared.is_fenced();
        let image = self.image()?;
        self.with_snapshots(Snapshots::reject);
        if let Some(claim) = self.shared.claim().take().filter(|_| !fenced) {
            let mut released = claim::release(&image, &claim, &self.name)
                .inspect_err(|error| self.note_fenced(error));
            if !claim.is_shared() {
                let unlock = |()| image.lock_release().map_err(|error| self.failed(error));
                released = released.and_then(unlock);
            }
            if let Err(error) = released {
                // This client still holds the lock or its shared claim, so it may continue to write.
                self.resume()?;
                return Err(error);
            }
        }
        Ok(HandoverState { fenced, ..HandoverState::default() })
    }

    fn resume(&self) -> Result<()> {
        self.with_snapshots(Snapshots::activate);
        let taken = self.claim(Purpose::Handover);
        // A client that shares the image can write without its claim, and a fence would not find it.
        let is_shared = self.claimant.as_ref().is_some_and(|(_, mode)| *mode != Mode::ReadWrite);
        if taken.as_ref().is_err_and(|error| is_shared || error.kind() == ErrorKind::InUse) {
            // Another client has acquired the lock. Without this, librbd would wait for the lock and then
            // continue to write.
            self.shared.set_fenced();
        }
        taken
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        if state.fenced {
            self.shared.set_fenced();
            return Ok(());
        }
        self.claim(Purpose::Handover)?;
        self.with_snapshots(Snapshots::activate);
        // The image may have been resized after this process opened it.
        self.read_size().map(drop)
    }
}
