//! Starts, finds, kills and reaps simulated workers for the supervisor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::planner::WorkerId;
use cleat_node::workers::{Handle, Launcher, Process};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::World;
use crate::workers::Worker;

/// Starts simulated workers.
pub(crate) struct SimLauncher(pub(crate) World);

impl Launcher for SimLauncher {
    fn launch(&self, channel: OwnedFd) -> Result<Process> {
        let mut state = self.0.state();
        let quirks = state.quirks.pop_front().unwrap_or_default();
        if quirks.not_launched {
            return Err(Error::new(ErrorKind::NoSpace, "no process can be started"));
        }
        state.launches += 1;
        // Pids are reused soon, as on a busy node.
        let mut numbers = (0..8).map(|n| 100 + (n + state.launches * 3) % 8);
        let free = numbers.find(|pid| !state.has_process(*pid)).unwrap_or(200 + state.launches);
        let pid = u32::try_from(free).unwrap_or(0);
        let id = WorkerId { pid, started_ticks: state.launches };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let exit = EventFd::from_flags(flags).expect("a descriptor is left");
        let process = self.process(id, exit.as_fd());
        tracing::debug!(pid, ticks = id.started_ticks, ?quirks, "WORLD launched");
        let mut worker = Worker::new(id, exit, channel, quirks);
        worker.binary = format!("build {}", state.build);
        state.workers.insert(pid, worker);
        Ok(process)
    }

    fn binary(&self) -> String {
        format!("build {}", self.0.state().build)
    }

    fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        let state = self.0.state();
        if state.blind {
            return Ok(None);
        }
        let alive = state.workers.get(&id.pid).filter(|worker| worker.id == id);
        let exit = alive.map(|worker| worker.exit.as_fd());
        let zombie = || state.zombies.iter().find(|(dead, _)| *dead == id).map(|z| z.1.as_fd());
        Ok(exit.or_else(zombie).map(|exit| self.process(id, exit)))
    }
}

impl SimLauncher {
    fn process(&self, id: WorkerId, exit: BorrowedFd<'_>) -> Process {
        let exit = exit.try_clone_to_owned().expect("a descriptor is left");
        Process { id, exit, handle: Box::new(SimHandle(self.0.clone(), id)) }
    }
}

struct SimHandle(World, WorkerId);

impl Handle for SimHandle {
    fn kill(&self) -> std::io::Result<()> {
        if self.0.has_crashed() {
            // The supervisor is dead: its handles are dropped, but it sends no signal.
            return Ok(());
        }
        let (pid, records) = (self.1.pid, self.0.records());
        let mut state = self.0.state();
        if state.workers.get(&pid).is_some_and(|worker| worker.id == self.1) {
            state.with(pid, records, |worker, around| around.stopped_by_supervisor(worker));
            drop(state);
            self.0.kill(pid);
        }
        Ok(())
    }

    fn reap(&self) -> Option<String> {
        self.0.state().zombies.retain(|(id, _)| *id != self.1);
        None
    }
}
