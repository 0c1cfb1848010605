//! A simulated image: its header and its data on several OSDs, the blocklist, and the processes that use it.
//!
//! An OSD refuses a fenced client only once it has a map with the entry. It gets new maps late from the
//! monitors, or with the request of a client that has one. Another image may take the place of this one, with a
//! copy of its metadata.

mod partners;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::super::decision::{Holder, Liveness, Lost, Observation, Purpose};
use super::super::header::Header;
use super::super::record::Claim;
use super::super::{ClaimAttempt, Claimant};
use cleat_core::clock::ManualClock;
use cleat_core::error::{Error, ErrorKind, Result};
use librbd::LockState;

/// More steps than a process makes.
pub(super) const STEPS: u32 = 20;

/// The OSD with the header.
pub(super) const HEADER: usize = 0;

/// The number of OSDs.
pub(super) const OSDS: usize = 3;

/// The number of actors whose processes run at the same time: two mappings, and clients without claims.
pub(super) const ACTORS: usize = 3;

/// The state of the storage, and the processes that run.
#[derive(Default)]
pub(super) struct State {
    pub(super) seen: Observation,
    pub(super) watching: BTreeSet<String>,
    pub(super) blocklist: BTreeMap<String, Liveness>,
    pub(super) running: BTreeSet<String>,
    /// The number of the present image. Each has another id.
    image: u64,
    /// The images for which the claim and the announcement were written.
    written_for: [u64; 2],
    /// The clients that have opened the present image.
    users: BTreeSet<String>,
    data: Data,
    maps: Maps,
    mappings: Mappings,
    /// The actor that may make the next step.
    turn: Option<usize>,
    ended: [bool; ACTORS],
}

/// The owner of the image, and whose data the OSDs have.
#[derive(Default)]
struct Data {
    /// The address of the client with the newest claim that is not released, or with the lock and no claim.
    owner: Option<String>,
    partners: partners::Partners,
    /// The number of owners so far.
    owners: u64,
    /// The newest owner whose data each OSD has.
    newest_on: [u64; OSDS],
}

/// The maps of the cluster, which contain the blocklist.
#[derive(Default)]
struct Maps {
    newest: u64,
    of_osds: [u64; OSDS],
    of_clients: BTreeMap<String, u64>,
    /// The map from which on each fenced client is refused.
    fenced_at: BTreeMap<String, u64>,
}

/// What is known of each mapping, by its id.
#[derive(Default)]
struct Mappings {
    /// Those with a process that is about to claim the image.
    claiming: BTreeSet<String>,
    /// The image that each has claimed last.
    claimed: BTreeMap<String, u64>,
    /// Those whose claim was active when a client without a claim became the owner.
    lost: BTreeSet<String>,
    /// How often a client without a claim has broken the lock of each one's active claim.
    broken: BTreeMap<String, u32>,
}

impl State {
    /// The OSDs drop the watch of a client.
    fn drop_watch(&mut self, address: &str) {
        self.watching.remove(address);
        if let Some(holder) = &mut self.seen.holder {
            holder.alive &= holder.address != address;
        }
    }

    /// An OSD gets a map, unless it has a newer one.
    fn deliver(&mut self, osd: usize, map: u64) {
        self.maps.of_osds[osd] = self.maps.of_osds[osd].max(map);
        if osd == HEADER {
            let known = self.maps.of_osds[HEADER];
            let fenced = self.maps.fenced_at.iter().filter(|(_, at)| **at <= known);
            let fenced: Vec<String> = fenced.map(|(address, _)| address.clone()).collect();
            // The lock stays, and its holder counts as dead when it watches no more.
            fenced.iter().for_each(|address| self.drop_watch(address));
        }
    }

    /// Executes a request of a client, which has opened the image `image`, at an OSD. Both have the newer of
    /// their maps then.
    fn execute<T>(
        &mut self,
        osd: usize,
        client: &str,
        image: u64,
        request: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let of_client = *self.maps.of_clients.get(client).unwrap_or(&0);
        self.deliver(osd, of_client);
        let map = self.maps.of_osds[osd];
        self.maps.of_clients.insert(client.to_owned(), map);
        if self.maps.fenced_at.get(client).is_some_and(|at| *at <= map) {
            return Err(Error::new(ErrorKind::Fenced, "the client is fenced"));
        }
        if image != self.image {
            return Err(Error::new(ErrorKind::NotFound, "the image was removed"));
        }
        request(self)
    }

    /// Makes the client the owner of the image. Returns its number.
    fn set_owner(&mut self, address: &str) -> u64 {
        self.data.owner = Some(address.to_owned());
        self.next_owner()
    }

    fn next_owner(&mut self) -> u64 {
        self.data.owners += 1;
        self.data.owners
    }

    fn claim(&self) -> Option<Claim> {
        self.seen.claim.clone().filter(|_| self.written_for[0] == self.image)
    }

    fn announced(&self) -> Option<Claim> {
        self.seen.announced.clone().filter(|_| self.written_for[1] == self.image)
    }

    /// Notes that a client without a claim breaks the lock of the client at `address`.
    fn note_broken(&mut self, address: &str) {
        let active = self.claim().filter(|claim| !claim.released);
        if let Some(claim) = active.filter(|claim| claim.client.address == address) {
            *self.mappings.broken.entry(claim.client.mapping_id).or_default() += 1;
        }
    }

    fn broken(&self, mapping_id: &str) -> u32 {
        self.mappings.broken.get(mapping_id).copied().unwrap_or_default()
    }

    /// Notes that a client without a claim has become the owner: a mapping with an active claim must not resume.
    /// `claim::decision` says in which cases the image does not show it.
    fn note_lost(&mut self) {
        let Some(claim) = self.claim().filter(|claim| !claim.released) else { return };
        let Claim { client, .. } = claim;
        let next = self.announced().map(|next| next.client);
        let follows = next.is_some_and(|next| {
            next.mapping_id == client.mapping_id && next.generation > client.generation
        });
        if !follows && !self.mappings.claiming.contains(&client.mapping_id) {
            self.mappings.lost.insert(client.mapping_id);
        }
    }
}

/// A simulated image. With `in_turns`, each step of an actor waits until the test grants it.
pub(super) struct World {
    state: Mutex<State>,
    changed: Condvar,
    in_turns: bool,
    /// OSDs get maps from the monitors only if the test delivers them.
    lags: bool,
    /// A client that fences another one waits for the map with the entry.
    waits_for_map: bool,
    clock: ManualClock,
}

/// A process of a mapping, or a client without claims, from its start to its end or crash.
pub(super) struct Process<'a> {
    world: &'a World,
    actor: usize,
    claimant: Claimant,
    address: String,
    image: u64,
    /// The number of this owner.
    owner: Cell<u64>,
    /// The number of its shared claim.
    number: Cell<u64>,
    /// How often the lock of the mapping's claim had been broken when this process read the lock.
    broken_before: Cell<u32>,
    /// The number of steps before the process crashes.
    left: Cell<u32>,
}

/// How a process ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    Served,
    Superseded,
    Failed(ErrorKind, String),
    Crashed,
    /// The process has crashed before its claim, so it has made no device.
    CrashedUnclaimed,
}

impl World {
    /// Creates an image on OSDs that get each map at once.
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            in_turns: false,
            lags: false,
            waits_for_map: true,
            clock: ManualClock::new(),
        }
    }

    /// Creates an image on OSDs that get maps late.
    pub(super) fn lagging(waits_for_map: bool) -> Self {
        Self { lags: true, waits_for_map, ..Self::new() }
    }

    /// Creates the same, with steps that the test grants.
    pub(super) fn in_turns() -> Self {
        Self { in_turns: true, ..Self::lagging(true) }
    }

    /// Ignores poisoning: the thread whose assertion failed reports it.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the actor make one step, unless it has ended.
    pub(super) fn grant(&self, actor: usize) {
        let mut state = self.state();
        state.turn = Some(actor);
        self.changed.notify_all();
        while state.turn.is_some() && !state.ended[actor] {
            state = self.wait(state);
        }
        state.turn = None;
    }

    pub(super) fn end(&self, actor: usize) {
        self.state().ended[actor] = true;
        self.changed.notify_all();
    }

    /// The OSDs drop the watch of a client.
    pub(super) fn drop_watch(&self, address: &str) {
        self.state().drop_watch(address);
    }

    /// The monitors send an OSD the newest map.
    pub(super) fn deliver(&self, osd: usize) {
        let mut state = self.state();
        let map = state.maps.newest;
        state.deliver(osd, map);
    }

    /// Another image gets the name of this one, and a copy of its metadata.
    pub(super) fn replace_image(&self) {
        let mut state = self.state();
        state.image += 1;
        state.seen.holder = None;
        state.data.owner = None;
        state.data.newest_on = [0; OSDS];
        state.data.partners = partners::Partners::default();
        state.watching.clear();
        state.users.clear();
    }

    /// Starts a process that crashes after `steps` steps.
    pub(super) fn start(
        &self,
        claimant: &Claimant,
        actor: usize,
        address: &str,
        steps: u32,
    ) -> Process<'_> {
        let mut state = self.state();
        let (address, map) = (address.to_owned(), state.maps.newest);
        // A new client gets the newest map.
        state.maps.of_clients.insert(address.clone(), map);
        state.watching.insert(address.clone());
        state.running.insert(address.clone());
        state.users.insert(address.clone());
        let (owner, broken_before, left) = (Cell::new(0), Cell::new(0), Cell::new(steps));
        let (image, claimant, number) = (state.image, claimant.clone(), Cell::new(0));
        Process { world: self, actor, claimant, address, image, owner, number, broken_before, left }
    }

    /// Runs a process of a mapping.
    pub(super) fn run(&self, claimant: &Claimant, actor: usize, address: &str, steps: u32) -> End {
        let process = self.start(claimant, actor, address, steps);
        self.state().mappings.claiming.insert(claimant.mapping_id.clone());
        let served = process.claim_and_write();
        self.state().mappings.claiming.remove(&claimant.mapping_id);
        process.end(served)
    }

    /// Runs a client without claims.
    pub(super) fn run_foreign(&self, actor: usize, address: &str, steps: u32) -> End {
        let process = self.start(&Claimant::default(), actor, address, steps);
        let served = process.lock_and_write();
        process.end(served)
    }
}

impl Process<'_> {
    /// Claims the image.
    pub(super) fn acquire(&self) -> Result<Result<Claim, Lost>> {
        let attempt = ClaimAttempt {
            header: self,
            name: "i",
            claimant: &self.claimant,
            purpose: Purpose::Open,
            only: None,
            clock: &self.world.clock,
        };
        attempt.acquire()
    }

    /// Ends a process that has not used the image.
    pub(super) fn close(&self) {
        self.end(Ok(End::Served));
    }

    fn claim_and_write(&self) -> Result<End> {
        let Ok(claim) = self.acquire()? else { return Ok(End::Superseded) };
        self.write_data(1)?;
        self.write_data(2)?;
        self.swap(Some(&claim), &claim.released(), LockState::Own)?;
        self.unlock().map(|()| End::Served)
    }

    /// Takes the lock if it is free or its holder is dead, as krbd and librbd do, and writes.
    fn lock_and_write(&self) -> Result<End> {
        if let Some(holder) = self.step(HEADER, |state| Ok(state.seen.holder.clone()))? {
            if holder.alive {
                return Err(Error::new(ErrorKind::InUse, "another client has the lock"));
            }
            self.fence(&holder.address, Liveness::MayLive)?;
            self.break_lock(&holder.address)?;
        }
        let locked = self.step(HEADER, |state| {
            let free = self.take_lock(state).is_none();
            if free {
                self.owner.set(state.set_owner(&self.address));
                state.note_lost();
            }
            Ok(free)
        })?;
        if !locked {
            return Err(Error::new(ErrorKind::InUse, "another client has acquired the lock"));
        }
        self.write_data(1)?;
        self.write_data(2)?;
        self.unlock().map(|()| End::Served)
    }

    /// Ends the process. Unless it has crashed or is fenced, it closes the image, which releases the lock and the
    /// watch.
    fn end(&self, served: Result<End>) -> End {
        let mut state = self.world.state();
        state.running.remove(&self.address);
        let crashed = self.left.get() == 0;
        let known = state.maps.of_osds[HEADER];
        let fenced = state.maps.fenced_at.get(&self.address).is_some_and(|at| *at <= known);
        if !crashed && !fenced && self.image == state.image {
            let own = |holder: &mut Holder| holder.address == self.address;
            state.seen.holder.take_if(own);
            state.watching.remove(&self.address);
        }
        match served {
            _ if crashed && self.owner.get() == 0 => End::CrashedUnclaimed,
            _ if crashed => End::Crashed,
            Ok(end) => end,
            Err(error) => End::Failed(error.kind(), error.message().to_owned()),
        }
    }

    /// Sends one request to an OSD. Fails if the process has crashed or its client is fenced.
    fn step<T>(&self, osd: usize, request: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        self.any_step(|state| state.execute(osd, &self.address, self.image, request))
    }

    fn any_step<T>(&self, request: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        if self.left.get() == 0 {
            return Err(Error::new(ErrorKind::Internal, "the process has crashed"));
        }
        self.left.set(self.left.get() - 1);
        let mut state = self.world.state();
        while self.world.in_turns && state.turn != Some(self.actor) {
            state = self.world.wait(state);
        }
        let done = request(&mut state);
        state.turn = None;
        self.world.changed.notify_all();
        done
    }

    /// Writes data to an OSD. Asserts the main rule: no write takes effect after another client has claimed the
    /// image; on an OSD that lags, after another client has written there.
    pub(super) fn write_data(&self, osd: usize) -> Result<()> {
        self.step(osd, |state| {
            let is_newest = self.owner.get() >= state.data.newest_on[osd];
            assert!(is_newest, "a write took effect after one of a newer owner");
            let is_owner = state.data.owner.as_ref() == Some(&self.address);
            let is_alone = is_owner && state.data.partners.is_empty();
            assert!(is_alone || self.world.lags, "a fenced client's write took effect");
            state.data.newest_on[osd] = self.owner.get();
            Ok(())
        })
    }

    /// Takes the lock if it is free. Returns its holder otherwise.
    fn take_lock(&self, state: &mut State) -> Option<String> {
        if let Some(holder) = &state.seen.holder {
            return Some(holder.address.clone());
        }
        let address = self.address.clone();
        let alive = state.watching.contains(&address);
        state.seen.holder = Some(Holder { address, alive, made_by_hand: None });
        None
    }
}

impl Header for Process<'_> {
    fn id(&self) -> Result<String> {
        Ok(format!("id {}", self.image))
    }

    fn own_address(&self) -> Result<String> {
        Ok(self.address.clone())
    }

    fn observe(&self) -> Result<Observation> {
        let claim = self.claim()?;
        let announced = self.step(HEADER, |state| Ok(state.announced()))?;
        let watching = self.step(HEADER, |state| Ok(state.watching.iter().cloned().collect()))?;
        let holder = self.step(HEADER, |state| {
            self.broken_before.set(state.broken(&self.claimant.mapping_id));
            Ok(state.seen.holder.clone())
        })?;
        Ok(Observation { claim, announced, holder, watching })
    }

    fn claim(&self) -> Result<Option<Claim>> {
        self.step(HEADER, |state| Ok(state.claim()))
    }

    /// A command for the monitors.
    fn fence(&self, address: &str, liveness: Liveness) -> Result<()> {
        self.any_step(|state| {
            let running = state.running.contains(address);
            let alive = running && state.watching.contains(address);
            assert!(self.claimant.take_over || !alive, "{address} is fenced without take_over");
            let short = liveness == Liveness::Ended;
            assert!(!(short && running), "{address} could write again after an hour");
            let known = state.image != self.image || state.users.contains(address);
            assert!(known, "{address}, which has not opened this image, is fenced");
            state.maps.newest += 1;
            let map = state.maps.newest;
            state.blocklist.insert(address.to_owned(), liveness);
            state.maps.fenced_at.entry(address.to_owned()).or_insert(map);
            if self.world.waits_for_map {
                state.maps.of_clients.insert(self.address.clone(), map);
            }
            if !self.world.lags {
                (0..OSDS).for_each(|osd| state.deliver(osd, map));
            }
            Ok(())
        })
    }

    fn break_lock(&self, address: &str) -> Result<bool> {
        self.step(HEADER, |state| match &state.seen.holder {
            Some(holder) if holder.address == address => {
                state.seen.holder = None;
                if self.claimant.mapping_id.is_empty() {
                    state.note_broken(address);
                }
                Ok(true)
            }
            None => Ok(false),
            Some(_) => Err(Error::new(ErrorKind::InUse, "another client has the lock")),
        })
    }

    fn announce(&self, next: &Claim) -> Result<()> {
        self.step(HEADER, |state| {
            state.seen.announced = Some(next.clone());
            state.written_for[1] = self.image;
            Ok(())
        })
    }

    fn lock(&self) -> Result<Option<String>> {
        self.step(HEADER, |state| Ok(self.take_lock(state)))
    }

    fn unlock(&self) -> Result<()> {
        self.step(HEADER, |state| {
            state.seen.holder.take_if(|holder| holder.address == self.address);
            Ok(())
        })
    }

    /// Asserts that a mapping with a device claims only the image that it had, and not after a client without a
    /// claim has written to it.
    fn swap(&self, last: Option<&Claim>, claim: &Claim, lock: LockState) -> Result<bool> {
        self.step(HEADER, |state| {
            let holder = state.seen.holder.as_ref();
            if lock == LockState::Own && holder.is_none_or(|held| held.address != self.address) {
                return Err(Error::new(ErrorKind::PermissionDenied, "the lock is lost"));
            }
            let is_held = lock == LockState::Free && holder.is_some();
            if is_held || state.claim().as_ref() != last {
                return Ok(false);
            }
            state.seen.claim = Some(claim.clone());
            state.written_for[0] = self.image;
            self.note_partners(state, claim);
            if claim.released {
                state.data.owner = None;
                return Ok(true);
            }
            self.owner.set(state.set_owner(&self.address));
            let mapping_id = &self.claimant.mapping_id;
            state.mappings.claiming.remove(mapping_id);
            let before = state.mappings.claimed.insert(mapping_id.clone(), self.image);
            let lost = state.mappings.lost.remove(mapping_id);
            if self.claimant.resumes {
                let unbroken = state.broken(mapping_id) == self.broken_before.get();
                assert!(!lost && unbroken, "{mapping_id} resumes after a client without a claim");
                assert_eq!(before, Some(self.image), "{mapping_id} resumes on another image");
            }
            Ok(true)
        })
    }
}
