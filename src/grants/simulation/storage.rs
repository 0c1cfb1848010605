//! The storage of a world: one record with conditional writes, and the clients that are cut off.

use std::collections::{BTreeMap, BTreeSet};

use super::messages::{Answer, Call};
use crate::object::Generation;
use crate::record::{Claim, FencePlan, Record, Refusal, Seal};

#[derive(Debug, Default)]
pub(crate) struct Storage {
    pub(crate) record: Record,
    /// Counts the writes of the record.
    pub(crate) revision: u64,
    /// Whether the record names only the last client that was cut off, as if 64 others had been fenced before.
    forgets: bool,
    cut: BTreeSet<String>,
    /// Every client that has ever claimed, with its node and generation.
    claimed: BTreeMap<String, (String, Generation)>,
    /// The clients that were cut off by the last call of a controller.
    pub(crate) newly_fenced: Vec<String>,
}

impl Storage {
    pub(crate) fn new(forgets: bool) -> Self {
        Self { forgets, ..Self::default() }
    }

    /// Returns whether the storage accepts a write of `client`.
    pub(crate) fn accepts(&self, client: &str) -> bool {
        self.claimed.contains_key(client) && !self.cut.contains(client)
    }

    pub(crate) fn is_cut(&self, client: &str) -> bool {
        self.cut.contains(client)
    }

    pub(crate) fn claim_of(&self, client: &str) -> Option<&(String, Generation)> {
        self.claimed.get(client)
    }

    /// Executes a call. `is_alive` says whether the process that claims still exists.
    pub(crate) fn call(&mut self, call: Call, is_alive: bool) -> Answer {
        match call {
            Call::ReadRecord => Answer::Record(self.record.clone()),
            Call::Claim(claim) => self.claim(claim, is_alive, false),
            Call::Reclaim(claim) => self.claim(claim, is_alive, true),
            Call::Release(client) => {
                let record = self.record.release(&client);
                let is_released = record.is_some();
                self.write(record);
                Answer::Released(is_released)
            }
            Call::Cut(target) => match self.record.plan_fence(&target) {
                FencePlan::Cut(client) => {
                    if let Some(client) = client.clone().filter(|c| self.cut.insert(c.clone())) {
                        self.newly_fenced.push(client);
                    }
                    Answer::Cut(client, self.revision)
                }
                FencePlan::Done(_) | FencePlan::Foreign(_) => Answer::Done,
            },
            Call::Seal { target, cut, revision } => {
                if revision != self.revision {
                    return Answer::Conflict;
                }
                let mut record = self.record.seal(&target, cut);
                for seal in &mut record.seals {
                    seal.machine = seal.client.as_deref().and_then(machine_of);
                }
                let lowest = record.lowest;
                let stays =
                    |seal: &Seal| seal.generation >= lowest || seal.generation == target.generation;
                record.seals.retain(|seal| !self.forgets || stays(seal));
                self.write(Some(record));
                Answer::Done
            }
            Call::Unfence(client) => {
                self.cut.remove(&client);
                let record = self.record.unfence(&client);
                self.write(record);
                Answer::Done
            }
            _ => unreachable!("a call for the API server"),
        }
    }

    fn claim(&mut self, claim: Claim, is_alive: bool, again: bool) -> Answer {
        if !is_alive || self.cut.contains(&claim.client) {
            return Answer::Refused(Refusal::NotClaimed);
        }
        let known = (claim.node.clone(), claim.generation);
        let client = claim.client.clone();
        let admission = match again {
            true => self.record.admit_reclaim(claim),
            false => self.record.admit_claim(claim),
        };
        match admission {
            Ok(admission) => {
                self.cut.extend(admission.cut);
                self.claimed.insert(client, known);
                self.write(Some(admission.record));
                Answer::Claimed
            }
            Err(refusal) => Answer::Refused(refusal),
        }
    }

    fn write(&mut self, record: Option<Record>) {
        if let Some(record) = record {
            self.record = record;
            self.revision += 1;
        }
    }
}

/// Returns the machine of a client.
fn machine_of(client: &str) -> Option<String> {
    client.split_once('/').map(|(machine, _)| machine.to_owned())
}
