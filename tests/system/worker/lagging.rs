//! A cluster with two OSDs, one of which gets the map with the blocklist entry late. Fencing must not depend on
//! the fast one.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use test_kit::ceph::{Cluster, ID, POOL};
use test_kit::nbd::kernel as nbd;
use test_kit::stopwatch::Stopwatch;
use test_kit::worker::{Worker, start_message};

const OBJECT: u64 = 4 << 20;

/// The number of objects of an image. With 8 placement groups on two OSDs, some are on each.
const OBJECTS: u64 = 16;

const BLOCK: u32 = 4096;

/// Returns the number of the OSD that keeps an object.
fn osd_of(cluster: &Cluster, object: &str) -> u64 {
    let printed = cluster.ceph(&["osd", "map", POOL, object, "--format", "json"]);
    let map: serde_json::Value = serde_json::from_str(&printed).unwrap();
    map["acting_primary"].as_u64().unwrap_or_else(|| panic!("{object}: {map}"))
}

/// Creates an image whose header objects are on one OSD, and returns its name, the name of the other OSD, and
/// the offsets of two objects there.
fn image_on_both(cluster: &Cluster) -> (String, &'static str, [u64; 2]) {
    for number in 0..16 {
        let image = format!("lagging{number}");
        let size = format!("{}B", OBJECTS * OBJECT);
        cluster.rbd(&["create", &format!("{POOL}/{image}"), "--size", &size]).unwrap();
        let info = cluster.rbd(&["info", &format!("{POOL}/{image}"), "--format", "json"]).unwrap();
        let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
        let id = info["id"].as_str().unwrap();
        let fast = osd_of(cluster, &format!("rbd_header.{id}"));
        let small = [format!("rbd_id.{image}"), format!("rbd_object_map.{id}")];
        if small.iter().any(|object| osd_of(cluster, object) != fast) {
            continue;
        }
        let data = |at: &u64| osd_of(cluster, &format!("rbd_data.{id}.{at:016x}")) != fast;
        let slow: Vec<u64> = (0..OBJECTS).filter(data).take(2).map(|at| at * OBJECT).collect();
        if let Ok(offsets) = slow.try_into() {
            return (image, if fast == 0 { "osd1" } else { "osd" }, offsets);
        }
    }
    panic!("no image has its objects on both OSDs");
}

fn start(cluster: &Cluster, image: &str, node: &str, take_over: bool) -> Start {
    let (conf, keyring) = (cluster.conf(), cluster.keyring(ID));
    let (conf, keyring) = (conf.display(), keyring.display());
    let uri = format!("rbd:{POOL}/{image}?conf={conf}&keyring={keyring}&id={ID}");
    let (node, boot_id) = (node.to_owned(), format!("boot of {node}"));
    Start { mapping_id: boot_id.replace(' ', "-"), node, boot_id, take_over, ..start_message(&uri) }
}

fn serving(start: &Start, connections: usize) -> (Worker, Vec<UnixStream>) {
    let mut worker = Worker::launch();
    worker.send_start(start);
    match worker.receive() {
        FromWorker::Ready(_) => {}
        other => panic!("{start:?}: {other:?}"),
    }
    let sockets = worker.serve(connections);
    (worker, sockets)
}

/// The old client has writes in flight at the OSD that lags. The new client is ready before that OSD has the new
/// map. What it then reads or writes there must not be changed by the old client.
#[test]
fn an_osd_that_lags_executes_no_old_write_after_the_first_request_of_the_new_client() {
    let cluster = Cluster::start_with_two_osds();
    let (image, lagging, [read_at, written_at]) = image_on_both(&cluster);
    let (old, theirs) = serving(&start(&cluster, &image, "a", false), 2);
    for offset in [read_at, written_at] {
        assert_eq!(nbd::write(&theirs[0], offset, &[1; BLOCK as usize]), 0);
    }
    cluster.tell(&format!("pause {lagging}"));
    for (socket, offset) in theirs.iter().zip([read_at, written_at]) {
        nbd::send(socket, nbd::WRITE, 9, offset, BLOCK, &[2; BLOCK as usize]);
    }
    let resumed = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let begun = Stopwatch::start();
            let new = serving(&start(&cluster, &image, "b", true), 1);
            (new, begun.elapsed())
        });
        // Longer than a take-over takes, so that the OSD gets the map only after it.
        std::thread::sleep(Duration::from_secs(8));
        let ready = taking.is_finished();
        cluster.tell(&format!("resume {lagging}"));
        let (new, took) = taking.join().unwrap();
        println!("figures: taken over in {took:?}, with the OSD frozen: {ready}");
        new
    });
    let (mut new, ours) = resumed;
    assert_eq!(nbd::write(&ours[0], written_at, &[3; BLOCK as usize]), 0);
    // The writes that were in flight have ended, one way or the other, before the first request.
    let seen = nbd::read(&ours[0], read_at, BLOCK);
    assert!(seen == [1; BLOCK as usize] || seen == [2; BLOCK as usize], "{:?}", &seen[..4]);
    for _ in 0..50 {
        // The old client keeps trying.
        for (socket, offset) in theirs.iter().zip([read_at, written_at]) {
            nbd::send(socket, nbd::WRITE, 10, offset, BLOCK, &[4; BLOCK as usize]);
        }
        assert!(nbd::read(&ours[0], read_at, BLOCK) == seen, "an old write took effect");
        let written = nbd::read(&ours[0], written_at, BLOCK);
        assert!(written == [3; BLOCK as usize], "an old write took effect: {:?}", &written[..4]);
        std::thread::sleep(Duration::from_millis(50));
    }
    for socket in &theirs {
        // The replies to the later writes: every one was refused.
        for _ in 0..51 {
            let (cookie, error) = nbd::reply(socket);
            assert!(cookie == 9 || error != 0, "a write of the fenced client succeeded");
        }
    }
    drop(old);
    new.send(&ToWorker::Stop, &[]);
    assert!(new.exit().success(), "{}", new.log());
}
