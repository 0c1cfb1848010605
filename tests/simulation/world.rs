//! The environment of supervisors, which outlives them: the kernel, worker processes, volumes, and the
//! knowledge of their users. It has no threads; [`World::turn`] advances it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_kernel::sim::{Io, Script, SimKernel};
use cleat_kernel::{Device, Identity};
use cleat_node::config::Config;
use cleat_node::planner::WorkerId;
use cleat_worker::protocol::Start;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::Notify;

mod launcher;
mod records;
mod surroundings;

pub(crate) use launcher::SimLauncher;
pub(crate) use records::{SimDisk, StateDisk};
pub(crate) use surroundings::{Claim, Surroundings, volume_identity};

use crate::clock;
use crate::disks::{self, Disk, Model, SECTOR};
use crate::quirks::Quirks;
use crate::scenario::HandoverFault;
use crate::workers::{Turn, Worker};

/// A handle on a world.
#[derive(Clone)]
pub(crate) struct World(Arc<Shared>);

struct Shared {
    kernel: SimKernel,
    directory: tempfile::TempDir,
    state: Mutex<State>,
    /// Whether something may have changed since the last turn.
    touched: AtomicBool,
    crash: Notify,
    crashed: AtomicBool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) workers: BTreeMap<u32, Worker>,
    pub(crate) disks: BTreeMap<String, Disk>,
    /// Volumes that another one has replaced, with their former names.
    pub(crate) replaced_disks: Vec<(String, Disk)>,
    /// The number of the volume that each mapping's workers have served.
    pub(crate) served: BTreeMap<String, u64>,
    pub(crate) model: Model,
    /// The quirks of the next workers.
    pub(crate) quirks: VecDeque<Quirks>,
    /// Whether the supervisor is in another pid namespace than its workers.
    pub(crate) blind: bool,
    /// Mappings with a forced unmap. One that was interrupted before it was recorded leaves no device.
    pub(crate) forced: BTreeSet<String>,
    /// Mappings that a supervisor has reported as unmapped.
    pub(crate) gone: BTreeSet<String>,
    /// Children of the current supervisor that have ended and are not reaped.
    zombies: Vec<(WorkerId, OwnedFd)>,
    /// Dead workers. Their counts remain in the statistics page.
    ended_workers: Vec<Worker>,
    violations: Vec<String>,
    generations: BTreeMap<String, u64>,
    /// The process that reads each socket, by the socket's inode.
    readers: BTreeMap<u64, u32>,
    /// The build of workers that are launched from now on.
    pub(crate) build: u32,
    /// The mapping whose worker is being upgraded.
    pub(crate) upgrading: Option<&'static str>,
    epochs: u64,
    launches: u64,
    lives: u64,
    /// Mappings whose records a script has damaged.
    pub(crate) touched: BTreeSet<String>,
    /// The state of the disk with the state directory.
    pub(crate) state_disk: StateDisk,
    /// Whether the runtime directory takes no copies of records.
    pub(crate) runtime_full: bool,
    /// Whether both of them have failed or were slow at the same time, so that a supervisor may have lost changes in a crash.
    pub(crate) was_unrecordable: bool,
}

impl World {
    /// Makes a world for one seed.
    pub(crate) fn new(seed: u64, faults_per_mille: u32) -> Self {
        clock::reset();
        // In memory if possible, because the journal syncs often.
        let memory = std::path::Path::new("/dev/shm");
        let directory = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        let script = Script { now: clock::now, ..Script::seeded(seed, faults_per_mille) };
        let world = Self(Arc::new(Shared {
            kernel: SimKernel::new(script),
            directory: directory.expect("a directory can be made"),
            state: Mutex::default(),
            touched: AtomicBool::new(true),
            crash: Notify::new(),
            crashed: AtomicBool::new(false),
        }));
        let shared = Arc::downgrade(&world.0);
        world.kernel().set_peer_step(Arc::new(move || {
            shared.upgrade().is_some_and(|shared| Self(shared).serve())
        }));
        let shared = Arc::downgrade(&world.0);
        world.kernel().on_connect(Arc::new(move |identity| {
            shared.upgrade().into_iter().for_each(|shared| Self(shared).connected(identity));
        }));
        let shared = Arc::downgrade(&world.0);
        world.kernel().on_freeze(Arc::new(move |identity| {
            shared.upgrade().into_iter().for_each(|shared| Self(shared).froze(identity));
        }));
        world
    }

    pub(crate) fn kernel(&self) -> &SimKernel {
        &self.0.kernel
    }

    pub(crate) fn config(&self) -> Config {
        let root = self.0.directory.path();
        Config { runtime_dir: root.join("run"), state_dir: root.join("state"), ..Config::default() }
    }

    pub(crate) fn records(&self) -> PathBuf {
        self.0.directory.path().join("state/mappings")
    }

    /// Locks the state for a change. The next turn then covers the whole world.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.touched.store(true, Ordering::Relaxed);
        self.look()
    }

    fn look(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids and names of the records in the state directory and in the runtime directory.
    pub(crate) fn recorded(&self) -> Vec<(String, String)> {
        records::all(&self.records())
    }

    /// The directory of copies and removal marks.
    pub(crate) fn copies(&self) -> PathBuf {
        records::copies(&self.records())
    }

    /// Whether writes to the state directory hang now.
    pub(crate) fn state_disk_hangs(&self) -> bool {
        self.look().state_disk == StateDisk::Hung
    }

    /// Changes the state of the disk with the state directory, and whether the runtime directory is full.
    pub(crate) fn set_state_disk(&self, disk: StateDisk, runtime_full: bool) {
        let mut state = self.state();
        (state.state_disk, state.runtime_full) = (disk, runtime_full);
        state.was_unrecordable |= runtime_full && disk != StateDisk::Works;
    }

    /// Takes note that a copy of a record is not written in time.
    pub(crate) fn runtime_directory_is_slow(&self) {
        let mut state = self.state();
        state.was_unrecordable |= state.state_disk != StateDisk::Works;
    }

    /// Records a violation of an invariant.
    pub(crate) fn violation(&self, what: String) {
        tracing::error!("VIOLATION: {what}");
        self.state().violations.push(what);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Called when a device is connected: a record must exist, so that a supervisor can find and remove it.
    fn connected(&self, identity: &Identity) {
        let id = identity.mapping_id();
        let recorded = !records::newest(&self.records(), id).is_null();
        if !recorded && !self.look().touched.contains(id) {
            self.violation(format!("{id} was connected without a record"));
        }
    }

    /// Called when file systems are frozen: a record must exist, so that the next supervisor can thaw them.
    fn froze(&self, identity: &Identity) {
        let id = identity.mapping_id();
        let record = records::newest(&self.records(), id);
        if record["quiesced"].is_null() && !self.look().touched.contains(id) {
            self.violation(format!("{id} was frozen without a record of it"));
        }
    }

    /// Ends the supervisor at once.
    pub(crate) fn crash(&self) {
        self.0.crashed.store(true, Ordering::Relaxed);
        self.0.crash.notify_one();
    }

    pub(crate) fn has_crashed(&self) -> bool {
        self.0.crashed.load(Ordering::Relaxed)
    }

    pub(crate) async fn crashed(&self) {
        self.0.crash.notified().await;
    }

    /// Cleans up after a supervisor: init reaps its children.
    pub(crate) fn clean_up_after_supervisor(&self) {
        let mut state = self.state();
        state.zombies.clear();
        state.upgrading = None;
        drop(state);
        self.0.crashed.store(false, Ordering::Relaxed);
    }

    /// The time until the next event of a worker.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        let state = self.look();
        let hung = |worker: &Worker| state.disks.get(&worker.disk).is_some_and(|disk| disk.hung);
        let due = state.workers.values().filter_map(|worker| worker.next_due(hung(worker))).min();
        due.map(|due| due.saturating_duration_since(clock::now()))
    }

    /// Advances the kernel and all workers at the current time. Returns whether anything changed.
    pub(crate) fn turn(&self) -> bool {
        if !self.0.touched.swap(false, Ordering::Relaxed) && self.is_quiet() {
            return false;
        }
        let mut moved = self.kernel().step();
        for done in self.kernel().completions() {
            let read = done.result.as_ref().ok().map(Vec::as_slice);
            let ended = self.look().model.ended(done.ticket, read);
            if let Err(error) = ended {
                self.violation(error);
            }
        }
        let pids: Vec<u32> = self.look().workers.keys().copied().collect();
        for pid in pids {
            let mut state = self.look();
            match state.with(pid, self.records(), |worker, around| worker.turn(around)) {
                Some(Turn::Ends) => {
                    state.end(pid);
                    moved = true;
                }
                Some(Turn::Moved) => moved = true,
                Some(Turn::Quiet) | None => {}
            }
        }
        moved
    }

    /// Whether a turn would change nothing.
    fn is_quiet(&self) -> bool {
        if self.kernel().has_requests() || self.next_due().is_some_and(|due| due.is_zero()) {
            return false;
        }
        let state = self.look();
        let running = state.workers.values().filter(|worker| !worker.stopped);
        let mut set: Vec<PollFd<'_>> = running
            .flat_map(Worker::descriptors)
            .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN))
            .collect();
        set.is_empty() || poll(&mut set, PollTimeout::ZERO).is_ok_and(|ready| ready == 0)
    }

    /// Runs a turn only of the workers' ends of the kernel's connections.
    fn serve(&self) -> bool {
        let mut state = self.look();
        let pids: Vec<u32> = state.workers.keys().copied().collect();
        let mut moved = false;
        for pid in pids {
            let served = state.with(pid, self.records(), |worker, around| {
                worker.is_alive() && worker.serve(around, true)
            });
            moved |= served.unwrap_or(false);
        }
        moved
    }

    /// Kills a worker (SIGKILL).
    pub(crate) fn kill(&self, pid: u32) {
        let mut state = self.state();
        let Some(worker) = state.workers.get_mut(&pid) else { return };
        tracing::debug!(pid, "WORLD killed");
        if worker.quirks.linger.is_zero() {
            state.end(pid);
        } else if worker.dying.is_none() {
            worker.dying = Some(clock::now() + worker.quirks.linger);
        }
        drop(state);
        self.kernel().check_connections();
    }

    /// The latest worker of the mapping with this name.
    pub(crate) fn worker_of(&self, name: &str) -> Option<u32> {
        let state = self.state();
        let serves = |worker: &&Worker| worker.start.as_ref().is_some_and(|s| s.name == name);
        state.workers.values().rfind(serves).map(|worker| worker.id.pid)
    }

    /// Applies a failure to the workers of the handover in progress.
    pub(crate) fn inject_handover_fault(&self, fault: HandoverFault) {
        let (old, new) = self.pair();
        tracing::debug!(?fault, ?old, ?new, "HANDOVER FAULT");
        let stop = |pid: Option<u32>| {
            let mut state = self.state();
            let worker = pid.and_then(|pid| state.workers.get_mut(&pid));
            worker.into_iter().for_each(|w| (w.stopped, w.was_stopped) = (true, true));
        };
        match fault {
            HandoverFault::Crash => self.crash(),
            HandoverFault::KillOld => old.into_iter().for_each(|pid| self.kill(pid)),
            HandoverFault::KillNew => new.into_iter().for_each(|pid| self.kill(pid)),
            HandoverFault::KillBoth => old.into_iter().chain(new).for_each(|pid| self.kill(pid)),
            HandoverFault::StopOld => stop(old),
            HandoverFault::StopNew => stop(new),
            HandoverFault::StopBoth => {
                stop(old);
                stop(new);
            }
        }
    }

    /// Whether an upgrade is in progress.
    pub(crate) fn is_upgrading(&self) -> bool {
        self.look().upgrading.is_some()
    }

    /// Continues all stopped workers (SIGCONT).
    pub(crate) fn continue_workers(&self) {
        self.state().workers.values_mut().for_each(|worker| worker.stopped = false);
    }

    /// The worker that is being replaced, and the one that was launched last.
    fn pair(&self) -> (Option<u32>, Option<u32>) {
        let state = self.state();
        let age = |worker: &&Worker| worker.id.started_ticks;
        let serves = |w: &&Worker| w.start.as_ref().map(|s| s.name.as_str()) == state.upgrading;
        let old = state.workers.values().filter(serves).min_by_key(age).map(|w| w.id.pid);
        let new = state.workers.values().max_by_key(age).map(|w| w.id.pid);
        (old, new.filter(|_| new != old))
    }

    /// The connected devices of the mapping with this name.
    pub(crate) fn devices_of(&self, name: &str) -> Vec<Device> {
        let all = cleat_devices(self.kernel());
        all.into_iter().filter(|d| d.identity().is_some_and(|id| id.name() == name)).collect()
    }

    /// Submits a write or a read of a sector on a device.
    pub(crate) fn submit(&self, device: &Device, sector: u64, writes: bool) -> Option<u64> {
        let identity = device.identity()?;
        let mut state = self.state();
        let key = state.key_of(identity.mapping_id())?;
        let stamp = state.model.next_stamp(&key, sector)?;
        let offset = sector * SECTOR;
        let length = u32::try_from(SECTOR).unwrap_or(0);
        let io = match writes {
            false => Io::Read { offset, length },
            true => {
                let mut data = stamp.to_le_bytes().to_vec();
                data.resize(length as usize, 0);
                Io::Write { offset, data }
            }
        };
        let ticket = self.kernel().submit(device.index, io).ok()?;
        let whose = (key.as_str(), sector, identity.mapping_id());
        state.model.begin(ticket, whose, writes.then_some(stamp));
        Some(ticket)
    }

    /// Whether another mapping has a request for this sector, which need not end.
    pub(crate) fn is_busy_elsewhere(&self, id: &str, sector: u64) -> bool {
        let state = self.state();
        let key = state.key_of(id).unwrap_or_default();
        state.model.is_busy_elsewhere(&key, sector, id)
    }
}

/// The connected devices with an identity of cleat.
pub(crate) fn cleat_devices(kernel: &SimKernel) -> Vec<Device> {
    let all = kernel.show();
    all.into_iter().filter(|device| device.connected && device.identity().is_some()).collect()
}

impl State {
    /// Calls `action` on a worker with its surroundings.
    fn with<T>(
        &mut self,
        pid: u32,
        records: PathBuf,
        action: impl FnOnce(&mut Worker, &mut Surroundings<'_>) -> T,
    ) -> Option<T> {
        let worker = self.workers.get_mut(&pid)?;
        let mut around = Surroundings {
            now: clock::now(),
            disks: &mut self.disks,
            served: &mut self.served,
            violations: &mut self.violations,
            generations: &mut self.generations,
            readers: &mut self.readers,
            gone: &self.gone,
            touched: &self.touched,
            was_unrecordable: self.was_unrecordable,
            epochs: &mut self.epochs,
            records,
        };
        Some(action(worker, &mut around))
    }

    fn has_process(&self, pid: u64) -> bool {
        u32::try_from(pid).is_ok_and(|pid| self.workers.contains_key(&pid))
    }

    /// Whether a worker of a mapping has reported a wrong size.
    pub(crate) fn has_liar(&self, mapping_id: &str) -> bool {
        let known = self.workers.values().chain(&self.ended_workers);
        known.filter(|worker| worker.mapping_id() == Some(mapping_id)).any(|w| w.has_lied)
    }

    /// Whether a worker of a mapping was ever fenced.
    pub(crate) fn was_fenced(&self, mapping_id: &str) -> bool {
        let known = self.workers.values().chain(&self.ended_workers);
        known.filter(|worker| worker.mapping_id() == Some(mapping_id)).any(|w| w.fenced)
    }

    /// Returns a seed for the next supervisor.
    pub(crate) fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives << 32
    }

    /// Ends a process and closes its descriptors.
    pub(crate) fn end(&mut self, pid: u32) {
        let Some(mut worker) = self.workers.remove(&pid) else { return };
        tracing::debug!(pid, mapping = worker.mapping_id(), "WORLD a worker ends");
        worker.close();
        for disk in self.disks.values_mut() {
            disk.claims.retain(|claim| claim.pid != pid);
        }
        self.readers.retain(|_, reader| *reader != pid);
        let is_last = self.workers.values().all(|other| other.disk != worker.disk);
        if worker.disk.starts_with("mem:") && is_last {
            self.disks.remove(&worker.disk);
        }
        let _ = worker.exit.write(1);
        let exit = worker.exit.as_fd().try_clone_to_owned().expect("a descriptor is left");
        self.zombies.push((worker.id, exit));
        self.ended_workers.push(worker);
    }

    /// The name of a mapping's volume for its users. Each mapping of a memory volume has a new volume.
    pub(crate) fn key_of(&self, mapping_id: &str) -> Option<String> {
        self.generations.contains_key(mapping_id).then_some(())?;
        let known = self.workers.values().chain(&self.ended_workers);
        let mut of_mapping = known.filter(|worker| worker.mapping_id() == Some(mapping_id));
        let name = of_mapping.find_map(|worker| Some(disk_name(worker.start.as_ref()?)))?;
        Some(disks::key(&name, *self.served.get(mapping_id)?))
    }

    /// Puts another volume in the place of one that no worker has open.
    pub(crate) fn replace_disk(&mut self, name: &str) {
        let Some(disk) = self.disks.get_mut(name).filter(|disk| disk.claims.is_empty()) else {
            return;
        };
        self.epochs += 1;
        tracing::debug!(name, number = self.epochs, "WORLD another volume");
        let mut other = Disk::new(disk.size, self.epochs);
        (other.gone, other.hung) = (disk.gone, disk.hung);
        self.replaced_disks.push((name.to_owned(), std::mem::replace(disk, other)));
    }

    /// Whether another volume has replaced the one that a mapping's workers have served.
    pub(crate) fn was_replaced(&self, mapping_id: &str, name: &str) -> bool {
        let now = self.disks.get(name).map(|disk| disk.number);
        self.served.get(mapping_id).is_some_and(|served| Some(*served) != now)
    }
}

/// The name of a worker's volume among the disks.
fn disk_name(start: &Start) -> String {
    match start.uri.starts_with("mem:") {
        true => format!("{}@{}", start.uri, start.mapping_id),
        false => start.uri.clone(),
    }
}
