//! A StatefulSet that writes numbered records to its volume, and what became of them.
//!
//! Each record is written in place, made durable, and then noted in a file of the node. So the content of the volume
//! shows which node wrote each record, and whether a write of an earlier node came late: it would replace records of a
//! later one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Cluster, POD, is_true, wait};
use crate::installation::POOL;
use crate::machine::Machine;
use crate::programs::BUSYBOX;

/// The name of the StatefulSet.
pub(crate) const WRITER: &str = "writer";

/// The name of its pod.
pub(crate) const WRITER_POD: &str = "writer-0";

/// The name of its claim.
pub(crate) const WRITER_CLAIM: &str = "data-writer-0";

/// The size of a record in bytes.
const RECORD: usize = 64;

/// What the container runs. The file has its size from the beginning, so that all nodes write to the same blocks.
const SCRIPT: &str = r#"
[ -e /v/records ] || dd if=/dev/zero of=/v/records bs=64k count=64 conv=fsync
last=$(tr -d '\000' </v/records | tail -n 1)
n=${last%% *}
failures=0
while :; do
    n=$((n + 1))
    read -r uptime rest </proc/uptime
    while ! printf '%-63s\n' "$n $NODE $uptime" |
        dd of=/v/records bs=64 seek=$((n - 1)) conv=notrunc,fsync 2>/dev/null; do
        echo "failed $n" >>/notes/$UID
        failures=$((failures + 1))
        # kubelet starts the container again.
        [ $failures -lt 20 ] || exit 1
    done
    echo "$n" >>/notes/$UID
done"#;

/// A record of the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) number: usize,
    pub(crate) node: String,
    /// The time since the node was started.
    pub(crate) uptime: Duration,
}

/// The pod of the StatefulSet that exists now.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    pub(crate) uid: String,
    pub(crate) node: String,
}

/// Creates the StatefulSet with a claim of this class.
pub(crate) fn create(cluster: &Cluster) {
    let field = |path: &str| json!({ "fieldRef": { "fieldPath": path } });
    let labels = json!({ "app": WRITER });
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": { "name": WRITER },
        "spec": {
            "replicas": 1, "serviceName": WRITER, "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{
                        "name": "main", "image": BUSYBOX, "command": ["sh", "-c", SCRIPT],
                        "env": [
                            { "name": "NODE", "valueFrom": field("spec.nodeName") },
                            { "name": "UID", "valueFrom": field("metadata.uid") },
                        ],
                        "volumeMounts": [
                            { "name": "data", "mountPath": "/v" },
                            { "name": "notes", "mountPath": "/notes" },
                        ],
                    }],
                    "volumes": [{
                        "name": "notes",
                        "hostPath": { "path": "/out/notes", "type": "DirectoryOrCreate" },
                    }],
                },
            },
            "volumeClaimTemplates": [{
                "metadata": { "name": "data" },
                "spec": {
                    "storageClassName": "cleat-rbd", "accessModes": ["ReadWriteOnce"],
                    "resources": { "requests": { "storage": "64Mi" } },
                },
            }],
        },
    }));
}

impl Writer {
    /// Waits until a pod of the StatefulSet other than `before` is ready.
    pub(crate) fn next(cluster: &Cluster, before: Option<&Self>) -> Self {
        let is_next = |pod: &Value| {
            is_true(pod, "Ready") && before.is_none_or(|known| pod["metadata"]["uid"] != known.uid)
        };
        let pod = cluster.until(POD, WRITER_POD, "is ready", is_next);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        Self { uid: text(&pod["metadata"]["uid"]), node: text(&pod["spec"]["nodeName"]) }
    }

    /// Returns the node on which the pod is not.
    pub(crate) fn other_node(&self) -> &'static str {
        if self.node == "a" { "b" } else { "a" }
    }

    /// Returns the numbers of the records that the pod has made durable, and how many writes have failed.
    pub(crate) fn notes(&self, cluster: &Cluster) -> (Vec<usize>, usize) {
        let text = cluster.machine(&self.node).run(&format!("cat /out/notes/{}", self.uid));
        let (failed, durable): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.starts_with("failed"));
        (durable.iter().map(|line| line.parse().unwrap()).collect(), failed.len())
    }

    /// Waits until the pod has written more records.
    pub(crate) fn goes_on(&self, cluster: &Cluster) {
        let count = || {
            let count = format!("cat /out/notes/{} 2>/dev/null | wc -l", self.uid);
            cluster.machine(&self.node).run(&count).trim().parse::<usize>().unwrap()
        };
        let before = count();
        wait("the pod writes", || (count() > before + 2).then_some(()));
    }
}

/// Returns the records of the volume, as the filesystem has them on the node of the pod.
pub(crate) fn records(cluster: &Cluster) -> Vec<Record> {
    parse(&cluster.exec(WRITER_POD, "tr -d \"\\000\" </v/records"))
}

/// Returns the records in the image, without a filesystem. A record can be there several times. The image must not be
/// mapped.
pub(crate) fn records_of_image(cluster: &Cluster, image: &str) -> Vec<Record> {
    let content = cluster.ceph().rbd(&["export", &format!("{POOL}/{image}"), "-"]).unwrap();
    let blocks = content.chunks(RECORD).filter(|block| block.ends_with(b" \n"));
    let lines: Vec<&str> = blocks.filter_map(|block| str::from_utf8(block).ok()).collect();
    parse(&lines.concat())
}

fn parse(text: &str) -> Vec<Record> {
    let record = |line: &str| {
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let (node, uptime) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some(Record { number, node, uptime: Duration::from_secs_f64(uptime) })
    };
    text.lines()
        .map(|line| record(line).unwrap_or_else(|| panic!("not a record: {line:?}")))
        .collect()
}

/// Returns when the machine was started, on the clock of this host, less the time for which it was frozen.
pub(crate) fn start_of(machine: &Machine) -> Instant {
    let before = Instant::now();
    let text = machine.run("cat /proc/uptime");
    let uptime = text.split_whitespace().next().unwrap().parse().unwrap();
    before + before.elapsed() / 2 - Duration::from_secs_f64(uptime)
}
