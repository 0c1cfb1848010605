//! Group snapshots on a real cluster, through the calls of CSI.

use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleat_worker::protocol::{FromWorker, Start};
use librbd::{Cluster, Config, Open};
use serde_json::{Value, json};
use test_kit::ceph::{ID, POOL, shared};
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, start_message};

use crate::cli::csi::Daemon;
use crate::volumes::fixture::options_of;

/// The pool namespace of these tests; others use the pool at the same time.
const SPACE: &str = "groups";

/// A daemon that knows the cluster.
pub(crate) struct Scene {
    pub(crate) daemon: Daemon,
    /// The namespace in the pool.
    pub(crate) space: String,
}

impl Scene {
    /// Makes a namespace of the pool for the test `test`.
    pub(crate) fn new(test: &str) -> Self {
        let space = format!("{SPACE}-{test}");
        shared().rbd(&["namespace", "create", &format!("{POOL}/{space}")]).unwrap();
        let conf = fs::read_to_string(shared().conf()).unwrap();
        let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
        let clusters = json!([{
            "clusterID": "test", "monitors": [monitors], "userID": ID,
            "keyring": shared().keyring(ID), "pools": [format!("{POOL}/{space}")],
        }]);
        Self { daemon: Daemon::with_clusters(&clusters), space }
    }

    fn volume_from(&self, name: &str, source: &Value) -> Result<String, String> {
        let answer = self.daemon.try_call(
            "CreateVolume",
            &json!({
                "name": name,
                "capacityRange": { "requiredBytes": (8 << 20).to_string() },
                "volumeCapabilities":
                    [{ "mount": {}, "accessMode": { "mode": "SINGLE_NODE_WRITER" } }],
                "parameters": { "clusterID": "test", "pool": POOL, "radosNamespace": self.space },
                "volumeContentSource": source,
            }),
        )?;
        Ok(answer["volume"]["volumeId"].as_str().unwrap().to_owned())
    }

    pub(crate) fn volumes(&self, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| self.volume_from(name, &Value::Null).unwrap()).collect()
    }

    fn group(&self, name: &str, volumes: &[String]) -> Result<Value, String> {
        let request = json!({ "name": name, "sourceVolumeIds": volumes });
        self.daemon
            .try_call("CreateVolumeGroupSnapshot", &request)
            .map(|answer| answer["groupSnapshot"].clone())
    }

    /// Makes a call for a group with these snapshots.
    fn of_group(&self, call: &str, group: &Value, snapshots: &[&Value]) -> Result<Value, String> {
        let id = &group["groupSnapshotId"];
        let ids: Vec<&Value> = snapshots.iter().map(|snapshot| &snapshot["snapshotId"]).collect();
        self.daemon.try_call(call, &json!({ "groupSnapshotId": id, "snapshotIds": ids }))
    }

    fn snapshots_of(&self, image: &str) -> Vec<String> {
        let path = format!("{POOL}/{}/{image}", self.space);
        let listed = shared().rbd(&["snap", "ls", "--format", "json", &path]).unwrap();
        let listed: Vec<Value> = serde_json::from_slice(&listed).unwrap();
        listed.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    fn rbd(&self, verb: &[&str], images: &[&str]) {
        let paths = images.iter().map(|image| format!("{POOL}/{}/{image}", self.space));
        let paths: Vec<String> = paths.collect();
        let arguments = verb.iter().copied().chain(paths.iter().map(String::as_str));
        shared().rbd(&arguments.collect::<Vec<_>>()).unwrap();
    }

    pub(crate) fn uri(&self, image: &str) -> String {
        format!("rbd:{POOL}/{}/{image}?{}", self.space, options_of(shared(), ID))
    }

    fn export(&self, image: &str, snapshot: &str) -> u64 {
        let path = format!("{POOL}/{}/{image}@{snapshot}", self.space);
        let bytes = shared().rbd(&["export", "--no-progress", &path, "-"]).unwrap();
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    }
}

fn snapshots(group: &Value) -> Vec<&Value> {
    group["snapshots"].as_array().unwrap().iter().collect()
}

#[test]
fn a_group_is_made_found_used_and_deleted() {
    let scene = Scene::new("life");
    let volumes = scene.volumes(&["a", "b", "c"]);
    let group = scene.group("g/1", &volumes[..2]).unwrap();
    let members = snapshots(&group);
    assert_eq!((members.len(), &group["readyToUse"]), (2, &json!(true)));
    let mut other_order = volumes[..2].to_vec();
    other_order.reverse();
    let again = scene.group("g/1", &other_order).unwrap();
    assert_eq!(again["groupSnapshotId"], group["groupSnapshotId"]);
    let found = scene.of_group("GetVolumeGroupSnapshot", &group, &members).unwrap();
    assert_eq!(found["groupSnapshot"], group);
    let listed = scene.daemon.call("ListSnapshots", &json!({}));
    let listed: Vec<&Value> =
        listed["entries"].as_array().unwrap().iter().map(|entry| &entry["snapshot"]).collect();
    assert_eq!(listed, members);

    // Other volumes under the same name, a list that is not that of the group, and a single member.
    let error = scene.group("g/1", &volumes[1..]).unwrap_err();
    assert!(error.contains("exists, of rbd:"), "{error}");
    for wrong in [&members[..1], &[]] {
        let error = scene.of_group("DeleteVolumeGroupSnapshot", &group, wrong).unwrap_err();
        assert!(error.contains("not those of the group"), "{error}");
    }
    let id = json!({ "snapshotId": members[0]["snapshotId"] });
    let error = scene.daemon.try_call("DeleteSnapshot", &id).unwrap_err();
    assert!(error.contains("belongs to the group snapshot"), "{error}");

    let source = json!({ "snapshot": { "snapshotId": members[1]["snapshotId"] } });
    scene.volume_from("clone", &source).unwrap();
    for _ in 0..2 {
        scene.of_group("DeleteVolumeGroupSnapshot", &group, &members).unwrap();
    }
    let error = scene.of_group("GetVolumeGroupSnapshot", &group, &members).unwrap_err();
    assert!(error.contains("does not exist"), "{error}");
    assert!(scene.snapshots_of("a").is_empty());
}

/// The states in which a crash of the controller can leave a group, made by hand.
#[test]
fn a_group_is_completed_after_a_crash_at_any_step() {
    let scene = Scene::new("crash");
    let volumes = scene.volumes(&["a", "b"]);
    let group = scene.group("g", &volumes).unwrap();
    let name = scene.snapshots_of("a").pop().unwrap();
    let unfinished = name.replacen("csigroup-", "csigroupnew-", 1);
    let at = |image: &str, name: &str| format!("{image}@{name}");
    let (a, b) = (at("a", &unfinished), at("b", &unfinished));
    let created = |group: &Value| group["creationTime"].clone();

    // After the last check, when one snapshot has its final name: both are kept.
    scene.rbd(&["snap", "rename"], &[&at("b", &name), &b]);
    let again = scene.group("g", &volumes).unwrap();
    assert_eq!(again, group);
    assert_eq!(scene.snapshots_of("b"), [&*name]);
    // Before it, nothing proves that they are of the same moment: both are taken again.
    scene.rbd(&["snap", "rename"], &[&at("a", &name), &a]);
    scene.rbd(&["snap", "rename"], &[&at("b", &name), &b]);
    std::thread::sleep(Duration::from_millis(1100));
    let again = scene.group("g", &volumes).unwrap();
    assert_ne!(created(&again), created(&group));
    // Between two snapshots.
    scene.rbd(&["snap", "rename"], &[&at("a", &name), &a]);
    scene.rbd(&["snap", "rm", "--no-progress"], &[&at("b", &name)]);
    assert!(
        scene.daemon.call("ListSnapshots", &json!({}))["entries"]
            .as_array()
            .is_none_or(Vec::is_empty)
    );
    scene.group("g", &volumes).unwrap();
    // In a deletion.
    scene.rbd(&["snap", "rm", "--no-progress"], &[&at("b", &name)]);
    let error = scene.group("g", &volumes).unwrap_err();
    assert!(error.contains("deleted in part"), "{error}");
    scene.of_group("DeleteVolumeGroupSnapshot", &group, &snapshots(&group)).unwrap();
    // A call that is not repeated does not keep its volumes from being deleted.
    scene.rbd(&["snap", "create", "--no-progress"], &[&a]);
    scene.daemon.call("DeleteVolume", &json!({ "volumeId": volumes[0] }));
}

/// A program writes to two volumes in turn, and each write waits for the end of the one before.
#[test]
fn a_group_of_volumes_in_use_has_no_write_without_those_before_it() {
    let scene = Scene::new("order");
    let volumes = scene.volumes(&["a", "b"]);
    let workers = [serve(&scene.uri("a"), "m1"), serve(&scene.uri("b"), "m2")];
    let stop = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            for number in 1_u64.. {
                for (_, sockets) in &workers {
                    let start = Instant::now();
                    assert_eq!(nbd::write(&sockets[0], 0, &block(number)), 0);
                    longest = longest.max(start.elapsed());
                }
                if stop.load(Ordering::Relaxed) {
                    return (number, longest);
                }
            }
            unreachable!("it ends when it should stop");
        });
        let mut last = 0;
        for round in 0..5 {
            let group = scene.group(&format!("g{round}"), &volumes).unwrap();
            let id = snapshots(&group)[0]["snapshotId"].as_str().unwrap().to_owned();
            let name = id.split_once('@').unwrap().1.to_owned();
            let (a, b) = (scene.export("a", &name), scene.export("b", &name));
            assert!(
                a == b || a == b + 1,
                "round {round}: {a} in the first volume, {b} in the second"
            );
            assert!(a > last, "the writes do not continue");
            last = a;
        }
        stop.store(true, Ordering::Relaxed);
        let (written, held) = writer.join().unwrap();
        assert!(written > last);
        held
    });
    println!("figures: group snapshots of two volumes: the longest write took {longest:?}");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
}

#[test]
fn a_group_with_a_writer_that_cannot_be_held_fails_and_leaves_nothing() {
    let scene = Scene::new("writers");
    let volumes = scene.volumes(&["a", "b"]);
    // The snapshots of this volume wait for a supervisor that freezes its file systems.
    let uri = scene.uri("b");
    let worker = Worker::launch();
    worker.send_start(&Start { quiesce: true, ..start_message(&uri) });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let error = scene.group("g", &volumes).unwrap_err();
    assert!(error.contains("quiesce"), "{error}");
    drop(worker);
    // A client without a claim, which has the image open.
    let config = Config {
        conf: Some(shared().conf()),
        id: Some(ID.to_owned()),
        keyring: Some(shared().keyring(ID)),
        ..Config::default()
    };
    let pool = Cluster::connect(&config).unwrap().pool(POOL, Some(&scene.space)).unwrap();
    let other = pool.open("a", None, Open::Write).unwrap();
    let error = scene.group("g", &volumes[..1]).unwrap_err();
    assert!(error.contains("which has made no claim"), "{error}");
    drop(other);
    assert!(scene.snapshots_of("a").is_empty() && scene.snapshots_of("b").is_empty());
}

pub(crate) fn serve(uri: &str, mapping: &str) -> (Worker, Vec<UnixStream>) {
    let mut worker = Worker::launch();
    worker.send_start(&Start { mapping_id: mapping.to_owned(), ..start_message(uri) });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(1);
    (worker, sockets)
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(512)
}
