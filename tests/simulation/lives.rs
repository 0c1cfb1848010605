//! Runs a scenario: starts and ends supervisors, makes events happen, makes calls, and checks their
//! results.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cleat_api::v1::UpgradeRequest;
use cleat_api::v1::upgrade_event::Outcome;
use cleat_core::error::{Error, ErrorKind};
use cleat_core::policy;
use cleat_core::random::Random;
use cleat_kernel::{Holder, UnmountScope};
use cleat_node::blocking::simulation;
use cleat_node::daemon::{Node, Parts};
use cleat_node::executor::NewSize;
use cleat_node::executor::{Executor, Halt, MapSpec};
use cleat_node::mapping::View;
use cleat_node::planner::State;
use tokio::time::{Instant, sleep, timeout};

use crate::checks;
use crate::clock::{self, Pulse, WorldClock};
use crate::disks::Disk;
use crate::scenario::{By, Dice, End, Lasting, Life, Op, Scenario, Slow, VolumePlan};
use crate::world::{SimDisk, SimLauncher, World};

/// The maximum duration of a life. A longer one counts as hung.
const LIFE_LIMIT: Duration = Duration::from_secs(3600);

/// The time for repairs after the last event.
const CALM: Duration = Duration::from_secs(100);

/// Runs a scenario and returns the violations.
pub(crate) fn run(seed: u64, scenario: &Scenario) -> Vec<String> {
    let world = World::new(seed, scenario.faults_per_mille);
    for volume in scenario.volumes.iter().filter(|volume| volume.uri.starts_with("file:")) {
        world.state().disks.insert(volume.uri.clone(), Disk::new(1 << 16, 0));
    }
    let mut boot = 1;
    let last = scenario.lives.len() - 1;
    for (nth, life) in scenario.lives.iter().enumerate() {
        let stays = nth == last && !scenario.fresh;
        tracing::debug!(nth, end = ?life.end, "LIFE");
        let player = Player { world: world.clone(), volumes: &scenario.volumes };
        let dice = Dice::new(seed ^ 0x5eed ^ (nth as u64) << 32);
        let end = Calm { lasting: scenario.lasting, by_force: scenario.by_force };
        lead(&player, life, (boot, dice), stays.then_some(end));
        if world.violations().is_empty() && !stays {
            for op in &life.between {
                tracing::debug!(?op, "BETWEEN");
                boot += u64::from(matches!(op, Op::Reboot));
                player.happen_between(op);
            }
        }
    }
    if scenario.fresh && world.violations().is_empty() {
        let quiet = Life::quiet();
        tracing::debug!("LIFE to the end");
        let player = Player { world: world.clone(), volumes: &scenario.volumes };
        let end = Calm { lasting: scenario.lasting, by_force: scenario.by_force };
        lead(&player, &quiet, (boot, Dice::new(seed)), Some(end));
    }
    world.violations()
}

/// How a scenario ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Calm {
    pub(crate) lasting: Option<Lasting>,
    pub(crate) by_force: bool,
}

/// Runs one life of a supervisor. With `to_the_end` the failures end in it, and the final state is checked.
fn lead(player: &Player<'_>, life: &Life, (boot, dice): (u64, Dice), to_the_end: Option<Calm>) {
    let world = &player.world;
    world.state().blind = life.blind;
    if life.steps.is_empty() {
        checks::end_faults(world, player.volumes, to_the_end.and_then(|end| end.lasting));
    }
    let calm = to_the_end.is_some();
    let (end, slow) = if calm { (End::Crash, None) } else { (life.end, life.slow) };
    simulation::install(Some(gate(world, end, slow, dice)));
    let pulse = Arc::new(Pulse::default());
    let runtime = clock::runtime(&pulse);
    runtime.block_on(async {
        clock::begin();
        tokio::spawn(clock::beat(Arc::clone(&pulse), world.clone()));
        let lived = pin!(timeout(LIFE_LIMIT, live(player, life, boot, end, to_the_end)));
        tokio::select! {
            biased;
            () = world.crashed() => tracing::debug!("CRASH"),
            lived = lived => if lived.is_err() {
                world.violation("a life did not end".into());
            },
        }
        clock::end();
    });
    // This cancels all tasks at their current point, as a crash does.
    drop(runtime);
    simulation::install(None);
    world.clean_up_after_supervisor();
}

async fn live(player: &Player<'_>, life: &Life, boot: u64, end: End, to_the_end: Option<Calm>) {
    let world = &player.world;
    let passed = AtomicU64::new(0);
    let (handover_fault, struck) = (life.handover_fault, AtomicBool::new(false));
    let halting = world.clone();
    let halt: Halt = Arc::new(move |point: &str| {
        let here = end == End::AtPoint(passed.fetch_add(1, Ordering::Relaxed));
        if here {
            tracing::debug!(point, "HALT");
            halting.crash();
        }
        if let Some((at, fault, for_a_while)) = handover_fault
            && at == point
            && halting.is_upgrading()
            && !struck.swap(true, Ordering::Relaxed)
        {
            halting.inject_handover_fault(fault);
            let world = halting.clone();
            for_a_while.map(|time| {
                tokio::spawn(async move {
                    sleep(time).await;
                    world.continue_workers();
                })
            });
        }
        here || halting.has_crashed()
    });
    let kernel = world.kernel().clone();
    let random = Random::seeded(boot ^ world.state().next_life());
    let parts = Parts {
        registry: cleat::backends::REGISTRY,
        kernel: Box::new(move || Arc::new(kernel)),
        launcher: Arc::new(SimLauncher(world.clone())),
        clock: Arc::new(WorldClock::new(random.next())),
        random,
        boot_id: format!("boot {boot}"),
        disk: Arc::new(SimDisk(world.clone())),
        halt: Some(halt),
    };
    let node = match Node::start(&world.config(), parts).await {
        Ok(node) => node,
        Err(error) => return world.violation(format!("it does not start: {}", error.report())),
    };
    for (pause, op) in &life.steps {
        sleep(*pause).await;
        tracing::debug!(?op, "STEP");
        player.happen(op, node.executor()).await;
    }
    if let Some(calm) = to_the_end {
        if !life.steps.is_empty() {
            checks::end_faults(world, player.volumes, calm.lasting);
        }
        world.state().blind = false;
        sleep(CALM / 2).await;
        checks::read_all(world);
        sleep(CALM / 2).await;
        checks::at_the_end(world, player.volumes, calm, node.executor()).await;
    } else if life.end == End::Shutdown {
        node.shutdown().await;
    }
}

/// Makes the gate around every call that may block: it sometimes adds a delay, and the delay and the crash
/// of the script.
fn gate(world: &World, end: End, slow: Option<Slow>, dice: Dice) -> simulation::Gate {
    let (calls, alike) = (AtomicU64::new(0), AtomicU64::new(0));
    let dice = std::sync::Mutex::new(dice);
    let (world, waiting) = (world.clone(), world.clone());
    let moment = move |crashes: bool, delay: Duration, hangs: bool| -> simulation::Delay {
        let world = waiting.clone();
        Box::pin(async move {
            if !delay.is_zero() {
                sleep(delay).await;
            }
            while hangs && world.state_disk_hangs() {
                sleep(Duration::from_millis(500)).await;
            }
            if crashes {
                tracing::debug!("HALT in a call");
                world.crash();
            }
            if world.has_crashed() {
                std::future::pending::<()>().await;
            }
        })
    };
    Arc::new(move |what| {
        let nth = calls.fetch_add(1, Ordering::Relaxed);
        let mut dice = dice.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let delayed = dice.below(12) == 0;
        let delay =
            if delayed { Duration::from_millis(1 + dice.below(40)) } else { Duration::ZERO };
        let same = slow.filter(|slow| what.starts_with(slow.what));
        let meant = same.filter(|slow| slow.nth == alike.fetch_add(1, Ordering::Relaxed));
        let before = meant.map_or(delay, |slow| slow.time);
        if meant.is_some() && what == "a call that blocks: a copy of a record" {
            world.runtime_directory_is_slow();
        }
        (
            moment(end == End::AtCall(nth, false), before, what == "a call that blocks: a record"),
            moment(end == End::AtCall(nth, true), delay, false),
        )
    })
}

/// Executes the events of a script.
struct Player<'a> {
    world: World,
    volumes: &'a [VolumePlan],
}

impl Player<'_> {
    fn name(&self, at: usize) -> &'static str {
        self.volumes[at].name
    }

    fn worker(&self, at: usize) -> Option<u32> {
        self.world.worker_of(self.name(at))
    }

    async fn happen(&self, op: &Op, executor: &Arc<Executor>) {
        let world = &self.world;
        let (executor, name) = (Arc::clone(executor), |at: usize| self.name(at));
        match op {
            Op::Map(at, seconds) => {
                let spec = spec_of(&self.volumes[*at]);
                let deadline = Instant::now() + Duration::from_secs(*seconds);
                tokio::spawn(map(world.clone(), executor, spec, deadline));
            }
            Op::Unmap(at, by) => {
                let target = match by {
                    By::Name => name(*at).to_owned(),
                    By::Uri => self.volumes[*at].uri.clone(),
                    By::Device => {
                        let device = world.devices_of(name(*at)).into_iter().next();
                        device.map_or(name(*at).to_owned(), |d| format!("/dev/nbd{}", d.index))
                    }
                };
                tokio::spawn(unmap(world.clone(), executor, target));
            }
            Op::Resize(at, size) => {
                tokio::spawn(resize(world.clone(), executor, name(*at), *size));
            }
            Op::Force(at) => {
                let name = name(*at).to_owned();
                tokio::spawn(force(world.clone(), executor, name));
            }
            Op::SetPolicy(at, change) => {
                let deadline = Instant::now() + Duration::from_secs(30);
                let (name, change, world) = (name(*at), *change, world.clone());
                tokio::spawn(async move {
                    let result = executor.set_policy(name, change, deadline).await;
                    let result = result.as_ref().map(brief).map_err(Error::report);
                    tracing::debug!(name, ?result, "POLICY SET");
                    late(&world, "set", deadline, Duration::from_secs(10));
                });
            }
            Op::Upgrade(at, newer) => {
                world.state().build += u32::from(*newer);
                tokio::spawn(upgrade(world.clone(), executor, name(*at), !newer));
            }
            Op::Pass(time) => sleep(*time).await,
            other => self.happen_between(other),
        }
    }

    /// Executes an event that needs no supervisor.
    fn happen_between(&self, op: &Op) {
        let (world, kernel) = (&self.world, self.world.kernel());
        let seen = |at: &usize| world.devices_of(self.name(*at)).into_iter().next();
        let device = |at: &usize| seen(at).map(|device| device.index);
        let submit = |at: &usize, sector: &u64, writes: bool| {
            seen(at).map(|device| world.submit(&device, *sector, writes));
        };
        let uri = |at: &usize| self.volumes[*at].uri.as_str();
        match op {
            Op::Write(at, sector) => submit(at, sector, true),
            Op::Read(at, sector) => submit(at, sector, false),
            Op::Kill(at) => self.worker(*at).into_iter().for_each(|pid| world.kill(pid)),
            Op::Stop(at) => self.with_worker(*at, |worker| {
                (worker.stopped, worker.was_stopped) = (true, true);
            }),
            Op::Continue(at) => self.with_worker(*at, |worker| worker.stopped = false),
            Op::CutChannel(at) => self.with_worker(*at, |worker| worker.cut_channel()),
            Op::Fence(at) => self.with_worker(*at, |worker| worker.fenced = true),
            Op::Latency(at, time) => self.with_worker(*at, |worker| worker.quirks.latency = *time),
            Op::Next(quirks) => world.state().quirks.push_back(quirks.clone()),
            Op::Inject(call, fault) => kernel.inject(*call, *fault),
            Op::Vanish(at) => device(at).into_iter().for_each(|index| kernel.vanish(index)),
            Op::Mount(at) => self.mount(*at),
            Op::Snapshot(at, time) => {
                self.with_worker(*at, |worker| worker.snapshots.begin(clock::now(), *time));
            }
            Op::KillLinks(at) => {
                device(at).into_iter().for_each(|index| kernel.kill_connections(index))
            }
            Op::LoseEvents(lost) => kernel.lose_events(*lost),
            Op::Hold(at) => self.hold(*at),
            Op::Release(at) => {
                device(at).into_iter().for_each(|index| kernel.set_holders(index, Vec::new()));
            }
            Op::Module(loaded) => kernel.set_module(*loaded),
            Op::Foreign(index) => {
                if kernel.show().iter().any(|d| d.index == *index && !d.connected) {
                    kernel.add_foreign(*index, 1 << 20, Some("somebody else's"));
                }
            }
            Op::Gone(at, gone) => self.with_disk(uri(at), |disk| disk.gone = *gone),
            Op::Hung(at, hung) => self.with_disk(uri(at), |disk| disk.hung = *hung),
            Op::Size(at, size) => self.with_disk(uri(at), |disk| disk.size = *size),
            Op::Replace(at) => self.replace(*at),
            Op::JournalFull(at) => self.with_record(*at, |path| {
                // Every write to the record fails as on a full disk.
                let _ = std::os::unix::fs::symlink("/dev/full", path.with_extension("tmp"));
            }),
            Op::Corrupt(at) => self.with_record(*at, |path| {
                let text = std::fs::read(path).unwrap_or_default();
                let _ = std::fs::write(path, &text[..text.len() / 2]);
            }),
            Op::Forget(at) => self.with_record(*at, |path| {
                let _ = std::fs::remove_file(path);
            }),
            Op::StateDisk(disk, runtime_full) => world.set_state_disk(*disk, *runtime_full),
            Op::Reboot => self.reboot(),
            Op::Pass(time) => self.pass(*time),
            Op::Usurp(at) => device(at).into_iter().for_each(|index| {
                kernel.vanish(index);
                kernel.add_foreign(index, 1 << 16, Some("somebody else's"));
            }),
            Op::Map(..)
            | Op::Unmap(..)
            | Op::Resize(..)
            | Op::SetPolicy(..)
            | Op::Force(..)
            | Op::Upgrade(..) => {}
        }
    }

    fn hold(&self, at: usize) {
        for device in self.world.devices_of(self.name(at)) {
            let holder = Holder::Process { pid: 4711, command: "dd".into() };
            self.world.kernel().set_holders(device.index, vec![holder]);
        }
    }

    fn replace(&self, at: usize) {
        self.worker(at).into_iter().for_each(|pid| self.world.kill(pid));
        self.world.state().replace_disk(&self.volumes[at].uri);
    }

    fn mount(&self, at: usize) {
        for device in self.world.devices_of(self.name(at)) {
            let (path, filesystem) = (format!("/mnt/{}", self.name(at)).into(), "ext4".to_owned());
            let holder = Holder::Mount { path, filesystem, namespace_pid: None };
            self.world.kernel().set_holders(device.index, vec![holder]);
        }
    }

    fn with_worker(&self, at: usize, action: impl FnOnce(&mut crate::workers::Worker)) {
        let Some(pid) = self.worker(at) else { return };
        self.world.state().workers.get_mut(&pid).map(action);
    }

    fn with_disk(&self, uri: &str, action: impl FnOnce(&mut Disk)) {
        self.world.state().disks.get_mut(uri).map(action);
    }

    fn with_record(&self, at: usize, action: impl FnOnce(&std::path::Path)) {
        let found = checks::records(&self.world).into_iter().find(|(_, n)| n == self.name(at));
        if let Some((id, _)) = found {
            self.world.state().touched.insert(id.clone());
            action(&self.world.records().join(format!("{id}.json")));
        }
    }

    /// Removes the state of the kernel, all workers, and the files under /run.
    fn reboot(&self) {
        let pids: Vec<u32> = self.world.state().workers.keys().copied().collect();
        for pid in pids {
            self.world.state().end(pid);
        }
        for device in self.world.kernel().show() {
            self.world.kernel().set_holders(device.index, Vec::new());
            self.world.kernel().vanish(device.index);
        }
        self.world.kernel().clear_frozen();
        let _ = std::fs::remove_dir_all(self.world.config().runtime_dir);
    }

    /// Advances the time without a supervisor, while the rest of the world continues.
    fn pass(&self, time: Duration) {
        let until = clock::now() + time;
        loop {
            while self.world.turn() {}
            let left = until.saturating_duration_since(clock::now());
            match self.world.next_due() {
                Some(due) if due < left => clock::pass(due),
                _ => return clock::pass(left),
            }
        }
    }
}

pub(crate) fn spec_of(volume: &VolumePlan) -> MapSpec {
    MapSpec {
        name: volume.name.to_owned(),
        uri: volume.uri.clone(),
        read_only: volume.read_only,
        connections: volume.connections,
        block_size: 0,
        dead_connection_timeout_s: dead_connection_timeout_s(volume),
        policy: policy::Change::default(),
        take_over: false,
        quiesce: volume.quiesce,
        grant: 0,
    }
}

/// The content of a memory volume dies with its worker. Its timeout is shorter than the time without failures at
/// the end, so that the supervisor then lets its I/O fail. 0: the default.
fn dead_connection_timeout_s(volume: &VolumePlan) -> u32 {
    if volume.uri.starts_with("mem:") { 20 } else { 0 }
}

async fn map(world: World, executor: Arc<Executor>, spec: MapSpec, deadline: Instant) {
    let known = executor.register().get(&spec.name).is_some();
    let before = checks::traces(&world, &spec.name);
    let result = executor.map(&spec, deadline).await;
    tracing::debug!(name = spec.name, result = ?result.as_ref().map(brief).map_err(Error::report), "MAPPED");
    match result {
        Ok(view) => checks::after_map(&world, &view),
        Err(error) => {
            late(&world, "map", deadline, Duration::from_secs(45));
            let undone = !error.report().contains("undoing it failed");
            if !known && undone && error.kind() != ErrorKind::Aborted {
                checks::after_failed_map(&world, &executor, &spec.name, &before, &error);
            }
        }
    }
}

async fn unmap(world: World, executor: Arc<Executor>, target: String) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let volume = executor.register().get(&target);
    let result = executor.unmap(&target, deadline).await;
    tracing::debug!(target, result = ?result.as_ref().map_err(Error::report), "UNMAPPED");
    late(&world, "unmap", deadline, Duration::from_secs(10));
    if let (Ok(_), Some(volume)) = (&result, volume) {
        checks::after_unmap(&world, &volume.mapping_id);
    }
}

/// Unmaps by force with the usual deadline. Returns whether the unmap was completed.
pub(crate) async fn force(world: World, executor: Arc<Executor>, target: String) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    let volume = executor.register().get(&target);
    world.state().forced.extend(volume.iter().map(|volume| volume.mapping_id.clone()));
    let result = executor.force_unmap(&target, UnmountScope::All, deadline).await;
    tracing::debug!(target, result = ?result.as_ref().map_err(Error::report), "FORCED");
    late(&world, "a forced unmap", deadline, Duration::from_millis(700));
    let forced = matches!(result, Ok(Some(_)));
    if let (true, Some(volume)) = (forced, volume) {
        checks::after_force(&world, &volume.mapping_id);
    }
    forced
}

/// Upgrades a mapping to a worker of another build, or by force of the same build.
async fn upgrade(world: World, executor: Arc<Executor>, name: &'static str, force: bool) {
    const LIMIT: Duration = Duration::from_secs(30);
    world.state().upgrading = Some(name);
    let deadline = Instant::now() + LIMIT;
    let id = executor.register().get(name).map(|volume| volume.mapping_id.clone());
    let before = id.map(|id| checks::processes(&world, &id)).unwrap_or_default();
    let targets = vec![name.to_owned()];
    let request = UpgradeRequest { targets, workers_only: true, force };
    let Ok(mut events) = executor.upgrade(request, LIMIT).await else {
        world.state().upgrading = None;
        return;
    };
    while let Some(Ok(event)) = events.recv().await {
        tracing::debug!(?event, "UPGRADED");
        late(&world, "an upgrade", deadline, Duration::from_secs(20));
        if event.outcome() == Outcome::HandedOver {
            checks::after_upgrade(&world, name, &before);
        }
    }
    world.state().upgrading = None;
}

async fn resize(world: World, executor: Arc<Executor>, name: &'static str, wanted: NewSize) {
    let size = wanted.bytes;
    let deadline = Instant::now() + Duration::from_secs(30);
    let result = executor.resize(name, wanted, deadline).await;
    tracing::debug!(name, size, result = ?result.as_ref().map(brief).map_err(Error::report), "RESIZED");
    late(&world, "resize", deadline, Duration::from_secs(10));
    if let Ok(view) = result
        && size != 0
        && view.state == State::Mapped
        && view.device.is_some_and(|device| device.size < size)
        && !world.state().has_liar(&view.record.mapping_id)
    {
        world.violation(format!("{name} was resized to {size} and is {:?}", view.device));
    }
}

/// Checks that a call did not exceed its deadline by more than `slack`.
fn late(world: &World, what: &str, deadline: Instant, slack: Duration) {
    if Instant::now() > deadline + slack {
        let by = Instant::now() - deadline;
        world.violation(format!("{what} came back {by:?} after its deadline"));
    }
}

fn brief(view: &View) -> String {
    format!("{:?} {:?}", view.state, view.device)
}
