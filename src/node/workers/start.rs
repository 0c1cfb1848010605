//! Starts workers, and adopts those that an earlier supervisor left.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Workers;
use super::link::Link;
use super::process::Process;
use super::reader::UNKNOWN_EXIT;
use super::sockets::{connect_to, seqpacket_pair};
use super::worker::{Worker, channel_broke, exit_of, from_failure, unexpected, worker_gone};
use crate::blocking::blocking;
use crate::planner::WorkerId;
use crate::worker_failures::StartFailure;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, Ready, Start, ToWorker};
use cleat_worker::version::Spoken;

/// A worker process that has been told nothing yet. Dropped, it exits by itself.
pub struct Launched {
    process: Process,
    link: Link,
}

impl Launched {
    /// Which process.
    pub fn id(&self) -> WorkerId {
        self.process.id
    }
}

/// What opening a volume in a worker led to, if not to a worker.
enum NotOpened {
    /// The worker says why.
    Refused(Error),
    /// It could not be asked, or said nothing.
    Broken(Error),
}

impl NotOpened {
    fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Broken(error) => error,
        }
    }
}

const KILL_GRACE: Duration = Duration::from_secs(5);

/// For a worker whose channel has closed to be gone.
const DYING_GRACE: Duration = Duration::from_secs(1);

impl Workers {
    /// Starts a process and tells it nothing yet.
    ///
    /// # Errors
    /// When no process can be started.
    pub async fn launch(&self) -> Result<Launched> {
        let failed = |error: std::io::Error| Error::from_io("cannot reach a new worker", error);
        let (ours, theirs) = seqpacket_pair().map_err(failed)?;
        let launcher = Arc::clone(&self.launcher);
        let process = blocking(move || launcher.launch(theirs)).await?;
        Ok(Launched { process, link: Link::new(ours).map_err(failed)? })
    }

    /// Has a launched process open its volume. `page` is that of the worker before, if any;
    /// `prepared` what a worker that still serves has given for its successor.
    ///
    /// On failure the process is ended, and this returns once that is proved or `deadline` is over.
    ///
    /// # Errors
    /// What the backend gives; `TimedOut`; `Unavailable` when the worker dies.
    pub async fn start(
        &self,
        launched: Launched,
        mut start: Start,
        page: Option<Page>,
        prepared: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<Worker, StartFailure> {
        start.log.clone_from(&self.log);
        let Spoken { newest, oldest, build } = Spoken::here();
        (start.version, start.oldest, start.build) = (newest, oldest, build);
        let Launched { process, link } = launched;
        let pid = process.id.pid;
        let mapping_id = start.mapping_id.clone();
        let late = || Error::new(ErrorKind::TimedOut, "the backend did not open in time");
        let opening = self.open(&link, pid, start, page, prepared);
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
                let own = Instant::now() + DYING_GRACE;
                let died = silent && timeout_at(own, exit_of(&process)).await.is_ok();
                let _ = process.handle.kill();
                // As long as it takes to die, but not for ever: a process in a backend's system
                // call may not. The planner then sees it as unreachable, and starts no other.
                let grace = Instant::now() + KILL_GRACE;
                let _ = timeout_at(grace, exit_of(&process)).await;
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
        prepared: Vec<OwnedFd>,
    ) -> Result<(Ready, Page), NotOpened> {
        let (generation, mapping_id) = (start.generation, start.mapping_id.clone());
        let send = async {
            let listener = self.sockets.listen(&start.mapping_id, pid, start.successor)?;
            let page = page.map_or_else(|| Page::create().map(|(page, _)| page), Ok)?;
            let file =
                page.file().map_err(|error| Error::from_io("cannot share statistics", error))?;
            let mut descriptors = vec![listener, file];
            descriptors.extend(prepared);
            link.send(&ToWorker::Start(Box::new(start)), &descriptors)
                .await
                .map_err(channel_broke)?;
            Ok(page)
        };
        let page = send.await.map_err(NotOpened::Broken)?;
        let (ready, _) = expect_ready(link).await?;
        if ready.mapping_id != mapping_id || ready.generation != generation {
            let message = "the worker speaks for another mapping";
            return Err(NotOpened::Broken(Error::new(ErrorKind::Internal, message)));
        }
        Ok((ready, page))
    }

    /// Takes over a worker that an earlier supervisor, or an earlier connection, has left.
    ///
    /// # Errors
    /// `Unavailable` with the reason when it does not answer, or not for this mapping.
    pub async fn adopt(
        &self,
        mapping_id: &str,
        process: Arc<Process>,
        deadline: Instant,
    ) -> Result<Worker> {
        let attempt = async {
            let failed = |error| Error::from_io("its control socket cannot be reached", error);
            let link =
                connect_to(&self.sockets.path(mapping_id, process.id.pid)).map_err(failed)?;
            let link = Link::new(link).map_err(failed)?;
            // Of the process that called listen(2): a supervisor, hence our own user.
            let uid = link.peer_uid().map_err(failed)?;
            if uid != nix::unistd::geteuid().as_raw() {
                let message = format!("its control socket belongs to user {uid}");
                return Err(Error::new(ErrorKind::PermissionDenied, message));
            }
            let Spoken { newest: version, oldest, build } = Spoken::here();
            let mapping_id = mapping_id.to_owned();
            let adopt = ToWorker::Adopt { version, oldest, build, mapping_id: mapping_id.clone() };
            link.send(&adopt, &[]).await.map_err(channel_broke)?;
            let ready = expect_ready(&link).await.map_err(NotOpened::into_error);
            let (ready, mut descriptors) = ready?;
            if ready.mapping_id != mapping_id || ready.pid != process.id.pid {
                let message = "its control socket speaks for another worker";
                return Err(Error::new(ErrorKind::Internal, message));
            }
            let page = descriptors
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Internal, "it gave no statistics page"))?;
            Ok((link, ready, Page::from_fd(page)?))
        };
        let (link, ready, page) = timeout_at(deadline, attempt).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, "it does not answer on its control socket")
        })??;
        Worker::watch(mapping_id, process, link, ready, page, self.events.clone())
    }
}

async fn expect_ready(link: &Link) -> Result<(Ready, Vec<OwnedFd>), NotOpened> {
    use NotOpened::{Broken, Refused};
    match link.receive().await.map_err(|error| Broken(channel_broke(error)))? {
        Some((FromWorker::Ready(ready), descriptors)) => {
            let (newest, oldest, build) = (ready.version, ready.oldest, ready.build.clone());
            Spoken::here().common(&Spoken { newest, oldest, build }).map_err(Refused)?;
            Ok((ready, descriptors))
        }
        Some((FromWorker::Failed(failure), _)) => Err(Refused(from_failure(failure))),
        Some((other, _)) => Err(Broken(unexpected(&other))),
        None => Err(Broken(worker_gone())),
    }
}
