//! What a forced unmap has done so far, and what it reports in the end.

use std::time::Duration;

use tokio::time::Instant;

use crate::planner::Action;
use cleat_core::error::Error;
use cleat_kernel::{DeviceIndex, Holder};

/// What a forced unmap did.
#[derive(Debug, Clone, Default)]
pub struct Forced {
    /// What was done, in order.
    pub steps: Vec<Done>,
    /// Mounts that are gone.
    pub unmounted: Vec<Holder>,
    /// The device that stays until its holders let go; everything on it fails.
    pub device_left: Option<DeviceIndex>,
    /// Who holds it.
    pub holders: Vec<Holder>,
    /// Why it is not known whether the backend has got its last request.
    pub unproven: Option<String>,
}

/// One step of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// What.
    pub step: &'static str,
    /// How long it took.
    pub took: Duration,
    /// What was special about it; empty otherwise.
    pub note: String,
}

/// What is remembered while it is going on.
#[derive(Debug, Default)]
pub struct ForceProgress {
    pub(crate) steps: Vec<Done>,
    pub(crate) under_way: Option<(&'static str, Instant)>,
    pub(crate) note: String,
    pub(crate) mounts: Vec<Holder>,
    /// The device that stayed when it was severed.
    pub(crate) left: Option<DeviceIndex>,
    pub(crate) unproven: Option<String>,
}

impl ForceProgress {
    pub(crate) fn begin(&mut self, step: &'static str) {
        self.under_way = Some((step, Instant::now()));
    }

    pub(crate) fn end(&mut self) {
        let Some((step, began)) = self.under_way.take() else { return };
        let note = std::mem::take(&mut self.note);
        tracing::info!(step, took = ?began.elapsed(), note, "done by force");
        self.steps.push(Done { step, took: began.elapsed(), note });
    }

    /// The error of a forced unmap that did not get to its end.
    pub(crate) fn unfinished(self, error: Error, name: &str) -> Error {
        let mut done: Vec<&str> = self.steps.iter().map(|done| done.step).collect();
        done.dedup();
        let done = if done.is_empty() { "nothing".to_owned() } else { done.join(", ") };
        let step = self.under_way.map_or("the report", |(step, _)| step);
        let note = if self.note.is_empty() { String::new() } else { format!(" ({})", self.note) };
        let message = format!(
            "{name} is not unmapped yet; done: {done}; not done: {step}{note}: {}",
            error.report()
        );
        let repair = error.repair().map(|repair| format!("{repair}; ")).unwrap_or_default();
        Error::new(error.kind(), message).with_repair(format!(
            "{repair}it is tried again by itself, and by the same command; see cleat status {name}"
        ))
    }
}

/// What a step is called in a report.
pub(super) fn name(action: Action) -> &'static str {
    match action {
        Action::RecordUnmapping => "record",
        Action::FailIo => "fail I/O",
        Action::TryUnquiesce | Action::Unquiesce => "thaw",
        Action::Unmount(..) => "unmount",
        Action::ForceDisconnect(_) => "disconnect",
        Action::StopWorker => "end the worker",
        Action::ProveNoWrites => "prove silence",
        Action::WaitForConnect => "await the kernel",
        Action::RemoveRecord => "forget",
        _ => "other",
    }
}
