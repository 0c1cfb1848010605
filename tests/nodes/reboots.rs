//! A node that boots again while a pod has a volume: the pod starts again there, with its data.

use crate::cluster::{CLAIM, Cluster, POD, claim, is_true, pod, run};
use crate::files::nothing_is_left;
use crate::machine::Machine;

/// Ends the node with a pod, and checks that the pod has what it had written when the node is back.
fn comes_back(end: fn(&Machine)) {
    run(|cluster| {
        cluster.apply(&claim("kept", "Filesystem"));
        cluster.start_pod(&pod("kept", "kept"));
        cluster.exec(
            "kept",
            "dd if=/dev/urandom of=/v/file bs=1M count=8 conv=fsync && \
             md5sum /v/file | dd of=/v/sum conv=fsync",
        );
        let (boot, container) = (boot_of(cluster), container_of(cluster));
        end(cluster.machine("a"));
        cluster.until("node", "a", "has booted and is Ready", |node| {
            is_true(node, "Ready") && node["status"]["nodeInfo"]["bootID"] != boot.as_str()
        });
        cluster.until(POD, "kept", "runs again", |pod| {
            let id = &pod["status"]["containerStatuses"][0]["containerID"];
            is_true(pod, "Ready") && *id != container.as_str()
        });
        cluster.exec("kept", "md5sum -c /v/sum && id > /v/other && cat /v/other");
        for workload in ["daemonset/cleat-node", "deployment/cleat-controller"] {
            cluster.rolled_out(workload);
        }
        cluster.delete(POD, "kept");
        cluster.delete(CLAIM, "kept");
        nothing_is_left(cluster);
    });
}

/// Returns the id of the boot of the node.
fn boot_of(cluster: &Cluster) -> String {
    let node = cluster.get("node", "a").unwrap();
    node["status"]["nodeInfo"]["bootID"].as_str().unwrap().to_owned()
}

/// Returns the id of the container of the pod.
fn container_of(cluster: &Cluster) -> String {
    let pod = cluster.get(POD, "kept").unwrap();
    pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap().to_owned()
}

#[test]
fn a_pod_has_its_data_after_a_reboot() {
    comes_back(Machine::reboot);
}

#[test]
fn a_pod_has_what_it_made_durable_after_a_reset() {
    comes_back(Machine::reset);
}
