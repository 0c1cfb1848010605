//! Workers: started, adopted, spoken to, stopped. The processes behind them are `process`'s.
//!
//! A worker owns its sockets and outlives the supervisor: dropping a [`Worker`] never ends it. A
//! later supervisor finds it through its control socket, so nothing has to be kept in the service
//! manager's descriptor store.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket, socketpair,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::{Instant, timeout_at};

use super::executor::blocking;
use super::link::{Link, watched};
use super::listener::listener_of;
use super::mapping::WorkerId;
use super::process::{Launcher, Process};
use super::setbacks::NotStarted;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, Outage, Ready, Start, ToWorker};
use cleat_worker::version::Spoken;

/// Something that a worker did by itself. A hint to look at its mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEvent {
    /// Whose worker.
    pub mapping_id: String,
    /// For the log.
    pub what: String,
}

/// Starts and adopts workers.
pub struct Workers {
    launcher: Arc<dyn Launcher>,
    directory: PathBuf,
    log: String,
    events: mpsc::Sender<WorkerEvent>,
}

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

/// A worker that serves a volume.
pub struct Worker {
    /// What it said of itself and its volume.
    pub ready: Ready,
    /// Its counters.
    pub statistics: Page,
    process: Arc<Process>,
    link: Arc<Link>,
    replies: Mutex<mpsc::Receiver<(FromWorker, Vec<OwnedFd>)>>,
    flags: Arc<Flags>,
    ended: watch::Receiver<bool>,
    reader: tokio::task::AbortHandle,
}

#[derive(Debug, Default)]
struct Flags {
    /// Of the volume, in bytes, as last heard.
    size: AtomicU64,
    /// The channel has ended or carried nonsense, or an answer did not come in time.
    broken: AtomicBool,
    fenced: AtomicBool,
    /// The snapshot that waits, or is being made; 0: none.
    snapshot: AtomicU64,
    /// What the worker says of its backend.
    outage: std::sync::Mutex<Option<Outage>>,
    /// How it ended: whoever asks first takes the exit status.
    end: std::sync::OnceLock<String>,
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

/// What stands behind a worker's control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// There is no socket: nothing is known.
    Absent,
    /// Nobody listens any more: the only process that did has ended.
    Refused,
    /// Somebody listens.
    Answers,
}

impl Workers {
    /// Workers whose control sockets are in `directory`. `log` is passed on to them.
    pub fn new(
        launcher: Arc<dyn Launcher>,
        directory: PathBuf,
        log: String,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Self {
        Self { launcher, directory, log, events }
    }

    /// Of the executable that new workers run, see `worker::version::binary_id`. Empty: not known.
    pub fn binary(&self) -> String {
        self.launcher.binary()
    }

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
    /// `bequeathed` what a worker that still serves has given for its successor.
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
        bequeathed: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<Worker, NotStarted> {
        start.log.clone_from(&self.log);
        let Spoken { newest, oldest, build } = Spoken::here();
        (start.version, start.oldest, start.build) = (newest, oldest, build);
        let Launched { process, link } = launched;
        let pid = process.id.pid;
        let mapping_id = start.mapping_id.clone();
        let late = || Error::new(ErrorKind::TimedOut, "the backend did not open in time");
        let opening = self.open(&link, pid, start, page, bequeathed);
        let opened = timeout_at(deadline, opening).await;
        match opened.unwrap_or_else(|_| Err(NotOpened::Refused(late()))) {
            Ok((ready, page)) => self
                .watch(&mapping_id, Arc::new(process), link, ready, page)
                .map_err(|error| NotStarted { error, pid, died: None }),
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
                let died = died.then(|| how.unwrap_or_else(|| UNKNOWN_END.to_owned()));
                Err(NotStarted { error: failed.into_error(), pid, died })
            }
        }
    }

    async fn open(
        &self,
        link: &Link,
        pid: u32,
        start: Start,
        page: Option<Page>,
        bequeathed: Vec<OwnedFd>,
    ) -> Result<(Ready, Page), NotOpened> {
        let (generation, mapping_id) = (start.generation, start.mapping_id.clone());
        let send = async {
            let listener = self.listen(&start, pid)?;
            let page = page.map_or_else(|| Page::create().map(|(page, _)| page), Ok)?;
            let file =
                page.file().map_err(|error| Error::from_io("cannot share statistics", error))?;
            let mut descriptors = vec![listener, file];
            descriptors.extend(bequeathed);
            link.send(&ToWorker::Start(Box::new(start)), &descriptors).await.map_err(broke)?;
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
            let link = connect_to(&self.socket_path(mapping_id, process.id.pid)).map_err(failed)?;
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
            link.send(&adopt, &[]).await.map_err(broke)?;
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
        self.watch(mapping_id, process, link, ready, page)
    }

    /// The process that was started under `id`; `None` when its end is proved.
    ///
    /// # Errors
    /// When it cannot be told.
    pub fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        self.launcher.find(id)
    }

    /// The process that listens on a control socket of a mapping that nothing else is known of.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub async fn listener(&self, mapping_id: &str) -> Result<Option<Process>> {
        let (paths, launcher) = (self.sockets_of(mapping_id), Arc::clone(&self.launcher));
        // Looks at what every process has open.
        let look = move || {
            for path in paths {
                let Some(pid) = listener_of(&path)? else { continue };
                let process = launcher.of_number(pid)?;
                // Still the one that listens: so it is the one that the descriptor names.
                if process.is_some() && listener_of(&path)? == Some(pid) {
                    return Ok(process);
                }
            }
            Ok(None)
        };
        blocking(look).await
    }

    /// Looks at the control sockets of a mapping that nothing else is known of.
    pub fn probe(&self, mapping_id: &str) -> Probe {
        let probes = self.sockets_of(mapping_id).into_iter().map(|path| probe(&path));
        probes.fold(Probe::Absent, |sum, one| match (sum, one) {
            (Probe::Answers, _) | (_, Probe::Answers) => Probe::Answers,
            (Probe::Refused, _) | (_, Probe::Refused) => Probe::Refused,
            (Probe::Absent, Probe::Absent) => Probe::Absent,
        })
    }

    /// Looks at the control socket of one worker of a mapping.
    pub fn probe_worker(&self, mapping_id: &str, pid: u32) -> Probe {
        probe(&self.socket_path(mapping_id, pid))
    }

    /// Removes the control sockets of a mapping that has ended.
    pub fn forget(&self, mapping_id: &str) {
        for path in self.sockets_of(mapping_id) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Each worker has its own, named after mapping and process: during a planned hand-over there are
    /// two of one mapping.
    fn socket_path(&self, mapping_id: &str, pid: u32) -> PathBuf {
        self.directory.join(format!("{mapping_id}.{pid}.sock"))
    }

    fn sockets_of(&self, mapping_id: &str) -> Vec<PathBuf> {
        let found = self.sockets().into_iter().filter(|(id, _)| id == mapping_id);
        found.map(|(_, path)| path).collect()
    }

    /// Every control socket, with the id of its mapping.
    pub fn sockets(&self) -> Vec<(String, PathBuf)> {
        // Unreadable, it is as good as empty: nobody can be reached there.
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (id, _pid) = name.strip_suffix(".sock")?.split_once('.')?;
            Some((id.to_owned(), entry.path()))
        });
        named.collect()
    }

    /// The listening socket through which later supervisors find the worker.
    fn listen(&self, start: &Start, pid: u32) -> Result<OwnedFd> {
        let path = self.socket_path(&start.mapping_id, pid);
        // What lies there belongs to workers that are proved gone, unless this one is to succeed one.
        if !start.successor {
            self.forget(&start.mapping_id);
        }
        let _ = std::fs::remove_file(&path);
        let make = || -> std::io::Result<OwnedFd> {
            let socket = seqpacket()?;
            bind(socket.as_raw_fd(), &UnixAddr::new(&path)?)?;
            // Nobody can connect before listen, so there is no moment of wider permissions.
            set_private(&path)?;
            listen(&socket, Backlog::new(8)?)?;
            Ok(socket)
        };
        make().map_err(|error| {
            Error::from_io(format!("cannot make the control socket {}", path.display()), error)
        })
    }

    fn watch(
        &self,
        mapping_id: &str,
        process: Arc<Process>,
        link: Link,
        ready: Ready,
        statistics: Page,
    ) -> Result<Worker> {
        let failed = |error| Error::from_io("cannot watch a worker", error);
        let exit = exit_descriptor(&process).map_err(failed)?;
        let link = Arc::new(link);
        let flags = Arc::new(Flags { size: ready.size.into(), ..Flags::default() });
        let (reply_sender, replies) = mpsc::channel(1);
        let (ended_sender, ended) = watch::channel(false);
        let reader = Reader {
            mapping_id: mapping_id.to_owned(),
            process: Arc::clone(&process),
            link: Arc::clone(&link),
            flags: Arc::clone(&flags),
            replies: Some(reply_sender),
            ended: ended_sender,
            events: self.events.clone(),
        };
        let reader = tokio::spawn(reader.run(exit)).abort_handle();
        let replies = Mutex::new(replies);
        Ok(Worker { ready, statistics, process, link, replies, flags, ended, reader })
    }
}

impl Worker {
    /// Which process.
    pub fn id(&self) -> WorkerId {
        self.process.id
    }

    /// The process, to adopt it anew over another connection.
    pub fn process(&self) -> Arc<Process> {
        Arc::clone(&self.process)
    }

    /// Whether its process has ended.
    pub fn has_ended(&self) -> bool {
        has_ended(&self.process)
    }

    /// Whether its channel can no longer be used.
    pub fn is_broken(&self) -> bool {
        self.flags.broken.load(Ordering::Acquire)
    }

    /// The outage of its backend, if there is one.
    pub fn outage(&self) -> Option<Outage> {
        self.flags.outage.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// How it ended, once it has.
    pub fn how_it_ended(&self) -> String {
        end_of(&self.process, &self.flags).to_owned()
    }

    /// Whether it has lost its volume to somebody else.
    pub fn is_fenced(&self) -> bool {
        self.flags.fenced.load(Ordering::Acquire)
    }

    /// Its number for the snapshot of its volume that waits, or is being made.
    pub fn snapshot(&self) -> Option<u64> {
        Some(self.flags.snapshot.load(Ordering::Acquire)).filter(|number| *number != 0)
    }

    /// The volume's size in bytes, as the worker last said it.
    pub fn size(&self) -> u64 {
        self.flags.size.load(Ordering::Acquire)
    }

    /// Gives it connections to serve, and returns once it does.
    ///
    /// # Errors
    /// As [`Worker::call`].
    pub async fn serve(&self, sockets: Vec<OwnedFd>, deadline: Instant) -> Result<()> {
        match self.call(ToWorker::Serve, sockets, deadline).await? {
            FromWorker::Serving => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a command and waits for its answer. After a missed deadline the channel is broken: the
    /// late answer would be taken for the next one's.
    ///
    /// # Errors
    /// What the worker answers; `TimedOut`; `Unavailable` when it is gone.
    pub async fn call(
        &self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<FromWorker> {
        self.exchange(command, descriptors, deadline).await.map(|(reply, _)| reply)
    }

    /// As [`Worker::call`], with the descriptors of the answer.
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
            return Err(gone());
        }
        // Set now and cleared at the end, so that a caller that goes away leaves it set.
        self.flags.broken.store(true, Ordering::Release);
        let exchange = async {
            self.link.send(&command, &descriptors).await.map_err(broke)?;
            // Copies of sockets must not keep them open any longer.
            drop(descriptors);
            replies.recv().await.ok_or_else(gone)
        };
        let reply = timeout_at(deadline, exchange)
            .await
            .map_err(|_| Error::new(ErrorKind::TimedOut, "the worker did not answer in time"))??;
        self.flags.broken.store(false, Ordering::Release);
        match reply {
            (FromWorker::Failed(failure), _) => Err(from_failure(failure)),
            reply => Ok(reply),
        }
    }

    /// Ends it: asks, and after `grace` kills. Returns once its end is proved.
    ///
    /// # Errors
    /// `TimedOut` when it lives on at `deadline`.
    pub async fn stop(&self, grace: Duration, deadline: Instant) -> Result<()> {
        let mut ended = self.ended.clone();
        let asked = async {
            // A broken channel is no reason to skip the wait: the disconnect alone may have ended it.
            let _ = self.link.send(&ToWorker::Stop, &[]).await;
            ended.wait_for(|ended| *ended).await.is_ok()
        };
        if timeout_at(deadline.min(Instant::now() + grace), asked).await == Ok(true) {
            return Ok(());
        }
        tracing::warn!(pid = self.id().pid, "a worker does not stop when asked; it is killed");
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
/// `TimedOut` when it lives on at `deadline`.
pub async fn stop_process(process: &Process, deadline: Instant) -> Result<()> {
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

/// Whether no thread of the process is left.
pub fn has_ended(process: &Process) -> bool {
    let mut set = [nix::poll::PollFd::new(process.exit.as_fd(), nix::poll::PollFlags::POLLIN)];
    nix::poll::poll(&mut set, nix::poll::PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// The exit status of a process that has ended, which can be taken once.
fn end_of<'a>(process: &Process, flags: &'a Flags) -> &'a str {
    flags.end.get_or_init(|| process.handle.reap().unwrap_or_else(|| UNKNOWN_END.to_owned()))
}

/// Only the parent is told, and that was an earlier daemon.
const UNKNOWN_END: &str = "ended in a way that was not told";

const KILL_GRACE: Duration = Duration::from_secs(5);

/// For a worker whose channel has closed to be gone.
const DYING_GRACE: Duration = Duration::from_secs(1);

/// Reads what a worker says, and notices its end.
struct Reader {
    mapping_id: String,
    process: Arc<Process>,
    link: Arc<Link>,
    flags: Arc<Flags>,
    /// Dropped with the channel, so that who waits for an answer learns at once.
    replies: Option<mpsc::Sender<(FromWorker, Vec<OwnedFd>)>>,
    ended: watch::Sender<bool>,
    events: mpsc::Sender<WorkerEvent>,
}

impl Reader {
    async fn run(mut self, exit: AsyncFd<OwnedFd>) {
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
        let how = end_of(&self.process, &self.flags);
        self.ended.send_replace(true);
        self.tell(format!("worker {} {how}", self.process.id.pid));
    }

    /// Whether there may be more.
    fn take(&mut self, message: std::io::Result<Option<(FromWorker, Vec<OwnedFd>)>>) -> bool {
        match message {
            Ok(Some((FromWorker::Disconnected, _))) => {
                self.tell("every connection has ended in order".to_owned());
            }
            Ok(Some((FromWorker::Fenced, _))) => {
                self.flags.fenced.store(true, Ordering::Release);
                self.tell("the volume belongs to somebody else now".to_owned());
            }
            Ok(Some((FromWorker::Outage { outage }, _))) => {
                let mut known =
                    self.flags.outage.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *known = outage;
                drop(known);
                self.tell("an outage of the backend began, changed or ended".to_owned());
            }
            Ok(Some((FromWorker::SnapshotPending { snapshot: waiting }, _))) => {
                self.flags.snapshot.store(waiting.unwrap_or(0), Ordering::Release);
                self.tell("a snapshot of the volume begins or has been made".to_owned());
            }
            Ok(Some((FromWorker::SizeChanged { size }, _))) => {
                self.flags.size.store(size, Ordering::Release);
                self.tell(format!("the volume has {size} bytes now"));
            }
            // The worker is of a newer build.
            Ok(Some((FromWorker::Unknown, _))) => {}
            Ok(Some(reply)) => {
                if let FromWorker::Size { size } = reply.0 {
                    self.flags.size.store(size, Ordering::Release);
                }
                // One command is under way at most; a second answer is nonsense.
                if self.replies.as_ref().is_none_or(|replies| replies.try_send(reply).is_err()) {
                    return self.give_up("answered twice");
                }
            }
            Ok(None) => return self.give_up("closed its channel"),
            Err(error) => return self.give_up(&format!("broke its channel: {error}")),
        }
        true
    }

    fn give_up(&mut self, why: &str) -> bool {
        self.flags.broken.store(true, Ordering::Release);
        self.replies = None;
        self.tell(format!("worker {} {why}", self.process.id.pid));
        false
    }

    fn tell(&self, what: String) {
        // A full queue loses the event; the next sweep finds what it was about.
        let _ = self.events.try_send(WorkerEvent { mapping_id: self.mapping_id.clone(), what });
    }
}

fn exit_descriptor(process: &Process) -> std::io::Result<AsyncFd<OwnedFd>> {
    watched(process.exit.try_clone()?, tokio::io::Interest::READABLE)
}

async fn exit_of(process: &Process) -> Result<()> {
    let failed = |error| Error::from_io("cannot watch a worker", error);
    let exit = exit_descriptor(process).map_err(failed)?;
    exit.readable().await.map_err(failed).map(|_| ())
}

async fn expect_ready(link: &Link) -> Result<(Ready, Vec<OwnedFd>), NotOpened> {
    use NotOpened::{Broken, Refused};
    match link.receive().await.map_err(|error| Broken(broke(error)))? {
        Some((FromWorker::Ready(ready), descriptors)) => {
            let (newest, oldest, build) = (ready.version, ready.oldest, ready.build.clone());
            Spoken::here().common(&Spoken { newest, oldest, build }).map_err(Refused)?;
            Ok((ready, descriptors))
        }
        Some((FromWorker::Failed(failure), _)) => Err(Refused(from_failure(failure))),
        Some((other, _)) => Err(Broken(unexpected(&other))),
        None => Err(Broken(gone())),
    }
}

fn from_failure(failure: cleat_worker::protocol::Failure) -> Error {
    let error = Error::new(failure.kind, failure.message);
    match failure.repair {
        Some(repair) => error.with_repair(repair),
        None => error,
    }
}

pub(super) fn unexpected(message: &FromWorker) -> Error {
    Error::new(ErrorKind::Internal, format!("the worker answered out of turn: {message:?}"))
}

fn gone() -> Error {
    Error::new(ErrorKind::Unavailable, "the worker died or closed its channel")
        .with_repair("see the log for its last words")
}

fn broke(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the channel to the worker broke").with_source(error)
}

fn probe(path: &Path) -> Probe {
    match connect_to(path) {
        Ok(_) => Probe::Answers,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Probe::Refused,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Probe::Absent,
        // A full queue, say: somebody must be there.
        Err(_) => Probe::Answers,
    }
}

fn connect_to(path: &Path) -> std::io::Result<OwnedFd> {
    let socket = seqpacket()?;
    // Non-blocking: a listener with a full queue must not stop the event loop.
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

fn set_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
}

fn seqpacket() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
}

fn seqpacket_pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?)
}
