//! A node fails, and the controller that takes its volume is killed in the middle.

use std::time::Instant;

use serde_json::Value;
use test_kit::control_plane::NAMESPACE;

use crate::cluster::{Kind, run_on};
use crate::fail_over::{FailOver, Fault, LIMIT, play};
use crate::timeline::{
    is_attachment, is_being_deleted, is_fenced, is_lost, is_out_of_service, is_revoked,
};
use crate::writer::Writer;

/// A step of a fail-over, and whether an event and its object show it. The last argument is the pod on the failed node.
type Step = (&'static str, fn(&str, &Value, &Writer) -> bool);

/// Each round kills the controller when the next one of these steps is visible. A few rounds reach different parts of the
/// fail-over.
const STEPS: [Step; 7] = [
    ("the node is fenced", |_, object, failed| is_fenced(object, &failed.node)),
    ("the pod is deleted", |event, object, failed| {
        object["metadata"]["uid"] == failed.uid && is_being_deleted(event, object)
    }),
    ("the node is lost", |_, object, failed| is_lost(object, &failed.node)),
    ("the volume is to be attached to the other node", |event, object, failed| {
        is_attachment(object, failed.other_node())
            && !is_being_deleted(event, object)
            && object["status"]["attached"] != true
    }),
    ("the grant is revoked", |_, object, failed| is_revoked(object, &failed.node)),
    ("the volume is to be detached", |event, object, failed| {
        is_attachment(object, &failed.node) && is_being_deleted(event, object)
    }),
    ("the node is out of service", |_, object, failed| is_out_of_service(object, &failed.node)),
];

/// Kills the controller on the node that works. It leads: the other one is on the node that has failed.
fn kill(fail_over: &FailOver<'_>, round: usize) {
    let failed = &fail_over.writer;
    let (step, is_reached) = STEPS[round % STEPS.len()];
    let reached = |event: &str, object: &Value| is_reached(event, object, failed);
    let _ = fail_over.timeline.when(step, fail_over.begin, LIMIT, reached);
    let other = failed.other_node();
    fail_over.cluster.machine(other).run("pkill -KILL -f '^/usr/bin/cleat controller '");
    println!("figures: the controller on {other} is killed when {step}");
}

/// Deletes the pod of the controller that was killed: kubelet would start its container later in each round.
fn replace(fail_over: &FailOver<'_>, _: usize) {
    let begin = Instant::now();
    let field = format!("--field-selector=spec.nodeName={}", fail_over.writer.node);
    let label = "--selector=app.kubernetes.io/component=controller";
    fail_over.cluster.kubectl(&["delete", "pod", "-n", NAMESPACE, label, &field]);
    fail_over.cluster.rolled_out("deployment/cleat-controller");
    println!("figures: a new controller is ready after {:.1} s", begin.elapsed().as_secs_f64());
}

#[test]
fn a_controller_that_is_killed_in_the_middle_is_continued_by_another_one() {
    run_on(Kind::TwoNodes, |cluster| {
        play(cluster, "Frozen, controller killed", Fault::Frozen, &kill, &replace);
    });
}
