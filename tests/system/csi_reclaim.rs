//! ControllerReclaimSpace on a real cluster, through the calls of CSI-Addons.

use cleat_worker::protocol::ToWorker;
use serde_json::json;
use test_kit::ceph::{POOL, shared};
use test_kit::nbd::kernel as nbd;

use crate::csi_groups::{Scene, serve};

/// The size of an object of the images, in bytes.
const OBJECT: usize = 4 << 20;

#[test]
fn zeroes_are_freed_while_a_volume_is_used_and_after() {
    let scene = Scene::new("reclaim");
    let id = scene.volumes(&["a"]).remove(0);
    let (mut worker, sockets) = serve(&scene.uri("a"), "m1");
    let data = vec![7; 1 << 20];
    assert_eq!(nbd::write(&sockets[0], 0, &data), 0);
    assert_eq!(nbd::write(&sockets[0], 1 << 20, &vec![0; 1 << 20]), 0);
    assert_eq!(nbd::write(&sockets[0], OBJECT as u64, &vec![0; OBJECT]), 0);
    let path = format!("{POOL}/{}/a", scene.space);
    let objects = || {
        let usage = shared().rbd(&["diff", "--format", "json", &path]).unwrap();
        let extents: Vec<serde_json::Value> = serde_json::from_slice(&usage).unwrap();
        extents.iter().map(|extent| extent["length"].as_u64().unwrap()).sum::<u64>()
    };
    let before = objects();
    let reclaim =
        |id: &str| scene.daemon.try_call("ControllerReclaimSpace", &json!({ "volumeId": id }));
    let usage = |answer: &serde_json::Value, when: &str| -> u64 {
        answer[when]["usageBytes"].as_str().unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
    };
    let answer = reclaim(&id).unwrap();
    // The object with zeroes only is gone.
    assert_eq!((usage(&answer, "preUsage"), usage(&answer, "postUsage")), (8 << 20, 4 << 20));
    assert!(objects() + (OBJECT as u64) <= before, "{before} bytes, then {}", objects());
    assert!(nbd::read(&sockets[0], 0, 1 << 20) == data);
    assert!(nbd::read(&sockets[0], 1 << 20, 7 << 20).iter().all(|byte| *byte == 0));
    assert_eq!(nbd::write(&sockets[0], OBJECT as u64, &data), 0);
    drop(sockets);
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    reclaim(&id).unwrap();

    let missing = reclaim(&id.replace("/a", "/none")).unwrap_err();
    assert!(missing.contains("does not exist"), "{missing}");
}
