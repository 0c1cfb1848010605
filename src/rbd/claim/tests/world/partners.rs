//! Clients with shared claims: writers, to which librbd passes the lock, and readers, which neither lock nor watch the
//! image.

use std::collections::BTreeMap;

use cleat_grants::object::Mode;

use super::super::super::ClaimAttempt;
use super::super::super::beside;
use super::super::super::decision::{Holder, Lost, Purpose};
use super::super::super::record::Claim;
use super::{Claimant, End, OSDS, Process, State, World};
use cleat_core::error::Result;

/// The clients with shared claims, as the record has them, and what they have written.
#[derive(Default)]
pub(super) struct Partners {
    modes: BTreeMap<String, Mode>,
    /// The number of the last claim of each mapping that has written to an OSD.
    newest_on: [BTreeMap<String, u64>; OSDS],
}

impl Partners {
    pub(super) fn is_empty(&self) -> bool {
        self.modes.is_empty()
    }
}

impl World {
    /// Runs a process of a mapping that shares the image in `mode`.
    pub(in super::super) fn run_beside(
        &self,
        claimant: &Claimant,
        mode: Mode,
        actor: usize,
        address: &str,
        steps: u32,
    ) -> End {
        let process = self.start_beside(claimant, mode, actor, address, steps);
        let served = process.use_beside(mode);
        process.end(served)
    }

    /// Starts such a process.
    pub(in super::super) fn start_beside(
        &self,
        claimant: &Claimant,
        mode: Mode,
        actor: usize,
        address: &str,
        steps: u32,
    ) -> Process<'_> {
        let process = self.start(claimant, actor, address, steps);
        if mode == Mode::ReadOnly {
            self.state().watching.remove(address);
        }
        process
    }
}

impl Process<'_> {
    pub(in super::super) fn acquire_beside(
        &self,
        mode: Mode,
        purpose: Purpose,
    ) -> Result<Result<Claim, Lost>> {
        let attempt = ClaimAttempt {
            header: self,
            name: "i",
            claimant: &self.claimant,
            purpose,
            only: None,
            clock: &self.world.clock,
        };
        attempt.acquire_beside(mode)
    }

    fn use_beside(&self, mode: Mode) -> Result<End> {
        let Ok(claim) = self.acquire_beside(mode, Purpose::Open)? else {
            return Ok(End::Superseded);
        };
        self.use_data(1)?;
        self.use_data(2)?;
        beside::leave(self, "i", &claim.client)?;
        Ok(End::Served)
    }

    /// Writes to an OSD, or reads from it. Asserts that no writer works beside a reader, and that no request takes
    /// effect after the claim was removed; on an OSD that lags, after one of a client that does not share the image
    /// with this one, or of the next process of the mapping.
    pub(in super::super) fn use_data(&self, osd: usize) -> Result<()> {
        self.step(osd, |state| {
            let data = &mut state.data;
            let is_newest = self.owner.get() >= data.newest_on[osd];
            assert!(is_newest, "a request took effect after one of a newer owner");
            let own = data.partners.modes.get(&self.address).copied();
            let is_claimed = own.is_some() && data.owner.is_none();
            assert!(is_claimed || self.world.lags, "a fenced client's request took effect");
            data.newest_on[osd] = self.owner.get();
            let newest = &mut data.partners.newest_on[osd];
            let newest = newest.entry(self.claimant.mapping_id.clone()).or_default();
            assert!(self.number.get() >= *newest, "a request took effect after a successor's");
            *newest = self.number.get();
            if own == Some(Mode::SharedReadWrite) {
                self.pass_lock(state);
            }
            Ok(())
        })
    }

    /// librbd has the holder of the lock release it, or breaks the lock of one that does not watch the image.
    fn pass_lock(&self, state: &mut State) {
        let address = self.address.clone();
        let alive = state.watching.contains(&address);
        state.seen.holder = Some(Holder { address, alive, made_by_hand: None });
    }

    /// Notes the shared claims of a new record. Asserts that all of them have one mode, and that the client of a claim
    /// that another one has removed is fenced or has ended.
    pub(super) fn note_partners(&self, state: &mut State, claim: &Claim) {
        let modes: BTreeMap<String, Mode> = claim
            .active_shared()
            .map(|shared| (shared.client.address.clone(), shared.mode))
            .collect();
        let mut kinds: Vec<Mode> = modes.values().copied().collect();
        kinds.dedup();
        assert!(kinds.len() <= 1, "readers beside writers: {modes:?}");
        assert!(claim.released || modes.is_empty(), "a single writer beside others: {modes:?}");
        let before = std::mem::replace(&mut state.data.partners.modes, modes);
        for address in before.keys() {
            let is_left = !state.data.partners.modes.contains_key(address);
            let is_cut = state.blocklist.contains_key(address);
            assert!(
                !is_left || is_cut || *address == self.address,
                "the claim of {address} is lost"
            );
        }
        let is_own = |modes: &BTreeMap<String, Mode>| modes.contains_key(&self.address);
        if is_own(&state.data.partners.modes) && !is_own(&before) {
            // Clients that share the image at the same time have the same number.
            if before.is_empty() {
                state.data.owners += 1;
            }
            self.owner.set(state.data.owners);
            self.number.set(claim.client.generation);
        }
    }
}
