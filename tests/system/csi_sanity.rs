//! csi-sanity on a Ceph cluster and on its object store: the specs of all services except Node, which needs a kernel (tests/device).

use std::process::Command;

use cleat::backends::REGISTRY;
use cleat_backend::store::Page;
use cleat_csi::Driver;
use cleat_node::csi_config::CsiConfig;
use serde_json::{Value, json};
use test_kit::ceph::{BUCKET, ID, POOL, shared};
use test_kit::csi_sanity::{self, ATTACH_LIMIT, ATTACH_LIMIT_OPTION, Chosen};
use test_kit::node::Machine;
use test_kit::wait::wait_until;

#[test]
fn csi_sanity_of_the_controller_over_rbd() {
    let conf = std::fs::read_to_string(shared().conf()).unwrap();
    let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
    // Other tests use the pool at the same time.
    shared().rbd(&["namespace", "create", &format!("{POOL}/sanity")]).unwrap();
    let cluster = json!({
        "clusterID": "test", "monitors": [monitors], "userID": ID,
        "keyring": shared().keyring(ID), "pools": [format!("{POOL}/sanity")],
    });
    let parameters = format!("clusterID: test\npool: {POOL}\nradosNamespace: sanity\n");
    run("rbd, without a kernel", &cluster, &parameters, true);
    let left = shared().rbd(&["ls", &format!("{POOL}/sanity")]).unwrap();
    assert!(left.is_empty(), "left: {}", String::from_utf8_lossy(&left));
}

#[test]
fn csi_sanity_of_the_controller_over_objects() {
    let (endpoint, credentials) = shared().s3();
    let options = format!("endpoint=http://{endpoint}&credentials_file={}", credentials.display());
    let store = format!("s3://{BUCKET}/csi-sanity?{options}");
    let cluster = json!({ "clusterID": "test", "store": store });
    run("objects, without a kernel", &cluster, "clusterID: test\n", false);
    let page = Page { after: None, limit: 1, details: false };
    let left = REGISTRY.store(&store).unwrap().connect().unwrap().list(&page).unwrap();
    assert!(left.volumes.is_empty(), "{:?}", left.volumes);
}

/// Runs the specs over volumes of `cluster` with these parameters.
fn run(what: &str, cluster: &Value, parameters: &str, has_groups: bool) {
    let machine = Machine::new();
    let supervisor = machine.start();
    let (list, chosen) = (machine.path("clusters.json"), machine.path("parameters.yaml"));
    std::fs::write(&list, json!([cluster]).to_string()).unwrap();
    std::fs::write(&chosen, parameters).unwrap();
    let config = CsiConfig {
        enabled: true,
        controller: true,
        register: false,
        kubelet_dir: machine.path("kubelet"),
        socket: Some(machine.path("csi.sock")),
        clusters: list,
        directories: [("default".to_owned(), machine.directory.path().to_owned())].into(),
        ..CsiConfig::default()
    };
    let driver = Driver::new(config, "node".to_owned(), supervisor.executor(), ATTACH_LIMIT);
    supervisor.spawn(driver.with_controller(REGISTRY).serve());
    wait_until("the driver serves", || machine.path("csi.sock").exists());

    let report = machine.path("report.json");
    let output = Command::new(csi_sanity::program())
        .arg(format!("--csi.endpoint=unix:{}", machine.path("csi.sock").display()))
        .arg(format!("--csi.mountdir={}", machine.path("mount").display()))
        .arg(format!("--csi.stagingdir={}", machine.path("staging").display()))
        .arg(format!("--csi.testvolumeparameters={}", chosen.display()))
        .args([format!("--csi.testvolumesize={}", 64 << 20)])
        .args([format!("--csi.testvolumeexpandsize={}", 128 << 20)])
        .args([ATTACH_LIMIT_OPTION, "--ginkgo.no-color", &Chosen::Others.option()])
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .output()
        .unwrap();
    assert!(report.exists(), "csi-sanity did not run: {output:?}");
    csi_sanity::check(&report, what, Chosen::Others, has_groups);
}
