//! The progress of a forced unmap, and its report.

use std::time::Duration;

use tokio::time::Instant;

use crate::planner::Action;
use cleat_core::error::Error;
use cleat_kernel::{DeviceIndex, Holder};

/// The report of a forced unmap.
#[derive(Debug, Clone, Default)]
pub struct ForceReport {
    /// The steps that were done, in order.
    pub steps: Vec<ForcedStep>,
    /// The mounts that were removed.
    pub unmounted: Vec<Holder>,
    /// The device that stays until its holders close it. All of its I/O fails.
    pub device_left: Option<DeviceIndex>,
    /// The holders of that device.
    pub holders: Vec<Holder>,
    /// Why it is not proved that the backend executes no request any more; `None` if it is proved.
    pub unproven: Option<String>,
}

/// A step of a forced unmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForcedStep {
    /// The name of the step.
    pub step: &'static str,
    /// The duration of the step.
    pub took: Duration,
    /// What was unusual about the step; empty if nothing was.
    pub note: String,
}

/// The progress of a forced unmap.
#[derive(Debug, Default)]
pub struct ForceProgress {
    /// The steps that are done.
    pub(crate) steps: Vec<ForcedStep>,
    /// The step that is running, and when it began.
    pub(crate) running: Option<(&'static str, Instant)>,
    /// What was unusual about the running step.
    pub(crate) note: String,
    /// The mounts that were found.
    pub(crate) mounts: Vec<Holder>,
    /// The device that was disconnected and still has holders.
    pub(crate) device_left: Option<DeviceIndex>,
    /// Why it is not proved that the backend executes no request any more.
    pub(crate) unproven: Option<String>,
}

impl ForceProgress {
    pub(crate) fn begin(&mut self, step: &'static str) {
        self.running = Some((step, Instant::now()));
    }

    pub(crate) fn end(&mut self) {
        let Some((step, began)) = self.running.take() else { return };
        let note = std::mem::take(&mut self.note);
        tracing::info!(step, took = ?began.elapsed(), note, "a step of a forced unmap is done");
        self.steps.push(ForcedStep { step, took: began.elapsed(), note });
    }

    /// Returns the error of a forced unmap that did not finish.
    pub(crate) fn unfinished(self, error: Error, name: &str) -> Error {
        let mut done: Vec<&str> = self.steps.iter().map(|done| done.step).collect();
        done.dedup();
        let done = if done.is_empty() { "nothing".to_owned() } else { done.join(", ") };
        let step = self.running.map_or("the report", |(step, _)| step);
        let note = if self.note.is_empty() { String::new() } else { format!(" ({})", self.note) };
        let message = format!(
            "{name} is not unmapped yet; done: {done}; not done: {step}{note}: {}",
            error.report()
        );
        let repair = error.repair().map(|repair| format!("{repair}; ")).unwrap_or_default();
        Error::new(error.kind(), message).with_repair(format!(
            "{repair}the daemon retries it, and so does the same command; see: cleat status {name}"
        ))
    }
}

/// Returns the name of an action in reports.
pub(super) fn step_name(action: Action) -> &'static str {
    match action {
        Action::RecordUnmapping => "record",
        Action::FailIo => "fail I/O",
        Action::TryUnquiesce | Action::Unquiesce => "thaw",
        Action::Unmount(..) => "unmount",
        Action::ForceDisconnect(_) => "disconnect",
        Action::StopWorker => "end the worker",
        Action::ProveNoWrites => "prove no writes",
        Action::WaitForConnect => "wait for the kernel",
        Action::RemoveRecord => "remove the record",
        _ => "other",
    }
}
