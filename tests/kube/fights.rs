//! Two nodes fight for one image of a real Ceph cluster, and the controller, a process, is killed after every step.
//! The content of the image shows that no write of an older generation is executed after the next one has claimed.

mod writers;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use cleat_backend::fault::DIE_AT;
use cleat_core::random::Random;
use cleat_grants::object::{Generation, Signal, Truth};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, DeleteParams};
use nix::sys::signal::Signal as Kill;

use self::writers::{Stamp, Writers};
use crate::agent::image;
use crate::cluster::sidecar::Sidecar;
use crate::control_plane::{ControlPlane, NAMESPACE};
use crate::fixture::{World, eventually, run};
use crate::node::TestNode;
use crate::proxy::Proxy;

/// The steps after which a controller is killed while a volume moves from a node that answers.
const MOVE: [&str; 3] = ["revoked", "freed", "granted"];

/// The same for a silent node. Those with `sealed` are within the fence at the storage.
const FENCE: [&str; 10] = [
    "revoked",
    "cut off, not sealed",
    "announced, not sealed",
    "lock broken, not sealed",
    LOCKED,
    SEALED,
    "fenced",
    "fences written",
    "freed",
    "granted",
];

/// The steps when the silent node is back and has cleaned up.
const RETURN: [&str; 2] = ["unfenced", "fences written"];

/// The number of rounds in `make test`, in which controllers are killed after every step but those within a fence.
const FIRST: u64 = 2;

/// The number of rounds from which on controllers are killed after every step.
const ALL: u64 = 30;

/// A controller that dies here leaves the lock of the image, until the OSDs drop its watch after 30 s.
const LOCKED: &str = "locked, not sealed";
const SEALED: &str = "sealed, locked";

/// How a node loses the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The node releases it.
    Answers,
    /// The network to the API server holds everything, and the node continues to write.
    NetworkHangs,
    /// The supervisor is killed, and the worker continues to write.
    SupervisorDies,
    /// The supervisor is killed and the worker is frozen, with requests in flight, until after the move.
    Freezes,
}

impl Way {
    fn of(round: u64) -> Self {
        match round % 6 {
            1 => Self::Freezes,
            3 => Self::NetworkHangs,
            5 => Self::SupervisorDies,
            _ => Self::Answers,
        }
    }
}

/// Returns where the controllers are killed in a round: in different combinations. A controller that dies while it has
/// the image open costs the next clients seconds, because its watch stays, so that the first rounds do without.
fn points(round: u64, among: &[&'static str]) -> Vec<&'static str> {
    let random = Random::seeded(round);
    let is_chosen = |point: &&&'static str| match **point {
        LOCKED => round % 20 == 7,
        SEALED => round % 20 == 17,
        // The next controller finds the seal.
        "fenced" if round % 20 == 17 => false,
        _ if round <= FIRST => !is_within_fence(point),
        _ => random.next().is_multiple_of(2),
    };
    among.iter().filter(is_chosen).copied().collect()
}

fn is_within_fence(point: &str) -> bool {
    point.contains("sealed")
}

/// A node with the network to the API server.
struct Fighter {
    node: TestNode,
    network: Proxy,
}

struct Fight<'a> {
    world: &'a World,
    directory: tempfile::TempDir,
    fighters: [Fighter; 2],
    handle: String,
    volume: String,
    controller: Option<Sidecar>,
    /// The node that has the volume, its request and its generation.
    holder: usize,
    attachment: String,
    generation: Generation,
    /// The content of the image.
    content: Vec<Stamp>,
    figures: Figures,
}

#[derive(Default)]
struct Figures {
    kills: BTreeMap<&'static str, u64>,
    refused: u64,
    late: u64,
    took: Vec<Duration>,
}

/// `CLEAT_TEST_GRANT_FIGHTS` sets the number of rounds.
#[test]
fn no_write_of_an_older_grant_is_executed_wherever_controllers_are_killed() {
    let asked = std::env::var("CLEAT_TEST_GRANT_FIGHTS").ok().and_then(|text| text.parse().ok());
    let rounds: u64 = asked.unwrap_or(FIRST);
    run(async |world: World| {
        let mut fight = Fight::start(&world).await;
        for round in 1..=rounds {
            fight.round(round).await;
        }
        let figures = fight.figures;
        let mut took = figures.took;
        took.sort_unstable();
        println!(
            "figures: {rounds} rounds, {:.1} s in the median and {:.1} s at most; {} writes of older generations \
             were refused, {} were executed; controllers killed after: {:?}",
            took[took.len() / 2].as_secs_f64(),
            took[took.len() - 1].as_secs_f64(),
            figures.refused,
            figures.late,
            figures.kills,
        );
        assert_eq!(figures.late, 0);
        for point in MOVE.iter().chain(&FENCE).chain(&RETURN) {
            let is_optional = is_within_fence(point) && rounds < ALL;
            assert!(is_optional || figures.kills.contains_key(point), "{point}");
        }
    });
}

impl<'a> Fight<'a> {
    async fn start(world: &'a World) -> Self {
        let fighters = [Fighter::start(world, "a").await, Fighter::start(world, "b").await];
        let handle = image("fought-over").await;
        let volume = world.volume("v", &handle).await;
        let mut fight = Self {
            world,
            directory: tempfile::tempdir().unwrap(),
            fighters,
            attachment: world.attach(&volume, &format!("a.{}", world.driver)).await,
            handle,
            volume,
            controller: None,
            holder: 0,
            generation: Generation::default(),
            content: Vec::new(),
            figures: Figures::default(),
        };
        fight.start_controller(None).await;
        fight.generation = world.attached(&fight.attachment).await;
        fight.stage().await;
        fight.content = fight.read().await;
        fight
    }

    /// Moves the volume to the other node while both write.
    async fn round(&mut self, round: u64) {
        let (begun, way) = (Instant::now(), Way::of(round));
        let mut old = self.write_all();
        old.have_written_all().await;
        let (left, request) = (self.holder, self.attachment.clone());
        let other = self.fighters[1 - left].node.name.clone();
        self.attachment = self.world.attach(&self.volume, &other).await;
        self.leave(way, &mut old).await;
        self.controller = None;
        self.world.detach(&request).await;
        self.killed_at(&points(round, if way == Way::Answers { &MOVE } else { &FENCE })).await;
        self.start_controller(None).await;
        let next = self.world.attached(&self.attachment).await;
        assert!(next > self.generation);
        (self.holder, self.generation) = (1 - left, next);
        self.stage().await;
        old.superseded();
        let claimed = self.read().await;
        old.check(&claimed, &self.content);
        let new = self.write_every_other();
        new.have_written_all().await;
        self.return_of(left, way, &old, round).await;
        let late = self.end(old, new, &claimed).await;
        self.settled(&request).await;
        self.figures.late += late;
        self.figures.took.push(begun.elapsed());
        println!("round {round}: {way:?}, {:.1} s", begun.elapsed().as_secs_f64());
    }

    /// The node releases the volume, or falls silent and is declared lost.
    async fn leave(&mut self, way: Way, old: &mut Writers) {
        let Fighter { node, network } = &mut self.fighters[self.holder];
        match way {
            Way::Answers => {
                old.stop().await;
                let handle = &self.handle;
                eventually("it is unstaged", async || node.unstage(handle).await.ok()).await;
                return;
            }
            Way::NetworkHangs => network.hold(true),
            Way::SupervisorDies => node.crash().await,
            Way::Freezes => {
                node.crash().await;
                node.signal_workers(Kill::SIGSTOP);
            }
        }
        self.world.out_of_service(&node.name, true).await;
    }

    /// The silent node is back: its writes are refused, it cleans up, and its fence is removed.
    async fn return_of(&mut self, left: usize, way: Way, old: &Writers, round: u64) {
        if way == Way::Answers {
            return;
        }
        self.controller = None;
        let Fighter { node, network } = &mut self.fighters[left];
        self.world.out_of_service(&node.name, false).await;
        if way == Way::Freezes {
            node.signal_workers(Kill::SIGCONT);
        }
        old.are_refused().await;
        match way {
            Way::Answers => {}
            Way::NetworkHangs => network.hold(false),
            Way::SupervisorDies | Way::Freezes => node.start_again().await,
        }
        self.killed_at(&points(round, &RETURN)).await;
        self.start_controller(None).await;
        let node = &self.fighters[left].node;
        node.unmapped(&self.handle).await;
        eventually("its workers have ended", async || (!node.has_workers()).then_some(())).await;
    }

    /// Ends the writers, and returns how many writes of the older generation were executed after the next one had
    /// claimed.
    async fn end(&mut self, mut old: Writers, mut new: Writers, claimed: &[Stamp]) -> u64 {
        old.stop().await;
        new.stop().await;
        let after = self.read().await;
        new.check(&after, claimed);
        // What the new holder does not write stays as it was when it claimed.
        let changed = claimed.iter().zip(&after).skip(1).step_by(2).filter(|(was, is)| was != is);
        let replaced =
            after.iter().step_by(2).filter(|stamp| stamp.generation != self.generation.0);
        let late = changed.count() + replaced.count();
        self.content = after;
        self.figures.refused += old.refused();
        late as u64 + old.late()
    }

    /// Waits until the grant has nothing but its holder.
    async fn settled(&self, request: &str) {
        self.world.gone(request).await;
        let name = &self.fighters[self.holder].node.name;
        eventually("the grant is not stuck", async || {
            let object = self.world.grant(&self.handle).await?;
            let grant = object.stored().grant;
            let [holder] = &grant.spec.holders[..] else { return None };
            let is_held = holder.node == *name && !holder.revoked;
            let is_usable = grant.is_true(name, Signal::SafeToMount, self.generation);
            let waits = !grant.status.fences.is_empty() || !object.status.waiting.is_empty();
            (is_held && is_usable && !waits).then_some(())
        })
        .await;
    }

    /// Stages the volume on its holder. kubelet repeats the call, too.
    async fn stage(&self) {
        let Fighter { node, .. } = &self.fighters[self.holder];
        let what = format!("{} stages", node.name);
        eventually(&what, async || node.stage(&self.handle).await.ok()).await;
        let (name, generation) = (&node.name, self.generation);
        eventually("it is mounted", async || {
            let grant = self.world.grant(&self.handle).await?.stored().grant;
            let entry = grant.entry(name)?;
            entry.is(Signal::SafeToMount, Truth::True, generation).then_some(())
        })
        .await;
    }

    async fn read(&self) -> Vec<Stamp> {
        let node = &self.fighters[self.holder].node;
        writers::stamps(&node.read(&self.handle, writers::LENGTH).await.unwrap())
    }

    fn write_all(&self) -> Writers {
        self.writers(1)
    }

    fn write_every_other(&self) -> Writers {
        self.writers(2)
    }

    fn writers(&self, step: u64) -> Writers {
        let device = self.fighters[self.holder].node.device(&self.handle);
        let (node, generation) = (self.holder as u64, self.generation.0);
        Writers::start(&device, Stamp { node, generation, sequence: 0 }, step)
    }

    /// Starts a controller for each of the points, and waits until it has died there.
    async fn killed_at(&mut self, points: &[&'static str]) {
        for point in points {
            self.start_controller(Some(point)).await;
            let controller = self.controller.as_mut().unwrap();
            let what = format!("the controller dies: {point}");
            let end = eventually(&what, async || controller.end()).await;
            assert_eq!(end.signal(), Some(Kill::SIGABRT as i32), "{point}: {end}");
            *self.figures.kills.entry(point).or_default() += 1;
        }
    }

    /// Kills the controller, and starts another one, which leads at once.
    async fn start_controller(&mut self, dies_at: Option<&str>) {
        self.controller = None;
        let leases: Api<Lease> = Api::namespaced(self.world.client.clone(), NAMESPACE);
        let lease = format!("controller-{}", self.world.driver);
        let _ = leases.delete(&lease, &DeleteParams::default()).await;
        let clusters = tokio::task::spawn_blocking(crate::rbd::clusters).await.unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        command.args(["controller", "--log-format", "human", "--release-timeout", "1"]);
        command.args(["--driver", &self.world.driver]).arg("--clusters").arg(clusters);
        command.arg("--kubeconfig").arg(self.world.plane.controller_kubeconfig());
        command.envs(dies_at.map(|point| (DIE_AT, point)));
        self.controller = Some(Sidecar::run("controller", self.directory.path(), command));
    }
}

impl Fighter {
    async fn start(world: &World, name: &str) -> Self {
        let name = world.node(name).await;
        let network = Proxy::start(ControlPlane::get().address());
        let kubeconfig = ControlPlane::get().node_kubeconfig_by(&name, network.port()).await;
        Self { node: TestNode::start_with(world, name, kubeconfig).await, network }
    }
}
