//! The metrics of the controller.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use cleat_core::error::{Error, ErrorKind, Result};

/// The counters, and the gauges that the leader sets.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    requests: Family<ApiRequest, Counter>,
    writes: Family<Write, Counter>,
    syncs: Family<Sync, Counter>,
    fences: Counter,
    unreadable: Family<Unreadable, Gauge>,
    unknown_claims: Family<UnknownClaims, Gauge>,
    pub(crate) leader: Gauge,
    pub(crate) grants: Gauge,
    pub(crate) attachments: Gauge,
    pub(crate) queue: Gauge,
    /// For how many seconds the volume has waited that waits for the longest time.
    pub(crate) oldest_wait: Gauge,
    nodes: Family<Nodes, Gauge>,
}

/// The states in which nodes are counted.
const STATES: [&str; 3] = ["silent", "lost", "refused"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Nodes {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequest {
    verb: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Write {
    object: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Unreadable {
    kind: String,
}

/// Claims of volumes that nothing names. `node` is `known` if this cluster has the node of the claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnknownClaims {
    node: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sync {
    object: &'static str,
    result: &'static str,
}

impl Metrics {
    /// Counts a request to the API server, also one that is a write and one that fails.
    pub(crate) fn request(&self, verb: &'static str) {
        self.requests.get_or_create(&ApiRequest { verb }).inc();
    }

    /// Counts a write of an object.
    pub(crate) fn write(&self, object: &'static str) {
        self.writes.get_or_create(&Write { object }).inc();
    }

    /// Counts an object that was looked at.
    pub(crate) fn sync(&self, object: &'static str, result: &'static str) {
        self.syncs.get_or_create(&Sync { object, result }).inc();
    }

    /// Counts a node that was fenced.
    pub(crate) fn fenced(&self) {
        self.fences.inc();
    }

    /// Sets the number of objects of a kind that cannot be read.
    pub(crate) fn unreadable(&self, kind: String, number: i64) {
        self.unreadable.get_or_create(&Unreadable { kind }).set(number);
    }

    /// Sets the number of claims of volumes that have neither a PersistentVolume nor a grant: those of nodes that this
    /// cluster has, and the others.
    pub(crate) fn unknown_claims(&self, of_known_nodes: usize, others: usize) {
        for (node, count) in [("known", of_known_nodes), ("unknown", others)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.unknown_claims.get_or_create(&UnknownClaims { node }).set(count);
        }
    }

    /// Sets the gauges of a process that is not the leader any more: what it knows is not true any more.
    pub(crate) fn reset(&self) {
        for gauge in [&self.leader, &self.grants, &self.attachments, &self.queue, &self.oldest_wait]
        {
            gauge.set(0);
        }
        self.unreadable.clear();
        self.unknown_claims.clear();
        self.nodes.clear();
    }

    /// Says how many nodes are in a state.
    pub(crate) fn nodes(&self, state: &'static str, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.nodes.get_or_create(&Nodes { state }).set(count);
    }

    /// Returns the metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// Returns `Internal` if a value cannot be formatted.
    pub(crate) fn text(&self) -> Result<String> {
        let mut registry = Registry::with_prefix("cleat_controller");
        let requests = "Requests to the API server, by verb";
        registry.register("api_requests", requests, self.requests.clone());
        let writes = "Writes to the API server, by object";
        registry.register("writes", writes, self.writes.clone());
        let syncs = "Objects that were looked at, by object and result";
        registry.register("syncs", syncs, self.syncs.clone());
        let fences = "Nodes that were fenced at the storage of a volume";
        registry.register("fences", fences, self.fences.clone());
        let unreadable = "Objects that cannot be read, by kind";
        registry.register("unreadable", unreadable, self.unreadable.clone());
        let unknown = "Claims of volumes that have neither a PersistentVolume nor a grant";
        registry.register("unknown_claims", unknown, self.unknown_claims.clone());
        registry.register(
            "leader",
            "Whether this process is the leader and works",
            self.leader.clone(),
        );
        registry.register("grants", "Volumes with a grant", self.grants.clone());
        let attachments = "VolumeAttachments of the driver";
        registry.register("attachments", attachments, self.attachments.clone());
        registry.register("queue", "Objects that wait to be looked at", self.queue.clone());
        let wait = "For how long the volume has waited that waits for the longest time";
        registry.register("oldest_wait_seconds", wait, self.oldest_wait.clone());
        for state in STATES {
            // A state without nodes is shown as well.
            drop(self.nodes.get_or_create(&Nodes { state }));
        }
        let nodes =
            "Nodes that are silent, marked as lost, or not marked because too many are silent";
        registry.register("nodes", nodes, self.nodes.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot format the metrics").with_source(error)
        })?;
        Ok(text)
    }
}
