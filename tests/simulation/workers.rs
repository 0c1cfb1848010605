//! Simulated worker processes. In its turn, each does what `cleat worker` would do, on the real channel,
//! control socket and connections; and it fails as its script demands.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_core::volume::Features;
use cleat_nbd::wire::transmission_flags;
use cleat_node::planner::WorkerId;
use cleat_statistics::{Page, Recorder};
use cleat_sys::seqpacket;
use cleat_worker::protocol::{
    Failure, FromWorker, Outage, PROTOCOL_VERSION, Ready, Start, ToWorker,
};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use crate::connections::{Connection, Side};
use crate::snapshots::Snapshots;
use crate::succession::Pause;
use crate::world::Surroundings;

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

/// A simulated worker process.
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    /// Written to when the worker ends; it stands for a pidfd.
    pub(crate) exit: EventFd,
    pub(crate) quirks: Quirks,
    /// Whether it is stopped (SIGSTOP).
    pub(crate) stopped: bool,
    /// Whether it was stopped at some time.
    pub(crate) was_stopped: bool,
    /// When a SIGKILL takes effect.
    pub(crate) dying: Option<Instant>,
    pub(crate) start: Option<Start>,
    pub(crate) fenced: bool,
    /// Whether it has reported a wrong size of its volume.
    pub(crate) has_lied: bool,
    /// The number of its open among the opens of all volumes.
    pub(crate) epoch: u64,
    /// The name of its volume among the disks.
    pub(crate) disk: String,
    /// The last known size of its volume.
    size: u64,
    pub(crate) connections: Vec<Connection>,
    pub(crate) page: Option<Page>,
    channel: Option<OwnedFd>,
    listener: Option<UnixListener>,
    strangers: Vec<OwnedFd>,
    opens_at: Option<Instant>,
    answers: u32,
    mute: bool,
    pub(crate) served: bool,
    /// The handover in progress, if any.
    pub(crate) pause: Option<Pause>,
    /// The build of the worker.
    pub(crate) binary: String,
    fails_io: bool,
    disconnecting: bool,
    told_fenced: bool,
    told_outage: bool,
    pub(crate) snapshots: Snapshots,
    alone_since: Option<Instant>,
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Quiet,
    Moved,
    Ends,
}

/// How long a worker without supervisor and connections waits, as the real worker does.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(600);

/// The maximum length of a supervisor's message in these tests.
const MESSAGE_BYTES: usize = 4096;

enum Message {
    Nothing,
    End,
    Bad,
    Command(ToWorker, Vec<OwnedFd>),
}

impl Worker {
    pub(crate) fn new(id: WorkerId, exit: EventFd, channel: OwnedFd, quirks: Quirks) -> Self {
        set_nonblocking(&channel);
        let quirks_lie = quirks.size_lie != 0;
        Self {
            id,
            exit,
            quirks,
            stopped: false,
            was_stopped: false,
            dying: None,
            start: None,
            fenced: false,
            has_lied: quirks_lie,
            epoch: 0,
            disk: String::new(),
            size: 0,
            connections: Vec::new(),
            page: None,
            channel: Some(channel),
            listener: None,
            strangers: Vec::new(),
            opens_at: None,
            answers: 0,
            mute: false,
            served: false,
            pause: None,
            binary: String::new(),
            fails_io: false,
            disconnecting: false,
            told_fenced: false,
            told_outage: false,
            snapshots: Snapshots::default(),
            alone_since: None,
        }
    }

    /// The mapping of the worker, once it has received its start message.
    pub(crate) fn mapping_id(&self) -> Option<&str> {
        self.start.as_ref().map(|start| start.mapping_id.as_str())
    }

    /// Whether it answers the commands of a supervisor.
    pub(crate) fn is_sane(&self) -> bool {
        !self.stopped && !self.mute && self.dying.is_none() && self.opens_at.is_none()
    }

    /// Ends the failures of the script.
    pub(crate) fn calm_down(&mut self, now: Instant) {
        let linger = self.quirks.linger;
        self.quirks = Quirks { linger, ..Quirks::default() };
        self.stopped = false;
        // An open that waits completes now.
        self.opens_at = self.opens_at.map(|at| at.min(now));
        self.mute = false;
    }

    /// The time of its next action without a message.
    pub(crate) fn next_due(&self, hung: bool) -> Option<Instant> {
        let orphan = self.alone_since.map(|since| since + ORPHAN_PATIENCE);
        let running = self.connections.iter().filter(|_| !hung).filter_map(Connection::next_due);
        let pause = self.pause.as_ref().map(Pause::until);
        let snapshot = self.snapshots.next_due();
        let own = [self.opens_at, orphan, pause, snapshot].into_iter().flatten();
        let own = own.filter(|_| self.dying.is_none()).chain(running).filter(|_| !self.stopped);
        own.chain(self.dying).min()
    }

    /// Whether its threads run.
    pub(crate) fn is_alive(&self) -> bool {
        !self.stopped && self.dying.is_none()
    }

    /// Whether it reads and answers requests.
    pub(crate) fn serves(&self) -> bool {
        let open = |connection: &Connection| connection.descriptor().is_some();
        self.is_sane() && self.connections.iter().any(open)
    }

    /// Closes all descriptors, as the end of a process does. The counts in its statistics page remain.
    pub(crate) fn close(&mut self) {
        self.cut_channel();
        self.listener = None;
        self.strangers.clear();
        self.connections.iter_mut().for_each(Connection::close);
    }

    /// All descriptors that it reads from.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let busy = self.opens_at.is_some() || self.is_coming_to_rest();
        let hears = !self.mute && !busy && self.dying.is_none();
        let channel = self.channel.iter().chain(&self.strangers).map(AsFd::as_fd);
        let own = channel.chain(self.listener.iter().map(AsFd::as_fd)).filter(move |_| hears);
        own.chain(self.connections.iter().filter_map(Connection::descriptor))
    }

    /// Closes the channel, as if it were broken.
    pub(crate) fn cut_channel(&mut self) {
        self.channel = None;
    }

    /// Does all work that is due.
    pub(crate) fn turn(&mut self, around: &mut Surroundings<'_>) -> Turn {
        if self.dying.is_some_and(|at| at <= around.now) {
            return Turn::Ends;
        }
        if self.stopped {
            return Turn::Quiet;
        }
        if self.dying.is_some() {
            // Its threads have ended, except for requests for which they wait in the kernel.
            return if self.serve(around, false) { Turn::Moved } else { Turn::Quiet };
        }
        if self.quirks.dies_at_start {
            return Turn::Ends;
        }
        let mut moved = self.serve(around, true);
        if self.disconnecting && self.connections.is_empty() {
            self.tell(&FromWorker::Disconnected, &[]);
            if !self.quirks.never_ends {
                return Turn::Ends;
            }
            (self.disconnecting, moved) = (false, true);
        }
        match self.mind_pause(around) {
            Turn::Quiet => {}
            Turn::Moved => moved = true,
            Turn::Ends => return Turn::Ends,
        }
        if self.fenced && !self.told_fenced && self.start.is_some() {
            self.told_fenced = true;
            self.tell(&FromWorker::Fenced, &[]);
        }
        self.tell_news(around);
        if self.opens_at.is_some_and(|at| at <= around.now) {
            self.opens_at = None;
            if !self.open(around) {
                return Turn::Ends;
            }
            moved = true;
        }
        if self.opens_at.is_none() && !self.mute && !self.is_coming_to_rest() {
            match self.listen(around) {
                Turn::Quiet => {}
                Turn::Moved => moved = true,
                Turn::Ends => return Turn::Ends,
            }
        }
        if self.is_orphan(around.now) {
            return Turn::Ends;
        }
        if moved { Turn::Moved } else { Turn::Quiet }
    }

    /// Runs a turn of each connection. Returns whether anything changed.
    pub(crate) fn serve(&mut self, around: &mut Surroundings<'_>, alive: bool) -> bool {
        let mut moved = false;
        let (pid, epoch, fenced) = (self.id.pid, self.epoch, self.fenced);
        let side = Side { pid, epoch, latency: self.quirks.latency, fenced, alive };
        for connection in &mut self.connections {
            moved |= connection.turn(around, &self.disk, side);
        }
        if alive {
            let ended = |connection: &Connection| connection.has_ended();
            self.disconnecting |= self.connections.iter().any(|c| ended(c) && c.said_goodbye);
            let before = self.connections.len();
            self.connections.iter().filter(|c| ended(c)).for_each(|c| c.ended(around, pid));
            self.connections.retain(|connection| !ended(connection));
            moved |= before != self.connections.len();
        }
        moved
    }

    /// Reads messages of supervisors.
    fn listen(&mut self, around: &mut Surroundings<'_>) -> Turn {
        let [channel, listener] = self.ready();
        let mut turn = Turn::Quiet;
        if channel {
            turn = Turn::Moved;
            let message = self.channel.as_ref().map_or(Message::Nothing, receive);
            if self.take(message, around) == Turn::Ends {
                return Turn::Ends;
            }
        }
        let mut strangers = std::mem::take(&mut self.strangers);
        strangers.retain_mut(|stranger| match receive(stranger) {
            Message::Nothing => true,
            message => {
                // A new supervisor does not know about a handover that the last one had begun.
                if self.end_pause(around) == Turn::Ends {
                    turn = Turn::Ends;
                    return false;
                }
                turn = Turn::Moved;
                let socket = stranger.try_clone().expect("a descriptor is left");
                self.take_stranger(socket, message);
                false
            }
        });
        self.strangers.append(&mut strangers);
        if turn == Turn::Ends {
            return turn;
        }
        if listener && let Some(listener) = &self.listener {
            // The type is for stream sockets, but accept4(2) is the same for all connected types.
            if let Ok((socket, _)) = listener.accept() {
                turn = Turn::Moved;
                let socket = OwnedFd::from(socket);
                set_nonblocking(&socket);
                self.strangers.push(socket);
            }
        }
        turn
    }

    /// Whether the channel and the listener are readable.
    fn ready(&self) -> [bool; 2] {
        let look = |socket: Option<BorrowedFd<'_>>| {
            socket.is_some_and(|socket| {
                let mut set = [PollFd::new(socket, PollFlags::POLLIN)];
                poll(&mut set, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
            })
        };
        [
            look(self.channel.as_ref().map(AsFd::as_fd)),
            look(self.listener.as_ref().map(AsFd::as_fd)),
        ]
    }

    fn take(&mut self, message: Message, around: &mut Surroundings<'_>) -> Turn {
        let rests_on = matches!(message, Message::Nothing | Message::Command(ToWorker::Ping, _));
        if !rests_on && self.end_pause(around) == Turn::Ends {
            return Turn::Ends;
        }
        match message {
            Message::Nothing => Turn::Quiet,
            Message::End => {
                self.channel = None;
                if self.served { Turn::Moved } else { Turn::Ends }
            }
            Message::Bad => {
                around.violation(format!("worker {} was sent nonsense", self.id.pid));
                Turn::Ends
            }
            Message::Command(ToWorker::Start(start), descriptors) if self.start.is_none() => {
                self.begin(*start, descriptors, around)
            }
            Message::Command(command, descriptors) => self.obey(command, descriptors, around),
        }
    }

    fn begin(
        &mut self,
        start: Start,
        descriptors: Vec<OwnedFd>,
        around: &mut Surroundings<'_>,
    ) -> Turn {
        around.started(self, &start);
        let mut descriptors = descriptors.into_iter();
        let listener = descriptors.next();
        let page = descriptors.next().and_then(|file| Page::from_fd(file).ok());
        if start.successor != (descriptors.len() > 0) {
            around.violation("only a successor opens what was bequeathed".into());
        }
        let (Some(page), Some(listener)) = (page, listener) else {
            around.violation("a worker was started without its descriptors".into());
            return Turn::Ends;
        };
        set_nonblocking(&listener);
        let listener = UnixListener::from(listener);
        (self.page, self.listener, self.start) = (Some(page), Some(listener), Some(start));
        match self.quirks.open {
            Open::Well | Open::Fails(_) => {
                if self.open(around) {
                    Turn::Moved
                } else {
                    Turn::Ends
                }
            }
            Open::Takes(time) => {
                self.opens_at = Some(around.now + time);
                Turn::Moved
            }
            Open::Hangs => {
                self.opens_at = Some(around.now + Duration::from_secs(1 << 30));
                Turn::Moved
            }
        }
    }

    /// Opens the volume and answers. Returns whether the worker continues.
    fn open(&mut self, around: &mut Surroundings<'_>) -> bool {
        let opened = match self.quirks.open {
            Open::Fails(kind) => Err((kind, "the script has it fail".to_owned())),
            _ => around.open(self),
        };
        match opened {
            Ok(()) => {
                self.look(around);
                let ready = FromWorker::Ready(self.describe());
                self.answer(&ready)
            }
            Err((kind, message)) => {
                self.answer(&refusal(kind, message));
                false
            }
        }
    }

    fn obey(
        &mut self,
        command: ToWorker,
        descriptors: Vec<OwnedFd>,
        around: &mut Surroundings<'_>,
    ) -> Turn {
        if self.dies_before_answer() {
            return Turn::Ends;
        }
        let reply = match command {
            ToWorker::Stop => {
                around.told_to_end(self);
                return if self.quirks.never_ends { Turn::Moved } else { Turn::Ends };
            }
            ToWorker::Serve => {
                self.disconnecting = false;
                self.served = true;
                for socket in descriptors {
                    let recorder = self.recorder();
                    let mut connection = Connection::new(socket, recorder);
                    connection.fail_all(self.fails_io);
                    self.connections.push(connection);
                }
                FromWorker::Serving
            }
            ToWorker::RefreshSize => self.look(around),
            ToWorker::Resize { size, shrink } => {
                let disk = around.disks.get_mut(&self.disk);
                if let Some(disk) = disk.filter(|disk| shrink || size >= disk.size) {
                    disk.size = size;
                }
                self.look(around)
            }
            ToWorker::Ping | ToWorker::SetPolicy(_) => FromWorker::Done,
            ToWorker::Quiesced { snapshot, errno } => {
                match self.snapshots.answer(snapshot, errno, around.now) {
                    true => FromWorker::Done,
                    false => refusal(ErrorKind::NotFound, "it does not wait".into()),
                }
            }
            ToWorker::FailIo { fail } => {
                self.fails_io = fail;
                let failed = self.connections.iter_mut().map(|c| c.fail_all(fail));
                match (fail, failed.sum()) {
                    (true, at_backend) => FromWorker::IoFails { at_backend },
                    (false, _) => FromWorker::Done,
                }
            }
            ToWorker::PrepareHandover => {
                let alive = self.answer_with(&FromWorker::HandoverPrepared, &[open_volume()]);
                return if alive { Turn::Moved } else { Turn::Ends };
            }
            ToWorker::OfferHandover { generation, limit_ms } => {
                match self.hand_over(generation, limit_ms, around) {
                    // The answer follows at once if no request is in flight.
                    Ok(()) if self.mind_pause(around) == Turn::Ends => return Turn::Ends,
                    Ok(()) => return Turn::Moved,
                    Err(refusal) => refusal,
                }
            }
            ToWorker::TakeOver { unread, .. } => self.take_over(&unread, descriptors, around),
            // Every command has already ended the pause.
            ToWorker::CancelHandover => FromWorker::Done,
            other => refusal(ErrorKind::Unsupported, format!("{other:?}")),
        };
        if self.answer(&reply) { Turn::Moved } else { Turn::Ends }
    }

    fn take_stranger(&mut self, socket: OwnedFd, message: Message) {
        let Message::Command(ToWorker::Adopt { version, mapping_id, .. }, _) = message else {
            return;
        };
        let right = version == PROTOCOL_VERSION && self.mapping_id() == Some(mapping_id.as_str());
        let before = self.channel.replace(socket);
        if !right {
            self.tell(&refusal(ErrorKind::InvalidArgument, "another mapping's".into()), &[]);
            self.channel = before;
            return;
        }
        let page = self.page.as_ref().and_then(|page| page.file().ok());
        let page: Vec<OwnedFd> = page.into_iter().collect();
        self.tell(&FromWorker::Ready(self.describe()), &page);
        if self.fenced {
            self.tell(&FromWorker::Fenced, &[]);
        }
        if self.told_outage {
            self.tell(&self.outage(), &[]);
        }
        if let Some(message) = self.snapshots.start_over() {
            self.tell(&message, &[]);
        }
    }

    fn describe(&self) -> Ready {
        let start = self.start.as_ref();
        let features = Features {
            read_only: start.is_some_and(|start| start.read_only),
            flush: true,
            fua: true,
            multi_connection: true,
            outlives_worker: start.is_some_and(|start| start.uri.starts_with("file:")),
            ..Features::default()
        };
        Ready {
            version: PROTOCOL_VERSION,
            oldest: 0,
            build: String::new(),
            binary: self.binary.clone(),
            mapping_id: start.map_or_else(String::new, |start| start.mapping_id.clone()),
            generation: start.map_or(0, |start| start.generation),
            pid: self.id.pid,
            size: self.size.saturating_add_signed(self.quirks.size_lie),
            minimum_block: 512,
            preferred_block: 4096,
            transmission_flags: transmission_flags(features),
            outlives_worker: features.outlives_worker,
            connections: u32::try_from(self.connections.len()).unwrap_or(u32::MAX),
        }
    }

    /// Reports changes at the backend.
    fn tell_news(&mut self, around: &Surroundings<'_>) {
        let wanted = self.start.as_ref().is_some_and(|start| start.quiesce);
        let news = self.snapshots.look(around.now, wanted, self.channel.is_some());
        if let Some(message) = news.filter(|_| !self.mute) {
            self.tell(&message, &[]);
        }
        let Some(disk) = around.disks.get(&self.disk).filter(|_| !self.mute) else { return };
        if disk.hung != self.told_outage {
            self.told_outage = disk.hung;
            self.tell(&self.outage(), &[]);
        }
        if disk.size != self.size && !disk.hung {
            let FromWorker::Size { size } = self.look(around) else { return };
            self.tell(&FromWorker::SizeChanged { size }, &[]);
        }
    }

    fn outage(&self) -> FromWorker {
        let outage = Outage { since_unix_ms: 1, reason: Some("the script wants it".into()) };
        FromWorker::Outage { outage: self.told_outage.then_some(outage) }
    }

    /// Reads the size of its volume.
    fn look(&mut self, around: &Surroundings<'_>) -> FromWorker {
        self.size = around.disks.get(&self.disk).map_or(0, |disk| disk.size);
        FromWorker::Size { size: self.size.saturating_add_signed(self.quirks.size_lie) }
    }

    pub(crate) fn recorder(&self) -> Option<Recorder> {
        self.page.as_ref()?.any_recorder()
    }

    fn is_orphan(&mut self, now: Instant) -> bool {
        if self.channel.is_some() || !self.connections.is_empty() {
            self.alone_since = None;
            return false;
        }
        now.saturating_duration_since(*self.alone_since.get_or_insert(now)) >= ORPHAN_PATIENCE
    }

    fn dies_before_answer(&self) -> bool {
        self.quirks.dies_at_answer == Some((self.answers, false))
    }

    /// Answers as its script demands. Returns whether the worker continues.
    pub(crate) fn answer(&mut self, message: &FromWorker) -> bool {
        self.answer_with(message, &[])
    }

    pub(crate) fn answer_with(&mut self, message: &FromWorker, descriptors: &[OwnedFd]) -> bool {
        let nth = self.answers;
        self.answers += 1;
        if self.quirks.dies_at_answer.is_some_and(|(at, _)| at == nth) {
            return false;
        }
        self.mute |= self.quirks.mute_at_answer == Some(nth);
        if self.quirks.hangs_up_at_answer == Some(nth) {
            self.channel = None;
            return self.served;
        }
        if self.mute {
            return true;
        }
        if self.quirks.nonsense_at_answer == Some(nth) {
            self.send(b"{\"event\":\"sing\"}", &[]);
            return true;
        }
        self.tell(message, descriptors);
        true
    }

    fn tell(&mut self, message: &FromWorker, descriptors: &[OwnedFd]) {
        let bytes = serde_json::to_vec(message).expect("every message can be encoded");
        self.send(&bytes, descriptors);
    }

    fn send(&mut self, bytes: &[u8], descriptors: &[OwnedFd]) {
        let Some(channel) = &self.channel else { return };
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if seqpacket::send(channel.as_fd(), bytes, &borrowed).is_err() && self.served {
            self.channel = None;
        }
    }
}

/// Returns a descriptor that stands for an open volume.
fn open_volume() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("it is there").into()
}

pub(crate) fn refusal(kind: ErrorKind, message: String) -> FromWorker {
    FromWorker::Failed(Failure { kind, message, repair: None })
}

fn receive(socket: &OwnedFd) -> Message {
    let mut buffer = [0; MESSAGE_BYTES];
    match seqpacket::receive(socket.as_fd(), &mut buffer) {
        Ok((0, _)) => Message::End,
        Ok((length, descriptors)) => match serde_json::from_slice(&buffer[..length]) {
            Ok(command) => Message::Command(command, descriptors),
            Err(_) => Message::Bad,
        },
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Message::Nothing,
        Err(_) => Message::End,
    }
}

pub(crate) fn set_nonblocking(socket: &OwnedFd) {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL).expect("it is open"));
    fcntl(socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).expect("it is open");
}
