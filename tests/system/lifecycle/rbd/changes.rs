//! Images that other clients change while they are mapped: resize, snapshots, clones, removal, rename.

use cleat_api::v1::MappingState;
use cleat_kernel::Kernel;
use nix::sys::signal::Signal;
use test_kit::ceph::{POOL, shared};
use tonic::Code;

use super::load::{SIZE, assert_within, held};
use super::{MIB, Scene, spec};
use test_kit::node::{assert_code, index_of, kill, wait_until};

#[test]
fn the_device_follows_a_larger_image_and_a_smaller_one_is_reported() {
    let scene = Scene::on(shared());
    scene.image("sized");
    let mapping = scene.map("sized");
    let load = scene.load(&mapping);
    let (kernel, index) = (&scene.machine.kernel, index_of(&mapping));
    let size = || kernel.devices().unwrap()[index as usize].size;
    let resize = |size: u64| {
        let size = format!("{size}B");
        let how = ["resize", &spec("sized"), "--size", &size, "--allow-shrink", "--no-progress"];
        shared().rbd(&how).unwrap();
    };
    for larger in [2 * SIZE, 3 * SIZE + 512] {
        resize(larger);
        wait_until("the device has the new size", || size() == larger);
        load.wait_for_more();
        kernel.write(index, larger - 512, &[9; 512]).unwrap();
    }
    // Shrink the image behind the range of the load: the rest is served, and the removed range fails.
    resize(2 * SIZE);
    let failed = scene.supervisor.wait_for("sized", MappingState::Failed);
    assert!(failed.message.contains("smaller") || failed.message.contains("shrunk"), "{failed:?}");
    load.wait_for_more();
    assert!(kernel.write(index, 3 * SIZE, &[9; 512]).is_err());
    assert!(kernel.read(index, 2 * SIZE - 512, 1024).is_err());
    resize(4 * SIZE);
    scene.supervisor.wait_for("sized", MappingState::Mapped);
    wait_until("the device has the new size", || size() == 4 * SIZE);
    assert_eq!(kernel.read(index, 3 * SIZE, 512).unwrap(), [0; 512]);
    let written = load.finish();
    scene.supervisor.unmap("sized").unwrap();
    let content = scene.content("sized");
    assert_eq!(held(&content[..usize::try_from(SIZE).unwrap()]), written);
    scene.machine.assert_clean();
}

#[test]
fn snapshots_and_clones_under_load_are_consistent() {
    let scene = Scene::on(shared());
    scene.image("snapped");
    let mapping = scene.map("snapped");
    let load = scene.load(&mapping);
    let rbd = |arguments: &[&str]| {
        shared().rbd(arguments).unwrap();
    };
    for round in 0..3 {
        load.wait_for_more();
        let at = format!("snapped@{round}");
        let done = load.done();
        rbd(&["snap", "create", "--no-progress", &spec(&at)]);
        let begun = load.begun();
        rbd(&["snap", "protect", &spec(&at)]);
        rbd(&["clone", &spec(&at), &spec("cloned")]);
        load.wait_for_more();
        let frozen = scene.content(&at);
        assert_within(held(&frozen), done, begun);
        assert!(scene.content("cloned") == frozen, "the clone differs from the snapshot");
        // Map the snapshot and the clone beside the image.
        let snapshot = scene.supervisor.map("then", &scene.uri(&at)).unwrap();
        assert!(snapshot.read_only, "{snapshot:?}");
        let clone = scene.supervisor.map("cloned", &scene.uri("cloned")).unwrap();
        let (kernel, length) = (&scene.machine.kernel, u32::try_from(MIB).unwrap());
        for mapping in [&snapshot, &clone] {
            let first = kernel.read(index_of(mapping), 0, length).unwrap();
            assert!(first == frozen[..first.len()], "{} has other content", mapping.name);
        }
        kernel.write(index_of(&clone), 0, &[9; 512]).unwrap();
        rbd(&["flatten", "--no-progress", &spec("cloned")]);
        assert_eq!(kernel.read(index_of(&clone), 0, 512).unwrap(), [9; 512]);
        for name in ["then", "cloned"] {
            scene.supervisor.unmap(name).unwrap();
        }
        load.wait_for_more();
        assert!(scene.content(&at) == frozen, "the snapshot has changed");
        rbd(&["rm", "--no-progress", &spec("cloned")]);
        rbd(&["snap", "unprotect", &spec(&at)]);
        rbd(&["snap", "rm", "--no-progress", &spec(&at)]);
    }
    load.wait_for_more();
    let written = load.finish();
    scene.supervisor.unmap("snapped").unwrap();
    assert_eq!(held(&scene.content("snapped")), written);
    scene.machine.assert_clean();
}

#[test]
fn the_removal_of_a_mapped_image_is_reported() {
    let scene = Scene::on(shared());
    scene.image("removed");
    let mapping = scene.map("removed");
    let index = index_of(&mapping);
    scene.machine.kernel.write(index, 0, &[1; 512]).unwrap();
    // Ceph does not remove an image that a client has open.
    let refused = shared().rbd(&["rm", "--no-progress", &spec("removed")]).unwrap_err();
    assert!(refused.contains("still has watchers"), "{refused}");
    // Kill the worker while no supervisor runs that would start a new one.
    let owner = scene.owner("removed");
    let Scene { supervisor, machine, .. } = scene;
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    shared().ceph(&["osd", "blocklist", "add", &owner]);
    wait_until("the image is removed", || {
        shared().rbd(&["rm", "--no-progress", &spec("removed")]).is_ok()
    });
    let supervisor = machine.start();
    wait_until("the mapping reports the missing image", || {
        let mapping = supervisor.get("removed").unwrap();
        mapping.message.contains("cannot open the RBD image volumes/removed")
            && mapping.message.contains("No such file")
    });
    assert_code(supervisor.map("removed", &mapping.uri), Code::NotFound, "volumes/removed");
    // Nothing can be flushed to a removed image, which only a forced unmap accepts.
    let refused = supervisor.unmap("removed");
    assert_code(refused, Code::Unavailable, "its data cannot be flushed");
    supervisor.force("removed").unwrap();
    machine.assert_clean();
}

/// Removes the header object directly; `rbd` refuses to remove an image with watchers.
#[test]
fn a_mapping_whose_image_header_is_removed_fails_and_can_be_unmapped() {
    let scene = Scene::on(shared());
    scene.image("destroyed");
    let mapping = scene.map("destroyed");
    let load = scene.load(&mapping);
    load.wait_for_more();
    let info = shared().rbd(&["info", &spec("destroyed"), "--format", "json"]).unwrap();
    let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
    let header = format!("rbd_header.{}", info["id"].as_str().unwrap());
    shared().rados(&["--pool", POOL, "rm", &header]).unwrap();
    let failed = scene.supervisor.wait_for("destroyed", MappingState::Failed);
    assert!(failed.message.contains("or has removed it"), "{failed:?}");
    assert!(load.stop().iter().all(Result::is_err), "a write succeeded");
    assert!(scene.machine.kernel.read(index_of(&mapping), 0, 512).is_err(), "a read succeeded");
    scene.supervisor.unmap("destroyed").unwrap();
    scene.machine.assert_clean();
}

#[test]
fn a_renamed_image_is_served_until_its_worker_ends() {
    let scene = Scene::on(shared());
    scene.image("renamed");
    let mapping = scene.map("renamed");
    let load = scene.load(&mapping);
    load.wait_for_more();
    let rename = |from: &str, to: &str| {
        shared().rbd(&["rename", &spec(from), &spec(to)]).unwrap();
    };
    rename("renamed", "another");
    load.wait_for_more();
    let refused = shared().rbd(&["trash", "mv", &spec("another")]).unwrap_err();
    assert!(refused.contains("busy"), "{refused}");
    load.wait_for_more();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the mapping reports the missing image", || {
        let mapping = scene.supervisor.get("renamed").unwrap();
        mapping.message.contains("cannot open the RBD image volumes/renamed")
    });
    // To rename the image, `rbd` breaks the lock of the dead worker, as a tool that writes does.
    rename("another", "renamed");
    wait_until("the mapping is fenced", || {
        // A map request does not wait for the backoff.
        let refused = scene.supervisor.map_with(scene.request("renamed"));
        refused.is_err() && scene.supervisor.get("renamed").unwrap().fenced
    });
    let (done, begun) = (load.done(), load.begun());
    assert!(load.stop().iter().all(Result::is_err), "a write succeeded");
    scene.supervisor.unmap("renamed").unwrap();
    assert_within(held(&scene.content("renamed")), done, begun);
    scene.machine.assert_clean();
}

/// The other image keeps its content, and no claim, lock or metadata is written to it.
#[test]
fn an_image_that_got_the_name_of_a_mapped_one_is_neither_served_nor_changed() {
    let scene = Scene::on(shared());
    scene.image("first");
    let mut request = scene.request("first");
    // Requests of a device that no worker will serve again fail after a second.
    request.options.as_mut().unwrap().dead_connection_timeout_s = 1;
    let mapping = scene.supervisor.map_with(request).unwrap();
    let (kernel, index) = (&scene.machine.kernel, index_of(&mapping));
    kernel.write(index, 0, &[1; 512]).unwrap();
    shared().rbd(&["rename", &spec("first"), &spec("hidden")]).unwrap();
    scene.image("first");
    // A successor opens the image by its name. The worker that serves has the first image open.
    let refused = scene.supervisor.fail_to_hand_over();
    assert!(refused.message.contains("is another volume than"), "{refused:?}");
    assert_eq!(scene.supervisor.get("first").unwrap().state(), MappingState::Mapped);
    kernel.write(index, 512, &[3; 512]).unwrap();
    assert_eq!(kernel.read(index, 0, 1024).unwrap(), [[1; 512], [3; 512]].concat());

    kill(mapping.worker_pid, Signal::SIGKILL);
    let failed = scene.supervisor.wait_for("first", MappingState::Failed);
    assert!(failed.message.contains("the volume of first was replaced"), "{failed:?}");
    assert!(failed.message.contains("cleat unmap --force first") && failed.fenced, "{failed:?}");
    assert!(kernel.read(index, 0, 512).is_err(), "data of another image was read");
    assert!(kernel.write(index, 0, &[7; 512]).is_err(), "a write to another image was accepted");
    scene.supervisor.force("first").unwrap();
    assert!(scene.content("first").iter().all(|byte| *byte == 0), "the other image was written");
    for what in [["lock", "ls"], ["image-meta", "ls"]] {
        let listed = shared().rbd(&[what[0], what[1], &spec("first"), "--format", "json"]);
        let listed = String::from_utf8(listed.unwrap()).unwrap();
        // Without metadata, `rbd` prints nothing.
        assert!(matches!(listed.trim(), "" | "[]"), "{what:?} of the other image: {listed}");
    }
    assert_eq!(scene.content("hidden")[..1024], [[1; 512], [3; 512]].concat());
    scene.machine.assert_clean();
}
