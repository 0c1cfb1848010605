//! Fencing by address on a real cluster, through the calls of CSI-Addons.
//!
//! All is in a network namespace, in which a route gives clients that connect the source address 127.0.0.1 or 127.0.0.2.
//! The daemons of the cluster have 127.0.0.1, so 127.0.0.2 can be fenced.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use test_kit::ceph::{Cluster, ID, POOL};

use crate::cli::csi::Daemon;
use crate::volumes::fixture::{User, options_of};

const VICTIM: &str = "127.0.0.2";
const OTHER: &str = "127.0.0.1";

#[test]
fn clients_are_fenced_by_their_addresses() {
    // The namespace is that of the thread, and of the processes that it starts.
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, which needs root");
        ip(&["link", "set", "lo", "up"]);
        fence_and_unfence();
    });
    thread.join().expect("no check failed");
}

fn fence_and_unfence() {
    let scene = Scene::new();
    connect_from(VICTIM);
    let victim = scene.user("victim");
    let found = scene.daemon.call("GetFenceClients", &scene.request(None));
    let fsid = scene.cluster.ceph(&["fsid"]);
    let addresses = [json!({ "cidr": format!("{VICTIM}/32") })];
    assert_eq!(found, json!({ "clients": [{ "id": fsid.trim(), "addresses": addresses }] }));
    connect_from(OTHER);
    let other = scene.user("other");
    assert!(victim.writes() && other.writes());
    assert_eq!(scene.listed(), [""; 0]);

    let ranges = ["127.0.0.2/32", "10.1.2.4/30", "fd00::7/128"];
    for _ in 0..2 {
        scene.daemon.call("FenceClusterNetwork", &scene.request(Some(&ranges)));
        wait_until_refused(&victim);
        assert!(other.writes());
    }
    let blocklist = scene.cluster.ceph(&["osd", "blocklist", "ls"]);
    assert!(blocklist.contains("127.0.0.2:0/32"), "{blocklist}");
    // Another program has fenced a whole address, and a single client.
    for address in ["10.9.9.9:0/0", "10.9.9.9:0/77"] {
        scene.cluster.ceph(&["osd", "blocklist", "add", address]);
    }
    let fenced = ["10.1.2.4/30", "10.9.9.9/32", "127.0.0.2/32", "fd00::7/128"];
    assert_eq!(scene.listed(), fenced);

    // From here on, the controller itself has the fenced address.
    connect_from(VICTIM);
    let unfence = scene.request(Some(&fenced));
    let error = scene.daemon.try_call("UnfenceClusterNetwork", &unfence).unwrap_err();
    assert_eq!(scene.listed(), fenced);
    scene.cluster.grant(&error).unwrap_or_else(|complaint| panic!("{error}: {complaint}"));
    for _ in 0..2 {
        scene.daemon.call("UnfenceClusterNetwork", &unfence);
        assert_eq!(scene.listed(), [""; 0]);
    }
    let blocklist = scene.cluster.ceph(&["osd", "blocklist", "ls"]);
    assert!(blocklist.contains("10.9.9.9:0/77"), "{blocklist}");
    assert!(scene.user("later").writes());
    victim.die();
}

/// An OSD refuses a client once it has the map of the monitors with the entry. They send it without being asked.
fn wait_until_refused(victim: &User) {
    let limit = Instant::now() + Duration::from_secs(20);
    while victim.writes() {
        assert!(Instant::now() < limit, "a fenced client writes");
    }
}

/// A cluster, and a daemon that knows it.
struct Scene {
    cluster: Cluster,
    daemon: Daemon,
}

impl Scene {
    fn new() -> Self {
        let cluster = Cluster::start();
        let conf = fs::read_to_string(cluster.conf()).unwrap();
        let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
        let known = json!([{ "clusterID": "test", "monitors": [monitors], "pools": [POOL] }]);
        Self { cluster, daemon: Daemon::with_clusters(&known) }
    }

    /// Starts a client that uses a new image.
    fn user(&self, image: &str) -> User {
        self.cluster.rbd(&["create", &format!("{POOL}/{image}"), "--size", "16M"]).unwrap();
        User::of(&format!("rbd:{POOL}/{image}?{}", options_of(&self.cluster, ID)))
    }

    /// Returns a request with these ranges, or one of a call without ranges.
    fn request(&self, ranges: Option<&[&str]>) -> Value {
        let keyring = fs::read_to_string(self.cluster.keyring(ID)).unwrap();
        let key = keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap();
        let mut request = json!({
            "parameters": { "clusterID": "test" },
            "secrets": { "userID": ID, "userKey": key },
        });
        if let Some(ranges) = ranges {
            request["cidrs"] = ranges.iter().map(|range| json!({ "cidr": range })).collect();
        }
        request
    }

    fn listed(&self) -> Vec<String> {
        let answer = self.daemon.call("ListClusterFence", &self.request(None));
        let cidrs = answer["cidrs"].as_array().unwrap_or_else(|| panic!("{answer}"));
        cidrs.iter().map(|cidr| cidr["cidr"].as_str().unwrap().to_owned()).collect()
    }
}

/// Sets the source address of later connections to the cluster.
fn connect_from(address: &str) {
    ip(&["route", "replace", "local", "127.0.0.1", "dev", "lo", "table", "local", "src", address]);
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status();
    assert!(status.expect("ip runs (apt install iproute2)").success(), "ip {arguments:?}");
}
