//! The answers, from objects.

use std::collections::BTreeMap;

use cleat_grants::object::Time;
use serde_json::{Value, json};

use super::*;
use crate::grant::VolumeGrant;
use crate::objects::VolumeAttachment;

const DRIVER: &str = "d.test";

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A claim that is bound to a volume, which a pod on node b uses and which needs an attachment.
fn facts() -> Facts<'static> {
    let pod = json!({
        "metadata": { "name": "p", "namespace": "n" },
        "spec": { "nodeName": "b", "containers": [] },
        "status": { "phase": "Pending" },
    });
    let csi = json!({ "driver": DRIVER, "volumeHandle": "pool/v" });
    let ready = |name: &str| {
        object(json!({
            "metadata": { "name": name },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        }))
    };
    Facts {
        driver: DRIVER,
        now: Time(1_000_000),
        claim: object(json!({
            "metadata": { "name": "c", "namespace": "n" },
            "spec": { "storageClassName": "s", "volumeName": "pv" },
            "status": { "phase": "Bound" },
        })),
        class: Some(object(json!({ "metadata": { "name": "s" }, "provisioner": DRIVER }))),
        volume: Some(object(json!({ "metadata": { "name": "pv" }, "spec": { "csi": csi } }))),
        csi_driver: Some(object(json!({ "metadata": { "name": DRIVER }, "spec": {} }))),
        registered: vec!["b".to_owned()],
        warnings: BTreeMap::new(),
        attachments: vec![attachment(true)],
        grant: Some(grant(json!([condition("True", "Mapped", "")]))),
        pods: vec![object(pod)],
        nodes: vec![ready("a"), ready("b")],
    }
}

fn attachment(attached: bool) -> VolumeAttachment {
    object(json!({
        "metadata": { "name": "va" },
        "spec": {
            "attacher": DRIVER, "nodeName": "b", "source": { "persistentVolumeName": "pv" },
        },
        "status": { "attached": attached },
    }))
}

fn condition(status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": "SafeToMount", "status": status, "reason": reason, "message": message,
        "generation": 2, "lastTransitionTime": "1970-01-12T00:00:00Z",
    })
}

fn grant(conditions: Value) -> VolumeGrant {
    let holder = json!({
        "node": "b", "mode": "ReadWrite", "generation": 2, "since": "1970-01-12T13:00:00Z",
    });
    object(json!({
        "metadata": { "name": "g" },
        "spec": { "generation": 2, "holders": [holder] },
        "status": { "nodes": [{ "node": "b", "generation": 2, "conditions": conditions }] },
    }))
}

/// Asserts that the answer contains `expected` after a change of the facts.
fn check(expected: &str, change: impl FnOnce(&mut Facts<'_>)) -> Why {
    let mut facts = facts();
    change(&mut facts);
    let why = answer(&facts);
    assert!(why.answer.contains(expected), "{expected:?} is not in {:?}", why.answer);
    assert!(why.answer.starts_with("n/c waits"), "{}", why.answer);
    assert_eq!(why.waits, why.action.is_some(), "{}", why.answer);
    why
}

#[test]
fn each_place_where_the_way_of_a_claim_stops_has_an_answer() {
    check("kubelet has not started pod p", |_| {});
    check("waits for nothing: the pods", |f| {
        f.pods[0].status = object(json!({ "phase": "Running" }))
    });
    check("no pod uses it", |f| f.pods.clear());
    check("is not one of d.test", |f| {
        f.volume.as_mut().unwrap().spec.as_mut().unwrap().csi.as_mut().unwrap().driver =
            "other".to_owned();
    });
    check("there is no VolumeAttachment for node b", |f| f.attachments.clear());
    check("the controller has not attached", |f| {
        f.attachments = vec![attachment(false)];
    });
    check("cannot be attached to node b: no such pool", |f| {
        f.attachments = vec![attachment(false)];
        let error = json!({ "message": "no such pool" });
        f.attachments[0].status.as_mut().unwrap().attach_error = object(error);
    });
    check("reports that the volume cannot be mounted: no read", |f| {
        f.grant = Some(grant(json!([condition("False", "Claiming", "no read")])));
    });
    check("has had the grant for 10 min, and kubelet has not staged", |f| {
        f.grant = Some(grant(json!([])));
        f.now = Time(997_200 + 600);
    });
    check("node b does not exist", |f| f.nodes.clear());
    check("pod p has no node", |f| f.pods[0].spec.as_mut().unwrap().node_name = None);
    check("node a has the volume, and node b does not", |f| {
        f.grant.as_mut().unwrap().spec.holders[0].node = "a".to_owned();
        f.attachments = vec![attachment(false)];
    });
    check("the driver is not registered on node b", |f| f.registered.clear());
    check("node b was fenced 5 min ago and has not cleaned up", |f| {
        let grant = f.grant.as_mut().unwrap();
        grant.spec.holders.clear();
        grant.status.grant.fences.push(fence(f.now));
        f.attachments = vec![attachment(false)];
    });
    check("not started pod p: no space", |f| {
        f.pods[0].metadata.uid = Some("u".to_owned());
        f.warnings.insert("u".to_owned(), "no space".to_owned());
    });
    check("not ready since", |f| {
        let condition = json!({
            "type": "Ready", "status": "Unknown", "lastTransitionTime": "1970-01-12T00:00:00Z",
        });
        f.nodes[1] = object(json!({
            "metadata": { "name": "b" }, "status": { "conditions": [condition] },
        }));
    });
}

#[test]
fn a_claim_without_a_volume_waits_for_its_class_a_pod_or_the_provisioner() {
    let unbound = |f: &mut Facts<'_>| {
        f.volume = None;
        f.claim.status = object(json!({ "phase": "Pending" }));
    };
    check("csi-provisioner has not created its volume", unbound);
    check("its StorageClass s does not exist", |f| {
        unbound(f);
        f.class = None;
    });
    check("the driver d.test is not installed", |f| {
        unbound(f);
        f.csi_driver = None;
    });
    check("it is being deleted", |f| {
        unbound(f);
        f.claim.metadata.deletion_timestamp = Some(object(json!("2030-01-01T00:00:00Z")));
    });
    check("is of the provisioner other", |f| {
        unbound(f);
        f.class.as_mut().unwrap().provisioner = "other".to_owned();
    });
    check("binds it when a pod uses it", |f| {
        unbound(f);
        f.class.as_mut().unwrap().volume_binding_mode = Some("WaitForFirstConsumer".to_owned());
        f.pods.clear();
    });
    check("its PersistentVolume was deleted", |f| {
        f.volume = None;
        f.claim.status = object(json!({ "phase": "Lost" }));
    });
}

#[test]
fn what_the_grant_waits_for_is_shown_with_its_repair_and_the_state_of_the_node() {
    let why = check("node a must release the volume; it is not known to be lost, for 2 min", |f| {
        let until = cleat_grants::controller::Until::ReleasedOrLost;
        let waiting = crate::grant::Waiting::new("a", until, Time(f.now.0 - 120));
        f.grant.as_mut().unwrap().status.waiting = vec![waiting];
        f.attachments = vec![attachment(false)];
    });
    assert!(why.action.unwrap().contains("kubectl taint node a"));
    let kinds: Vec<&str> = why.steps.iter().map(|step| step.kind).collect();
    assert_eq!(
        kinds,
        [
            "PersistentVolumeClaim",
            "StorageClass",
            "PersistentVolume",
            "Pod",
            "VolumeAttachment",
            "VolumeGrant",
            "Node",
            "Node"
        ]
    );
}

/// A pod runs until its kubelet says otherwise, which a lost node does not do.
#[test]
fn a_running_pod_waits_if_its_node_is_lost_or_the_volume_was_taken_from_it() {
    let running = |f: &mut Facts<'_>| f.pods[0].status = object(json!({ "phase": "Running" }));
    check("node b does not exist", |f| {
        running(f);
        f.nodes.clear();
    });
    check("node b must release the volume, for", |f| {
        running(f);
        f.grant.as_mut().unwrap().spec.holders[0].revoked = true;
    });
    check("node b reports that it has lost the volume: gone", |f| {
        running(f);
        f.grant = Some(grant(json!([condition("False", "Lost", "gone")])));
    });
    let why =
        check("pod p runs, and node b has not staged the volume with its grant of gen", |f| {
            running(f);
            f.grant = Some(grant(json!([])));
        });
    assert!(why.action.unwrap().starts_with("delete pod p"));
    check("grant of generation 3", |f| {
        running(f);
        f.grant.as_mut().unwrap().spec.holders[0].generation.0 = 3;
    });
    let why = check("node b was fenced", |f| {
        running(f);
        let grant = f.grant.as_mut().unwrap();
        grant.spec.holders.clear();
        grant.status.grant.fences.push(fence(f.now));
    });
    let record = why.steps.last().unwrap();
    assert_eq!((record.kind, &*record.name), ("StorageRecord", "client.1"));
    assert_eq!(record.state, "generation 2 of node b fenced 5 min ago");
}

fn fence(now: Time) -> cleat_grants::object::FenceEntry {
    cleat_grants::object::FenceEntry {
        node: "b".to_owned(),
        generation: cleat_grants::object::Generation(2),
        client: Some("client.1".to_owned()),
        proof: String::new(),
        time: Time(now.0 - 300),
    }
}
