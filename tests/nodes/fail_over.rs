//! A node fails while a StatefulSet of it writes to an RBD image: the volume and the pod move to the other node by
//! themselves, and no write of the failed node comes late when it returns.
//!
//! `CLEAT_TEST_FAIL_OVERS` is the number of rounds of each kind (default 2). The pod moves from one node to the other and
//! back. With a number above 1, each round begins when both controllers have run for a while, as in a cluster where failures are
//! rare.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::{CLAIM, Cluster, Kind, POD, is_true, run_on, wait};
use crate::demo::{is_shown, say, show};
use crate::figures::{Figures, Parts};
use crate::slow::while_slow;
use crate::timeline::{Timeline, is_attachment, is_fenced, is_lost, is_mapped, is_out_of_service};
use crate::writer::{
    self, Record, WRITER, WRITER_CLAIM, WRITER_POD, Writer, records, records_of_image, start_of,
};

/// The limit for all parts. A busy host takes several times as long as a quiet one.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// The Deployment of the controllers.
const CONTROLLER: &str = "deployment/cleat-controller";

/// The Lease of the controller that leads.
const LEASE: &str = "controller-cleat.csi.storage";

/// What happens to a node.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// Its processors and its clocks stop.
    Frozen,
    /// It reaches neither the API server nor the storage.
    Unplugged,
    /// It does not reach the API server, and writes to the storage.
    NoApiServer,
}

impl Fault {
    pub(crate) fn begin(self, cluster: &Cluster, node: &str) {
        let machine = cluster.machine(node);
        match self {
            Self::Frozen => machine.freeze(),
            Self::Unplugged => machine.set_link(false),
            Self::NoApiServer => drop(machine.run(&filter("-I", cluster))),
        }
    }

    pub(crate) fn end(self, cluster: &Cluster, node: &str) {
        let machine = cluster.machine(node);
        match self {
            Self::Frozen => machine.thaw(),
            Self::Unplugged => machine.set_link(true),
            Self::NoApiServer => drop(machine.run(&filter("-D", cluster))),
        }
    }

    /// Returns whether a write of the node certainly reaches the fence before its pod is ended. With a cut network, the pod
    /// may end while its last write still waits for the storage.
    fn reaches_the_fence(self) -> bool {
        !matches!(self, Self::Unplugged)
    }
}

/// Returns the command that drops what the node and its pods send to the API server.
fn filter(action: &str, cluster: &Cluster) -> String {
    let rule = |chain: &str| {
        format!("iptables {action} {chain} -p tcp --dport {} -j DROP", cluster.api_port())
    };
    format!("{} && {}", rule("OUTPUT"), rule("FORWARD"))
}

/// How long both controllers have run before a round. A candidate that has just started does not know yet for how long a
/// node has been silent.
const SETTLED: Duration = Duration::from_secs(20);

/// Returns the number of rounds of each kind, if it is given.
fn given_rounds() -> Option<usize> {
    std::env::var("CLEAT_TEST_FAIL_OVERS").ok().map(|rounds| rounds.parse().unwrap())
}

/// Returns the number of rounds of each kind.
pub(crate) fn rounds() -> usize {
    given_rounds().unwrap_or(2)
}

/// Waits until both controllers have run for a while.
fn settle(cluster: &Cluster) {
    cluster.rolled_out(CONTROLLER);
    std::thread::sleep(SETTLED);
}

/// A StatefulSet, and which records were written on which node.
pub(crate) struct FailOver<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) timeline: Timeline,
    pub(crate) writer: Writer,
    /// When the last fault began.
    pub(crate) begin: Instant,
    /// The pods before this one, each with the number of its last record.
    ended: Vec<(Writer, usize)>,
}

impl<'a> FailOver<'a> {
    /// Creates the StatefulSet, and waits until it writes. Prints what changes if that is wanted.
    pub(crate) fn new(cluster: &'a Cluster, is_printed: bool) -> Self {
        say(
            "a StatefulSet is created: its pod writes numbered records to an RBD image. From now on, each change of a \
             node, a pod, a VolumeAttachment or a VolumeGrant is printed with its time",
        );
        let timeline = Timeline::start(cluster, is_printed);
        writer::create(cluster);
        let writer = Writer::next(cluster, None);
        writer.goes_on(cluster);
        Self { cluster, timeline, writer, begin: Instant::now(), ended: Vec::new() }
    }

    /// Begins a fault of the node of the pod.
    pub(crate) fn fail(&mut self, fault: Fault) {
        self.begin = Instant::now();
        fault.begin(self.cluster, &self.writer.node);
    }

    /// Waits for the steps of node remediation after the last fault. Returns when each part ended.
    fn remediated(&self) -> Vec<(&'static str, Instant)> {
        let failed = self.writer.node.as_str();
        let when = |what: &str, condition: &dyn Fn(&str, &Value) -> bool| {
            self.timeline.when(what, self.begin, LIMIT, condition)
        };
        let detected = when("the node is lost", &|_, object| is_lost(object, failed));
        let fenced = when("it is fenced", &|_, object| is_fenced(object, failed));
        when("it is out of service", &|_, object| is_out_of_service(object, failed));
        vec![("detection", detected), ("fencing", fenced)]
    }

    /// Waits for the other steps of a fail-over, and until the next pod writes. `parts` are those before them, with their
    /// ends. Returns the seconds of each part. The writer is the next pod then.
    pub(crate) fn move_on(&mut self, mut parts: Vec<(&'static str, Instant)>) -> Parts {
        let (from, begin) = (self.writer.clone(), self.begin);
        let (cluster, timeline, other) = (self.cluster, &self.timeline, from.other_node());
        let when = |what: &str, condition: &dyn Fn(&str, &Value) -> bool| {
            timeline.when(what, begin, LIMIT, condition)
        };
        let deleted = when("its pod is deleted", &|event, object| {
            event == "DELETED" && object["metadata"]["uid"] == from.uid
        });
        let attached = when("the volume is attached", &|_, object| {
            is_attachment(object, other) && object["status"]["attached"] == true
        });
        let mapped = when("it is mapped", &|_, object| is_mapped(object, other));
        let next = Writer::next(cluster, Some(&from));
        assert_eq!(next.node, other);
        next.goes_on(cluster);
        let started = start_of(cluster.machine(other));
        let all = records(cluster);
        let first =
            all.iter().position(|record| record.node == other && started + record.uptime > begin);
        let first = first.expect("the next pod has written");
        let written = started + all[first].uptime;
        self.ended.push((from, first));
        self.writer = next;
        parts.extend([
            ("deletion", deleted),
            ("attach", attached),
            ("map", mapped),
            ("mount and first write", written),
        ]);
        Parts::new(begin, &parts)
    }

    /// Waits until the node that has failed is in service again: it has cleaned up without a reboot.
    pub(crate) fn returns(&self) {
        let (ended, _) = self.ended.last().expect("a node has failed");
        let (node, cluster) = (ended.node.as_str(), self.cluster);
        cluster.until("node", node, "is in service again", |object| {
            is_true(object, "Ready") && !is_lost(object, node) && !is_out_of_service(object, node)
        });
        for grant in cluster.list("volumegrant") {
            assert!(!is_fenced(&grant, node), "{grant}");
        }
        wait("nothing is left of the volume on the failed node", || {
            let left =
                "cat /sys/block/nbd*/pid 2>/dev/null; grep -E '^/dev/nbd' /proc/mounts; true";
            cluster.machine(node).run(left).is_empty().then_some(())
        });
    }

    /// Checks what the pods have noted, and the content of the volume. Returns the number of records.
    pub(crate) fn check(&self) -> usize {
        let all = records(self.cluster);
        self.check_content(&all);
        for (number, record) in (1..).zip(&all) {
            assert_eq!(record.number, number, "a record was lost or overwritten");
        }
        let mut begin = 0;
        for (writer, end) in &self.ended {
            let (durable, failed) = writer.notes(self.cluster);
            let late = durable.iter().filter(|number| **number > *end).count();
            println!(
                "figures: {}: {} records, {failed} writes failed, {late} late writes",
                writer.node,
                end - begin
            );
            assert_eq!(late, 0, "writes of a fenced node were acknowledged");
            // The last record can be in the volume without the note that it is durable.
            let numbers: Vec<usize> = (begin + 1..=*end).collect();
            let noted = numbers.len().min(durable.len());
            assert!(numbers.len() - noted <= 1 && numbers[..noted] == durable, "{durable:?}");
            begin = *end;
        }
        all.len()
    }

    /// Returns how many writes of the pod that ran on the failed node have failed.
    fn failed_writes(&self) -> usize {
        let (ended, _) = self.ended.last().expect("a node has failed");
        ended.notes(self.cluster).1
    }

    /// Checks that each record is of the pod that was to write it.
    fn check_content(&self, records: &[Record]) {
        for record in records {
            let ended = self.ended.iter().find(|(_, end)| record.number <= *end);
            let writer = ended.map_or(&self.writer, |(writer, _)| writer);
            assert_eq!(record.node, writer.node, "a late write: {record:?}");
        }
    }

    /// Removes everything, and checks the content of the image itself.
    pub(crate) fn end(self) {
        let cluster = self.cluster;
        let claim = cluster.get(CLAIM, WRITER_CLAIM).unwrap();
        let name = claim["spec"]["volumeName"].as_str().unwrap();
        let volume = cluster.get("persistentvolume", name).unwrap();
        let handle = volume["spec"]["csi"]["volumeHandle"].as_str().unwrap();
        let image = handle.rsplit('/').next().unwrap();
        cluster.delete("statefulset", WRITER);
        wait("the pod has ended", || cluster.get(POD, WRITER_POD).is_none().then_some(()));
        wait("the volume is detached", || {
            cluster.list("volumeattachment").is_empty().then_some(())
        });
        let records = records_of_image(cluster, image);
        assert!(!records.is_empty());
        self.check_content(&records);
        cluster.delete(CLAIM, WRITER_CLAIM);
        wait("the volume is deleted", || cluster.list("persistentvolume").is_empty().then_some(()));
    }
}

/// What a test does beside the fault of each round. It is called with the number of the round.
pub(crate) type Action = dyn Fn(&FailOver<'_>, usize) + Sync;

/// Plays rounds with a fault. `meanwhile` is called when the fault has begun, and `afterwards` when the node works again.
/// The figures are those of `kind`.
pub(crate) fn play(
    cluster: &Cluster,
    kind: &str,
    fault: Fault,
    meanwhile: &Action,
    afterwards: &Action,
) {
    let mut fail_over = FailOver::new(cluster, is_shown());
    let mut figures = Figures::default();
    for round in 0..rounds() {
        if given_rounds().is_some_and(|rounds| rounds > 1) {
            settle(cluster);
        }
        let node = fail_over.writer.node.clone();
        let leads = leader(cluster) == node;
        show(|command| cluster.kubectl(command), WRITER_POD);
        say(&format!("node {node} fails: {kind}"));
        fail_over.fail(fault);
        meanwhile(&fail_over, round);
        let parts = fail_over.move_on(fail_over.remediated());
        parts.print(&format!("round {round}, {kind}, node {node}"));
        figures.add(if leads { "the node that failed" } else { "the other node" }, parts);
        show(|command| cluster.kubectl(command), WRITER_POD);
        say(&format!(
            "node {node} works again, and does not know of all this: its pod still runs, and writes"
        ));
        fault.end(cluster, &node);
        let ended = Instant::now();
        fail_over.returns();
        let seconds = ended.elapsed().as_secs_f64();
        println!("figures: node {node} is in service after {seconds:.1} s");
        fail_over.writer.goes_on(cluster);
        afterwards(&fail_over, round);
        say(
            "each record must have its number, and be of the node that was to write it: a late write would replace one",
        );
        println!("figures: {} records", fail_over.check());
        let has_failed = fail_over.failed_writes() > 0;
        assert!(has_failed || !fault.reaches_the_fence(), "no write of {node} reached the fence");
        show(|command| cluster.kubectl(command), WRITER_POD);
    }
    figures.print(kind);
    say("everything is removed, and the image itself is searched for late writes");
    fail_over.end();
}

/// Plays rounds with a fault only.
fn rounds_of(fault: Fault) {
    run_on(Kind::TwoNodes, |cluster| {
        play(cluster, &format!("{fault:?}"), fault, &|_, _| {}, &|_, _| {});
    });
}

/// Waits until a controller leads, and returns its node.
fn leader(cluster: &Cluster) -> String {
    wait("a controller leads", || {
        let leases = cluster.list("lease");
        let lease = leases.iter().find(|lease| lease["metadata"]["name"] == LEASE)?;
        // The name of the pod and a number of the process.
        let (holder, _) = lease["spec"]["holderIdentity"].as_str()?.rsplit_once('_')?;
        let pods = cluster.list(POD);
        let pod = pods.iter().find(|pod| pod["metadata"]["name"] == holder)?;
        pod["spec"]["nodeName"].as_str().map(str::to_owned)
    })
}

#[test]
fn a_frozen_node_loses_its_volume_and_writes_nothing_when_it_is_thawed() {
    rounds_of(Fault::Frozen);
}

#[test]
fn a_node_without_network_loses_its_volume_and_writes_nothing_when_it_is_back() {
    rounds_of(Fault::Unplugged);
}

#[test]
fn a_node_that_only_the_storage_hears_is_fenced_while_it_writes() {
    rounds_of(Fault::NoApiServer);
}

#[test]
fn slow_storage_delays_the_fail_over_of_a_frozen_node() {
    run_on(Kind::TwoNodes, |cluster| {
        while_slow(cluster.ceph(), || {
            play(cluster, "Frozen, slow storage", Fault::Frozen, &|_, _| {}, &|_, _| {});
        });
    });
}
