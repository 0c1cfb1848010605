//! A full cluster: requests that need new space wait or fail, depending on the policy; all others
//! succeed.

use std::io;
use std::thread::{self, JoinHandle};

use cleat_api::v1::{MappingState, Outage, SetOptionsRequest};
use cleat_kernel::DeviceIndex;
use cleat_kernel::sim::SimKernel;
use test_kit::ceph::{Cluster, POOL};

use super::load::{Load, SIZE, held};
use super::{MIB, Scene, spec};
use test_kit::node::{index_of, wait_until};

/// The device of a mapped image that is larger than the range of the load.
struct Device {
    kernel: SimKernel,
    index: DeviceIndex,
}

impl Device {
    /// Starts a write to a range without data, on a thread, because it may block.
    fn begin(&self, place: u64) -> JoinHandle<io::Result<()>> {
        let (kernel, index) = (self.kernel.clone(), self.index);
        thread::spawn(move || kernel.write(index, place, &[5; 4096]))
    }

    fn read(&self, place: u64) -> Vec<u8> {
        self.kernel.read(self.index, place, 4096).unwrap()
    }
}

/// Maps an image and starts a load that has written its whole range once.
fn loaded(cluster: &Cluster) -> (Scene<'_>, Device, Load) {
    let scene = Scene::on(cluster);
    scene.image("a");
    cluster.rbd(&["resize", &spec("a"), "--size", "128M", "--no-progress"]).unwrap();
    let mapping = scene.map("a");
    let device = Device { kernel: scene.machine.kernel.clone(), index: index_of(&mapping) };
    let load = scene.load(&mapping);
    load.wait_until_all_is_written();
    (scene, device, load)
}

impl Scene<'_> {
    /// Sets or resets the full state of the OSD, and waits until the pool shows it.
    fn set_full(&self, full: bool) {
        let ratio = if full { "0.001" } else { "0.95" };
        for limit in ["nearfull", "backfillfull", "full"] {
            self.cluster.ceph(&["osd", &format!("set-{limit}-ratio"), ratio]);
        }
        self.wait_for_flag("full", full);
    }

    /// Sets a quota of the pool, and waits until the pool shows whether it is exceeded.
    fn set_quota(&self, of: &str, limit: &str) {
        self.cluster.ceph(&["osd", "pool", "set-quota", POOL, of, limit]);
        self.wait_for_flag("full_quota", limit != "0");
    }

    fn wait_for_flag(&self, flag: &str, set: bool) {
        wait_until("the pool shows the flag", || {
            let pools = self.cluster.ceph(&["osd", "pool", "ls", "detail", "--format", "json"]);
            let pools: serde_json::Value = serde_json::from_str(&pools).unwrap();
            let mut flags = pools[0]["flags_names"].as_str().unwrap().split(',');
            flags.any(|name| name == flag) == set
        });
    }

    fn outage(&self) -> Option<Outage> {
        let mapping = self.supervisor.get("a").unwrap();
        assert_eq!(mapping.state(), MappingState::Mapped, "{mapping:?}");
        mapping.outage
    }

    fn on_outage(&self, policy: &str) {
        let (target, on_outage) = ("a".into(), policy.into());
        let request = SetOptionsRequest {
            target,
            on_outage,
            iops: None,
            bytes_per_s: None,
            ..Default::default()
        };
        self.supervisor.block_on(self.supervisor.client().set_options(request)).unwrap();
    }
}

#[test]
fn writes_to_a_full_cluster_wait_or_fail_depending_on_the_policy() {
    let cluster = Cluster::start();
    let (scene, device, load) = loaded(&cluster);
    let waits = || scene.outage().is_some_and(|outage| outage.queued > 0);
    scene.set_full(true);
    // Writes to existing objects succeed.
    load.wait_for_more();
    let written = load.finish();
    assert_eq!(scene.outage(), None);

    // A new object needs space.
    let writer = device.begin(SIZE);
    wait_until("the write waits, and the outage is reported", waits);
    let reason = scene.outage().unwrap().reason;
    assert!(reason.contains("no space is left for volumes/a"), "{reason}");
    assert_eq!(device.read(SIZE), [0; 4096]);
    assert!(!writer.is_finished());
    scene.set_full(false);
    writer.join().unwrap().unwrap();
    wait_until("the end of the outage is reported", || scene.outage().is_none());

    scene.set_full(true);
    let writer = device.begin(SIZE + 4 * MIB);
    wait_until("the write waits", waits);
    scene.on_outage("fail");
    // NBD_ENOSPC.
    for failed in [writer, device.begin(SIZE + 8 * MIB)] {
        let error = failed.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("NBD error 28"), "{error}");
    }
    assert_eq!(device.read(SIZE), [5; 4096]);
    scene.set_full(false);
    device.kernel.write(device.index, SIZE + 8 * MIB, &[6; 4096]).unwrap();
    wait_until("the end of the outage is reported", || scene.outage().is_none());
    scene.supervisor.unmap("a").unwrap();
    let content = scene.content("a");
    let (first, rest) = content.split_at(usize::try_from(SIZE).unwrap());
    assert_eq!(held(first), written);
    let object = usize::try_from(4 * MIB).unwrap();
    for (number, byte) in [5, 0, 6, 0].into_iter().enumerate() {
        assert_eq!(rest[number * object..][..4096], [byte; 4096], "object {number}");
    }
    scene.machine.assert_clean();
}

#[test]
fn writes_beyond_a_quota_wait_or_fail_depending_on_the_policy() {
    let cluster = Cluster::start();
    cluster.tell("start mgr");
    let (scene, device, load) = loaded(&cluster);
    let waits = || scene.outage().is_some_and(|outage| outage.queued > 0);
    let mut places = (0..24).map(|number| SIZE + number * 4 * MIB);
    for of in ["max_bytes", "max_objects"] {
        scene.set_quota(of, "1");
        load.wait_for_more();
        assert_eq!(scene.outage(), None, "writes to existing objects succeed");
        // The OSD may receive the new map later than this client. A write that it then executes slowly
        // counts as waiting until it succeeds.
        let (place, writer) = places
            .by_ref()
            .map(|place| (place, device.begin(place)))
            .find(|(place, writer)| {
                wait_until("the write succeeds or waits", || writer.is_finished() || waits());
                device.read(*place) == [0; 4096] && !writer.is_finished()
            })
            .unwrap();
        let reason = scene.outage().unwrap().reason;
        for part in ["the pool volumes has reached its quota", "set-quota volumes"] {
            assert!(reason.contains(part), "{part}: {reason}");
        }
        assert!(!writer.is_finished());
        scene.set_quota(of, "0");
        writer.join().unwrap().unwrap();
        wait_until("the end of the outage is reported", || scene.outage().is_none());
        assert_eq!(device.read(place), [5; 4096]);
    }
    scene.set_quota("max_bytes", "1");
    scene.on_outage("fail");
    // NBD has no error for an exceeded quota; it is NBD_ENOSPC, too.
    let error =
        places.find_map(|place| device.begin(place).join().unwrap().err()).unwrap().to_string();
    assert!(error.contains("NBD error 28"), "{error}");
    load.wait_for_more();
    load.finish();
    scene.supervisor.unmap("a").unwrap();
    // Neither a claim nor an unmap needs space.
    scene.map("a");
    scene.supervisor.unmap("a").unwrap();
    scene.set_quota("max_bytes", "0");
    scene.machine.assert_clean();
}
