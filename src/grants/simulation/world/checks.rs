//! What must hold after every event of a world, and at its end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::World;
use crate::agent::OwnClaim;
use crate::object::{FenceEntry, Generation, Signal, Truth, VolumeGrant};
use crate::simulation::messages::Object;
use crate::simulation::storage::Storage;

/// A client whose writes the storage accepts, or its reads if its node only reads.
struct Writer<'a> {
    node: &'a str,
    generation: Generation,
    client: &'a str,
}

/// What the checks remember of a run.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// Every revocation that was ever recorded.
    revoked: BTreeSet<(String, Generation)>,
    /// The node that each generation was given to.
    given: BTreeMap<Generation, String>,
    /// The SafeToDetach of a restored backup that were not written again since. They may be wrong until the
    /// node has seen them.
    restored: BTreeSet<(String, Generation)>,
    was_restored: bool,
    /// The generations with which nodes were about to claim when a backup was restored. The object does not
    /// have these intents any more, so that the holder can be freed before the claim is recorded. Such a
    /// claim is adopted afterwards, and until then the storage refuses every other one.
    lost_intents: BTreeSet<(String, Generation)>,
    last: Option<Arc<Object>>,
    /// What the last write has changed.
    changes: Vec<&'static str>,
}

impl Checks {
    /// Checks the state after an event.
    pub(crate) fn after_event(&self, world: &World<'_>) -> Option<String> {
        let writers = writers(world);
        let rivals = writers.iter().find_map(|one| {
            let is_rival = |other: &&Writer<'_>| {
                let modes = [one, other].map(|client| world.mode_of(client.node));
                let is_shared = modes[0].is_compatible(modes[1]) && other.node != one.node;
                other.client != one.client && !is_shared
            };
            writers.iter().find(is_rival).map(|other| (one, other))
        });
        if let Some((one, other)) = rivals {
            return Some(format!("two writers: {} and {}", one.client, other.client));
        }
        let grant = world.api.grant()?;
        writers.iter().find_map(|writer| self.contradiction(world, grant, writer))
    }

    /// Returns what the object says that cannot be true while `writer` can write.
    fn contradiction(
        &self,
        world: &World<'_>,
        grant: &VolumeGrant,
        writer: &Writer<'_>,
    ) -> Option<String> {
        let Writer { node, generation, client } = *writer;
        let is_restored = self.restored.contains(&(node.to_owned(), generation));
        if grant.is_true(node, Signal::SafeToDetach, generation) && !is_restored {
            return Some(format!("SafeToDetach of {node} is a lie: {client} can write"));
        }
        if grant.fence(node, generation).is_some() {
            return Some(format!("Fenced of {node} is a lie: {client} can write"));
        }
        if grant.is_true(node, Signal::Cleaned, generation) {
            return Some(format!("Cleaned of {node} is a lie: {client} can write"));
        }
        let later = grant.spec.holders.iter().find(|holder| {
            let is_rival = !holder.mode.is_compatible(world.mode_of(node));
            is_rival && holder.node != node && holder.generation > generation
        });
        let later = later.filter(|_| !self.was_restored)?;
        Some(format!("{} was granted while {client} can write", later.node))
    }

    /// Checks a change of the object.
    pub(crate) fn after_write(
        &mut self,
        world: &World<'_>,
        object: &Arc<Object>,
    ) -> Option<String> {
        let before = self.last.replace(object.clone());
        let grant = &object.stored.grant;
        self.restored
            .retain(|(node, generation)| grant.is_true(node, Signal::SafeToDetach, *generation));
        let known = before.as_ref().map(|object| &object.stored.grant);
        let holders = &grant.spec.holders;
        for holder in holders {
            let named = (holder.node.clone(), holder.generation);
            if holder.revoked {
                self.revoked.insert(named);
            } else if self.revoked.contains(&named) && !self.was_restored {
                return Some(format!("the revocation of {named:?} was withdrawn"));
            }
            let given = self.given.entry(holder.generation).or_insert_with(|| holder.node.clone());
            if *given != holder.node && !self.was_restored {
                return Some(format!("generation {} was given out twice", holder.generation));
            }
            let is_adopted = known.is_some_and(|known| holder.generation <= known.spec.generation)
                && known.and_then(|known| known.holder(&holder.node)).is_none();
            if is_adopted {
                self.changes.push("adopted");
            }
            let is_new = known.and_then(|known| known.holder(&holder.node)).is_none();
            if is_new && let Some(left) = world.left_of_a_fence(&holder.node) {
                return Some(format!("{} has a grant, and has not cleaned up {left}", holder.node));
            }
        }
        let is_restored_fence = |fence: &&FenceEntry| {
            let known = known.filter(|_| self.was_restored);
            let is_new = |known: &VolumeGrant| known.fence(&fence.node, fence.generation).is_none();
            known.is_some_and(is_new) && grant.holder(&fence.node).is_none()
        };
        if grant.status.fences.iter().any(|fence| is_restored_fence(&fence)) {
            self.changes.push("fence restored");
        }
        let removed = known.iter().flat_map(|known| &known.status.fences);
        for fence in removed.filter(|f| grant.fence(&f.node, f.generation).is_none()) {
            let is_clean = grant.is_true(&fence.node, Signal::Cleaned, fence.generation);
            self.changes.push(if is_clean { "cleaned up" } else { "fence forgotten" });
        }
        let entries = known.iter().flat_map(|known| &known.status.nodes);
        let forgotten = entries.filter(|entry| grant.entry(&entry.node).is_none());
        self.changes.extend(forgotten.map(|_| "node forgotten"));
        let freed = known.iter().flat_map(|known| &known.spec.holders);
        let freed = freed.filter(|holder| grant.holder(&holder.node).is_none());
        let is_lost =
            |node: &String, generation| self.lost_intents.contains(&(node.clone(), generation));
        let mut freed = freed.filter(|holder| !is_lost(&holder.node, holder.generation));
        let writers = writers(world);
        freed.find_map(|holder| {
            let writes =
                |w: &&Writer<'_>| w.node == holder.node && w.generation == holder.generation;
            let writer = writers.iter().find(writes)?;
            Some(format!("{} was freed while {} can write", holder.node, writer.client))
        })
    }

    /// Returns what the last write has changed, for the tally.
    pub(crate) fn changes(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.changes)
    }

    /// Checks that each client that a controller has cut off was revoked before.
    pub(crate) fn after_fencing(&self, storage: &mut Storage) -> Option<String> {
        let fenced = std::mem::take(&mut storage.newly_fenced);
        fenced.into_iter().find_map(|client| {
            let claim = storage.claim_of(&client)?;
            (!self.revoked.contains(claim)).then(|| format!("{client} was cut off, not revoked"))
        })
    }

    /// Checks that a mapping that ends by force was revoked, or is cut off.
    pub(crate) fn before_end(&self, world: &World<'_>, node: usize, force: bool) -> Option<String> {
        let node = &world.nodes[node];
        let mapping = node.local.mapping.as_ref().filter(|_| force)?;
        let is_revoked = self.revoked.contains(&(node.name.clone(), mapping.generation));
        let is_cut = world.storage.is_cut(&mapping.client);
        (!is_revoked && !is_cut)
            .then(|| format!("{} was ended by force and not revoked", mapping.client))
    }

    /// Notes that a backup was restored: what it says may be wrong until it is written again.
    pub(crate) fn after_restore(&mut self, world: &World<'_>) {
        self.was_restored = true;
        self.last.clone_from(world.api.object());
        let permitted = world
            .nodes
            .iter()
            .filter_map(|node| node.permitted().map(|generation| (node.name.clone(), generation)));
        self.lost_intents.extend(permitted);
        let entries = world.api.grant().map(|grant| grant.status.nodes.as_slice());
        for entry in entries.unwrap_or_default() {
            let signal = entry.condition(Signal::SafeToDetach);
            if let Some(signal) = signal.filter(|signal| signal.status == Truth::True) {
                self.restored.insert((entry.node.clone(), signal.generation));
            }
        }
    }
}

/// Returns what is missing of the final state, in which the nodes `last` use the volume and no other node
/// has anything of it.
pub(crate) fn unfinished(world: &World<'_>, last: &[usize]) -> Option<String> {
    let empty = VolumeGrant::default();
    let grant = world.api.grant().unwrap_or(&empty);
    if !grant.status.fences.is_empty() {
        return Some("a fence is left".to_owned());
    }
    for (at, node) in world.nodes.iter().enumerate() {
        let name = &node.name;
        let claim = world.storage.record.claim_of(name);
        let holder = grant.holder(name);
        if !last.contains(&at) {
            let is_left = holder.is_some() || claim.is_some() || node.local.mapping.is_some();
            if is_left || matches!(node.local.claim, OwnClaim::Held(_)) {
                return Some(format!("{name} still has the volume"));
            }
            continue;
        }
        let Some(holder) = holder.filter(|holder| !holder.revoked) else {
            return Some(format!("{name} has no grant"));
        };
        let mapping = node.local.usable().filter(|known| known.generation == holder.generation);
        let Some(mapping) = mapping else { return Some(format!("{name} has no mapping")) };
        if claim.is_none_or(|claim| claim.client != mapping.client) {
            return Some(format!("the claim of {name} is not recorded"));
        }
        let entry = grant.entry(name);
        let says = |signal, truth| entry.is_some_and(|e| e.is(signal, truth, holder.generation));
        let client = entry.and_then(|entry| entry.client.as_ref());
        let is_told = says(Signal::SafeToMount, Truth::True)
            && says(Signal::SafeToDetach, Truth::False)
            && client == Some(&mapping.client);
        if !is_told {
            return Some(format!("{name} has not published its mapping"));
        }
    }
    None
}

/// Returns the clients whose processes exist and whose writes the storage accepts.
fn writers<'a>(world: &'a World<'_>) -> Vec<Writer<'a>> {
    let nodes = world.nodes.iter().flat_map(|node| {
        let processes = node.processes.iter().chain(&node.strays);
        processes.map(|(client, generation)| Writer {
            node: &node.name,
            generation: *generation,
            client,
        })
    });
    nodes.filter(|writer| world.storage.accepts(writer.client)).collect()
}
