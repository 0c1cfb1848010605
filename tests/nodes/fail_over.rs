//! A node fails while a StatefulSet of it writes to an RBD image: the volume and the pod move to the other node by
//! themselves, and no write of the failed node comes late when it returns.
//!
//! `CLEAT_TEST_FAIL_OVERS` is the number of rounds of each kind (default 2). The pod moves from one node to the other and
//! back.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::{CLAIM, Cluster, Kind, POD, is_true, run_on, wait};
use crate::demo::{is_shown, say, show};
use crate::timeline::{Timeline, is_attachment, is_fenced, is_lost, is_mapped, is_out_of_service};
use crate::writer::{
    self, Record, WRITER, WRITER_CLAIM, WRITER_POD, Writer, records, records_of_image, start_of,
};

/// The limit for each part. A busy host takes several times as long as a quiet one.
const LIMIT: Duration = Duration::from_secs(300);

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
}

/// Returns the command that drops what the node and its pods send to the API server.
fn filter(action: &str, cluster: &Cluster) -> String {
    let rule = |chain: &str| {
        format!("iptables {action} {chain} -p tcp --dport {} -j DROP", cluster.api_port())
    };
    format!("{} && {}", rule("OUTPUT"), rule("FORWARD"))
}

/// Returns the number of rounds of each kind.
fn rounds() -> usize {
    std::env::var("CLEAT_TEST_FAIL_OVERS").map_or(2, |rounds| rounds.parse().unwrap())
}

/// The seconds of the parts of one fail-over, in their order.
pub(crate) struct Parts(Vec<(&'static str, f64)>);

impl Parts {
    fn total(&self) -> f64 {
        self.0.iter().map(|(_, seconds)| seconds).sum()
    }

    pub(crate) fn print(&self, what: &str) {
        let parts: Vec<String> =
            self.0.iter().map(|(part, seconds)| format!("{part} {seconds:.1}")).collect();
        println!("figures: {what}: {:.1} s: {}", self.total(), parts.join(", "));
    }
}

/// A StatefulSet, and which records were written on which node.
pub(crate) struct FailOver<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) timeline: Timeline,
    pub(crate) writer: Writer,
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
        Self { cluster, timeline, writer, ended: Vec::new() }
    }

    /// Waits for the steps of a fail-over that began at `begin`, and until the next pod writes. Returns the seconds of
    /// each part. The writer is the next pod then.
    pub(crate) fn move_on(&mut self, begin: Instant) -> Parts {
        let from = self.writer.clone();
        let (failed, cluster, timeline) = (from.node.as_str(), self.cluster, &self.timeline);
        let other = if failed == "a" { "b" } else { "a" };
        let when = |what: &str, condition: &dyn Fn(&str, &Value) -> bool| {
            timeline.when(what, begin, LIMIT, condition)
        };
        let detected = when("the node is lost", &|_, object| is_lost(object, failed));
        let fenced = when("it is fenced", &|_, object| is_fenced(object, failed));
        when("it is out of service", &|_, object| is_out_of_service(object, failed));
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
        let parts = [
            ("detection", detected),
            ("fencing", fenced),
            ("deletion", deleted),
            ("attach", attached),
            ("map", mapped),
            ("mount and first write", written),
        ];
        let mut before = begin;
        Parts(
            parts
                .into_iter()
                .map(|(part, at)| {
                    let seconds = at.saturating_duration_since(before).as_secs_f64();
                    before = before.max(at);
                    (part, seconds)
                })
                .collect(),
        )
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

/// Plays rounds with a fault. `meanwhile` is called when the fault has begun, with the number of the round.
fn rounds_of(fault: Fault, meanwhile: impl Fn(&FailOver<'_>, usize) + Send) {
    run_on(Kind::TwoNodes, move |cluster| {
        let mut fail_over = FailOver::new(cluster, is_shown());
        let mut totals = Vec::new();
        for round in 0..rounds() {
            let node = fail_over.writer.node.clone();
            show(|command| cluster.kubectl(command), WRITER_POD);
            say(&format!("node {node} fails: {fault:?}"));
            let begin = Instant::now();
            fault.begin(cluster, &node);
            meanwhile(&fail_over, round);
            let parts = fail_over.move_on(begin);
            parts.print(&format!("round {round}, {fault:?} node {node}"));
            totals.push(parts.total());
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
            say(
                "each record must have its number, and be of the node that was to write it: a late write would replace one",
            );
            println!("figures: {} records", fail_over.check());
            show(|command| cluster.kubectl(command), WRITER_POD);
        }
        totals.sort_by(f64::total_cmp);
        let (count, worst) = (totals.len(), totals[totals.len() - 1]);
        let median = totals[count / 2];
        println!("figures: {fault:?}: {count} rounds, median {median:.1} s, worst {worst:.1} s");
        say("everything is removed, and the image itself is searched for late writes");
        fail_over.end();
    });
}

#[test]
fn a_frozen_node_loses_its_volume_and_writes_nothing_when_it_is_thawed() {
    rounds_of(Fault::Frozen, |_, _| {});
}

#[test]
fn a_node_without_network_loses_its_volume_and_writes_nothing_when_it_is_back() {
    rounds_of(Fault::Unplugged, |_, _| {});
}

#[test]
fn a_node_that_only_the_storage_hears_is_fenced_while_it_writes() {
    rounds_of(Fault::NoApiServer, |_, _| {});
}

/// The leader is killed when a step has become visible, one step a round.
#[test]
fn a_controller_that_is_killed_in_the_middle_is_continued_by_another_one() {
    rounds_of(Fault::Frozen, |fail_over, round| {
        let failed = fail_over.writer.node.as_str();
        let other = if failed == "a" { "b" } else { "a" };
        let step = ["marked", "fenced", "out of service"][round % 3];
        let is_reached = |object: &Value| match step {
            "marked" => is_lost(object, failed),
            "fenced" => is_fenced(object, failed),
            _ => is_out_of_service(object, failed),
        };
        let begin = Instant::now();
        let _ = fail_over.timeline.when(step, begin, LIMIT, |_, object| is_reached(object));
        fail_over.cluster.machine(other).run("pkill -KILL -f '^/usr/bin/cleat controller '");
        println!("figures: the controller on {other} is killed when node {failed} is {step}");
    });
}
