//! The lives of a supervisor with a CSI driver on one machine.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cleat_core::random::Random;
use cleat_csi::Driver;
use cleat_node::blocking::simulation;
use cleat_node::csi_config::CsiConfig;
use cleat_node::daemon::{Node, Parts};
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::calls::{Call, Event, Volume};
use super::host::SimHost;
use super::machine::Machine;
use super::steps::{Kill, Moment, Steps, kill};
use crate::clock::{self, Pulse, WorldClock};
use crate::disks::Disk;
use crate::world::{SimDisk, SimLauncher, World};

/// The maximum duration of a life. A longer one counts as hung.
const LIMIT: Duration = Duration::from_secs(900);

/// How often a caller repeats a call.
const REPETITIONS: usize = 20;

/// The time between two attempts of a call, and after which no program of an earlier supervisor runs.
const PAUSE: Duration = Duration::from_secs(3);

/// A machine with one volume.
pub(crate) struct Play {
    pub(crate) world: World,
    pub(crate) machine: Arc<Mutex<Machine>>,
    pub(crate) volume: Volume,
}

/// The state of a machine between two lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) mounts: Vec<String>,
    /// Each mapping with the size of its device.
    pub(crate) mappings: Vec<String>,
    pub(crate) records: usize,
    pub(crate) workers: usize,
    pub(crate) paths: Vec<String>,
    pub(crate) content: String,
}

impl Play {
    /// Makes a machine with a volume that no supervisor has mapped.
    pub(crate) fn new(volume: Volume) -> Self {
        let world = World::new(1, 0);
        let mut machine = Machine::new(world.kernel().clone());
        machine.volumes = volume.stored();
        machine.mounts.extend(volume.stale_mounts());
        machine.paths.extend(volume.stale_paths());
        world.state().disks.insert(Volume::URI.to_owned(), Disk::new(Volume::SIZE, 0));
        Self { world, machine: Arc::new(Mutex::new(machine)), volume }
    }

    /// Runs a supervisor that makes each of `before` and, after the event, `last`. It is killed at `at` in the last call.
    /// Returns the names of the last call's steps, and whether it was killed.
    pub(crate) fn first_life(
        &self,
        before: &[Call],
        event: Event,
        last: Call,
        at: Option<Kill>,
    ) -> (Vec<String>, bool) {
        let steps = Steps::new(at);
        self.live(1, &steps, async |driver: &Driver| {
            for call in before {
                self.succeed(driver, *call).await;
            }
            self.happens(event, true);
            if matches!(event, Event::Fenced | Event::Hangs) {
                // The supervisor learns of it.
                sleep(PAUSE).await;
            }
            steps.count(true);
            let answer = self.volume.call(driver, last).await;
            steps.count(false);
            if let Err(status) = answer {
                self.world.violation(format!("{last:?}: {status:?}"));
            }
        });
        (steps.names(), steps.has_killed())
    }

    /// Begins an event, or ends it if it does not last.
    pub(crate) fn happens(&self, event: Event, begins: bool) {
        let mut state = self.world.state();
        let disk = state.disks.get_mut(Volume::URI).expect("the volume");
        match event {
            Event::Grows if begins => disk.size = 2 * Volume::SIZE,
            Event::Hangs => disk.hung = begins,
            Event::Fenced if begins => {
                state.workers.values_mut().for_each(|worker| worker.fenced = true);
            }
            Event::Nothing | Event::Grows | Event::Fenced => {}
        }
    }

    /// Runs a supervisor that makes these calls until they succeed.
    pub(crate) fn next_life(&self, calls: &[Call]) {
        self.live(2, &Steps::default(), async |driver: &Driver| {
            for call in calls {
                self.succeed(driver, *call).await;
            }
            // Programs of an earlier supervisor end.
            sleep(PAUSE).await;
        });
    }

    /// Runs a supervisor that executes `body`.
    pub(crate) fn one_life(&self, body: impl AsyncFnOnce(&Driver)) {
        self.live(1, &Steps::default(), body);
    }

    /// Makes a call until it succeeds, as kubelet does.
    async fn succeed(&self, driver: &Driver, call: Call) {
        let temporary =
            [Code::Aborted, Code::Unavailable, Code::FailedPrecondition, Code::DeadlineExceeded];
        for _ in 0..REPETITIONS {
            match self.volume.call(driver, call).await {
                Ok(()) => return,
                Err(status) if temporary.contains(&status.code()) => sleep(PAUSE).await,
                Err(status) => return self.world.violation(format!("{call:?}: {status:?}")),
            }
        }
        let last = self.volume.call(driver, call).await;
        self.world.violation(format!("{call:?} does not succeed: {last:?}"));
    }

    /// Runs one supervisor. Its tasks end with it, at their current point.
    fn live(&self, boot: u64, steps: &Steps, body: impl AsyncFnOnce(&Driver)) {
        let world = &self.world;
        simulation::install(Some(gate(world, steps)));
        let pulse = Arc::new(Pulse::default());
        let runtime = clock::runtime(&pulse);
        runtime.block_on(async {
            clock::begin();
            tokio::spawn(clock::beat(Arc::clone(&pulse), world.clone()));
            let lived = pin!(timeout(LIMIT, self.with_driver(boot, steps, body)));
            tokio::select! {
                biased;
                () = world.crashed() => {}
                lived = lived => if lived.is_err() {
                    world.violation("a life did not end".into());
                },
            }
            clock::end();
        });
        drop(runtime);
        simulation::install(None);
        world.clean_up_after_supervisor();
    }

    async fn with_driver(&self, boot: u64, steps: &Steps, body: impl AsyncFnOnce(&Driver)) {
        let world = &self.world;
        let kernel = world.kernel().clone();
        let parts = Parts {
            registry: cleat::backends::REGISTRY,
            kernel: Box::new(move || Arc::new(kernel)),
            launcher: Arc::new(SimLauncher(world.clone())),
            clock: Arc::new(WorldClock::new(boot)),
            random: Random::seeded(boot),
            boot_id: "boot".to_owned(),
            disk: Arc::new(SimDisk(world.clone())),
            halt: None,
        };
        let node = match Node::start(&world.config(), parts).await {
            Ok(node) => node,
            Err(error) => return world.violation(format!("it does not start: {}", error.report())),
        };
        let directories = BTreeMap::from([("d".to_owned(), "/volumes".into())]);
        let config = CsiConfig { directories, ..CsiConfig::default() };
        let host = SimHost {
            world: world.clone(),
            machine: Arc::clone(&self.machine),
            steps: steps.clone(),
        };
        let driver = Driver::new(config, "n1".to_owned(), Arc::clone(node.executor()), 16);
        body(&driver.with_host(Arc::new(host))).await;
    }

    /// Returns what the supervisors have left.
    pub(crate) fn state(&self) -> State {
        let machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let mounts = machine.mounts.iter().map(|mount| {
            let volume = machine.volume_on(mount.index).unwrap_or_else(|_| "a stranger".to_owned());
            let access = if mount.read_only { "ro" } else { "rw" };
            format!("{} {:?} {access} of {volume}", mount.path.display(), mount.shown)
        });
        let devices = self.world.kernel().show().into_iter().filter(|device| device.connected);
        let decrypted = machine
            .unlocked
            .iter()
            .map(|device| format!("{} of {} bytes, decrypted", device.name, device.size));
        let mapping = |device: cleat_kernel::Device| {
            let name = device.identity().map(|identity| identity.name().to_owned());
            format!("{} of {} bytes", name.unwrap_or_default(), device.size)
        };
        let paths = machine.paths.iter().map(|(path, kind)| format!("{kind:?} {}", path.display()));
        State {
            mounts: mounts.collect(),
            mappings: devices.map(mapping).chain(decrypted).collect(),
            records: self.world.recorded().len(),
            workers: self.world.state().workers.len(),
            paths: paths.collect(),
            content: format!("{:?}", machine.volumes),
        }
    }
}

/// Makes the gate around every call of the supervisor that may block: each is a step.
fn gate(world: &World, steps: &Steps) -> simulation::Gate {
    let (world, steps) = (world.clone(), steps.clone());
    Arc::new(move |what| {
        let moment = steps.pass(what, &[Moment::Before, Moment::After]);
        let delay = |here: bool| -> simulation::Delay {
            let world = world.clone();
            Box::pin(async move {
                if here || world.has_crashed() {
                    kill(&world).await;
                }
            })
        };
        (delay(moment == Some(Moment::Before)), delay(moment == Some(Moment::After)))
    })
}
