//! How a simulated worker reads, executes and answers the messages of supervisors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use cleat_core::error::ErrorKind;
use cleat_core::volume::Features;
use cleat_nbd::wire::transmission_flags;
use cleat_statistics::Page;
use cleat_sys::seqpacket;
use cleat_worker::protocol::{FromWorker, PROTOCOL_VERSION, Ready, Refuse, Start, ToWorker};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Turn, Worker, refusal, set_nonblocking};
use crate::connections::Connection;
use crate::quirks::Open;
use crate::world::{Surroundings, volume_identity};

/// The maximum length of a supervisor's message in these tests.
const MESSAGE_BYTES: usize = 4096;

enum Message {
    Nothing,
    End,
    Bad,
    Command(ToWorker, Vec<OwnedFd>),
}

impl Worker {
    /// Reads messages of supervisors.
    pub(super) fn listen(&mut self, around: &mut Surroundings<'_>) -> Turn {
        let [channel, listener] = self.ready();
        let mut turn = Turn::Quiet;
        if channel {
            turn = Turn::Moved;
            let message = self.channel.as_ref().map_or(Message::Nothing, receive);
            if self.take(message, around) == Turn::Ends {
                return Turn::Ends;
            }
        }
        let mut adopting = std::mem::take(&mut self.adopting);
        adopting.retain_mut(|socket| match receive(socket) {
            Message::Nothing => true,
            message => {
                // A new supervisor does not know about a handover that the last one had begun.
                if self.end_pause(around) == Turn::Ends {
                    turn = Turn::Ends;
                    return false;
                }
                turn = Turn::Moved;
                let socket = socket.try_clone().expect("a descriptor is left");
                self.adopt(socket, message);
                false
            }
        });
        self.adopting.append(&mut adopting);
        if turn == Turn::Ends {
            return turn;
        }
        if listener && let Some(listener) = &self.listener {
            // The type is for stream sockets, but accept4(2) is the same for all connected types.
            if let Ok((socket, _)) = listener.accept() {
                turn = Turn::Moved;
                let socket = OwnedFd::from(socket);
                set_nonblocking(&socket);
                self.adopting.push(socket);
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
        let keeps_pause = matches!(message, Message::Nothing | Message::Command(ToWorker::Ping, _));
        if !keeps_pause && self.end_pause(around) == Turn::Ends {
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
            Message::Command(ToWorker::Refuse(refuse), descriptors) if self.start.is_none() => {
                self.begin_refusing(*refuse, descriptors, around)
            }
            Message::Command(command, descriptors) => self.execute(command, descriptors, around),
        }
    }

    fn begin_refusing(
        &mut self,
        refuse: Refuse,
        descriptors: Vec<OwnedFd>,
        around: &mut Surroundings<'_>,
    ) -> Turn {
        tracing::debug!(pid = self.id.pid, id = refuse.mapping_id, "WORLD refuses");
        let Ok([page]) = <[OwnedFd; 1]>::try_from(descriptors) else {
            around.violation("a worker without a volume gets only its page".into());
            return Turn::Ends;
        };
        (self.page, self.refuse, self.fails_io) = (Page::from_fd(page).ok(), Some(refuse), true);
        let ready = FromWorker::Ready(Box::new(self.describe()));
        if self.answer(&ready) { Turn::Moved } else { Turn::Ends }
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
            around.violation(
                "a start message has handover descriptors if and only if the worker is a successor"
                    .into(),
            );
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
    pub(super) fn open(&mut self, around: &mut Surroundings<'_>) -> bool {
        let opened = match self.quirks.open {
            Open::Fails(kind) => Err((kind, "the script has it fail".to_owned())),
            _ => around.open(self),
        };
        match opened {
            Ok(()) => {
                self.look(around);
                let ready = FromWorker::Ready(Box::new(self.describe()));
                self.answer(&ready)
            }
            Err((kind, message)) => {
                self.answer(&refusal(kind, message));
                false
            }
        }
    }

    fn execute(
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
                around.stopped_by_supervisor(self);
                if self.quirks.never_ends {
                    return Turn::Moved;
                }
                self.report(&FromWorker::Closed, &[]);
                return Turn::Ends;
            }
            ToWorker::Serve => {
                self.disconnecting = false;
                self.served = true;
                around.serves(self);
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
                    Ok(()) if self.check_pause(around) == Turn::Ends => return Turn::Ends,
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

    fn adopt(&mut self, socket: OwnedFd, message: Message) {
        let Message::Command(ToWorker::Adopt { version, mapping_id, .. }, _) = message else {
            return;
        };
        let right = version == PROTOCOL_VERSION && self.mapping_id() == Some(mapping_id.as_str());
        let before = self.channel.replace(socket);
        if !right {
            self.report(&refusal(ErrorKind::InvalidArgument, "another mapping's".into()), &[]);
            self.channel = before;
            return;
        }
        let page = self.page.as_ref().and_then(|page| page.file().ok());
        let page: Vec<OwnedFd> = page.into_iter().collect();
        self.report(&FromWorker::Ready(Box::new(self.describe())), &page);
        if self.fenced {
            self.report(&FromWorker::Fenced, &[]);
        }
        if self.reported_outage {
            self.report(&self.outage(), &[]);
        }
        if let Some(message) = self.snapshots.start_over() {
            self.report(&message, &[]);
        }
    }

    fn describe(&self) -> Ready {
        let start = self.start.as_ref();
        let features = Features {
            read_only: start.is_some_and(|start| start.read_only),
            flush: true,
            fua: true,
            multi_connection: true,
            keeps_acknowledged_writes: start.is_some_and(|start| start.uri.starts_with("file:")),
            ..Features::default()
        };
        Ready {
            version: PROTOCOL_VERSION,
            oldest: PROTOCOL_VERSION,
            build: String::new(),
            binary: self.binary.clone(),
            mapping_id: self.owner().unwrap_or_default().to_owned(),
            generation: start.map_or(0, |start| start.generation),
            pid: self.id.pid,
            identity: Some(volume_identity(self.number)),
            size: self.size.saturating_add_signed(self.quirks.size_lie),
            minimum_block: 512,
            preferred_block: 4096,
            transmission_flags: transmission_flags(features),
            outlives_worker: features.keeps_acknowledged_writes,
            connections: u32::try_from(self.connections.len()).unwrap_or(u32::MAX),
            opened: None,
        }
    }
}

/// Returns a descriptor that stands for an open volume.
fn open_volume() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("it is there").into()
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
