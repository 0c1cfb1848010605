//! Reads the messages of a worker, and detects its end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};

use super::link::Link;
use super::process::Process;
use cleat_worker_protocol::protocol::{FromWorker, Outage};

/// An event of a worker, after which its mapping should be reconciled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEvent {
    /// The worker's mapping.
    pub mapping_id: String,
    /// A description for the log.
    pub what: String,
}

/// The state of a worker as its messages report it.
#[derive(Debug, Default)]
pub(super) struct ReportedState {
    /// The size of the volume in bytes, as last reported.
    pub(super) size: AtomicU64,
    /// Whether the channel has ended or carried an invalid message, or an answer was late.
    pub(super) broken: AtomicBool,
    /// Whether another client has fenced the worker's volume.
    pub(super) fenced: AtomicBool,
    /// Whether the worker has closed the volume.
    pub(super) closed: AtomicBool,
    /// The number of the snapshot that waits or is being made; 0: none.
    pub(super) snapshot: AtomicU64,
    /// The present outage of the backend.
    pub(super) outage: std::sync::Mutex<Option<Outage>>,
    /// How the worker ended. The exit status can be taken only once, so the first caller stores it.
    pub(super) end: std::sync::OnceLock<String>,
}

/// Reads the messages of a worker until it has ended.
pub(super) struct Reader {
    pub(super) mapping_id: String,
    pub(super) process: Arc<Process>,
    pub(super) link: Arc<Link>,
    pub(super) state: Arc<ReportedState>,
    /// Dropped when the channel ends, so that a waiting call fails at once.
    pub(super) replies: Option<mpsc::Sender<(FromWorker, Vec<OwnedFd>)>>,
    pub(super) ended: watch::Sender<bool>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
}

impl Reader {
    pub(super) async fn run(mut self, exit: AsyncFd<OwnedFd>) {
        let mut listening = true;
        loop {
            tokio::select! {
                // Messages are read before the end is reported.
                biased;
                message = self.link.receive(), if listening => listening = self.take(message),
                _ = exit.readable() => break,
            }
        }
        self.state.broken.store(true, Ordering::Release);
        let how = exit_reason_of(&self.process, &self.state);
        self.ended.send_replace(true);
        self.send_event(format!("worker {} {how}", self.process.id.pid));
    }

    /// Handles a message. Returns false at the end of the channel.
    fn take(&mut self, message: std::io::Result<Option<(FromWorker, Vec<OwnedFd>)>>) -> bool {
        match message {
            Ok(Some((FromWorker::Disconnected, _))) => {
                self.send_event("the kernel closed all connections".to_owned());
            }
            Ok(Some((FromWorker::Fenced, _))) => {
                self.state.fenced.store(true, Ordering::Release);
                self.send_event("the volume was fenced by another client".to_owned());
            }
            // The end of the process follows.
            Ok(Some((FromWorker::Closed, _))) => self.state.closed.store(true, Ordering::Release),
            Ok(Some((FromWorker::SyncFailed, _))) => {
                // The statistics page says so, too, and it survives the worker.
                self.send_event("a sync of the volume failed".to_owned());
            }
            Ok(Some((FromWorker::Outage { outage }, _))) => {
                let mut known =
                    self.state.outage.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *known = outage;
                drop(known);
                self.send_event("an outage of the backend began, changed or ended".to_owned());
            }
            Ok(Some((FromWorker::SnapshotPending { snapshot }, _))) => {
                self.state.snapshot.store(snapshot.unwrap_or(0), Ordering::Release);
                self.send_event("a snapshot of the volume began or ended".to_owned());
            }
            Ok(Some((FromWorker::SizeChanged { size }, _))) => {
                self.state.size.store(size, Ordering::Release);
                self.send_event(format!("the volume's size is now {size} bytes"));
            }
            // An event of a newer build.
            Ok(Some((FromWorker::Unknown, _))) => {}
            Ok(Some(reply)) => {
                if let FromWorker::Size { size } = reply.0 {
                    self.state.size.store(size, Ordering::Release);
                }
                // At most one command is in progress, so a second answer is a protocol error.
                if self.replies.as_ref().is_none_or(|replies| replies.try_send(reply).is_err()) {
                    return self.close("sent an answer without a command");
                }
            }
            Ok(None) => return self.close("closed the channel"),
            Err(error) => return self.close(&format!("broke the channel: {error}")),
        }
        true
    }

    fn close(&mut self, why: &str) -> bool {
        self.state.broken.store(true, Ordering::Release);
        self.replies = None;
        self.send_event(format!("worker {} {why}", self.process.id.pid));
        false
    }

    fn send_event(&self, what: String) {
        // If the queue is full, the next sweep finds the change.
        let _ = self.events.try_send(WorkerEvent { mapping_id: self.mapping_id.clone(), what });
    }
}

/// Returns how a process ended. Takes its exit status at the first call.
pub(super) fn exit_reason_of<'a>(process: &Process, state: &'a ReportedState) -> &'a str {
    state.end.get_or_init(|| process.handle.reap().unwrap_or_else(|| UNKNOWN_EXIT.to_owned()))
}

/// How a worker ended that an earlier daemon started: only its parent gets the exit status.
pub(crate) const UNKNOWN_EXIT: &str = "ended with an unknown exit status";
