//! Gives blocks of zeroes back to the cluster (`rbd sparsify`).

use librbd::Open;

use super::{RbdStore, Target};
use crate::timeouts::Tracker;
use cleat_backend::store::{Progress, ReclaimStore};
use cleat_core::error::Result;

/// The length of the smallest run of zeroes that is freed, in bytes. librbd permits no smaller one.
const UNIT: usize = 4096;

impl ReclaimStore for RbdStore {
    fn reclaim(&self, name: &str, progress: Progress<'_>) -> Result<()> {
        self.follow(name, None, progress, Target::sparsify)
    }
}

impl Target {
    fn sparsify(&self, tracker: &Tracker) -> Result<()> {
        let image = self.open(Open::Write)?;
        image
            .sparsify(UNIT, &mut |done, total| tracker.report(done, total))
            .map_err(|error| self.stopped_error(error, "a part of the zeroes is freed"))
    }
}
