//! The simulated worker's part in a planned handover. It uses the real statistics page, which determines
//! the worker that reads the connections.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use cleat_backend::HandoverState;
use cleat_core::error::ErrorKind;
use cleat_sys::shared::SharedMemory;
use cleat_worker::protocol::FromWorker;

use crate::connections::Connection;
use crate::workers::{Turn, Worker, refusal};
use crate::world::Surroundings;

/// How long a worker with paused connections waits for a message, as the real worker does.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The progress of a handover to the worker of a generation.
#[derive(Debug)]
pub(crate) enum Pause {
    /// Waits until this time for the requests at the backend.
    Draining(u64, Instant),
    /// The offer is valid until this time.
    Offered(u64, Instant),
}

impl Pause {
    pub(crate) fn until(&self) -> Instant {
        match self {
            Self::Draining(_, until) | Self::Offered(_, until) => *until,
        }
    }
}

impl Worker {
    /// Whether the control thread waits until the connections are idle.
    pub(crate) fn is_draining(&self) -> bool {
        matches!(self.pause, Some(Pause::Draining(..)))
    }

    /// Begins to pause the connections. The answer is sent later.
    pub(crate) fn hand_over(
        &mut self,
        generation: u64,
        limit_ms: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), FromWorker> {
        let own = self.start.as_ref().map_or(0, |start| start.generation);
        if self.connections.is_empty() || generation <= own {
            return Err(refusal(ErrorKind::InvalidArgument, "nothing to hand over".into()));
        }
        if self.snapshots.is_wanted() {
            return Err(refusal(ErrorKind::Unavailable, "a snapshot is being made".into()));
        }
        let pid = self.id.pid;
        self.connections.iter_mut().for_each(|connection| connection.rest(around, pid));
        let until = around.now + Duration::from_millis(limit_ms.into());
        self.pause = Some(Pause::Draining(generation, until));
        Ok(())
    }

    /// Continues a handover that has begun.
    pub(crate) fn check_pause(&mut self, around: &mut Surroundings<'_>) -> Turn {
        match self.pause {
            None => Turn::Quiet,
            Some(Pause::Offered(_, until)) if until > around.now => Turn::Quiet,
            Some(Pause::Offered(..)) => self.end_pause(around),
            Some(Pause::Draining(generation, until)) => {
                self.come_to_rest(generation, until, around)
            }
        }
    }

    fn come_to_rest(
        &mut self,
        generation: u64,
        until: Instant,
        around: &mut Surroundings<'_>,
    ) -> Turn {
        let idle = self.connections.iter().all(Connection::is_idle);
        if !idle && until > around.now {
            return Turn::Quiet;
        }
        let late = || refusal(ErrorKind::TimedOut, "requests did not end in time".into());
        let over = || refusal(ErrorKind::Aborted, "a connection ended meanwhile".into());
        let offered: Option<Vec<_>> = match idle {
            true => self.connections.iter_mut().map(Connection::offered).collect(),
            false => None,
        };
        let alive = match (offered, &self.page) {
            (Some(offered), Some(page)) if !offered.is_empty() => {
                let (unread, descriptors) = pack(offered);
                page.offer_handover(generation);
                self.pause = Some(Pause::Offered(generation, around.now + PAUSE_TIMEOUT));
                let state = HandoverState::default();
                self.answer_with(&FromWorker::HandoverOffered { unread, state }, &descriptors)
            }
            _ => {
                self.continue_workers(around);
                self.answer(&if idle { over() } else { late() })
            }
        };
        if alive { Turn::Moved } else { Turn::Ends }
    }

    /// Serves again if no worker has taken the connections over; otherwise ends the worker.
    pub(crate) fn end_pause(&mut self, around: &mut Surroundings<'_>) -> Turn {
        let Some(Pause::Offered(generation, _)) = self.pause else { return Turn::Quiet };
        if self.page.as_ref().is_some_and(|page| page.withdraw_handover(generation)) {
            self.continue_workers(around);
            return Turn::Moved;
        }
        self.connections.iter_mut().for_each(Connection::leave);
        Turn::Ends
    }

    fn continue_workers(&mut self, around: &mut Surroundings<'_>) {
        self.pause = None;
        self.connections.iter_mut().for_each(Connection::continue_workers);
        self.serve(around, true);
    }

    /// Takes the connections over that the predecessor has offered.
    pub(crate) fn take_over(
        &mut self,
        unread: &[u32],
        descriptors: Vec<OwnedFd>,
        around: &mut Surroundings<'_>,
    ) -> FromWorker {
        let start = self.start.as_ref().filter(|start| start.successor && !self.served);
        let (Some(start), Some(page)) = (start, &self.page) else {
            return refusal(ErrorKind::InvalidArgument, "the worker is not a successor".into());
        };
        let Some(rests) = unpack(unread, descriptors) else {
            around.violation("a hand-over has lost something on its way".into());
            return refusal(ErrorKind::InvalidArgument, "something is missing".into());
        };
        if !page.accept_handover(start.generation) {
            return refusal(ErrorKind::Aborted, "the worker before went on by itself".into());
        }
        if self.quirks.declines {
            page.decline_handover(start.generation);
            return refusal(ErrorKind::Internal, "the script has it decline".into());
        }
        page.take_over();
        for (socket, unread) in rests {
            let recorder = self.recorder();
            self.connections.push(Connection::taken(socket, unread, recorder));
        }
        self.served = true;
        around.serves(self);
        self.serve(around, true);
        FromWorker::Serving
    }
}

fn pack(offered: Vec<(OwnedFd, Vec<u8>)>) -> (Vec<u32>, Vec<OwnedFd>) {
    let bytes: Vec<u8> = offered.iter().flat_map(|(_, unread)| unread.iter().copied()).collect();
    let lengths = offered.iter().map(|(_, unread)| u32::try_from(unread.len()).unwrap_or(0));
    let lengths = lengths.collect();
    let mut descriptors = Vec::new();
    if !bytes.is_empty() {
        let memory = SharedMemory::create("unread", bytes.len() as u64).expect("there is memory");
        memory.write_at(0, &bytes);
        descriptors.push(memory.file().try_clone_to_owned().expect("a descriptor is left"));
    }
    descriptors.extend(offered.into_iter().map(|(socket, _)| socket));
    (lengths, descriptors)
}

fn unpack(unread: &[u32], descriptors: Vec<OwnedFd>) -> Option<Vec<(OwnedFd, Vec<u8>)>> {
    let total: u64 = unread.iter().map(|length| u64::from(*length)).sum();
    let mut descriptors = descriptors.into_iter();
    let mut bytes = vec![0; usize::try_from(total).ok()?];
    if total > 0 {
        let memory = SharedMemory::from_fd(descriptors.next()?, total).ok()?;
        memory.read_at(0, &mut bytes);
    }
    let mut bytes = bytes.into_iter();
    let rests = unread
        .iter()
        .zip(descriptors.by_ref())
        .map(|(length, socket)| (socket, bytes.by_ref().take(*length as usize).collect()));
    let rests: Vec<_> = rests.collect();
    (rests.len() == unread.len() && descriptors.next().is_none()).then_some(rests)
}
