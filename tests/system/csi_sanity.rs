//! csi-sanity on a Ceph cluster: the specs of all services except Node, which needs a kernel (tests/device).

use std::process::Command;

use cleat::backends::REGISTRY;
use cleat_csi::Driver;
use cleat_node::csi_config::CsiConfig;
use serde_json::json;
use test_kit::ceph::{ID, POOL, shared};
use test_kit::csi_sanity::{self, ATTACH_LIMIT, ATTACH_LIMIT_OPTION, Chosen};
use test_kit::node::Machine;
use test_kit::wait::wait_until;

#[test]
fn csi_sanity_of_the_controller_over_rbd() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let conf = std::fs::read_to_string(shared().conf()).unwrap();
    let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
    // Other tests use the pool at the same time.
    shared().rbd(&["namespace", "create", &format!("{POOL}/sanity")]).unwrap();
    let clusters = json!([{
        "clusterID": "test", "monitors": [monitors], "userID": ID,
        "keyring": shared().keyring(ID), "pools": [format!("{POOL}/sanity")],
    }]);
    let (list, parameters) = (machine.path("clusters.json"), machine.path("parameters.yaml"));
    std::fs::write(&list, clusters.to_string()).unwrap();
    let chosen = format!("clusterID: test\npool: {POOL}\nradosNamespace: sanity\n");
    std::fs::write(&parameters, chosen).unwrap();
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
        .arg(format!("--csi.testvolumeparameters={}", parameters.display()))
        .args([format!("--csi.testvolumesize={}", 64 << 20)])
        .args([format!("--csi.testvolumeexpandsize={}", 128 << 20)])
        .args([ATTACH_LIMIT_OPTION, "--ginkgo.no-color", &Chosen::Others.option()])
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .output()
        .unwrap();
    assert!(report.exists(), "csi-sanity did not run: {output:?}");
    csi_sanity::check(&report, "rbd, without a kernel", Chosen::Others, true);
    let left = shared().rbd(&["ls", &format!("{POOL}/sanity")]).unwrap();
    assert!(left.is_empty(), "left: {}", String::from_utf8_lossy(&left));
}
