//! A fail-over with the settings of Kubernetes and csi-attacher that users have without node remediation: a person sets the
//! taint when the node is not ready. `make comparison-fail-over` runs it.

use std::time::Instant;

use serde_json::Value;

use crate::cluster::{Kind, run_on, wait};
use crate::fail_over::{FailOver, Fault, LIMIT, rounds};
use crate::figures::Figures;
use crate::timeline::{is_fenced, is_not_ready};

/// The taint of node remediation.
const TAINT: &str = "node.kubernetes.io/out-of-service";

/// Waits until the node is not ready, and sets the taint. Returns when each part ended.
fn taint_by_hand(fail_over: &FailOver<'_>) -> Vec<(&'static str, Instant)> {
    let node = fail_over.writer.node.as_str();
    let not_ready =
        fail_over.timeline.when("the node is not ready", fail_over.begin, LIMIT, |_, object| {
            is_not_ready(object, node)
        });
    let taint = format!("{TAINT}=nodeshutdown:NoExecute");
    fail_over.cluster.kubectl(&["taint", "node", node, &taint]);
    vec![("detection", not_ready), ("taint by hand", Instant::now())]
}

#[test]
fn a_frozen_node_with_a_taint_by_hand() {
    run_on(Kind::Stock, |cluster| {
        let mut fail_over = FailOver::new(cluster, false);
        let mut figures = Figures::default();
        for round in 0..rounds() {
            let node = fail_over.writer.node.clone();
            fail_over.fail(Fault::Frozen);
            let parts = fail_over.move_on(taint_by_hand(&fail_over));
            parts.print(&format!("round {round}, stock settings, node {node}"));
            figures.add("any node", parts);
            Fault::Frozen.end(cluster, &node);
            cluster.kubectl(&["taint", "node", &node, &format!("{TAINT}-")]);
            wait("the node has cleaned up", || {
                let is_fenced = |grant: &Value| is_fenced(grant, &node);
                (!cluster.list("volumegrant").iter().any(is_fenced)).then_some(())
            });
            fail_over.returns();
            fail_over.writer.goes_on(cluster);
            println!("figures: {} records", fail_over.check());
        }
        figures.print("stock settings");
        fail_over.end();
    });
}
