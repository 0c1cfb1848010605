//! The actions of a plan, one function each. Each is bounded in time, safe to repeat, and leaves
//! behind only what the next look at the world can see.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::executor::{Change, Executor, blocking};
use super::force::or_by_force;
use super::kernel_calls::COMMAND_LIMIT;
use super::mapping::{Action, Intent, READ_ONLY, Record, Volume, WorkerId};
use super::unlocking;
use super::volume::Guard;
use super::workers::{Worker, stop_process};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{ConnectSpec, DeviceIndex, Kernel};
use cleat_statistics::Page;
use cleat_worker::protocol::{OLDEST_PROTOCOL, PROTOCOL_VERSION, Ready, Start};
use cleat_worker::refuse::Refusing;

/// NBD_FLAG_CAN_MULTI_CONN (the protocol's transmission flags): the volume's contract holds across
/// connections.
const CAN_MULTI_CONN: u16 = 1 << 8;

/// Bounds on single steps, within that of the whole.
const START_LIMIT: Duration = Duration::from_secs(20);
/// For a worker that is being started to keep others from it: longer, and it is not the machine that
/// it waits for.
const TURN_LIMIT: Duration = Duration::from_secs(2);
const SERVE_LIMIT: Duration = Duration::from_secs(10);
const STOP_GRACE: Duration = Duration::from_secs(2);
pub(super) const FORCED_STOP_GRACE: Duration = Duration::from_millis(300);
const STOP_LIMIT: Duration = Duration::from_secs(7);
/// For the kernel to notice that the dead worker's sockets are closed.
const DEAD_LINK_LIMIT: Duration = Duration::from_secs(3);
/// For a worker's threads to show up in its counters.
const COUNTED_LIMIT: Duration = Duration::from_secs(1);

impl Executor {
    /// Does one thing.
    pub(super) async fn step(
        &self,
        guard: &mut Guard,
        action: Action,
        deadline: Instant,
    ) -> Result<()> {
        match action {
            Action::StartWorker => self.start_worker(guard, deadline).await,
            Action::Connect => self.connect(guard, deadline).await,
            Action::WaitReady => self.wait_ready(guard, deadline).await,
            Action::Establish => {
                guard.record.established = true;
                let stored = self.store(guard).await;
                guard.record.established = stored.is_ok();
                stored
            }
            Action::Reconnect { index, missing } => {
                self.reconnect(guard, index, missing, deadline).await
            }
            Action::Refuse { index, connections } => {
                self.refuse(guard, index, connections, deadline).await
            }
            Action::RememberFence => {
                guard.record.fenced = true;
                let stored = self.store(guard).await;
                guard.record.fenced = stored.is_ok();
                stored
            }
            Action::Grow { index, size } => self.grow(guard, index, size, deadline).await,
            Action::Quiesce { index, snapshot } => {
                self.quiesce(guard, index, snapshot, deadline).await
            }
            Action::Thaw => self.thaw(guard, deadline).await,
            Action::Renounce if matches!(guard.record.intent, Intent::Forced(_)) => {
                self.forced_step(guard, action, deadline).await
            }
            Action::Renounce => self.renounce(guard).await,
            Action::Flush(index) => {
                let flush = move |k: &dyn Kernel, until| k.flush(index, until);
                let flushed = self.kernel.wait("flush the device", deadline, None, flush).await;
                flushed.map_err(|error| or_by_force(error, &guard.record.name))
            }
            Action::Disconnect(index) => self.disconnect(guard, index, deadline).await,
            Action::StopWorker => self.stop_worker(guard, deadline).await,
            Action::EndPredecessor => self.end_predecessor(guard, deadline).await,
            Action::Reinstate => self.reinstate(guard).await,
            Action::AwaitConnect => guard.volume().await_connect(deadline).await,
            Action::WithdrawRecord => self.withdraw(guard).await,
            Action::FailIo
            | Action::TryThaw
            | Action::Detach(..)
            | Action::Sever(_)
            | Action::ProveSilence => self.forced_step(guard, action, deadline).await,
        }
    }

    /// The right to start a worker. A few have it at a time, so that each has the machine while its own
    /// bound runs.
    pub(super) async fn turn_to_start(&self, deadline: Instant) -> Result<SemaphorePermit<'_>> {
        let turn = timeout_at(deadline, self.starts.acquire()).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, "other workers were being started until the deadline")
        })?;
        turn.map_err(|_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down"))
    }

    async fn start_worker(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let _unlocking = self.turn_to_unlock(guard, deadline).await?;
        let turn = self.turn_to_start(deadline).await?;
        let deadline = within(deadline, START_LIMIT + unlocking::patience(&guard.record.uri));
        // The process waits; only when it can be found again after a crash is it told anything.
        let launched = self.workers.launch().await?;
        self.point("worker launched").await;
        guard.record.generation += 1;
        guard.record.worker = Some(launched.id());
        self.store(guard).await?;
        self.point("worker recorded").await;
        let start =
            Start { take_over: guard.take_over, ..self.start_message(&guard.record, false) };
        let page = guard.statistics.clone();
        // Of a worker whose end is proved: what it was serving, it serves no more.
        page.iter().for_each(Page::take_over);
        let mut starting = pin!(self.workers.start(launched, start, page, Vec::new(), deadline));
        let started = match timeout(TURN_LIMIT, &mut starting).await {
            Ok(started) => started,
            Err(_) => {
                // It waits for its backend, which takes nothing from others.
                drop(turn);
                starting.await
            }
        };
        let worker = started.map_err(|failed| guard.setbacks.not_started(failed))?;
        guard.setbacks.started();
        self.point("worker started").await;
        let volume = match volume_of(&guard.record, &worker.ready) {
            Ok(volume) => volume,
            Err(error) => {
                worker.stop(STOP_GRACE, deadline).await?;
                return Err(error);
            }
        };
        guard.statistics = Some(worker.statistics.clone());
        guard.volume().show_statistics(Some(worker.statistics.clone()));
        guard.worker = Some(worker);
        if guard.record.volume != Some(volume) {
            guard.record.volume = Some(volume);
            self.store(guard).await?;
        }
        Ok(())
    }

    /// What a worker is told first; who speaks and where logs go is filled in by `workers`.
    pub(super) fn start_message(&self, record: &Record, successor: bool) -> Start {
        Start {
            version: PROTOCOL_VERSION,
            oldest: OLDEST_PROTOCOL,
            build: String::new(),
            mapping_id: record.mapping_id.clone(),
            name: record.name.clone(),
            generation: record.generation,
            uri: record.uri.clone(),
            read_only: record.options.read_only,
            log: String::new(),
            policy: record.options.policy,
            successor,
            node: self.settings.node.clone(),
            machine: self.settings.machine.clone(),
            boot_id: self.settings.boot_id.clone(),
            take_over: false,
            // A worker has had it, and perhaps a device was made.
            resumes: record.volume.is_some(),
            quiesce: record.options.quiesce,
        }
    }

    async fn connect(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let Some(turn) = guard.volume().turn_to_connect() else {
            // Its device may have come since the look that led here.
            guard.volume().await_connect(deadline).await?;
            let message = "an earlier attempt to connect the device has only now ended";
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let record = &guard.record;
        let volume = record.volume.ok_or_else(|| no_worker(record))?;
        let options = &record.options;
        let (kernel_ends, ends) = socket_pairs(options.connections)?;
        // Served before it exists, so that the device answers from its first moment.
        self.serve(guard, ends, within(deadline, SERVE_LIMIT)).await?;
        self.point("serving, not connected").await;
        let delay = Duration::from_millis(u64::from(options.replay_delay_ms));
        let spec = ConnectSpec {
            sockets: kernel_ends,
            size: volume.size,
            block_size: volume.block_size,
            transmission_flags: volume.transmission_flags,
            identity: record.identity(),
            dead_connection_timeout: Duration::from_secs(u64::from(
                options.dead_connection_timeout_s,
            )),
            request_timeout: Duration::ZERO,
            replay_delay: (!delay.is_zero()).then_some(delay),
        };
        let index = self.kernel.connect(spec, turn, deadline).await?;
        tracing::info!(mapping = record.name, device = index, "connected");
        self.counted(guard).await;
        Ok(())
    }

    async fn wait_ready(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let (identity, name) = (guard.record.identity(), guard.record.name.clone());
        let devices = self.devices(deadline).await?;
        let device = devices
            .iter()
            .find(|device| device.connected && device.identity().as_ref() == Some(&identity))
            .ok_or_else(|| {
                let message = format!("the device of {name} vanished while it was set up");
                Error::new(ErrorKind::Unavailable, message)
            })?;
        let (index, size) = (device.index, guard.record.volume.map_or(device.size, |v| v.size));
        // After a resize the device is larger than the record: the device is what counts.
        let size = if guard.record.established { device.size } else { size };
        let paths = self
            .kernel
            .wait("wait for udev", deadline, None, move |kernel, until| {
                kernel.wait_ready(index, &identity, size, until)
            })
            .await?;
        guard.paths = Some(paths);
        Ok(())
    }

    /// RECONFIGURE replaces dead connections only and drops other sockets without a word
    /// (nbd_genl_reconfigure): a dropped one shows as a hang-up on our end. Only sockets that were
    /// taken go to the worker.
    async fn reconnect(
        &self,
        guard: &mut Guard,
        index: DeviceIndex,
        missing: u32,
        deadline: Instant,
    ) -> Result<()> {
        self.end_refusal(guard).await?;
        let until = within(deadline, DEAD_LINK_LIMIT);
        let mut missing = missing;
        loop {
            let taken = self.reconfigure(guard, index, missing, deadline).await?;
            missing -= u32::try_from(taken.len()).unwrap_or(missing).min(missing);
            if !taken.is_empty() {
                self.serve(guard, taken, within(deadline, SERVE_LIMIT)).await?;
            }
            if missing == 0 {
                self.counted(guard).await;
                guard.statistics.iter().for_each(Page::count_reconnect);
                tracing::info!(mapping = guard.record.name, device = index, "reconnected");
                return Ok(());
            }
            if Instant::now() >= until {
                let message = format!(
                    "/dev/nbd{index} does not take new connections: {missing} of its old ones \
                     still count as alive"
                );
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Gives the device new sockets; the other ends of those that it took.
    async fn reconfigure(
        &self,
        guard: &Guard,
        index: DeviceIndex,
        count: u32,
        deadline: Instant,
    ) -> Result<Vec<OwnedFd>> {
        let (kernel_ends, ends) = socket_pairs(count)?;
        let identity = guard.record.identity();
        self.kernel
            .command("give the device new connections", deadline, move |kernel| {
                kernel.reconfigure(index, &identity, kernel_ends)
            })
            .await?;
        self.point("reconfigured, not served").await;
        Ok(ends.into_iter().filter(|end| !hung_up(end)).collect())
    }

    async fn refuse(
        &self,
        guard: &mut Guard,
        index: DeviceIndex,
        connections: u32,
        deadline: Instant,
    ) -> Result<()> {
        let taken = self.reconfigure(guard, index, connections, deadline).await?;
        guard.refusing = Some(blocking(move || Refusing::start(taken)).await?);
        let name = &guard.record.name;
        tracing::warn!(
            mapping = name,
            device = index,
            "nobody serves it: its I/O fails from now on"
        );
        Ok(())
    }

    /// Before a worker takes the refusal's place: the kernel takes new sockets for closed ones only.
    async fn end_refusal(&self, guard: &mut Guard) -> Result<()> {
        let Some(refusing) = guard.refusing.take() else { return Ok(()) };
        blocking(move || {
            drop(refusing);
            Ok(())
        })
        .await
    }

    async fn serve(&self, guard: &Guard, ends: Vec<OwnedFd>, deadline: Instant) -> Result<()> {
        let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
        worker.serve(ends, deadline).await
    }

    /// Waits until the worker's counters show its connections, so that the next look does not take
    /// them for missing. When they never do, the next look decides.
    pub(super) async fn counted(&self, guard: &Guard) {
        let Some(worker) = &guard.worker else { return };
        let wanted = u64::from(guard.record.options.connections);
        let until = Instant::now() + COUNTED_LIMIT;
        while worker.statistics.snapshot().connections < wanted
            && Instant::now() < until
            && !worker.has_ended()
        {
            sleep(Duration::from_millis(1)).await;
        }
    }

    pub(super) async fn renounce(&self, guard: &mut Guard) -> Result<()> {
        if guard.renounced {
            return Ok(());
        }
        // Nothing was ever recorded of a map that failed early.
        if guard.record.worker.is_some() {
            self.store(guard).await?;
        }
        guard.renounced = true;
        Ok(())
    }

    async fn disconnect(&self, guard: &Guard, index: DeviceIndex, deadline: Instant) -> Result<()> {
        // The flush took time; somebody may have opened the device meanwhile.
        self.check_unheld(guard, index, deadline).await?;
        let identity = guard.record.identity();
        self.kernel
            .wait("disconnect the device", deadline, Some(COMMAND_LIMIT), move |kernel, until| {
                kernel.disconnect(index, &identity, until)
            })
            .await
    }

    async fn stop_worker(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        self.end_worker(guard, guard.worker.as_ref(), guard.record.worker, deadline).await?;
        guard.worker = None;
        Ok(())
    }

    /// Ends a worker that nothing is asked of any more, whether it speaks to us or not.
    pub(super) async fn end_worker(
        &self,
        guard: &Guard,
        worker: Option<&Worker>,
        id: Option<WorkerId>,
        deadline: Instant,
    ) -> Result<()> {
        // By force, all the time that is left may go into this.
        let (grace, deadline) = match guard.record.intent {
            Intent::Forced(_) => (FORCED_STOP_GRACE, deadline),
            Intent::Mapped | Intent::Unmapped => (STOP_GRACE, within(deadline, STOP_LIMIT)),
        };
        if let Some(worker) = worker {
            return worker.stop(grace, deadline).await;
        }
        let Some(id) = id else { return Ok(()) };
        let socket = || self.workers.probe_worker(&guard.record.mapping_id, id.pid);
        match self.workers.find(id)? {
            Some(process) => stop_process(&process, deadline).await,
            None if self.falls_silent(socket).await => Ok(()),
            None => Err(unseen(id.pid)),
        }
    }

    async fn withdraw(&self, guard: &mut Guard) -> Result<()> {
        self.end_refusal(guard).await?;
        let id = guard.record.mapping_id.clone();
        // The record goes last: without it nobody would look for the socket.
        self.workers.forget(&id);
        self.write_journal(guard, move |journal, _| journal.withdraw(&id)).await?;
        guard.withdrawn = true;
        let volume = Arc::clone(guard.volume());
        self.register.remove(&volume);
        let _ = self.changes.send(Change { view: volume.view(), removed: true });
        Ok(())
    }
}

/// What the device is made from. A worker that replaces another must offer no less.
pub(super) fn volume_of(record: &Record, ready: &Ready) -> Result<Volume> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    let asked = record.options.block_size;
    let before = record.volume.map(|volume| volume.block_size);
    let least = ready.minimum_block.max(512);
    let block_size = before.unwrap_or(if asked == 0 { least } else { asked });
    if block_size < least || !block_size.is_multiple_of(least) || block_size > 4096 {
        return Err(invalid(format!("{} needs blocks of {least} bytes", record.uri))
            .with_repair(format!("map it with a block size that is a multiple of {least}")));
    }
    // A volume that grew by less than a block under its device is no reason to leave that without a
    // worker: the end is out of its reach.
    let rest = if record.volume.is_some() { ready.size % u64::from(block_size) } else { 0 };
    let size = ready.size - rest;
    if size == 0 || !size.is_multiple_of(u64::from(block_size)) {
        let message = format!(
            "the size of {}, {} bytes, is not a positive multiple of {block_size}",
            record.uri, ready.size
        );
        return Err(invalid(message).with_repair("use a smaller block size, or grow the volume"));
    }
    if record.options.connections > 1 && ready.transmission_flags & CAN_MULTI_CONN == 0 {
        let message = format!("{} cannot be used over several connections", record.uri);
        return Err(invalid(message).with_repair("map it with connections=1"));
    }
    if let Some(before) = record.volume {
        let (had, has) = (before.transmission_flags, ready.transmission_flags);
        // Among what it must not lose is the right to write, which has a flag for its absence.
        if had & !has != 0 || has & !had & READ_ONLY != 0 {
            let message = format!("{} can do less than when its device was made", record.uri);
            return Err(Error::new(ErrorKind::Internal, message));
        }
    }
    Ok(Volume {
        size,
        block_size,
        transmission_flags: record
            .volume
            .map_or(ready.transmission_flags, |v| v.transmission_flags),
        outlives_worker: ready.outlives_worker,
    })
}

pub(super) fn no_worker(record: &Record) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the worker of {} has gone", record.name))
}

/// Somebody listens for a worker whose process cannot be seen.
fn unseen(pid: u32) -> Error {
    let message = format!("worker {pid} lives on where it cannot be seen from here");
    Error::new(ErrorKind::Unavailable, message)
        .with_repair("end it in the pid namespace that it was started in")
}

/// Connected pairs: the kernel's ends, and the worker's.
fn socket_pairs(count: u32) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    (0..count)
        .map(|_| UnixStream::pair().map(|(kernel, worker)| (kernel.into(), worker.into())))
        .collect::<std::io::Result<_>>()
        .map_err(|error| {
            Error::from_io("cannot make sockets for the kernel", error)
                .with_repair("raise the daemon's limit of open files (LimitNOFILE=)")
        })
}

/// Whether nobody has the other end.
fn hung_up(socket: &OwnedFd) -> bool {
    let mut set = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let polled = poll(&mut set, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    polled && set[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

pub(super) fn within(deadline: Instant, limit: Duration) -> Instant {
    deadline.min(Instant::now() + limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping;

    fn record(connections: u32, block_size: u32) -> Record {
        let mut record = mapping::tests::record(connections, true);
        record.options.block_size = block_size;
        record.volume = None;
        record
    }

    fn ready(size: u64, minimum_block: u32, transmission_flags: u16) -> Ready {
        Ready {
            version: PROTOCOL_VERSION,
            oldest: 0,
            build: String::new(),
            binary: String::new(),
            mapping_id: "00000000000000aa".into(),
            generation: 1,
            pid: 1,
            size,
            minimum_block,
            preferred_block: 4096,
            transmission_flags,
            outlives_worker: true,
            connections: 0,
        }
    }

    #[test]
    fn a_device_fits_its_volume() {
        let volume = volume_of(&record(1, 0), &ready(8192, 1, 1)).unwrap();
        assert_eq!((volume.size, volume.block_size), (8192, 512));
        assert_eq!(volume_of(&record(1, 0), &ready(8192, 4096, 1)).unwrap().block_size, 4096);
        assert_eq!(volume_of(&record(1, 4096), &ready(8192, 512, 1)).unwrap().block_size, 4096);
        for (record, ready) in [
            (record(1, 512), ready(8192, 4096, 1)),
            (record(1, 0), ready(0, 1, 1)),
            (record(1, 0), ready(1000, 1, 1)),
            (record(1, 0), ready(65536, 8192, 1)),
            (record(2, 0), ready(8192, 1, 1)),
        ] {
            let error = volume_of(&record, &ready).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
        }
        volume_of(&record(2, 0), &ready(8192, 1, 1 | CAN_MULTI_CONN)).unwrap();
    }

    #[test]
    fn a_later_worker_offers_no_less() {
        let mut record = record(1, 0);
        record.volume = Some(volume_of(&record, &ready(8192, 1, 5)).unwrap());
        assert!(volume_of(&record, &ready(8192, 1, 1)).is_err());
        assert!(volume_of(&record, &ready(8192, 1, 5 | READ_ONLY)).is_err());
        let volume = volume_of(&record, &ready(8192, 1, 5 | 1 << 3)).unwrap();
        assert_eq!(volume.transmission_flags, 5);
        // It may have grown by less than a block meanwhile.
        let volume = volume_of(&record, &ready(8192 + 700, 1, 5)).unwrap();
        assert_eq!(volume.size, 8192 + 512);
    }

    #[test]
    fn a_dropped_socket_shows() {
        let (kernel, ours) = socket_pairs(1).unwrap();
        assert!(!hung_up(&ours[0]));
        drop(kernel);
        assert!(hung_up(&ours[0]));
    }
}
