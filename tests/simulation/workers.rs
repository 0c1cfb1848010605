//! Simulated worker processes. In its turn, each does what `cleat worker` would do, on the real channel,
//! control socket and connections; and it fails as its script demands.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_node::planner::WorkerId;
use cleat_statistics::{Page, Recorder};
use cleat_sys::seqpacket;
use cleat_worker::protocol::{Failure, FromWorker, Outage, Refuse, Start};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::EventFd;

mod commands;

use crate::connections::{Connection, Side};
use crate::handover::Pause;
use crate::quirks::Quirks;
use crate::snapshots::Snapshots;
use crate::world::Surroundings;

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
    /// The start message of a worker without a volume, which answers every request with an error.
    refuse: Option<Refuse>,
    pub(crate) fenced: bool,
    /// Whether it has reported a wrong size of its volume.
    pub(crate) has_lied: bool,
    /// The number of its open among the opens of all volumes.
    pub(crate) epoch: u64,
    /// The name of its volume among the disks.
    pub(crate) disk: String,
    /// The number of its volume.
    pub(crate) number: u64,
    /// The last known size of its volume.
    size: u64,
    pub(crate) connections: Vec<Connection>,
    pub(crate) page: Option<Page>,
    channel: Option<OwnedFd>,
    listener: Option<UnixListener>,
    adopting: Vec<OwnedFd>,
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
    reported_fenced: bool,
    reported_outage: bool,
    pub(crate) snapshots: Snapshots,
    orphan_since: Option<Instant>,
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Quiet,
    Moved,
    Ends,
}

/// How long a worker without supervisor and connections waits, as the real worker does.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(600);

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
            refuse: None,
            fenced: false,
            has_lied: quirks_lie,
            epoch: 0,
            disk: String::new(),
            number: 0,
            size: 0,
            connections: Vec::new(),
            page: None,
            channel: Some(channel),
            listener: None,
            adopting: Vec::new(),
            opens_at: None,
            answers: 0,
            mute: false,
            served: false,
            pause: None,
            binary: String::new(),
            fails_io: false,
            disconnecting: false,
            reported_fenced: false,
            reported_outage: false,
            snapshots: Snapshots::default(),
            orphan_since: None,
        }
    }

    /// The mapping of the worker, once it has received its start message.
    pub(crate) fn mapping_id(&self) -> Option<&str> {
        self.start.as_ref().map(|start| start.mapping_id.as_str())
    }

    /// The mapping whose device it serves, with or without a volume.
    pub(crate) fn owner(&self) -> Option<&str> {
        let refuse = self.refuse.as_ref().map(|refuse| refuse.mapping_id.as_str());
        self.mapping_id().or(refuse)
    }

    /// Whether it answers the commands of a supervisor.
    pub(crate) fn answers_commands(&self) -> bool {
        !self.stopped && !self.mute && self.dying.is_none() && self.opens_at.is_none()
    }

    /// Ends the failures of the script.
    pub(crate) fn end_faults(&mut self, now: Instant) {
        let linger = self.quirks.linger;
        self.quirks = Quirks { linger, ..Quirks::default() };
        self.stopped = false;
        // An open that waits completes now.
        self.opens_at = self.opens_at.map(|at| at.min(now));
        self.mute = false;
    }

    /// The time of its next action without a message.
    pub(crate) fn next_due(&self, hung: bool) -> Option<Instant> {
        let orphan = self.orphan_since.map(|since| since + ORPHAN_TIMEOUT);
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
        self.answers_commands() && self.connections.iter().any(open)
    }

    /// Closes all descriptors, as the end of a process does. The counts in its statistics page remain.
    pub(crate) fn close(&mut self) {
        self.cut_channel();
        self.listener = None;
        self.adopting.clear();
        self.connections.iter_mut().for_each(Connection::close);
    }

    /// All descriptors that it reads from.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let busy = self.opens_at.is_some() || self.is_draining();
        let listens = !self.mute && !busy && self.dying.is_none();
        let channel = self.channel.iter().chain(&self.adopting).map(AsFd::as_fd);
        let own = channel.chain(self.listener.iter().map(AsFd::as_fd)).filter(move |_| listens);
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
        if self.refuse.is_some() && self.channel.is_none() {
            // It never outlives its supervisor.
            return Turn::Ends;
        }
        if self.refuse.is_none() && self.disconnecting && self.connections.is_empty() {
            self.report(&FromWorker::Disconnected, &[]);
            if !self.quirks.never_ends {
                self.report(&FromWorker::Closed, &[]);
                return Turn::Ends;
            }
            (self.disconnecting, moved) = (false, true);
        }
        match self.check_pause(around) {
            Turn::Quiet => {}
            Turn::Moved => moved = true,
            Turn::Ends => return Turn::Ends,
        }
        if self.fenced && !self.reported_fenced && self.start.is_some() {
            self.reported_fenced = true;
            self.report(&FromWorker::Fenced, &[]);
        }
        self.report_changes(around);
        if self.opens_at.is_some_and(|at| at <= around.now) {
            self.opens_at = None;
            if !self.open(around) {
                return Turn::Ends;
            }
            moved = true;
        }
        if self.opens_at.is_none() && !self.mute && !self.is_draining() {
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

    /// Reports changes at the backend.
    fn report_changes(&mut self, around: &Surroundings<'_>) {
        let wanted = self.start.as_ref().is_some_and(|start| start.quiesce);
        let news = self.snapshots.look(around.now, wanted, self.channel.is_some());
        if let Some(message) = news.filter(|_| !self.mute) {
            self.report(&message, &[]);
        }
        let Some(disk) = around.disks.get(&self.disk).filter(|_| !self.mute) else { return };
        if disk.hung != self.reported_outage {
            self.reported_outage = disk.hung;
            self.report(&self.outage(), &[]);
        }
        if disk.size != self.size && !disk.hung {
            let FromWorker::Size { size } = self.look(around) else { return };
            self.report(&FromWorker::SizeChanged { size }, &[]);
        }
    }

    fn outage(&self) -> FromWorker {
        let outage = Outage { since_unix_ms: 1, reason: Some("the script wants it".into()) };
        FromWorker::Outage { outage: self.reported_outage.then_some(outage) }
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
            self.orphan_since = None;
            return false;
        }
        now.saturating_duration_since(*self.orphan_since.get_or_insert(now)) >= ORPHAN_TIMEOUT
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
        self.report(message, descriptors);
        true
    }

    fn report(&mut self, message: &FromWorker, descriptors: &[OwnedFd]) {
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

pub(crate) fn refusal(kind: ErrorKind, message: String) -> FromWorker {
    FromWorker::Failed(Failure { kind, message, repair: None })
}

pub(crate) fn set_nonblocking(socket: &OwnedFd) {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL).expect("it is open"));
    fcntl(socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).expect("it is open");
}
