//! Node remediation: a node whose kubelet and whose agent are silent loses its volumes and its pods by itself.
//!
//! 1. The node is marked as lost by an annotation, so that every later controller continues.
//! 2. Its volumes are revoked and fenced (`volumes`). The storage proves that the node cannot write any more.
//! 3. It gets the taint `node.kubernetes.io/out-of-service`, with which Kubernetes detaches its volumes at once.
//! 4. Its pods with volumes of the driver are deleted, as Kubernetes' garbage collection would do it later.
//! 5. When its kubelet and its agent work again, and the agent has reported every volume clean, mark and taint go.
//!
//! The Leases decide when to begin, and prove nothing: a node that lives has its volumes fenced, and loses no more than
//! a reboot would cost it.

pub(crate) mod beats;
mod deletion;
mod objects;
mod plan;
mod pulse;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::Result;
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt};
use tokio::time::Instant;

use crate::api::message;
use crate::cluster::Cluster;
use crate::config::Remediation;
use crate::marks;
use crate::nodes;
use crate::objects::Node;
use crate::source;
pub(crate) use beats::{Beats, Silence};
use plan::{Observed, Step, plan};
use pulse::Pulse;

/// The annotation of a node that is never remediated, with the value `true`.
const MAINTENANCE: &str = "cleat.csi.storage/maintenance";

/// The time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// The same while a lost node is being fenced: its pods wait for the next step.
const FENCING_PERIOD: Duration = Duration::from_millis(200);

/// For how many timeouts a candidate reads the Leases of a node that is silent.
const READ_FOR: u32 = 4;

/// Observes the Leases of nodes until the future is dropped, and does nothing about them. The watches of the Leases run.
pub(crate) async fn observe(cluster: &Arc<Cluster>, settings: Remediation) {
    let pulse = Pulse::new(cluster, settings.timeout, settings.limit);
    loop {
        if cluster.heartbeats.mirror.is_complete() {
            let kubelets = cluster.leases.mirror.all();
            let names: BTreeSet<String> = kubelets.iter().map(|lease| lease.name_any()).collect();
            pulse.beats().keep(&names);
            names.iter().for_each(|name| pulse.observe(name));
            // One that has been silent for longer is lost already, or off.
            let since = Instant::now().checked_sub(READ_FOR * settings.timeout);
            let is_recent = |name: &String| pulse.beats().last(name) >= since;
            let recent: Vec<String> = names.into_iter().filter(is_recent).collect();
            if let Err(error) = pulse.read_silent(&recent, &[]).await {
                tracing::debug!("{}", error.report());
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Remediates until the future is dropped.
pub(crate) async fn run(cluster: Arc<Cluster>, settings: Remediation) {
    let mut watch = Watch::new(cluster, settings);
    loop {
        let text = watch.turn().await.err().map(|error| message(&error)).unwrap_or_default();
        if text != watch.failed && !text.is_empty() {
            tracing::warn!("node remediation: {text}");
        }
        let is_fencing = text.is_empty() && watch.is_fencing;
        watch.failed = text;
        tokio::time::sleep(if is_fencing { FENCING_PERIOD } else { PERIOD }).await;
    }
}

/// The nodes that have to do with grants.
struct Volumes {
    /// Those that hold a volume.
    held: BTreeSet<String>,
    /// Those that ask for one. A volume that is stored on its node needs no grant.
    asked: BTreeSet<String>,
    /// Those that were fenced from one, and have not cleaned up.
    fenced: BTreeSet<String>,
}

impl Volumes {
    fn of(cluster: &Cluster) -> Self {
        let (mut held, mut fenced) = (BTreeSet::new(), BTreeSet::new());
        for grant in cluster.grants.mirror.all() {
            held.extend(grant.spec.holders.iter().map(|holder| holder.node.clone()));
            fenced.extend(grant.status.grant.fences.iter().map(|fence| fence.node.clone()));
        }
        let attachments = cluster.attachments.mirror.all();
        let requests = attachments.iter().filter_map(|a| source::request(a, &cluster.finalizer));
        let asked = requests.map(|request| request.node).collect();
        Self { held, asked, fenced }
    }
}

fn is_maintained(node: &Node) -> bool {
    node.annotations().get(MAINTENANCE).is_some_and(|value| value == "true")
}

struct Watch {
    cluster: Arc<Cluster>,
    settings: Remediation,
    pulse: Pulse,
    /// The lost nodes without pods.
    cleared: BTreeSet<String>,
    /// For each lost node, the pods that tolerate the taint and were there when its pods were first listed.
    tolerating: BTreeMap<String, BTreeSet<String>>,
    /// The last step of each node that is repeated and has an event already.
    said: BTreeMap<String, Step>,
    failed: String,
    /// Whether a node was just marked, or is lost and still holds a volume.
    is_fencing: bool,
}

impl Drop for Watch {
    /// A controller that does not lead counts no nodes.
    fn drop(&mut self) {
        for state in ["silent", "lost", "refused"] {
            self.cluster.metrics.nodes(state, 0);
        }
    }
}

impl Watch {
    fn new(cluster: Arc<Cluster>, settings: Remediation) -> Self {
        Self {
            pulse: Pulse::new(&cluster, settings.timeout, settings.limit),
            cluster,
            settings,
            cleared: BTreeSet::new(),
            tolerating: BTreeMap::new(),
            said: BTreeMap::new(),
            failed: String::new(),
            is_fencing: false,
        }
    }

    /// Looks at all nodes once, and makes the next step of each. A step that fails delays no other; the first error is
    /// returned.
    async fn turn(&mut self) -> Result<()> {
        let volumes = Volumes::of(&self.cluster);
        let names = self.names(&volumes);
        self.cleared.retain(|name| names.contains(name));
        self.tolerating.retain(|name, _| names.contains(name));
        let nodes: Vec<Arc<Node>> =
            names.iter().filter_map(|name| self.cluster.nodes.mirror.get(name)).collect();
        let mut errors = Vec::new();
        for node in &nodes {
            if let Err(error) = self.make_lease(node).await {
                // The others fail for the same reason, each after a timeout.
                errors.push(error);
                break;
            }
        }
        let silent_others = self.observe_beats(&names).await?;
        let observed: Vec<Observed> =
            nodes.iter().map(|node| self.observed(node, &volumes, &silent_others)).collect();
        let steps = plan(&observed, self.settings.limit);
        let is_marked = steps.iter().any(|(_, step)| *step == Step::Mark);
        self.is_fencing = is_marked || observed.iter().any(|node| node.lost && node.holds);
        let is_silent =
            |node: &&Observed| !node.lost && matches!(node.silence, Silence::Late | Silence::Lost);
        let refused = steps.iter().filter(|(_, step)| *step == Step::Refuse).count();
        self.cluster.metrics.nodes("silent", observed.iter().filter(is_silent).count());
        self.cluster.metrics.nodes("refused", refused);
        self.said.retain(|name, _| steps.iter().any(|(other, _)| other == name));
        for (name, step) in steps {
            let node = nodes.iter().find(|node| node.name_any() == name);
            if let Some(node) = node {
                errors.extend(self.step(node, step).await.err());
            }
        }
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    /// Returns the nodes that have volumes with grants, or are being remediated.
    fn names(&self, volumes: &Volumes) -> BTreeSet<String> {
        let Volumes { held, asked, fenced } = volumes;
        let mut names: BTreeSet<String> =
            [held, asked, fenced].into_iter().flatten().cloned().collect();
        let marked = marks::marked(&self.cluster).into_iter();
        names.extend(marked.map(|node| node.name_any()));
        names
    }

    /// Observes the Leases of all nodes, of which `names` have to do with grants. Returns the others that are silent. Those in
    /// maintenance and those that are marked do not count.
    async fn observe_beats(&self, names: &BTreeSet<String>) -> Result<Vec<String>> {
        let all = self.cluster.nodes.mirror.all();
        let counts = |node: &&Arc<Node>| !nodes::state(node, None).lost && !is_maintained(node);
        self.pulse.beats().keep(&all.iter().map(|node| node.name_any()).collect());
        all.iter().for_each(|node| self.pulse.observe(&node.name_any()));
        let counted = all.iter().filter(counts).map(|node| node.name_any());
        let (known, others): (Vec<String>, Vec<String>) =
            counted.partition(|name| names.contains(name));
        self.pulse.read_silent(&known, &others).await?;
        // The plan itself counts those of which the agent is known.
        let is_unknown = |name: &String| self.pulse.silence(name) == Silence::Unknown;
        let known = known.into_iter().filter(is_unknown);
        Ok(known.chain(others).filter(|name| self.pulse.is_suspect(name)).collect())
    }

    fn observed(&self, node: &Node, volumes: &Volumes, silent_others: &[String]) -> Observed {
        let name = node.name_any();
        let state = nodes::state(node, None);
        let is_with = |other: &&String| self.pulse.beats().is_with(other, &name);
        Observed {
            lost: state.lost,
            tainted: state.out_of_service,
            maintenance: is_maintained(node),
            silence: self.pulse.silence(&name),
            others: silent_others.iter().filter(is_with).count(),
            is_back: self.pulse.is_back(&name),
            holds: volumes.held.contains(&name),
            asks: volumes.asked.contains(&name),
            fenced: volumes.fenced.contains(&name),
            has_pods: !self.cleared.contains(&name),
            name,
        }
    }

    async fn step(&mut self, node: &Node, step: Step) -> Result<()> {
        let name = node.name_any();
        // The watches may have stopped, and other nodes may have been read in the place of this one.
        if step == Step::Mark && self.pulse.read(&name).await? != Silence::Lost {
            return Ok(());
        }
        if self.settings.dry_run || matches!(step, Step::Spare | Step::Refuse) {
            self.say_once(node, step).await;
            return Ok(());
        }
        match step {
            Step::Mark => self.mark(node).await?,
            Step::Taint => {
                self.taint(node).await?;
                self.say(node, step).await;
                return self.clear(node).await;
            }
            Step::DeletePods => return self.clear(node).await,
            Step::Return => {
                // It may have cleaned up before its pods were deleted. Their mounts do not work any more.
                if self.delete_running_pods(&name).await? > 0 {
                    self.say_once(node, Step::DeletePods).await;
                    return Ok(());
                }
                self.unmark(node).await?;
                self.cleared.remove(&name);
                self.tolerating.remove(&name);
            }
            Step::Spare | Step::Refuse => {}
        }
        self.say(node, step).await;
        Ok(())
    }

    /// Deletes the pods of a node that has the taint. Repeated until none is left: a finalizer can keep a pod.
    async fn clear(&mut self, node: &Node) -> Result<()> {
        let name = node.name_any();
        if self.delete_pods(&name).await? == 0 {
            self.cleared.insert(name);
        } else {
            self.say_once(node, Step::DeletePods).await;
        }
        Ok(())
    }

    /// As [`Self::say`], unless it was the last step that was said of the node.
    async fn say_once(&mut self, node: &Node, step: Step) {
        if self.said.insert(node.name_any(), step) != Some(step) {
            self.say(node, step).await;
        }
    }

    /// Writes an event about a node, and a line of the log.
    async fn say(&self, node: &Node, step: Step) {
        let Remediation { timeout, limit, dry_run } = self.settings;
        let silent =
            format!("neither kubelet nor cleat has renewed its Lease for {} s", timeout.as_secs());
        let (reason, text) = match step {
            Step::Mark => {
                ("NodeLost", format!("{silent}: its volumes are fenced, then its pods are deleted"))
            }
            Step::Spare => (
                "NodeInMaintenance",
                format!("{silent}: nothing is done, because of {MAINTENANCE}"),
            ),
            Step::Refuse => (
                "TooManyNodesSilent",
                format!(
                    "{silent}: nothing is done, because more than {limit} nodes are silent or lost \
                     (--remediation-limit); check the network"
                ),
            ),
            Step::Taint => {
                ("OutOfService", "its volumes are fenced: it gets the out-of-service taint".into())
            }
            Step::DeletePods => ("PodsDeleted", "its pods with volumes are deleted".into()),
            Step::Return => {
                ("NodeReturned", "it works again, and has cleaned up: it is in service".into())
            }
        };
        // An event with the reason of an earlier one is counted there, and its text is lost.
        let (reason, text) = match dry_run {
            true => (format!("DryRun{reason}"), format!("dry run, nothing is changed: {text}")),
            false => (reason.to_owned(), text),
        };
        let type_ = match step {
            Step::Return | Step::Spare => EventType::Normal,
            Step::Mark | Step::Refuse | Step::Taint | Step::DeletePods => EventType::Warning,
        };
        tracing::warn!(node = node.name_any(), "{text}");
        self.cluster.events.publish_about(&node.object_ref(&()), type_, &reason, text).await;
    }
}

#[cfg(test)]
mod tests;
