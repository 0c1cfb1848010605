//! Claims of volumes that have neither a PersistentVolume nor a grant, for example after both were lost with the restored
//! backup of an API server. Nothing here names these volumes, so each sweep lists the places where volumes are.
//!
//! They are reported, and stay. Nothing proves that their clients have ended: another cluster may use the same pool, with
//! nodes of the same names, and a grant for such a claim would end with the fence of a client that works.

use std::collections::BTreeSet;

use cleat_core::error::{ErrorKind, Result};
use cleat_grants::object::Generation;
use cleat_grants::record::{Claim, Record};

use crate::api::message;
use crate::cluster::Cluster;
use crate::grant::grant_name;
use crate::storage::{self, Backing, has_not_answered};

/// The maximum number of claims that one sweep names in the log. All are counted.
const MAX_NAMED: usize = 100;

/// The claims that one sweep has found, and the places that it has not looked at.
#[derive(Debug, Default)]
pub(crate) struct UnknownClaims {
    left: BTreeSet<String>,
    of_known_nodes: usize,
    others: usize,
}

/// What was found in one place.
type Found = Vec<(String, Claim)>;

impl UnknownClaims {
    /// Begins a sweep of the configured places, and of those of known volumes.
    pub(crate) fn begin<'a>(cluster: &Cluster, known: impl Iterator<Item = &'a str>) -> Self {
        let mut left: BTreeSet<String> = known.map(str::to_owned).collect();
        match cluster.storage.places() {
            Ok(places) => left.extend(places),
            Err(error) => {
                tracing::warn!("only places of known volumes are listed: {}", message(&error));
            }
        }
        Self { left, ..Self::default() }
    }

    /// Returns whether all places were looked at.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    /// Looks at the places that are left, except those whose storage is silent. Adds to these what does not answer.
    pub(crate) async fn look(&mut self, cluster: &Cluster, silent: &mut BTreeSet<String>) {
        for place in std::mem::take(&mut self.left) {
            if silent.contains(&place) {
                self.left.insert(place);
                continue;
            }
            match claims_in(cluster, &place).await {
                Ok(found) => self.report(cluster, found),
                Err(error) => {
                    tracing::warn!(place, "its claims are not known: {}", message(&error));
                    if has_not_answered(&error) {
                        silent.insert(place.clone());
                        self.left.insert(place);
                    }
                }
            }
        }
        cluster.metrics.unknown_claims(self.of_known_nodes, self.others);
    }

    fn report(&mut self, cluster: &Cluster, found: Found) {
        for (volume, claim) in found {
            let is_known = !cluster.node_states([&*claim.node].into_iter()).is_empty();
            let count = if is_known { &mut self.of_known_nodes } else { &mut self.others };
            *count += 1;
            if self.of_known_nodes + self.others <= MAX_NAMED {
                let Claim { node, generation, client, .. } = claim;
                tracing::warn!(
                    volume,
                    node,
                    %generation,
                    client,
                    "a claim of a volume that has neither a PersistentVolume nor a grant; it stays. If the volume is \
                     needed, create its PersistentVolume; otherwise, end the claim with cleat fence"
                );
            }
        }
    }
}

/// Returns the claims with a grant in one place that nothing in this cluster names.
async fn claims_in(cluster: &Cluster, place: &str) -> Result<Found> {
    let mut found = Found::new();
    for handle in storage::list(&cluster.calls, &cluster.storage, place).await? {
        if is_known(cluster, &handle) {
            continue;
        }
        let record = match record(cluster, &handle).await {
            Ok(record) => record,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) if has_not_answered(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(volume = handle, "its claims are not known: {}", message(&error));
                continue;
            }
        };
        // It may have been made while its record was read.
        if !is_known(cluster, &handle) {
            // Without a grant, a claim is made by hand or by a driver that needs no grants.
            let granted =
                record.claims.into_iter().filter(|claim| claim.generation > Generation(0));
            found.extend(granted.map(|claim| (handle.clone(), claim)));
        }
    }
    Ok(found)
}

/// Returns whether a PersistentVolume or a grant names the volume, or may do so because it cannot be read.
fn is_known(cluster: &Cluster, handle: &str) -> bool {
    let name = grant_name(&cluster.config.driver, handle);
    let (grants, volumes) = (&cluster.grants.mirror, &cluster.volumes.mirror);
    let is_readable = grants.unreadable_len() == 0 && volumes.unreadable_len() == 0;
    !is_readable || grants.get(&name).is_some() || !volumes.find(0, &name).is_empty()
}

async fn record(cluster: &Cluster, handle: &str) -> Result<Record> {
    let Backing::Granted(storage) = cluster.storage.find(handle)? else {
        return Ok(Record::default());
    };
    storage::on_thread(&cluster.calls, &storage, handle, |storage, deadline| {
        storage.record(deadline)
    })
    .await
}
