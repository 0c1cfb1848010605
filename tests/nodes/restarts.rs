//! Parts of a node that restart while a pod uses its volume.
//!
//! `CLEAT_TEST_REPLACEMENTS` is how often the pod of the daemon is replaced (default 1).

use std::time::Duration;

use serde_json::Value;

use crate::cluster::{CLAIM, Cluster, POD, claim, is_true, pod, run, wait};
use crate::files::nothing_is_left;

/// A load with verification on the volume of a pod, as a process of the node.
struct Load<'a> {
    cluster: &'a Cluster,
    pod: Value,
}

impl<'a> Load<'a> {
    /// Creates a claim and a pod of this name, and starts the load.
    fn start(cluster: &'a Cluster, name: &str) -> Self {
        cluster.apply(&claim(name, "Filesystem"));
        cluster.start_pod(&pod(name, name));
        let pod = cluster.get(POD, name).unwrap();
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        cluster.on_node(&format!(
            "cd /var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/*/mount && rm -f /run/stop
             export file=$PWD/load
             setsid bash -c '
                 round=0
                 until [ -e /run/stop ]; do
                     fio --name=load --filename=$file --size=16M --rw=randwrite --bs=4k --direct=1 --iodepth=8 \
                         --ioengine=libaio --verify=crc32c --do_verify=1 --verify_fatal=1 \
                         --output-format=json --output=/out/fio.json 2>/out/fio.log || exit
                     grep -A 2 lat_ns /out/fio.json | grep max >>/run/latencies
                     round=$((round + 1)); echo $round >/run/rounds
                 done
                 echo verified >/run/rounds' </dev/null >/dev/null 2>&1 &
             rm -f /run/rounds /run/latencies"
        ));
        let load = Self { cluster, pod };
        load.goes_on();
        load
    }

    fn name(&self) -> &str {
        self.pod["metadata"]["name"].as_str().unwrap()
    }

    /// Returns how long the longest request of the load has taken.
    fn longest_stall(&self) -> Duration {
        let lines = self.cluster.on_node("cat /run/latencies");
        let latencies = lines.lines().map(|line| {
            let (_, number) = line.split_once(':').unwrap();
            number.trim().trim_end_matches(',').parse().unwrap()
        });
        Duration::from_nanos(latencies.max().expect("the load has ended once"))
    }

    /// Waits until more has been written and verified.
    fn goes_on(&self) {
        let rounds = || self.cluster.on_node("cat /run/rounds 2>/dev/null || echo 0");
        let before = rounds();
        wait("the load goes on", || (rounds() != before).then_some(()));
    }

    /// Checks that neither the load nor the container has seen an error, and removes everything.
    fn end(self) {
        self.goes_on();
        self.cluster.on_node("touch /run/stop");
        wait("the load ends without an error", || {
            (self.cluster.on_node("cat /run/rounds").trim() == "verified").then_some(())
        });
        println!("figures: the longest request took {:.1} s", self.longest_stall().as_secs_f64());
        let errors = self
            .cluster
            .on_node("dmesg | grep -iE 'i/o error|ext4-fs error|nbd.*(timed out|error)'; true");
        assert_eq!(errors, "");
        let now = self.cluster.get(POD, self.name()).unwrap();
        let container = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
        assert_eq!(container(&now), container(&self.pod), "the container was restarted");
        self.cluster.exec(self.name(), "id > /v/other && cat /v/other");
        self.cluster.delete(POD, self.name());
        self.cluster.delete(CLAIM, self.name());
        nothing_is_left(self.cluster);
    }
}

/// Ends a service of the node and starts it again, and waits until the node is Ready after that.
fn restart(cluster: &Cluster, service: &str) {
    cluster.on_node(&format!(
        "kill $(cat /run/{service}.pid)
         while kill -0 $(cat /run/{service}.pid) 2>/dev/null; do sleep 0.1; done
         /payload/service {service}"
    ));
    let answers = match service {
        "kubelet" => {
            "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:10248/healthz\")'"
        }
        _ => "/payload/bin/ctr version",
    };
    wait(&format!("{service} is started"), || (cluster.try_on_node(answers).0 == 0).then_some(()));
    wait("the node is Ready", || {
        is_true(&cluster.get("node", "a").unwrap(), "Ready").then_some(())
    });
}

#[test]
fn kubelet_and_containerd_restart_under_a_pod() {
    run(|cluster| {
        let load = Load::start(cluster, "restarted");
        restart(cluster, "kubelet");
        load.goes_on();
        restart(cluster, "containerd");
        load.end();
    });
}

/// Returns how often the pod of the daemon is replaced.
fn replacements() -> usize {
    std::env::var("CLEAT_TEST_REPLACEMENTS").map_or(1, |count| count.parse().unwrap())
}

#[test]
fn the_pod_of_the_daemon_is_replaced_under_load() {
    run(|cluster| {
        let load = Load::start(cluster, "replaced");
        for replacement in 1..=replacements() {
            cluster.kubectl(&["rollout", "restart", "daemonset/cleat-node", "-n", "cleat-system"]);
            cluster.rolled_out("daemonset/cleat-node");
            load.goes_on();
            let stall = load.longest_stall().as_secs_f64();
            println!("figures: replacement {replacement}, longest request until now {stall:.1} s");
        }
        // The new pod is registered with kubelet, and serves another pod.
        cluster.start_pod(&pod("second", "replaced"));
        cluster.delete(POD, "second");
        load.end();
    });
}
