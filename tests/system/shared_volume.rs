//! A block volume that several nodes write to: two daemons on a real cluster. Their kernels are simulated.

use cleat::backends::REGISTRY;
use cleat_csi::{Driver, mapping_name};
use cleat_node::csi_config::CsiConfig;
use serde_json::{Value, json};
use test_kit::ceph::{ID, POOL, shared};
use test_kit::node::{Machine, Supervisor};
use test_kit::wait::wait_until;

use crate::cli::csi::call;

/// A node with the CSI services.
struct Node {
    supervisor: Supervisor,
    machine: Machine,
}

impl Node {
    fn start(name: &str) -> Self {
        let machine = Machine::new();
        let conf = std::fs::read_to_string(shared().conf()).unwrap();
        let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
        let clusters = json!([{
            "clusterID": "test", "monitors": [monitors], "userID": ID, "keyring": shared().keyring(ID),
        }]);
        std::fs::write(machine.path("clusters.json"), clusters.to_string()).unwrap();
        let config = CsiConfig {
            enabled: true,
            controller: true,
            register: false,
            kubelet_dir: machine.path("kubelet"),
            socket: Some(machine.path("csi.sock")),
            clusters: machine.path("clusters.json"),
            ..CsiConfig::default()
        };
        let supervisor = machine.start();
        let driver = Driver::new(config, name.to_owned(), supervisor.executor(), 64);
        supervisor.spawn(driver.with_controller(REGISTRY).serve());
        wait_until("the driver serves", || machine.path("csi.sock").exists());
        Self { supervisor, machine }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.machine.path("csi.sock")
    }

    fn stage(&self, id: &Value, mode: &str) -> Result<Value, String> {
        call(&self.socket(), "NodeStageVolume", &self.request(id, Some(mode)))
    }

    fn unstage(&self, id: &Value) {
        call(&self.socket(), "NodeUnstageVolume", &self.request(id, None)).unwrap();
    }

    fn request(&self, id: &Value, mode: Option<&str>) -> Value {
        let mut request =
            json!({ "volumeId": id, "stagingTargetPath": self.machine.path("staging") });
        if let Some(mode) = mode {
            request["volumeCapability"] = capability(mode);
        }
        request
    }

    fn index(&self, id: &Value) -> cleat_kernel::DeviceIndex {
        let name = mapping_name(id.as_str().unwrap());
        let mapping = self.supervisor.executor().register().get(&name).unwrap();
        mapping.view().device.unwrap().index
    }
}

fn capability(mode: &str) -> Value {
    json!({ "block": {}, "accessMode": { "mode": mode } })
}

#[test]
fn two_nodes_write_to_a_block_volume() {
    let [one, two] = ["n1", "n2"].map(Node::start);
    let create = json!({
        "name": "shared",
        "capacityRange": { "requiredBytes": (16 << 20).to_string() },
        "volumeCapabilities": [capability("MULTI_NODE_MULTI_WRITER")],
        "parameters": { "clusterID": "test", "pool": POOL },
    });
    let id = &call(&one.socket(), "CreateVolume", &create).unwrap()["volume"]["volumeId"];
    for node in [&one, &two] {
        for _ in 0..2 {
            node.stage(id, "MULTI_NODE_MULTI_WRITER").unwrap();
        }
    }
    // Each sees what the other one has written, in turns.
    for round in 0..4_u8 {
        for (writer, reader) in [(&one, &two), (&two, &one)] {
            let data = [round + 1; 4096];
            writer.machine.kernel.write(writer.index(id), u64::from(round) << 20, &data).unwrap();
            let read = reader.machine.kernel.read(reader.index(id), u64::from(round) << 20, 4096);
            assert_eq!(read.unwrap(), data);
        }
    }
    // On its node, the volume has one way of use at a time.
    let other = one.stage(id, "SINGLE_NODE_WRITER").unwrap_err();
    assert!(other.contains("mapped already"), "{other}");
    one.unstage(id);
    let data = [9_u8; 4096];
    two.machine.kernel.write(two.index(id), 0, &data).unwrap();
    two.unstage(id);

    // Without the mode, one node has it alone.
    one.stage(id, "SINGLE_NODE_WRITER").unwrap();
    let refused = two.stage(id, "SINGLE_NODE_WRITER").unwrap_err();
    assert!(refused.contains("n1") || refused.contains("claim"), "{refused}");
    two.unstage(id);
    one.unstage(id);
    call(&one.socket(), "DeleteVolume", &json!({ "volumeId": id })).unwrap();
}
