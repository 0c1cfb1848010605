//! Changes of a volume that another client serves: of its snapshots and its size, and its flattening. Only its writer
//! may append to the log, so a command asks the writer through the store:
//!
//! ```text
//! ask/NUMBER       created by the command, deleted by the writer
//! answer/NUMBER    created by the writer, deleted by the command
//! ```
//!
//! NUMBER is random. The writer looks for requests when it looks for later claims, about every 5 s. It executes those
//! that name its epoch, each once, and deletes the others. Both are input from outside: everyone with access to the
//! store can write them.

use std::collections::BTreeSet;
use std::io;
use std::pin::pin;
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::store::{Store, StoreError};
use cleat_object::volume::{Failure, Flattening, Volume};
use serde::{Deserialize, Serialize};

use crate::errors;
use crate::executor::block_until;
use crate::nonce::token;
use crate::quiesce::Quiesce;
use crate::timeouts::SECOND;

/// The maximum length of a request or an answer in bytes.
const MAX_BYTES: usize = 4096;

/// The number of failures for which the store waits as long as a command waits between two looks for the answer.
const LOOKS: u32 = 2;

/// The time in which a request is deleted that has no answer.
const PAUSE: Duration = Duration::from_millis(200);

/// How long a snapshot waits until the volume is quiesced, in seconds. The command waits for longer.
const QUIESCE_S: u32 = 20;

/// The requests that a writer remembers, so that it executes none twice.
const MAX_REMEMBERED: usize = 1024;

/// What the writer is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Change {
    /// Take a snapshot with this name.
    Take { name: String, created_at_s: u64 },
    /// Delete the snapshot with this name.
    Delete { name: String },
    /// Give the volume at least this size, in bytes.
    Grow { size: u64 },
    /// Copy what the volume reads from its parent, in the background. The answer says how far that is.
    Flatten,
    /// End that.
    StopFlatten,
}

/// The result of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Whether anything has changed.
    pub(crate) changed: bool,
    /// The bytes that are done, and all, of a change that goes on in the background.
    pub(crate) progress: Option<(u64, u64)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The epoch of the writer. A later one does not execute the request.
    epoch: u64,
    change: Change,
}

#[derive(Default, Serialize, Deserialize)]
struct Answer {
    /// Whether anything has changed.
    changed: bool,
    /// Why the change has failed.
    error: Option<String>,
    /// The bytes that are done, and all, of a change that goes on.
    #[serde(default)]
    progress: Option<(u64, u64)>,
    /// The snapshots that read from the parent, if the change has failed for that.
    #[serde(default)]
    need_parent: Vec<String>,
    /// Whether the change has failed because a clone needs the snapshot.
    #[serde(default)]
    has_clones: bool,
}

impl Answer {
    fn refused(reason: String) -> Self {
        Self { error: Some(reason), ..Self::default() }
    }

    fn of(done: std::result::Result<Outcome, Failure>) -> Self {
        match done {
            Ok(Outcome { changed, progress }) => Self { changed, progress, ..Self::default() },
            Err(Failure::NeedParent(snapshots)) => {
                Self { need_parent: snapshots, ..Self::default() }
            }
            // Earlier builds read only the text.
            Err(failure) => Self {
                has_clones: failure == Failure::HasClones,
                ..Self::refused(failure.to_string())
            },
        }
    }
}

/// Carries a change out for a command.
async fn answer(store: &dyn Store, volume: &Volume, quiesce: &Quiesce, change: &Change) -> Answer {
    let is_snapshot = matches!(change, Change::Take { .. });
    let limit = pin!(async {
        for _ in 0..QUIESCE_S {
            store.back_off(SECOND).await;
        }
    });
    let taking = if is_snapshot { quiesce.begin(limit).await } else { Ok(None) };
    match taking {
        // The snapshot ends with `_taking`.
        Ok(_taking) => Answer::of(execute(volume, change).await),
        Err(errno) => {
            let reason = io::Error::from_raw_os_error(errno);
            Answer::refused(format!("its file systems cannot be frozen now: {reason}"))
        }
    }
}

fn request_name(number: u64) -> String {
    format!("ask/{number:016x}")
}

fn answer_name(number: u64) -> String {
    format!("answer/{number:016x}")
}

/// Carries a change out.
///
/// # Errors
/// Returns the failure of the volume.
pub(crate) async fn execute(
    volume: &Volume,
    change: &Change,
) -> std::result::Result<Outcome, Failure> {
    let found = |wanted: &str| volume.snapshots().into_iter().find(|found| found.name == wanted);
    let changed = match change {
        Change::Take { name, .. } if found(name).is_some() => false,
        Change::Take { name, created_at_s } => {
            volume.take_snapshot(name, *created_at_s).await?;
            true
        }
        Change::Delete { name } => match found(name) {
            Some(snapshot) => {
                volume.delete_snapshot(snapshot.id).await?;
                true
            }
            None => false,
        },
        Change::Grow { size } if volume.size() >= *size => false,
        Change::Grow { size } => {
            volume.grow(*size).await?;
            true
        }
        Change::Flatten => return flatten(volume),
        Change::StopFlatten => {
            volume.stop_flatten();
            true
        }
    };
    Ok(Outcome { changed, progress: None })
}

/// Starts a flattening, or says how far it is. A failure is reported once; the next call starts it again.
fn flatten(volume: &Volume) -> std::result::Result<Outcome, Failure> {
    let now = match volume.flattening() {
        Flattening::Idle => {
            volume.start_flatten();
            volume.flattening()
        }
        now => now,
    };
    match now {
        Flattening::Failed(failure) => {
            volume.stop_flatten();
            Err(failure)
        }
        Flattening::Done => Ok(Outcome { changed: true, progress: None }),
        Flattening::Running { done, total } => {
            Ok(Outcome { changed: true, progress: Some((done, total)) })
        }
        Flattening::Idle => Err(Failure::Invalid("the flattening was stopped")),
    }
}

/// The writer that a command asks.
pub(crate) struct Writer<'a> {
    /// Its epoch. The writer of a later one does not execute the request.
    pub(crate) epoch: u64,
    /// Whether it is proved that its process has ended, so that it answers nothing any more.
    pub(crate) has_ended: &'a dyn Fn() -> bool,
}

/// Asks a writer to carry a change out, and waits for its answer.
///
/// # Errors
/// Returns `InUse` if the writer has ended without an answer, or does not answer until `deadline`; it may still carry the
/// change out. Otherwise returns the writer's error, or that of the store.
pub(crate) fn ask(
    store: &dyn Store,
    shown: &str,
    (writer, change): (&Writer<'_>, &Change),
    deadline: Instant,
) -> Result<Outcome> {
    let failed = |error: StoreError| {
        Error::new(ErrorKind::Unavailable, format!("the store of {shown} fails: {error}"))
            .with_repair("check that the store can be reached, then repeat the command")
    };
    let number = token()?;
    let request = Request { epoch: writer.epoch, change: change.clone() };
    let bytes = serde_json::to_vec(&request).map_err(|error| {
        Error::new(ErrorKind::Internal, "internal: cannot print a request").with_source(error)
    })?;
    let name = answer_name(number);
    let (mut is_sent, mut unclear, mut has_ended) = (false, None, false);
    while SystemClock.now() < deadline {
        // Before the look for the answer: what the writer has answered is there when its process has ended.
        has_ended = (writer.has_ended)();
        if !is_sent && !has_ended {
            match block_until(deadline, store.create(&request_name(number), &bytes)) {
                // The number is random, so the request that exists is this one.
                Some(Ok(()) | Err(StoreError::Exists)) => is_sent = true,
                Some(Err(error @ StoreError::Unclear(_))) => unclear = Some(error),
                Some(Err(error)) => return Err(failed(error)),
                None => unclear = Some(StoreError::Unclear("no answer".into())),
            }
        }
        match block_until(deadline, store.read(&name, 0..MAX_BYTES as u64)) {
            Some(Ok(bytes)) => {
                // What stays is deleted by the next writer.
                let _ = block_until(deadline, store.delete(&name));
                return result(&bytes, shown);
            }
            Some(Err(StoreError::NotFound)) if has_ended => {
                unclear = None;
                break;
            }
            Some(Err(StoreError::NotFound)) => unclear = None,
            Some(Err(error @ StoreError::Unclear(_))) => unclear = Some(error),
            Some(Err(error)) => return Err(failed(error)),
            None => {}
        }
        let _ = block_until(deadline, store.back_off(LOOKS));
    }
    let _ = block_until(SystemClock.now() + PAUSE, store.delete(&request_name(number)));
    if let Some(error) = unclear {
        return Err(failed(error));
    }
    Err(unanswered(shown, has_ended))
}

/// The error for a writer that has not answered.
fn unanswered(shown: &str, has_ended: bool) -> Error {
    let (message, repair) = match has_ended {
        true => (
            format!("the process that served {shown} has ended, and no other one serves it"),
            "repeat the command when the mapping has a new worker, which cleat status shows. If there is no such mapping any \
             more: cleat fence ls, then cleat fence add",
        ),
        false => (
            format!("{shown} is in use, and its client has not answered"),
            "cleat fence ls shows the client; unmap the volume there, or repeat the command. If the client has ended for \
             good: cleat fence add",
        ),
    };
    Error::new(ErrorKind::InUse, message).with_repair(repair)
}

fn result(bytes: &[u8], shown: &str) -> Result<Outcome> {
    let answer: Answer = serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("the client of {shown} has given an answer that cannot be read");
        Error::new(ErrorKind::Internal, message).with_source(error)
    })?;
    let Answer { changed, error, progress, need_parent, has_clones } = answer;
    if !need_parent.is_empty() {
        return Err(errors::failed(shown, Failure::NeedParent(need_parent)));
    }
    if has_clones {
        return Err(errors::failed(shown, Failure::HasClones));
    }
    match error {
        None => Ok(Outcome { changed, progress }),
        Some(reason) => {
            let message = format!("the client that serves {shown} has refused: {reason}");
            Err(Error::new(ErrorKind::Aborted, message))
        }
    }
}

/// The requests that a writer has executed.
#[derive(Default)]
pub(crate) struct Answered(BTreeSet<u64>);

impl Answered {
    /// Executes the requests that are there. Errors of the store only delay them.
    /// A snapshot waits until the volume is quiesced.
    pub(crate) async fn answer(&mut self, store: &dyn Store, volume: &Volume, quiesce: &Quiesce) {
        for name in store.list("ask/", "").await.unwrap_or_default() {
            let number = number_of(&name, "ask/");
            if let Some(number) = number.filter(|number| !self.0.contains(number)) {
                let Ok(bytes) = store.read(&name, 0..MAX_BYTES as u64).await else { continue };
                let request = serde_json::from_slice::<Request>(&bytes);
                if let Ok(request) = request
                    && request.epoch == volume.epoch()
                {
                    self.remember(number);
                    let answer = answer(store, volume, quiesce, &request.change).await;
                    let bytes = serde_json::to_vec(&answer).unwrap_or_default();
                    // Without an answer, the command reports that the client has not answered.
                    let _ = store.create(&answer_name(number), &bytes).await;
                }
            }
            let _ = store.delete(&name).await;
        }
    }

    /// Deletes answers of earlier writers, whose commands have ended.
    pub(crate) async fn tidy(&self, store: &dyn Store) {
        for name in store.list("answer/", "").await.unwrap_or_default() {
            let _ = store.delete(&name).await;
        }
    }

    fn remember(&mut self, number: u64) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.pop_first();
        }
        self.0.insert(number);
    }
}

fn number_of(name: &str, prefix: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix).filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}
