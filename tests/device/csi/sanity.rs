//! csi-sanity, the tests of CSI drivers that the Kubernetes project publishes, against the driver on a real kernel.

use std::path::Path;

use serde_json::{Value, json};
use test_kit::ceph::{ID, POOL};
use test_kit::csi_sanity::{self, ATTACH_LIMIT, ATTACH_LIMIT_OPTION, Chosen, PROGRAM};

use super::{KUBELET, Scene, VOLUMES};
use crate::fixture::{repeat, shell};
use crate::rbd::cluster;

/// Returns the section that limits the volumes of the node.
fn limits() -> String {
    format!("[limits]\nmappings = {ATTACH_LIMIT}")
}

pub(crate) fn file_mount() {
    run(&with_files(), "mount", Chosen::All, "");
}

pub(crate) fn file_block() {
    run(&with_files(), "block", Chosen::All, "");
}

/// The other specs take three minutes on an emulated processor. A campaign runs them here, and
/// `csi_sanity_of_the_controller_over_rbd` on the host.
pub(crate) fn rbd_mount() {
    let chosen = if repeat().is_some() { Chosen::All } else { Chosen::Node };
    run(&with_client(), "mount", chosen, &parameters());
}

pub(crate) fn rbd_block() {
    run(&with_client(), "block", Chosen::All, &parameters());
}

/// A daemon that has a directory.
fn with_files() -> Scene {
    Scene::with(&format!("directories = {{ default = \"{VOLUMES}\" }}\n{}", limits()))
}

/// A daemon that also has a cluster, and a client for it.
fn with_client() -> Scene {
    with_cluster(json!({ "userID": ID, "keyring": cluster().keyring(ID) }), &limits())
}

/// A daemon that also has the cluster `test`, with the client in `entry`, and with `more` sections of its configuration.
pub(super) fn with_cluster(mut entry: Value, more: &str) -> Scene {
    const CLUSTERS: &str = "/tmp/clusters.json";
    let conf = cluster().conf();
    let monitors = shell(&format!("sed -n 's/^ *mon[ _]host *= *//p' {}", conf.display()));
    entry["clusterID"] = json!("test");
    entry["monitors"] = json!([monitors]);
    entry["pools"] = json!([POOL]);
    std::fs::write(CLUSTERS, json!([entry]).to_string()).expect("writing the clusters");
    Scene::with(&format!(
        "clusters = \"{CLUSTERS}\"\ndirectories = {{ default = \"{VOLUMES}\" }}\n{more}"
    ))
}

/// The option with the parameters of RBD volumes.
fn parameters() -> String {
    const FILE: &str = "/tmp/parameters.yaml";
    let text = format!("clusterID: test\npool: {POOL}\n");
    std::fs::write(FILE, text).expect("writing the parameters");
    format!("--csi.testvolumeparameters={FILE}")
}

/// Runs the chosen specs and checks their results.
fn run(scene: &Scene, access: &str, chosen: Chosen, options: &str) {
    let has_groups = !options.is_empty();
    const REPORT: &str = "/tmp/csi-sanity.json";
    let log = format!("/out/csi-sanity-{access}.log");
    // The exit status is not needed: the report says what failed.
    shell(&format!(
        "rm -f {REPORT}; ./{PROGRAM} --csi.endpoint=unix:{KUBELET}/plugins/csi.test/csi.sock \
         --csi.mountdir={KUBELET}/sanity-mount --csi.stagingdir={KUBELET}/sanity-staging \
         {ATTACH_LIMIT_OPTION} --csi.testvolumesize={} --csi.testvolumeexpandsize={} --csi.testvolumeaccesstype={access} \
         --ginkgo.no-color --ginkgo.json-report={REPORT} {} {options} > {log} 2>&1 || true",
        64 << 20,
        128 << 20,
        chosen.option()
    ));
    assert!(
        Path::new(REPORT).exists(),
        "csi-sanity did not run: {}",
        shell(&format!("tail -n 20 {log}"))
    );
    csi_sanity::check(Path::new(REPORT), access, chosen, has_groups);
    scene.nothing_is_left();
}
