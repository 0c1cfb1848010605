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

    /// Takes what the watches have shown of a node.
    pub(super) fn observe(&self, node: &str) {
        let kubelet = self.cluster.leases.mirror.get(node);
        let agent = self.cluster.heartbeats.mirror.get(&heartbeat::name_of(node));
        self.beats().observe(node, [kubelet.as_deref(), agent.as_deref()], Instant::now());
    }

    /// Reads the Leases of those of `nodes` that seem to be silent, the one that is silent for the longest time first: the
    /// watches may have stopped. Ends when more nodes are silent than the limit, because nothing is done then.
    ///
    /// # Errors
    /// Returns an error if the API server does not answer. All times then begin again: the nodes may not have reached it
    /// either.
    pub(super) async fn read_silent<'a>(&self, nodes: impl Iterator<Item = &'a str>) -> Result<()> {
        let mut suspects: Vec<&str> = nodes.filter(|node| is_silent(self.silence(node))).collect();
        suspects.sort_by_cached_key(|node| self.beats().last(node));
        let mut silent = 0;
        for node in suspects.into_iter().take(MAX_READ) {
            match self.read(node).await {
                Ok(silence) if is_silent(silence) => silent += 1,
                Ok(_) => {}
                Err(error) => {
                    self.beats().restart(Instant::now());
                    return Err(error);
                }
            }
            if silent > self.limit {
                break;
            }
        }
        Ok(())
    }

    /// Reads both Leases of a node, and returns how long it has been silent.
    pub(super) async fn read(&self, node: &str) -> Result<Silence> {
        self.cluster.leases.refresh(node).await?;
        self.cluster.heartbeats.refresh(&heartbeat::name_of(node)).await?;
        self.observe(node);
        Ok(self.silence(node))
    }
}

fn is_silent(silence: Silence) -> bool {
    matches!(silence, Silence::Late | Silence::Lost)
}
