//! Images of a real Ceph cluster, and volumes on an object store: the controller fences at the storage. The tests play
//! the nodes, with the backend.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cleat::backends::REGISTRY;
use cleat::kubernetes::fencing::Volumes;
use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_backend::store::Layout;
use cleat_backend::{Image, OpenOptions};
use cleat_core::error::{ErrorKind, Result};
use cleat_csi::{VolumeId, remote_uri};
use cleat_grants::object::{FenceEntry, Generation, GrantSpec, Mode, Reason, Signal, Time, Truth};
use cleat_kube::grant::{VolumeGrant, grant_name};
use cleat_kube::storage::{Backing, Storage};
use kube::api::PostParams;
use librbd::{Cluster, Config, NewImage, Open, Pool};
use serde_json::json;
use std::time::{Duration, Instant};
use test_kit::ceph::{POOL, shared};

use crate::fixture::{World, eventually, run};

/// A namespace of the pool, of the test that lists volumes.
const LISTED: &str = "listed";

/// The directory for the files of these tests.
fn directory() -> PathBuf {
    std::env::var_os("CLEAT_TEST_SHM").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// The store of the volumes of objects.
fn objects() -> String {
    format!("dir:{}", directory().join("objects").display())
}

/// The file of clusters, with the test cluster as `ceph` and an object store as `objects`.
pub(crate) fn clusters() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let conf = std::fs::read_to_string(shared().conf()).unwrap();
        let monitors = conf.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "mon_host" || key.trim() == "mon host").then(|| value.trim().to_owned())
        });
        let list = json!([{
            "clusterID": "ceph",
            "monitors": [monitors.expect("the configuration has mon_host")],
            "userID": "admin",
            "keyring": shared().keyring("admin"),
            "pools": [format!("{POOL}/{LISTED}")],
        }, { "clusterID": "objects", "store": objects() }]);
        let path = directory().join("clusters.json");
        std::fs::write(&path, list.to_string()).unwrap();
        path
    };
    FILE.get_or_init(make).clone()
}

/// The storages as `cleat controller` has them.
pub(crate) fn volumes() -> Volumes {
    Volumes { clusters: Some(clusters()) }
}

/// The pool of the images.
fn pool() -> Arc<Pool> {
    let config = Config {
        conf: Some(shared().conf()),
        id: Some("admin".to_owned()),
        keyring: Some(shared().keyring("admin")),
        ..Config::default()
    };
    Cluster::connect(&config).unwrap().pool(POOL, None).unwrap()
}

/// Removes the claim of an image, as `rbd image-meta remove IMAGE cleat.claim` does.
pub(crate) fn remove_claim(name: &str) {
    pool().open(name, None, Open::Write).unwrap().metadata_remove("cleat.claim").unwrap();
}

/// Creates an image, and returns its CSI volume handle.
pub(crate) fn create(name: &str) -> String {
    pool().create(name, 8 << 20, &NewImage::default()).unwrap();
    format!("rbd/ceph/{POOL}//{name}")
}

/// Creates a volume on the object store, and returns its CSI volume handle.
fn create_objects(name: &str) -> String {
    std::fs::create_dir_all(directory().join("objects")).unwrap();
    create_in(&objects(), name)
}

/// Creates a volume in an object store that the file of clusters names `objects`, and returns its handle.
pub(crate) fn create_in(store: &str, name: &str) -> String {
    let store = REGISTRY.store(store).unwrap().connect().unwrap();
    store.create(name, 8 << 20, &Layout::default()).unwrap();
    format!("object/objects/{name}")
}

/// Opens a volume as a worker on `node` does that has a grant with this generation.
pub(crate) fn open(handle: &str, node: &str, generation: Generation) -> Result<Arc<dyn Image>> {
    open_as(handle, node, generation, Mode::ReadWrite)
}

/// As [`open`], in a mode.
fn open_as(handle: &str, node: &str, generation: Generation, mode: Mode) -> Result<Arc<dyn Image>> {
    let id = VolumeId::parse(handle).unwrap();
    let mut uri = remote_uri(&clusters(), &id).unwrap().unwrap();
    if mode == Mode::SharedReadWrite {
        uri.push_str("&lock=shared");
    }
    let claimant = Claimant {
        node: node.to_owned(),
        boot_id: format!("boot of {node}"),
        mapping_id: format!("mapping on {node}"),
        process: ProcessMark::own(),
        grant: Some(generation.0),
        ..Claimant::default()
    };
    let read_only = mode == Mode::ReadOnly;
    let options = OpenOptions { claimant, read_only, ..OpenOptions::default() };
    REGISTRY.volume(&uri).unwrap().open(&options)
}

#[test]
fn row_13_an_image_of_a_lost_node_is_fenced_at_the_cluster_before_it_moves() {
    a_lost_node_is_fenced(create, true);
}

#[test]
fn row_13_the_log_of_a_lost_node_is_ended_before_its_volume_moves() {
    a_lost_node_is_fenced(create_objects, false);
}

/// `is_cut_off` says that the storage also cuts off the client of the node.
fn a_lost_node_is_fenced(create: fn(&str) -> String, is_cut_off: bool) {
    run(async |world: World| {
        let handle = &tokio::task::spawn_blocking(move || create("moved")).await.unwrap();
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let volume = world.volume("v", handle).await;
        let first = world.attach(&volume, &a).await;
        let generation = world.attached(&first).await;
        let claiming = (Signal::SafeToDetach, Truth::False, Reason::Claiming, generation);
        world.report(handle, &a, &[claiming]).await;
        let image = open(handle, &a, generation).unwrap();
        let mounted = (Signal::SafeToMount, Truth::True, Reason::Mapped, generation);
        world.report(handle, &a, &[mounted]).await;

        let second = world.attach(&volume, &b).await;
        world.out_of_service(&a, true).await;
        world.detach(&first).await;
        assert_eq!(world.attached(&second).await, generation.next());
        world.gone(&first).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        let fence = grant.fence(&a, generation).unwrap();
        assert!(fence.proof.contains("is sealed"), "{fence:?}");
        assert_eq!(fence.client.is_some(), is_cut_off, "{fence:?}");
        assert!(fence.client.iter().all(|client| fence.proof.contains(client)), "{fence:?}");
        eventually("the worker of the node is fenced", async || image.is_fenced().then_some(()))
            .await;
        // A new worker of the node, with a client that was not cut off.
        let Err(error) = open(handle, &a, generation) else { panic!("a stale generation claims") };
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains("the generation was fenced"), "{}", error.message());
        drop(open(handle, &b, generation.next()).unwrap());

        // The node returns, and cleans up.
        world.out_of_service(&a, false).await;
        drop(image);
        let cleaned = (Signal::Cleaned, Truth::True, Reason::Cleaned, generation);
        world.report(handle, &a, &[cleaned]).await;
        let Backing::Granted(storage) = volumes().find(handle).unwrap() else { panic!() };
        eventually("the client may connect again", async || {
            let record = storage.record(Instant::now() + Duration::from_secs(30)).unwrap();
            record.seal_of(generation)?.client.is_none().then_some(())
        })
        .await;
        controller.stop().await;
    });
}

#[test]
fn row_31_an_image_that_was_deleted_is_detached() {
    run(async |world: World| {
        let handle = &tokio::task::spawn_blocking(|| create("deleted")).await.unwrap();
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let volume = world.volume("v", handle).await;
        let attachment = world.attach(&volume, &a).await;
        let generation = world.attached(&attachment).await;
        shared().rbd(&["rm", &format!("{POOL}/deleted")]).unwrap();
        // Also the request of another node, which cannot be granted.
        let second = world.attach(&volume, &b).await;
        world.released(handle, &a, generation).await;
        world.detach(&attachment).await;
        world.revoked(handle, &a).await;
        world.attach_error(&second, "No such file or directory").await;
        world.detach(&second).await;
        world.gone(&second).await;
        world.gone(&attachment).await;
        controller.stop().await;
    });
}

#[test]
fn row_31_an_image_that_was_deleted_is_taken_from_a_lost_node() {
    run(async |world: World| {
        let handle = &tokio::task::spawn_blocking(|| create("trashed")).await.unwrap();
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let volume = world.volume("v", handle).await;
        let first = world.attach(&volume, &a).await;
        let generation = world.attached(&first).await;
        let claiming = (Signal::SafeToDetach, Truth::False, Reason::Claiming, generation);
        world.report(handle, &a, &[claiming]).await;
        drop(open(handle, &a, generation).unwrap());
        shared().rbd(&["trash", "mv", &format!("{POOL}/trashed")]).unwrap();
        // The node may be alive.
        world.detach(&first).await;
        world.revoked(handle, &a).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(world.attachment(&first).await.is_some());
        world.out_of_service(&a, true).await;
        world.gone(&first).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(grant.spec.holders.is_empty() && grant.status.fences.is_empty(), "{grant:?}");

        // The image is restored: its record still closes the earlier generations.
        let listed = shared().rbd(&["trash", "ls", POOL]).unwrap();
        let listed = String::from_utf8(listed).unwrap();
        let id = listed.lines().find_map(|line| line.strip_suffix(" trashed")).unwrap();
        shared().rbd(&["trash", "restore", "--pool", POOL, id]).unwrap();
        let second = world.attach(&volume, &b).await;
        assert_eq!(world.attached(&second).await, generation.next());
        drop(open(handle, &b, generation.next()).unwrap());
        let Err(error) = open(handle, &a, generation) else { panic!("a stale generation claims") };
        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
        controller.stop().await;
    });
}

#[test]
fn row_38_a_fence_keeps_a_grant_only_as_long_as_the_image_exists() {
    run(async |world: World| {
        let kept = tokio::task::spawn_blocking(|| create("fenced-and-kept")).await.unwrap();
        let deleted = format!("rbd/ceph/{POOL}//fenced-and-deleted");
        let grants = world.all::<VolumeGrant>();
        for handle in [&kept, &deleted] {
            let fence = FenceEntry {
                node: "lost".to_owned(),
                generation: Generation(3),
                client: None,
                proof: String::new(),
                time: Time(0),
            };
            let spec = GrantSpec { holders: Vec::new(), generation: Generation(3) };
            let grant = VolumeGrant::new(&world.driver, handle, spec);
            let mut grant = grants.create(&PostParams::default(), &grant).await.unwrap();
            grant.status.grant.fences.push(fence);
            let name = grant_name(&world.driver, handle);
            grants.replace_status(&name, &PostParams::default(), &grant).await.unwrap();
        }
        let controller = world.controller();
        eventually("the grant of the deleted image is removed", async || {
            world.grant(&deleted).await.is_none().then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(world.grant(&kept).await.is_some());
        controller.stop().await;
    });
}

#[test]
fn row_13_and_37_one_of_the_nodes_that_share_an_image_is_fenced() {
    one_of_two_is_fenced("shared", Mode::SharedReadWrite, "ReadWriteMany");
}

#[test]
fn row_13_and_37_one_of_the_nodes_that_read_an_image_is_fenced() {
    one_of_two_is_fenced("read", Mode::ReadOnly, "ReadOnlyMany");
}

/// Two nodes hold an image. One of them is lost, the other one goes on, and a single writer waits for both.
fn one_of_two_is_fenced(image: &'static str, mode: Mode, access: &str) {
    run(async |world: World| {
        let handle = &tokio::task::spawn_blocking(|| create(image)).await.unwrap();
        let controller = world.controller();
        let (a, b, c) = (world.node("a").await, world.node("b").await, world.node("c").await);
        let mut spec = world.spec(handle);
        spec["accessModes"] = json!([access]);
        spec["volumeMode"] = json!("Block");
        let volume = world.volume_of("v", spec).await;
        let mut held = Vec::new();
        for node in [&a, &b] {
            let attachment = world.attach(&volume, node).await;
            let generation = world.attached(&attachment).await;
            let claiming = (Signal::SafeToDetach, Truth::False, Reason::Claiming, generation);
            world.report(handle, node, &[claiming]).await;
            let image = open_as(handle, node, generation, mode).unwrap();
            let mounted = (Signal::SafeToMount, Truth::True, Reason::Mapped, generation);
            world.report(handle, node, &[mounted]).await;
            held.push((attachment, generation, image));
        }
        let [(first, of_a, lost), (second, of_b, kept)] = &held[..] else { panic!() };
        let writer = world.volume("w", handle).await;
        let writer = world.attach(&writer, &c).await;
        world.attach_error(&writer, "holds it").await;

        world.out_of_service(&a, true).await;
        world.detach(first).await;
        world.gone(first).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        let fence = grant.fence(&a, *of_a).unwrap();
        assert!(fence.client.is_some() && fence.proof.contains("is sealed"), "{fence:?}");
        eventually("the worker of the node is fenced", async || lost.is_fenced().then_some(()))
            .await;
        let Err(error) = open_as(handle, &a, *of_a, mode) else { panic!("a stale generation") };
        assert!(error.message().contains("the generation was fenced"), "{}", error.message());
        // Its check of the claim runs every 5 s.
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert!(!kept.is_fenced());
        kept.refresh_size().unwrap();
        if mode == Mode::SharedReadWrite {
            kept.resize().unwrap().grow(16 << 20).unwrap();
        }
        world.attach_error(&writer, "holds it").await;

        world.detach(second).await;
        world.revoked(handle, &b).await;
        kept.close();
        world.released(handle, &b, *of_b).await;
        world.gone(second).await;
        let generation = world.attached(&writer).await;
        assert_eq!(generation, of_b.next());
        drop(open(handle, &c, generation).unwrap());
        controller.stop().await;
    });
}

/// The volumes that the sweeper looks for.
#[test]
fn row_38_the_volumes_of_configured_pools_and_object_stores_are_listed() {
    let storage = volumes();
    let pool = format!("rbd/ceph/{POOL}/{LISTED}");
    let places: Vec<String> = storage.places().unwrap().into_iter().collect();
    assert_eq!(places, ["object/objects".to_owned(), pool.clone()]);

    shared().rbd(&["namespace", "create", &format!("{POOL}/{LISTED}")]).unwrap();
    for name in ["one", "of two%"] {
        shared().rbd(&["create", "--size", "8M", &format!("{POOL}/{LISTED}/{name}")]).unwrap();
    }
    create_objects("listed");
    let deadline = Instant::now() + Duration::from_secs(30);
    let images = storage.volumes_in(&pool, deadline).unwrap();
    assert_eq!(images, [format!("{pool}/of%20two%25"), format!("{pool}/one")]);
    for handle in &images {
        let Backing::Granted(record) = storage.find(handle).unwrap() else { panic!() };
        assert!(record.record(deadline).unwrap().claims.is_empty());
    }
    let volumes = storage.volumes_in("object/objects", deadline).unwrap();
    assert!(volumes.contains(&"object/objects/listed".to_owned()), "{volumes:?}");
    // Files need no grant, and a static volume has no place.
    for place in ["file/node-1/default", ""] {
        assert!(storage.volumes_in(place, deadline).unwrap().is_empty());
    }
    let error = storage.volumes_in("rbd/ceph/no-such-pool/", deadline).unwrap_err();
    assert!(error.message().contains("no-such-pool"), "{}", error.message());
}
