//! Failures after which a volume stays where it is: the node still works.

use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Kind, is_true, run_on, wait};
use crate::fail_over::FailOver;
use crate::slow::while_slow;

/// For how long nothing may be taken over. Remediation waits for 15 s, and Kubernetes for 50 s until the node is not Ready.
const WATCHED: Duration = Duration::from_secs(90);

/// Checks that the node keeps its volume while `failure` lasts, and that no write fails.
fn stays(failure: impl FnOnce(&Cluster, &str) + Send, repair: impl FnOnce(&Cluster, &str) + Send) {
    run_on(Kind::TwoNodes, |cluster| {
        let fail_over = FailOver::new(cluster, false);
        let node = fail_over.writer.node.as_str();
        let begin = Instant::now();
        failure(cluster, node);
        stays_since(&fail_over, begin);
        repair(cluster, node);
        ends_without_failed_writes(fail_over);
    });
}

/// Checks that the pod writes for the whole time since `begin`, and that its node is not taken for lost.
fn stays_since(fail_over: &FailOver<'_>, begin: Instant) {
    while begin.elapsed() < WATCHED {
        fail_over.writer.goes_on(fail_over.cluster);
    }
    let was_lost = fail_over.timeline.was_lost(&fail_over.writer.node, begin);
    assert!(!was_lost, "the node was taken for lost");
}

fn ends_without_failed_writes(fail_over: FailOver<'_>) {
    fail_over.writer.goes_on(fail_over.cluster);
    let (_, failed) = fail_over.writer.notes(fail_over.cluster);
    assert_eq!(failed, 0, "writes have failed");
    println!("figures: {} records", fail_over.check());
    fail_over.end();
}

#[test]
fn a_node_without_kubelet_keeps_its_volume_because_its_agent_works() {
    let kill = |cluster: &Cluster, node: &str| {
        cluster.machine(node).run("kill -KILL $(cat /run/kubelet.pid)");
    };
    stays(kill, |cluster, node| {
        let known = cluster.get("node", node).unwrap();
        assert!(!is_true(&known, "Ready"), "the node was not watched for long enough");
        cluster.machine(node).run("/payload/service kubelet");
        cluster.until("node", node, "is Ready", |object| is_true(object, "Ready"));
    });
}

#[test]
fn a_daemon_that_is_killed_costs_no_write() {
    let pid = "pgrep -f '^/usr/bin/cleat node '";
    let kill = |cluster: &Cluster, node: &str| {
        cluster.machine(node).run(&format!("kill -KILL $({pid})"));
    };
    stays(kill, |cluster, node| {
        wait("the daemon runs again", || (cluster.machine(node).try_run(pid).0 == 0).then_some(()));
        cluster.rolled_out("daemonset/cleat-node");
    });
}

#[test]
fn a_node_keeps_its_volume_while_the_storage_is_slow() {
    run_on(Kind::TwoNodes, |cluster| {
        let fail_over = FailOver::new(cluster, false);
        while_slow(cluster.ceph(), || stays_since(&fail_over, Instant::now()));
        ends_without_failed_writes(fail_over);
    });
}
