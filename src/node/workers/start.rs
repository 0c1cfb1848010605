//! Starts workers, and adopts the workers of an earlier supervisor.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Workers;
use super::link::Link;
use super::process::Process;
use super::reader::UNKNOWN_EXIT;
use super::socket_owner::listens;
use super::sockets::{connect_to, seqpacket_pair};
use super::worker::{Worker, channel_broke, exit_of, from_failure, unexpected, worker_gone};
use crate::blocking::blocking;
use crate::planner::WorkerId;
use crate::worker_failures::StartFailure;
use cleat_backend::CacheUse;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_worker_protocol::protocol::{FromWorker, Ready, Start, ToWorker};
use cleat_worker_protocol::version::ProtocolVersions;

/// A worker process that has received no message yet. It exits by itself if this is dropped.
pub struct Launched {
    process: Process,
    link: Link,
}

impl Launched {
    /// Returns the process number and start time.
    pub fn id(&self) -> WorkerId {
        self.process.id
    }

    /// Returns the process and the supervisor's end of its channel.
    pub(super) fn into_parts(self) -> (Process, Link) {
        (self.process, self.link)
    }
}

/// Why a worker did not open its volume.
pub(super) enum NotOpened {
    /// The worker reported an error, or the timeout passed.
    Refused(Error),
    /// The channel to the worker broke before an answer.
    Broken(Error),
}

impl NotOpened {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Broken(error) => error,
        }
    }
}

/// How long a start that failed waits for the end of the killed process.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a worker that has closed its channel may take to exit by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

impl Workers {
    /// Starts a worker process and sends it no message yet.
    ///
    /// # Errors
    /// Returns an error if no process can be started.
    pub async fn launch(&self) -> Result<Launched> {
        let failed = |error: std::io::Error| {
            Error::from_io("cannot create the channel to a new worker", error)
        };
        let (ours, theirs) = seqpacket_pair().map_err(failed)?;
        let launcher = Arc::clone(&self.launcher);
        let process = blocking(move || launcher.launch(theirs)).await?;
        Ok(Launched { process, link: Link::new(ours).map_err(failed)? })
    }

    /// Makes a launched process open its volume. `page` is the statistics page of the previous worker;
    /// `None`: there is none. `more` are the descriptors of `start.credentials`, then those that a worker
    /// that still serves passes to its successor.
    ///
    /// If this fails, it kills the process and waits [`KILL_TIMEOUT`] at most for its end.
    ///
    /// # Errors
    /// Returns the backend's error, `TimedOut` after `deadline`, and `Unavailable` if the worker dies.
    pub async fn start(
        &self,
        launched: Launched,
        mut start: Start,
        page: Option<Page>,
        more: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<Worker, StartFailure> {
        start.log.clone_from(&self.log);
        let Launched { process, link } = launched;
        let pid = process.id.pid;
        let mapping_id = start.mapping_id.clone();
        let late =
            || Error::new(ErrorKind::TimedOut, "the backend did not open the volume in time");
        let opening = self.open(&link, pid, start, page, more);
        let opened = timeout_at(deadline, opening).await;
        match opened.unwrap_or_else(|_| Err(NotOpened::Refused(late()))) {
            Ok((ready, page)) => Worker::watch(
                &mapping_id,
                Arc::new(process),
                link,
                ready,
                page,
                self.events.clone(),
            )
            .map_err(|error| StartFailure { error, pid, died: None }),
            Err(failed) => {
                drop(link);
                let silent = matches!(failed, NotOpened::Broken(_));
                let exit_deadline = Instant::now() + EXIT_TIMEOUT;
                let died = silent && timeout_at(exit_deadline, exit_of(&process)).await.is_ok();
                let _ = process.handle.kill();
                // A process that is blocked in a system call may not end. The planner then sees an
                // unreachable worker and starts no other one.
                let kill_deadline = Instant::now() + KILL_TIMEOUT;
                let _ = timeout_at(kill_deadline, exit_of(&process)).await;
                let how = process.handle.reap();
                let died = died.then(|| how.unwrap_or_else(|| UNKNOWN_EXIT.to_owned()));
                Err(StartFailure { error: failed.into_error(), pid, died })
            }
        }
    }

    async fn open(
        &self,
        link: &Link,
        pid: u32,
        start: Start,
        page: Option<Page>,
        more: Vec<OwnedFd>,
    ) -> Result<(Ready, Page), NotOpened> {
        let (generation, mapping_id) = (start.generation, start.mapping_id.clone());
        let send = async {
            let listener = self.sockets.listen(&start.mapping_id, pid, start.successor)?;
            let page = page.map_or_else(|| Page::create().map(|(page, _)| page), Ok)?;
            let file =
                page.file().map_err(|error| Error::from_io("cannot share statistics", error))?;
            let mut start = start;
            let tail = self.tails.open(&start.mapping_id, start.tail_bytes);
            let tail = tail.map_err(|error| {
                Error::from_io("cannot create the tail file of the mapping", error)
            })?;
            if tail.is_none() {
                start.tail_bytes = 0;
            }
            let volume = self.registry.volume(&start.uri);
            let cache = volume.map_or(CacheUse::None, |volume| volume.spec().cache());
            // The disk of the caches may hang.
            let (caches, id) = (Arc::clone(&self.caches), start.mapping_id.clone());
            let cache = blocking(move || Ok(caches.open(&id, &cache))).await?;
            start.cache_files = cache.files.len();
            start.cache_file_bytes = cache.file_bytes;
            let mut descriptors = vec![listener, file];
            descriptors.extend(tail);
            descriptors.extend(cache.files);
            descriptors.extend(more);
            link.send(&ToWorker::Start(Box::new(start)), &descriptors)
                .await
                .map_err(channel_broke)?;
            Ok(page)
        };
        let page = send.await.map_err(NotOpened::Broken)?;
        let (ready, _) = expect_ready(link).await?;
        if ready.mapping_id != mapping_id || ready.generation != generation {
            let message = "the worker answered for another mapping";
            return Err(NotOpened::Broken(Error::new(ErrorKind::Internal, message)));
        }
        Ok((ready, page))
    }

    /// Connects to a running worker, which an earlier supervisor started or whose channel broke.
    ///
    /// # Errors
    /// Returns an error if the control socket cannot be reached or belongs to another worker or user, and
    /// `TimedOut` if the worker does not answer until `deadline`.
    pub async fn adopt(
        &self,
        mapping_id: &str,
        process: Arc<Process>,
        deadline: Instant,
    ) -> Result<Worker> {
        let attempt = async {
            let failed = |error| Error::from_io("cannot connect to its control socket", error);
            let path = self.sockets.path(mapping_id, process.id.pid);
            let link = Link::new(connect_to(&path).map_err(failed)?).map_err(failed)?;
            // The credentials are those of the process that called listen(2): the worker, before it changed its
            // user. For a worker of an earlier version, its supervisor called listen(2).
            let (uid, pid) = link.peer().map_err(failed)?;
            let id = process.id.pid;
            if process.handle.is_known_to_the_kernel()
                && pid != id
                && !blocking(move || listens(id, &path)).await?
            {
                let message = format!("its control socket belongs to process {pid}");
                return Err(Error::new(ErrorKind::PermissionDenied, message));
            }
            if uid != nix::unistd::geteuid().as_raw() {
                let message = format!("its control socket belongs to user {uid}");
                return Err(Error::new(ErrorKind::PermissionDenied, message));
            }
            let ProtocolVersions { newest: version, oldest, build } =
                ProtocolVersions::of_this_build();
            let mapping_id = mapping_id.to_owned();
            let id = mapping_id.clone();
            let adopt =
                ToWorker::Adopt { version, oldest, build, mapping_id: id, keeps_tail: true };
            link.send(&adopt, &[]).await.map_err(channel_broke)?;
            let ready = expect_ready(&link).await.map_err(NotOpened::into_error);
            let (ready, mut descriptors) = ready?;
            if ready.mapping_id != mapping_id || ready.pid != process.id.pid {
                let message = "another worker answered on its control socket";
                return Err(Error::new(ErrorKind::Internal, message));
            }
            let page = descriptors
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Internal, "it sent no statistics page"))?;
            Ok((link, ready, Page::from_fd(page)?))
        };
        let (link, ready, page) = timeout_at(deadline, attempt).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, "it did not answer on its control socket in time")
        })??;
        Worker::watch(mapping_id, process, link, ready, page, self.events.clone())
    }
}

/// Receives the answer of a worker to its first message, and compares the protocol versions.
pub(super) async fn expect_ready(link: &Link) -> Result<(Ready, Vec<OwnedFd>), NotOpened> {
    use NotOpened::{Broken, Refused};
    match link.receive().await.map_err(|error| Broken(channel_broke(error)))? {
        Some((FromWorker::Ready(ready), descriptors)) => {
            let (newest, oldest, build) = (ready.version, ready.oldest, ready.build.clone());
            ProtocolVersions::of_this_build()
                .common(&ProtocolVersions { newest, oldest, build })
                .map_err(Refused)?;
            Ok((*ready, descriptors))
        }
        Some((FromWorker::Failed(failure), _)) => Err(Refused(from_failure(failure))),
        Some((other, _)) => Err(Broken(unexpected(&other))),
        None => Err(Broken(worker_gone())),
    }
}
