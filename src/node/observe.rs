//! Looks at the world for the planner: the kernel's devices, the worker, the holders. And finds what
//! a user means by a name, a URI or a path.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::executor::{Executor, Target, held};
use super::force::or_by_force;
use super::kernel_calls::COMMAND_LIMIT;
use super::mapping::{Intent, Observed, SeenDevice, SeenWorker};
use super::process::Process;
use super::volume::{Guard, Volume};
use super::workers::{Probe, Worker, has_ended};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Holder, Identity};
use cleat_worker::protocol::ToWorker;

/// For a worker to answer on its control socket.
const ADOPT_LIMIT: Duration = Duration::from_secs(5);

/// As above, when it is killed if it does not.
const FORCED_ADOPT_LIMIT: Duration = Duration::from_millis(500);

/// For a worker's control thread to give a sign of life.
const LIFE_LIMIT: Duration = Duration::from_secs(5);

/// For a process that does not listen to have ended: it was perhaps on its way out.
const ENDING_LIMIT: Duration = Duration::from_secs(1);

impl Executor {
    /// What is, as far as a mapping is concerned.
    pub(super) async fn observe(&self, guard: &mut Guard, deadline: Instant) -> Result<Observed> {
        let identity = guard.record.identity();
        let ours =
            |device: &Device| device.connected && device.identity() == Some(identity.clone());
        let devices: Vec<SeenDevice> = self
            .devices(deadline)
            .await?
            .iter()
            .filter(|device| ours(device))
            .map(|device| SeenDevice { index: device.index, size: device.size })
            .collect();
        let mut holders = Vec::new();
        if guard.record.intent == Intent::Unmapped {
            for device in &devices {
                holders.extend(self.holders(device.index, deadline).await?);
            }
        }
        let worker = self.observe_worker(guard, Seat::Worker, deadline).await?;
        let predecessor = self.observe_worker(guard, Seat::Predecessor, deadline).await?;
        let page = guard.statistics.as_ref().filter(|_| guard.record.predecessor.is_some());
        let taken = page.map(|page| page.is_handed_over_to(guard.record.generation));
        let announced = guard.paths.is_some();
        let growth_waits = guard.growth.as_ref().is_some_and(|(until, _)| *until > Instant::now());
        let (failures, history) = (guard.failures, guard.setbacks.history());
        if worker == SeenWorker::Gone && !devices.is_empty() {
            guard.dead_since.get_or_insert_with(Instant::now);
        }
        let limit_s = guard.record.options.dead_connection_timeout_s;
        let limit = Duration::from_secs(u64::from(limit_s));
        let overdue = guard.dead_since.is_some_and(|since| since.elapsed() >= limit);
        Ok(Observed {
            devices,
            worker,
            predecessor,
            taken,
            holders,
            announced,
            failures,
            history,
            overdue,
            refusing: guard.refusing.is_some(),
            growth_waits,
            quiet: super::quiesce::observe(guard),
            connecting: guard.volume().is_connecting(),
        })
    }

    /// Every nbd device.
    pub(super) async fn devices(&self, deadline: Instant) -> Result<Vec<Device>> {
        self.urgent.command("list nbd devices", deadline, |kernel| kernel.devices()).await
    }

    /// Who holds a device.
    pub async fn holders(&self, index: DeviceIndex, deadline: Instant) -> Result<Vec<Holder>> {
        self.kernel.wait("look for holders", deadline, None, move |k, _| k.holders(index)).await
    }

    async fn observe_worker(
        &self,
        guard: &mut Guard,
        seat: Seat,
        deadline: Instant,
    ) -> Result<SeenWorker> {
        let (worker, id) = match seat {
            Seat::Worker => (&guard.worker, guard.record.worker),
            Seat::Predecessor => (&guard.predecessor, guard.record.predecessor),
        };
        let process = match worker {
            Some(worker) if worker.has_ended() => return Ok(self.bury(guard, seat)),
            Some(worker) if worker.is_fenced() => return Ok(SeenWorker::Fenced),
            Some(worker) if !worker.is_broken() => return Ok(alive(worker)),
            Some(worker) => worker.process(),
            None => {
                let Some(id) = id else { return Ok(SeenWorker::Gone) };
                match self.workers.find(id)? {
                    None => return Ok(self.unseen(guard, id.pid).await),
                    Some(process) => Arc::new(process),
                }
            }
        };
        self.adopt(guard, seat, process, deadline).await
    }

    /// Asks a mapping's worker for a sign of life. When none comes, the mapping is looked at.
    pub async fn ask_for_life(&self, volume: &Arc<Volume>) {
        let Some(guard) = volume.enter_keeper() else { return };
        let Some(worker) = guard.worker.as_ref() else { return };
        let limit = Instant::now() + LIFE_LIMIT;
        let asked = volume.giving_way(worker.call(ToWorker::Ping, Vec::new(), limit)).await;
        if let Err(error) = asked
            && error.kind() != ErrorKind::Aborted
        {
            let pid = worker.id().pid;
            tracing::warn!(mapping = volume.name, pid, "gives no sign of life: {}", error.report());
            drop(guard);
            let _ = self.attention.send(volume.name.clone()).await;
        }
    }

    /// No process has the worker's number. In a pid namespace other than that of the supervisor
    /// before, this would prove nothing; that nobody listens on its control socket does.
    async fn unseen(&self, guard: &Guard, pid: u32) -> SeenWorker {
        let mapping_id = &guard.record.mapping_id;
        if self.falls_silent(|| self.workers.probe_worker(mapping_id, pid)).await {
            return SeenWorker::Gone;
        }
        let reason = "cannot be seen from here: is this another pid namespace?".to_owned();
        SeenWorker::Unreachable { pid, reason }
    }

    /// Whether nobody listens on a control socket, now or after a moment.
    pub(super) async fn falls_silent(&self, probe: impl Fn() -> Probe) -> bool {
        let until = Instant::now() + ENDING_LIMIT;
        while probe() == Probe::Answers {
            if Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        true
    }

    async fn adopt(
        &self,
        guard: &mut Guard,
        seat: Seat,
        process: Arc<Process>,
        deadline: Instant,
    ) -> Result<SeenWorker> {
        let forced = matches!(guard.record.intent, Intent::Forced(_));
        let (adopting, ending) = match forced {
            true => (FORCED_ADOPT_LIMIT, Duration::ZERO),
            false => (ADOPT_LIMIT, ENDING_LIMIT),
        };
        let limit = deadline.min(Instant::now() + adopting);
        let mapping_id = guard.record.mapping_id.clone();
        match self.workers.adopt(&mapping_id, Arc::clone(&process), limit).await {
            Ok(worker) => {
                tracing::info!(mapping = guard.volume().name, pid = process.id.pid, "adopted");
                // Who changed its policy last may have died before it was told; and who unmapped it by
                // force, where that could not be recorded.
                let mut orders = vec![ToWorker::SetPolicy(guard.record.options.policy)];
                if guard.record.intent == Intent::Mapped {
                    orders.push(ToWorker::FailIo { fail: false });
                }
                for order in orders {
                    if let Err(error) = worker.call(order, Vec::new(), limit).await {
                        tracing::warn!(
                            mapping = guard.volume().name,
                            "adopted: {}",
                            error.report()
                        );
                    }
                }
                guard.volume().show_statistics(Some(worker.statistics.clone()));
                guard.statistics = Some(worker.statistics.clone());
                let seen = alive(&worker);
                *seat.of(guard) = Some(worker);
                Ok(seen)
            }
            Err(error) => {
                let until = Instant::now() + ending;
                while !has_ended(&process) && Instant::now() < until {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                if has_ended(&process) {
                    process.handle.reap();
                    return Ok(self.bury(guard, seat));
                }
                Ok(SeenWorker::Unreachable { pid: process.id.pid, reason: error.report() })
            }
        }
    }

    /// The worker's end is proved.
    fn bury(&self, guard: &mut Guard, seat: Seat) -> SeenWorker {
        let worker = seat.of(guard).take();
        // One of two may end: that is what a hand-over comes to, either way.
        if guard.record.predecessor.is_some() {
            return SeenWorker::Gone;
        }
        if let Some(worker) = &worker {
            let (pid, how) = (worker.id().pid, worker.how_it_ended());
            guard.setbacks.ended(pid, how);
        }
        if worker.is_some() && guard.record.established && guard.record.intent == Intent::Mapped {
            let how = guard.setbacks.last_end().unwrap_or_default();
            tracing::warn!(mapping = guard.volume().name, "its worker has died: {how}");
            self.count_failure(guard);
        }
        SeenWorker::Gone
    }

    /// What a user means.
    ///
    /// # Errors
    /// `InvalidArgument` when several mappings are meant.
    pub async fn find(&self, target: &str, deadline: Instant) -> Result<Target> {
        if let Some(volume) = self.register.get(target) {
            return Ok(Target::Volume(volume));
        }
        if target.starts_with('/') {
            return self.find_device(Path::new(target), deadline).await;
        }
        let mut named = self.mapped_as(target).into_iter();
        match (named.next(), named.next()) {
            (None, _) => self.find_orphan(target, deadline).await,
            (Some(volume), None) => Ok(Target::Volume(volume)),
            (Some(one), Some(other)) => {
                let message = format!("{target} is mapped as {} and as {}", one.name, other.name);
                Err(Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("say which by its name"))
            }
        }
    }

    /// A device without a record, by the name that its identity gives it and that lists show.
    async fn find_orphan(&self, name: &str, deadline: Instant) -> Result<Target> {
        let mut named =
            self.orphans(deadline).await?.into_iter().filter(|(_, id)| id.name() == name);
        match (named.next(), named.next()) {
            (None, _) => Ok(Target::Nothing),
            (Some((device, identity)), None) => Ok(Target::Orphan(device.index, identity)),
            (Some((one, _)), Some((other, _))) => {
                let (one, other) = (one.index, other.index);
                let message =
                    format!("{name} is /dev/nbd{one} and /dev/nbd{other}, without a record");
                Err(Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("say which by its device"))
            }
        }
    }

    /// What is behind a device node or a symlink to one.
    async fn find_device(&self, path: &Path, deadline: Instant) -> Result<Target> {
        // Only what lies under /dev is looked at: elsewhere a file server that hangs could keep this
        // thread. A path that does not exist may still be the name of a device whose node is gone.
        let plain = path.components().all(|part| part != std::path::Component::ParentDir);
        let real = match path.starts_with("/dev") && plain {
            true => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
            false => return Ok(Target::Nothing),
        };
        let index = real
            .strip_prefix("/dev")
            .ok()
            .and_then(|name| name.to_str()?.strip_prefix("nbd")?.parse::<DeviceIndex>().ok());
        let Some(index) = index else {
            let name = path.to_str().and_then(|p| p.strip_prefix("/dev/disk/by-id/cleat-"));
            let volume = name.and_then(|name| self.register.get(name));
            return Ok(volume.map_or(Target::Nothing, Target::Volume));
        };
        let devices = self.devices(deadline).await?;
        let device = devices.iter().find(|device| device.index == index && device.connected);
        let Some(identity) = device.and_then(Device::identity) else { return Ok(Target::Nothing) };
        let volume = self.register.get(identity.name());
        match volume.filter(|volume| volume.mapping_id == identity.mapping_id()) {
            Some(volume) => Ok(Target::Volume(volume)),
            None => Ok(Target::Orphan(index, identity)),
        }
    }

    /// Devices that carry an identity of ours and have no record.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub async fn orphans(&self, deadline: Instant) -> Result<Vec<(Device, Identity)>> {
        // Before and after the look: a mapping that comes or goes meanwhile is no orphan.
        let mut known = self.register.ids();
        let devices = self.devices(deadline).await?;
        known.extend(self.register.ids());
        let orphans = devices.into_iter().filter(|device| device.connected).filter_map(|device| {
            let identity = device.identity()?;
            (!known.contains(identity.mapping_id())).then_some((device, identity))
        });
        Ok(orphans.collect())
    }

    /// Disconnects an orphan that nobody holds, as a user asked.
    pub(super) async fn drop_orphan(
        &self,
        index: DeviceIndex,
        identity: Identity,
        deadline: Instant,
    ) -> Result<()> {
        let holders = self.holders(index, deadline).await?;
        if !holders.is_empty() {
            let name = format!("/dev/nbd{index}");
            return Err(or_by_force(held(&name, &holders), &name));
        }
        let mapping_id = identity.mapping_id().to_owned();
        if self.workers.probe(&mapping_id) == Probe::Answers {
            // Its page cache is written back through the worker, which ends by the disconnect.
            self.kernel
                .wait("flush an orphan", deadline, None, move |k, until| k.flush(index, until))
                .await?;
        }
        self.kernel
            .wait("disconnect an orphan", deadline, Some(COMMAND_LIMIT), move |kernel, until| {
                kernel.disconnect(index, &identity, until)
            })
            .await?;
        tracing::warn!(device = index, mapping_id, "disconnected an orphan");
        if self.falls_silent(|| self.workers.probe(&mapping_id)).await {
            self.workers.forget(&mapping_id);
        }
        Ok(())
    }
}

/// Which of a mapping's workers, of which there are two during a hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seat {
    Worker,
    Predecessor,
}

impl Seat {
    fn of(self, guard: &mut Guard) -> &mut Option<Worker> {
        match self {
            Self::Worker => &mut guard.worker,
            Self::Predecessor => &mut guard.predecessor,
        }
    }
}

fn alive(worker: &Worker) -> SeenWorker {
    SeenWorker::Alive {
        connections: u32::try_from(worker.statistics.snapshot().connections).unwrap_or(u32::MAX),
        size: worker.size(),
    }
}
