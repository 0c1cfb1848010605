//! A worker that serves a volume: its commands and its state.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::{Instant, timeout_at};

use super::link::{Link, watched};
use super::process::Process;
use super::reader::{Reader, ReportedState, WorkerEvent, exit_reason_of};
use crate::planner::WorkerId;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_worker_protocol::protocol::{Failure, FromWorker, Outage, Ready, ToWorker};

/// The timeout for reading what a worker that has ended sent last.
const LAST_MESSAGES_TIMEOUT: Duration = Duration::from_secs(1);

/// A worker that serves a volume.
pub struct Worker {
    /// The properties of the worker and its volume.
    pub ready: Ready,
    /// The statistics page.
    pub statistics: Page,
    process: Arc<Process>,
    link: Arc<Link>,
    replies: Mutex<mpsc::Receiver<(FromWorker, Vec<OwnedFd>)>>,
    state: Arc<ReportedState>,
    ended: watch::Receiver<bool>,
    reader: tokio::task::AbortHandle,
}

impl Worker {
    /// Starts to read the messages of a worker that has opened its volume, and to watch its process.
    pub(super) fn watch(
        mapping_id: &str,
        process: Arc<Process>,
        link: Link,
        ready: Ready,
        statistics: Page,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Result<Self> {
        let failed = |error| Error::from_io("cannot watch a worker", error);
        let exit = exit_descriptor(&process).map_err(failed)?;
        let link = Arc::new(link);
        let state = Arc::new(ReportedState { size: ready.size.into(), ..ReportedState::default() });
        let (reply_sender, replies) = mpsc::channel(1);
        let (ended_sender, ended) = watch::channel(false);
        let reader = Reader {
            mapping_id: mapping_id.to_owned(),
            process: Arc::clone(&process),
            link: Arc::clone(&link),
            state: Arc::clone(&state),
            replies: Some(reply_sender),
            ended: ended_sender,
            events,
        };
        let reader = tokio::spawn(reader.run(exit)).abort_handle();
        let replies = Mutex::new(replies);
        Ok(Self { ready, statistics, process, link, replies, state, ended, reader })
    }

    /// Returns the process number and start time.
    pub fn id(&self) -> WorkerId {
        self.process.id
    }

    /// Returns the process, which can be adopted again over a new connection.
    pub fn process(&self) -> Arc<Process> {
        Arc::clone(&self.process)
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&self) -> bool {
        has_ended(&self.process)
    }

    /// Waits until the last messages of a worker that has ended are read, for at most 1 s. A process can be seen to have
    /// ended before its report that it has closed the volume is read.
    pub async fn last_messages(&self) {
        let mut ended = self.ended.clone();
        let read = ended.wait_for(|ended| *ended);
        let _ = timeout_at(Instant::now() + LAST_MESSAGES_TIMEOUT, read).await;
    }

    /// Returns whether the channel can no longer be used.
    pub fn is_broken(&self) -> bool {
        self.state.broken.load(Ordering::Acquire)
    }

    /// Returns the present outage of the backend.
    pub fn outage(&self) -> Option<Outage> {
        self.state.outage.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Returns how the process ended. Must be called only after its end.
    pub fn exit_reason(&self) -> String {
        exit_reason_of(&self.process, &self.state).to_owned()
    }

    /// Returns whether another client has fenced the worker's volume.
    pub fn is_fenced(&self) -> bool {
        self.state.fenced.load(Ordering::Acquire)
    }

    /// Returns whether the worker has closed its volume, which releases the claim. Workers of builds that do
    /// not report it have never closed it.
    pub fn has_closed(&self) -> bool {
        self.state.closed.load(Ordering::Acquire)
    }

    /// Returns the number of the snapshot of the volume that waits or is being made.
    pub fn snapshot(&self) -> Option<u64> {
        Some(self.state.snapshot.load(Ordering::Acquire)).filter(|number| *number != 0)
    }

    /// Returns the volume's size in bytes, as the worker last reported it.
    pub fn size(&self) -> u64 {
        self.state.size.load(Ordering::Acquire)
    }

    /// Passes connections to the worker and waits until it serves them.
    ///
    /// # Errors
    /// As [`Worker::call`].
    pub async fn serve(&self, sockets: Vec<OwnedFd>, deadline: Instant) -> Result<()> {
        match self.call(ToWorker::Serve, sockets, deadline).await? {
            FromWorker::Serving => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a command and waits for its answer. A timeout breaks the channel, since the late answer would be
    /// taken for that of the next command.
    ///
    /// # Errors
    /// Returns the error that the worker reports, `TimedOut` after `deadline`, and `Unavailable` if the
    /// worker has ended or the channel is broken.
    pub async fn call(
        &self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<FromWorker> {
        self.exchange(command, descriptors, deadline).await.map(|(reply, _)| reply)
    }

    /// Sends a command as [`Worker::call`] does, and returns the descriptors of the answer, too.
    ///
    /// # Errors
    /// As [`Worker::call`].
    pub async fn exchange(
        &self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(FromWorker, Vec<OwnedFd>)> {
        let mut replies = self.replies.lock().await;
        if self.is_broken() {
            return Err(worker_gone());
        }
        // Set now and cleared after the answer, so that it stays set if the caller is cancelled.
        self.state.broken.store(true, Ordering::Release);
        let exchange = async {
            self.link.send(&command, &descriptors).await.map_err(channel_broke)?;
            // The copies of the sockets must not keep them open.
            drop(descriptors);
            replies.recv().await.ok_or_else(worker_gone)
        };
        let reply = timeout_at(deadline, exchange)
            .await
            .map_err(|_| Error::new(ErrorKind::TimedOut, "the worker did not answer in time"))??;
        self.state.broken.store(false, Ordering::Release);
        match reply {
            (FromWorker::Failed(failure), _) => Err(from_failure(failure)),
            reply => Ok(reply),
        }
    }

    /// Asks the worker to stop, and kills it after `timeout`. Returns when its end is proved.
    ///
    /// # Errors
    /// Returns `TimedOut` if the process has not ended at `deadline`.
    pub async fn stop(&self, timeout: Duration, deadline: Instant) -> Result<()> {
        let mut ended = self.ended.clone();
        let asked = async {
            // The wait is useful even if the channel is broken: the disconnect may have ended the worker.
            let _ = self.link.send(&ToWorker::Stop, &[]).await;
            ended.wait_for(|ended| *ended).await.is_ok()
        };
        if timeout_at(deadline.min(Instant::now() + timeout), asked).await == Ok(true) {
            return Ok(());
        }
        tracing::warn!(pid = self.id().pid, "a worker did not stop in time: killing it");
        stop_process(&self.process, deadline).await
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Kills a process and waits until its end is proved.
///
/// # Errors
/// Returns `TimedOut` if the process has not ended at `deadline`.
pub(crate) async fn stop_process(process: &Process, deadline: Instant) -> Result<()> {
    let pid = process.id.pid;
    process
        .handle
        .kill()
        .map_err(|error| Error::from_io(format!("cannot kill worker {pid}"), error))?;
    timeout_at(deadline, exit_of(process)).await.map_err(|_| {
        Error::new(ErrorKind::TimedOut, format!("worker {pid} was killed and has not ended yet"))
            .with_repair(format!("see /proc/{pid}/stack for what it waits for"))
    })??;
    process.handle.reap();
    Ok(())
}

/// Returns whether all threads of the process have ended.
pub(crate) fn has_ended(process: &Process) -> bool {
    let mut set = [nix::poll::PollFd::new(process.exit.as_fd(), nix::poll::PollFlags::POLLIN)];
    nix::poll::poll(&mut set, nix::poll::PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

fn exit_descriptor(process: &Process) -> std::io::Result<AsyncFd<OwnedFd>> {
    watched(process.exit.try_clone()?, tokio::io::Interest::READABLE)
}

/// Waits until all threads of the process have ended.
///
/// # Errors
/// Returns an error if the process cannot be watched.
pub(crate) async fn exit_of(process: &Process) -> Result<()> {
    let failed = |error| Error::from_io("cannot watch a worker", error);
    let exit = exit_descriptor(process).map_err(failed)?;
    exit.readable().await.map_err(failed).map(|_| ())
}

/// Converts an error that a worker reported.
pub(crate) fn from_failure(failure: Failure) -> Error {
    let error = Error::new(failure.kind, failure.message);
    match failure.repair {
        Some(repair) => error.with_repair(repair),
        None => error,
    }
}

/// Returns the error for an answer that does not match the command.
pub(crate) fn unexpected(message: &FromWorker) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("internal: unexpected answer of the worker: {message:?}"),
    )
}

/// Returns the error for a worker whose channel has ended.
pub(crate) fn worker_gone() -> Error {
    Error::new(ErrorKind::Unavailable, "the worker died or closed its channel")
        .with_repair("see its last messages in the daemon's log")
}

/// Returns the error for a channel that broke.
pub(crate) fn channel_broke(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the channel to the worker broke").with_source(error)
}
