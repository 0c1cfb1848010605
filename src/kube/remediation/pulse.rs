//! Observes the Leases of kubelets and agents: what the watches have shown, and what the API server answers where a node
//! seems to be silent. It writes nothing.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::Result;
use tokio::time::Instant;

use super::beats::{Beats, Silence};
use crate::cluster::Cluster;
use crate::heartbeat;

/// The maximum number of nodes whose Leases are read in one turn.
const MAX_READ: usize = 50;

/// The heartbeats of all nodes.
#[derive(Debug)]
pub(super) struct Pulse {
    cluster: Arc<Cluster>,
    timeout: Duration,
    limit: usize,
}

impl Pulse {
    pub(super) fn new(cluster: &Arc<Cluster>, timeout: Duration, limit: usize) -> Self {
        Self { cluster: Arc::clone(cluster), timeout, limit }
    }

    pub(super) fn beats(&self) -> &Beats {
        &self.cluster.beats
    }

    pub(super) fn silence(&self, node: &str) -> Silence {
        self.beats().silence(node, self.timeout, Instant::now())
    }

    /// Returns whether both have renewed their Leases within the timeout.
    pub(super) fn is_back(&self, node: &str) -> bool {
        self.beats().is_back(node, self.timeout, Instant::now())
    }

    /// Returns whether a node seems not to work. For one whose agent has no Lease, its kubelet decides.
    pub(super) fn is_suspect(&self, node: &str) -> bool {
        let now = Instant::now();
        match self.beats().silence(node, self.timeout, now) {
            Silence::Late | Silence::Lost => true,
            Silence::Unknown => self.beats().is_stale(node, self.timeout, now),
            Silence::No => false,
        }
    }

    /// Takes what the watches have shown of a node.
    pub(super) fn observe(&self, node: &str) {
        let kubelet = self.cluster.leases.mirror.get(node);
        let agent = self.cluster.heartbeats.mirror.get(&heartbeat::name_of(node));
        self.beats().observe(node, [kubelet.as_deref(), agent.as_deref()], Instant::now());
    }

    /// Reads the Leases of those of `nodes` that seem not to work, and of those of `others` if one of `nodes` does not: the
    /// watches may have stopped. The one that is silent for the longest time comes first. Ends when more nodes are silent than
    /// the limit, because nothing is done then.
    ///
    /// # Errors
    /// Returns an error if the API server does not answer. All times then begin again: the nodes may not have reached it
    /// either.
    pub(super) async fn read_silent(&self, nodes: &[String], others: &[String]) -> Result<()> {
        let read = async {
            let silent = self.read_suspects(nodes, 0).await?;
            if silent > 0 {
                self.read_suspects(others, silent).await?;
            }
            Ok(())
        };
        read.await.inspect_err(|_| self.beats().restart(Instant::now()))
    }

    /// Returns how many nodes are silent, of which `silent` are known.
    async fn read_suspects(&self, nodes: &[String], mut silent: usize) -> Result<usize> {
        let suspects = nodes.iter().filter(|node| self.is_suspect(node));
        let mut suspects: Vec<&String> = suspects.collect();
        suspects.sort_by_cached_key(|node| self.beats().last(node));
        for node in suspects.into_iter().take(MAX_READ) {
            if silent > self.limit {
                break;
            }
            self.read(node).await?;
            silent += usize::from(self.is_suspect(node));
        }
        Ok(silent)
    }

    /// Reads both Leases of a node, and returns how long it has been silent.
    pub(super) async fn read(&self, node: &str) -> Result<Silence> {
        self.cluster.leases.refresh(node).await?;
        self.cluster.heartbeats.refresh(&heartbeat::name_of(node)).await?;
        self.observe(node);
        Ok(self.silence(node))
    }
}
