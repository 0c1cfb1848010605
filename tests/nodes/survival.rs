//! Failures after which a volume stays where it is: the node still works.

use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Kind, is_true, run_on, wait};
use crate::fail_over::FailOver;

/// For how long nothing may be taken over. Remediation waits for 15 s.
const WATCHED: Duration = Duration::from_secs(45);

/// Checks that the node keeps its volume while `failure` lasts, and that no write fails.
fn stays(failure: impl FnOnce(&Cluster, &str) + Send, repair: impl FnOnce(&Cluster, &str) + Send) {
    run_on(Kind::TwoNodes, |cluster| {
        let fail_over = FailOver::new(cluster, false);
        let node = fail_over.writer.node.as_str();
        let begin = Instant::now();
        failure(cluster, node);
        while begin.elapsed() < WATCHED {
            fail_over.writer.goes_on(cluster);
        }
        assert!(!fail_over.timeline.was_lost(node, begin), "the node was taken for lost");
        repair(cluster, node);
        fail_over.writer.goes_on(cluster);
        let (_, failed) = fail_over.writer.notes(cluster);
        assert_eq!(failed, 0, "writes have failed");
        println!("figures: {} records", fail_over.check());
        fail_over.end();
    });
}

#[test]
fn a_node_without_kubelet_keeps_its_volume_because_its_agent_works() {
    let kill = |cluster: &Cluster, node: &str| {
        cluster.machine(node).run("kill -KILL $(cat /run/kubelet.pid)");
    };
    stays(kill, |cluster, node| {
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
