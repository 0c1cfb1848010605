//! The failures that a script gives to a simulated worker.

use std::time::Duration;

use cleat_core::error::ErrorKind;

/// The failures of a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Quirks {
    /// The process cannot be started at all.
    pub(crate) not_launched: bool,
    /// The process ends before it reads anything.
    pub(crate) dies_at_start: bool,
    /// The result of opening the volume.
    pub(crate) open: Open,
    /// Dies instead of its nth answer, before or after it has executed the command.
    pub(crate) dies_at_answer: Option<(u32, bool)>,
    /// Sends no answer from the nth one on, but serves.
    pub(crate) mute_at_answer: Option<u32>,
    /// Its nth answer is not a valid message.
    pub(crate) nonsense_at_answer: Option<u32>,
    /// Closes its channel instead of its nth answer, but serves.
    pub(crate) hangs_up_at_answer: Option<u32>,
    /// Opens any volume, as a worker that does not compare identities. The supervisor must compare them.
    pub(crate) ignores_identity: bool,
    /// Added to the size that it reports.
    pub(crate) size_lie: i64,
    /// Does not end by itself: it hangs while it closes its volume.
    pub(crate) never_ends: bool,
    /// How long it takes to die after SIGKILL, because it waits in the kernel.
    pub(crate) linger: Duration,
    /// The time from a request to its effect and answer.
    pub(crate) latency: Duration,
    /// Accepts a handover, finds that it cannot serve, and returns the connections.
    pub(crate) declines: bool,
}

/// The result of opening a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Open {
    #[default]
    Well,
    Fails(ErrorKind),
    Takes(Duration),
    Hangs,
}
