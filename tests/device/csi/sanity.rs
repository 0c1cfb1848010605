//! csi-sanity, the tests of CSI drivers that the Kubernetes project publishes, against the driver on a real kernel.

use std::path::Path;

use serde_json::{Value, json};
use test_kit::ceph::{ID, POOL};

use super::{KUBELET, Scene, VOLUMES};
use crate::fixture::shell;
use crate::rbd::cluster;

/// The program, in the payload.
pub(crate) const PROGRAM: &str = "csi-sanity";

/// The directory of the Go module that pins the program.
pub(crate) const MODULE: &str = "tests/csi-sanity";

/// The program's package.
pub(crate) const PACKAGE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity";

/// The number of specs of version 5.6.0. One of them is pending by its authors.
const SPECS: usize = 103;

/// Parts of the names of the specs that are skipped, because the driver does not announce what they need.
const SKIPPED: [&str; 5] = [
    // PUBLISH_READONLY.
    "already published but is incompatible",
    // Only with the option testnodevolumeattachlimit.
    "node max attach limit",
    // SNAPSHOT_ACCESSIBILITY_CONSTRAINTS.
    "creating a snapshot with accessibility requirements",
    // The service of group snapshots.
    "GroupController",
    "VolumeGroupSnapshot",
];

pub(crate) fn file_mount() {
    let directories = format!("directories = {{ default = \"{VOLUMES}\" }}");
    run(&Scene::with(&directories), "mount", "");
}

pub(crate) fn file_block() {
    let directories = format!("directories = {{ default = \"{VOLUMES}\" }}");
    run(&Scene::with(&directories), "block", "");
}

pub(crate) fn rbd_mount() {
    run(&with_client(), "mount", &parameters());
}

pub(crate) fn rbd_block() {
    run(&with_client(), "block", &parameters());
}

/// A daemon that also has a cluster, and a client for it.
fn with_client() -> Scene {
    with_cluster(json!({ "userID": ID, "keyring": cluster().keyring(ID) }))
}

/// A daemon that also has the cluster `test`, with the client in `entry`.
pub(super) fn with_cluster(mut entry: Value) -> Scene {
    const CLUSTERS: &str = "/tmp/clusters.json";
    let conf = cluster().conf();
    let monitors = shell(&format!("sed -n 's/^ *mon[ _]host *= *//p' {}", conf.display()));
    entry["clusterID"] = json!("test");
    entry["monitors"] = json!([monitors]);
    entry["pools"] = json!([POOL]);
    std::fs::write(CLUSTERS, json!([entry]).to_string()).expect("writing the clusters");
    Scene::with(&format!("clusters = \"{CLUSTERS}\"\ndirectories = {{ default = \"{VOLUMES}\" }}"))
}

/// The option with the parameters of RBD volumes.
fn parameters() -> String {
    const FILE: &str = "/tmp/parameters.yaml";
    let text = format!("clusterID: test\npool: {POOL}\n");
    std::fs::write(FILE, text).expect("writing the parameters");
    format!("--csi.testvolumeparameters={FILE}")
}

/// Runs all specs, and checks that each of them passes or is one of those that must be skipped.
fn run(scene: &Scene, access: &str, options: &str) {
    const REPORT: &str = "/tmp/csi-sanity.json";
    let log = format!("/out/csi-sanity-{access}.log");
    // The exit status is not needed: the report says what failed.
    shell(&format!(
        "rm -f {REPORT}; ./{PROGRAM} --csi.endpoint=unix:{KUBELET}/plugins/csi.test/csi.sock \
         --csi.mountdir={KUBELET}/sanity-mount --csi.stagingdir={KUBELET}/sanity-staging \
         --csi.testvolumesize={} --csi.testvolumeexpandsize={} --csi.testvolumeaccesstype={access} \
         --ginkgo.no-color --ginkgo.json-report={REPORT} {options} > {log} 2>&1 || true",
        64 << 20,
        128 << 20
    ));
    assert!(
        Path::new(REPORT).exists(),
        "csi-sanity did not run: {}",
        shell(&format!("tail -n 20 {log}"))
    );
    let report = std::fs::read(REPORT).expect("the report");
    let report: Value = serde_json::from_slice(&report).expect("the report is JSON");
    let specs: Vec<Spec> = report[0]["SpecReports"]
        .as_array()
        .expect("the specs")
        .iter()
        .filter(|spec| spec["LeafNodeType"] == "It")
        .map(Spec::of)
        .collect();
    let count = |state| specs.iter().filter(|spec| spec.state == state).count();
    let (passed, skipped, pending) = (count("passed"), count("skipped"), count("pending"));
    println!("figures: csi-sanity {access}: {passed} passed, {skipped} skipped, {pending} pending");
    for spec in specs.iter().filter(|spec| spec.state == "skipped") {
        println!("figures: skipped: {}: {}", spec.name, spec.failure);
    }
    let is_expected = |spec: &&Spec| match &*spec.state {
        "passed" | "pending" => true,
        "skipped" => SKIPPED.iter().any(|part| spec.name.contains(part)),
        _ => false,
    };
    let wrong: Vec<&Spec> = specs.iter().filter(|spec| !is_expected(spec)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!((specs.len(), pending), (SPECS, 1));
    scene.nothing_is_left();
}

/// What the report says about a spec.
#[derive(Debug)]
struct Spec {
    name: String,
    state: String,
    /// Why it failed or was skipped.
    failure: String,
}

impl Spec {
    fn of(report: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let containers = report["ContainerHierarchyTexts"].as_array().into_iter().flatten();
        let names = containers.chain([&report["LeafNodeText"]]).map(text);
        Self {
            name: names.collect::<Vec<_>>().join(" "),
            state: text(&report["State"]),
            failure: text(&report["Failure"]["Message"]),
        }
    }
}
