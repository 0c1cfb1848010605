//! Reads what a worker sends, and notices its end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};

use super::link::Link;
use super::process::Process;
use cleat_worker::protocol::{FromWorker, Outage};

/// Something that a worker did by itself. A hint to look at its mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEvent {
    /// Whose worker.
    pub mapping_id: String,
    /// For the log.
    pub what: String,
}

#[derive(Debug, Default)]
pub(super) struct Flags {
    /// Of the volume, in bytes, as last heard.
    pub(super) size: AtomicU64,
    /// The channel has ended or carried nonsense, or an answer did not come in time.
    pub(super) broken: AtomicBool,
    pub(super) fenced: AtomicBool,
    /// The snapshot that waits, or is being made; 0: none.
    pub(super) snapshot: AtomicU64,
    /// What the worker says of its backend.
    pub(super) outage: std::sync::Mutex<Option<Outage>>,
    /// How it ended: whoever asks first takes the exit status.
    pub(super) end: std::sync::OnceLock<String>,
}

/// Reads what a worker says, and notices its end.
pub(super) struct Reader {
    pub(super) mapping_id: String,
    pub(super) process: Arc<Process>,
    pub(super) link: Arc<Link>,
    pub(super) flags: Arc<Flags>,
    /// Dropped with the channel, so that who waits for an answer learns at once.
    pub(super) replies: Option<mpsc::Sender<(FromWorker, Vec<OwnedFd>)>>,
    pub(super) ended: watch::Sender<bool>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
}

impl Reader {
    pub(super) async fn run(mut self, exit: AsyncFd<OwnedFd>) {
        let mut listening = true;
        loop {
            tokio::select! {
                // Its last words before its end.
                biased;
                message = self.link.receive(), if listening => listening = self.take(message),
                _ = exit.readable() => break,
            }
        }
        self.flags.broken.store(true, Ordering::Release);
        let how = exit_reason_of(&self.process, &self.flags);
        self.ended.send_replace(true);
        self.send_event(format!("worker {} {how}", self.process.id.pid));
    }

    /// Whether there may be more.
    fn take(&mut self, message: std::io::Result<Option<(FromWorker, Vec<OwnedFd>)>>) -> bool {
        match message {
            Ok(Some((FromWorker::Disconnected, _))) => {
                self.send_event("every connection has ended in order".to_owned());
            }
            Ok(Some((FromWorker::Fenced, _))) => {
                self.flags.fenced.store(true, Ordering::Release);
                self.send_event("the volume belongs to somebody else now".to_owned());
            }
            Ok(Some((FromWorker::Outage { outage }, _))) => {
                let mut known =
                    self.flags.outage.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *known = outage;
                drop(known);
                self.send_event("an outage of the backend began, changed or ended".to_owned());
            }
            Ok(Some((FromWorker::SnapshotPending { snapshot: waiting }, _))) => {
                self.flags.snapshot.store(waiting.unwrap_or(0), Ordering::Release);
                self.send_event("a snapshot of the volume begins or has been made".to_owned());
            }
            Ok(Some((FromWorker::SizeChanged { size }, _))) => {
                self.flags.size.store(size, Ordering::Release);
                self.send_event(format!("the volume has {size} bytes now"));
            }
            // The worker is of a newer build.
            Ok(Some((FromWorker::Unknown, _))) => {}
            Ok(Some(reply)) => {
                if let FromWorker::Size { size } = reply.0 {
                    self.flags.size.store(size, Ordering::Release);
                }
                // One command is under way at most; a second answer is nonsense.
                if self.replies.as_ref().is_none_or(|replies| replies.try_send(reply).is_err()) {
                    return self.close("answered twice");
                }
            }
            Ok(None) => return self.close("closed its channel"),
            Err(error) => return self.close(&format!("broke its channel: {error}")),
        }
        true
    }

    fn close(&mut self, why: &str) -> bool {
        self.flags.broken.store(true, Ordering::Release);
        self.replies = None;
        self.send_event(format!("worker {} {why}", self.process.id.pid));
        false
    }

    fn send_event(&self, what: String) {
        // A full queue loses the event; the next sweep finds what it was about.
        let _ = self.events.try_send(WorkerEvent { mapping_id: self.mapping_id.clone(), what });
    }
}

/// The exit status of a process that has ended, which can be taken once.
pub(super) fn exit_reason_of<'a>(process: &Process, flags: &'a Flags) -> &'a str {
    flags.end.get_or_init(|| process.handle.reap().unwrap_or_else(|| UNKNOWN_EXIT.to_owned()))
}

/// Only the parent is told, and that was an earlier daemon.
pub(crate) const UNKNOWN_EXIT: &str = "ended in a way that was not told";
