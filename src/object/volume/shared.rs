//! What the parts of an open volume share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use super::Config;
use super::access::{Access, Failure};
use super::ahead::ReadAhead;
use super::budget::Budget;
use super::flattening::Phase;
use super::page_objects::{PageObjects, Rest};
use super::snapshots::Snapshots;
use super::table::{self, Missing, inherited_entries, inherited_pages};
use super::tail::Tail;
use super::tasks::Part;
use super::usage;
use crate::codec::{Description, Index, Leaf, MAX_MAP_PAGES, PageId};
use crate::name::{Name, Position};
use crate::rules::{Rule, applies};
use crate::tail_memory::TailMemory;

/// How long an operation on the store is repeated while the store fails or refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// A caller waits: it gets the error after some attempts.
    Caller,
    /// The work in the background: without a limit, because an error would end the volume.
    Background,
}

/// An open volume.
pub(super) struct Shared {
    pub(super) access: Access,
    pub(super) config: Config,
    pub(super) epoch: u64,
    pub(super) page_bytes: u64,
    pub(super) description: Description,
    /// The size in bytes, with every change that was appended to the log.
    size: AtomicU64,
    state: Mutex<State>,
}

/// The state that changes. The lock is never held while a part waits.
pub(super) struct State {
    pub(super) tail: Tail,
    pub(super) tail_memory: Option<TailMemory>,
    pub(super) map: table::Table,
    pub(super) usage: usage::Table,
    pub(super) garbage: Garbage,
    pub(super) budget: Budget,
    pub(super) checkpoints: Checkpoints,
    pub(super) snapshots: Snapshots,
    pub(super) ahead: ReadAhead,
    /// The size in bytes after the slots that were applied.
    pub(super) applied_size: u64,
    /// The bytes that were written since the volume was opened, without those of the collector.
    pub(super) written_bytes: u64,
    pub(super) pause: Pause,
    pub(super) flatten: Phase,
    failure: Option<Failure>,
    wakers: Vec<Waker>,
}

/// What the next checkpoint depends on.
#[derive(Default)]
pub(super) struct Checkpoints {
    /// The newest checkpoint of this epoch.
    pub(super) newest: Option<Position>,
    /// The newest checkpoint of this epoch with a confirmed base record.
    pub(super) base: Option<Position>,
    /// A checkpoint was requested. It is written when there is something new for it.
    pub(super) wanted: bool,
    /// The slots that were applied since the newest checkpoint, without those that have only its base record.
    pub(super) new_slots: u64,
    /// How many were written.
    pub(super) count: u64,
    /// The number of the next object with pages.
    pub(super) next_page: u64,
    /// The objects with pages of this epoch.
    pub(super) pages: PageObjects,
    /// Pages and checkpoints of this epoch may be superfluous that no checkpoint has replaced.
    pub(super) has_orphans: bool,
}

/// Whether the work in the background may go on.
#[derive(Default)]
pub(super) struct Pause {
    /// Nothing new starts.
    pub(super) is_wanted: bool,
    /// The steps that have started and not ended.
    pub(super) running: usize,
}

/// Objects that are, or will be, superfluous.
#[derive(Default)]
pub(super) struct Garbage {
    /// What the next checkpoint does not need, as far as it is known.
    superseded: Superseded,
    /// What each checkpoint does not need. Its base record is not confirmed.
    pending: VecDeque<(Position, Superseded)>,
    /// How often each object is in these. The newest base may need it, although the map in memory does not.
    held: BTreeMap<Name, usize>,
    /// What may be deleted.
    pub(super) permitted: VecDeque<Name>,
    /// The number of names in memory from which pages are left to a sweep.
    max_names: usize,
    /// The next checkpoint makes pages superfluous that are left to a sweep.
    leaves_pages: bool,
    /// The newest checkpoint that has made such pages superfluous. Its base record is not confirmed.
    left_at: Option<Position>,
}

/// What a checkpoint does not need.
#[derive(Default)]
struct Superseded {
    /// Objects that can be deleted.
    objects: Vec<Name>,
    /// Objects of which something else may need a part. A sweep must find out whether that is so.
    parts: BTreeSet<Name>,
}

/// The memory of the map in bytes, for each name of a superfluous object that is kept. A name takes about an eighth of
/// that. A trim can make every page of a volume superfluous at the same time.
const MAP_BYTES_FOR_NAME: usize = 1024;

impl Garbage {
    /// Makes an empty list. `map_bytes` is the memory for the map.
    fn new(map_bytes: usize) -> Self {
        Self { max_names: map_bytes / MAP_BYTES_FOR_NAME, ..Self::default() }
    }

    /// Takes objects that the next checkpoint does not need. Must be called together with the change of the map
    /// or the usage, so that a sweep finds each object there or here.
    pub(super) fn supersede(&mut self, names: impl IntoIterator<Item = Name>) {
        for name in names {
            if matches!(name, Name::Page { .. }) && self.is_full() {
                self.leaves_pages = true;
                continue;
            }
            *self.held.entry(name).or_default() += 1;
            self.superseded.objects.push(name);
        }
    }

    /// The next checkpoint does not need a part of the object, or a snapshot needs it. Must be called as [`Garbage::supersede`].
    fn supersede_part(&mut self, object: Name) {
        if self.is_full() {
            self.leaves_pages = true;
        } else if self.superseded.parts.insert(object) {
            *self.held.entry(object).or_default() += 1;
        }
    }

    fn is_full(&self) -> bool {
        self.names() >= self.max_names
    }

    /// The number of names in memory.
    pub(super) fn names(&self) -> usize {
        self.held.len() + self.permitted.len()
    }

    /// The checkpoint was written.
    pub(super) fn close(&mut self, checkpoint: Position) {
        if std::mem::take(&mut self.leaves_pages) {
            self.left_at = Some(checkpoint);
        }
        self.pending.push_back((checkpoint, std::mem::take(&mut self.superseded)));
    }

    /// Permits the deletion of what the checkpoint and the ones before it have made superfluous. Its base
    /// record is confirmed. Returns whether a sweep must find some of it.
    pub(super) fn permit(&mut self, checkpoint: Position) -> bool {
        while self.pending.front().is_some_and(|(at, _)| *at <= checkpoint) {
            let Some((_, Superseded { objects, parts })) = self.pending.pop_front() else { break };
            objects.iter().chain(&parts).for_each(|name| self.release(*name));
            self.permitted.extend(objects);
        }
        self.left_at.take_if(|at| *at <= checkpoint).is_some()
    }

    fn release(&mut self, name: Name) {
        if let Some(times) = self.held.get_mut(&name) {
            *times -= 1;
            if *times == 0 {
                self.held.remove(&name);
            }
        }
    }

    /// Whether the object must be kept until a base record is confirmed. All pages are, while it is not known which ones.
    pub(super) fn is_held(&self, name: Name) -> bool {
        let is_any_page_left = self.leaves_pages || self.left_at.is_some();
        self.held.contains_key(&name) || is_any_page_left && matches!(name, Name::Page { .. })
    }
}

impl State {
    /// Takes pages and checkpoints that the checkpoint at `at` does not need. Those that a snapshot needs are found
    /// after its deletion; until then the base that is confirmed may need them, too, because of a roll-back.
    pub(super) fn supersede(&mut self, names: impl IntoIterator<Item = Name>, at: Position) {
        let Self { garbage, snapshots, .. } = self;
        for name in names {
            match snapshots.keep(name, at) {
                true => garbage.supersede_part(name),
                false => garbage.supersede([name]),
            }
        }
    }

    /// Takes pages that the checkpoint at `at` does not need.
    pub(super) fn supersede_pages(
        &mut self,
        pages: impl IntoIterator<Item = PageId>,
        at: Position,
    ) {
        let is_own = |page: &PageId| page.ancestor == 0 || !applies(Rule::OwnObjects);
        for page in pages.into_iter().filter(is_own) {
            match self.checkpoints.pages.supersede(page, at.epoch) {
                Rest::Nothing => self.supersede([page.object()], at),
                Rest::Unknown => self.garbage.supersede_part(page.object()),
                Rest::Needed => {}
            }
        }
    }

    /// The snapshots have changed.
    pub(super) fn limit_collection(&mut self) {
        self.usage.pin(self.snapshots.newest());
    }

    /// Wakes what waits for a change of the state.
    pub(super) fn changed(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }

    /// A step of the work in the background has ended.
    pub(super) fn ended(&mut self) {
        self.pause.running -= 1;
        if self.pause.is_wanted {
            self.changed();
        }
    }

    /// Returns the reason why the volume cannot continue, if there is one.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Shared {
    pub(super) fn new(
        access: Access,
        config: Config,
        epoch: u64,
        (description, size): (&Description, u64),
        (map, usage): (table::Table, usage::Table),
    ) -> Self {
        let state = State {
            tail: Tail::new(1),
            tail_memory: None,
            map,
            usage,
            garbage: Garbage::new(config.map_bytes),
            budget: Budget::new(config.max_copies),
            checkpoints: Checkpoints::default(),
            snapshots: Snapshots::default(),
            ahead: ReadAhead::new(config.read_ahead_bytes),
            applied_size: size,
            written_bytes: 0,
            pause: Pause::default(),
            flatten: Phase::default(),
            failure: None,
            wakers: Vec::new(),
        };
        Self {
            access,
            config,
            epoch,
            page_bytes: description.page_bytes.into(),
            description: description.clone(),
            size: AtomicU64::new(size),
            state: Mutex::new(state),
        }
    }

    /// The size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The map of the volume, for a clone of what it has now.
    pub(super) fn into_inherited(self) -> table::Table {
        let state = self.state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.map.inherited()
    }

    /// Gives the volume another content.
    pub(super) fn become_content_of(&self, other: Self, at: Position) {
        let other_state = other.state.into_inner();
        let other_state = other_state.unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut state = self.lock();
        state.map = other_state.map;
        state.checkpoints.pages.forget();
        state.usage.roll_back(&other_state.usage, at);
        state.applied_size = other_state.applied_size;
        self.size.store(state.applied_size, Ordering::Release);
        state.changed();
    }

    /// Lets requests use the volume up to `size`, if it is larger than before.
    ///
    /// # Errors
    /// Returns an error if the map cannot have that many pages.
    pub(super) fn extend(&self, state: &mut State, size: u64) -> Result<(), Failure> {
        if size.div_ceil(self.page_bytes) > MAX_MAP_PAGES {
            return Err(Failure::Invalid("the size is too large for the pages of the map"));
        }
        state.map.extend(size.div_ceil(self.page_bytes));
        self.size.fetch_max(size, Ordering::AcqRel);
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The slot of this epoch as a position.
    pub(super) fn position(&self, slot: u64) -> Position {
        Position { epoch: self.epoch, slot }
    }

    /// Waits until `ready` returns a result, or the volume fails.
    pub(super) async fn wait<R>(
        &self,
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R, Failure> {
        poll_fn(|context| {
            let mut state = self.lock();
            if let Err(failure) = state.check() {
                return Poll::Ready(Err(failure));
            }
            if let Some(result) = ready(&mut state) {
                return Poll::Ready(Ok(result));
            }
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Records that the volume cannot continue. The first reason stays.
    pub(super) fn fail(&self, failure: &Failure) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = Some(failure.clone());
        }
        state.changed();
    }

    /// Runs `access` on the state, and loads the pages of the map that it needs.
    pub(super) async fn with_map<R>(
        &self,
        access: impl FnMut(&mut State) -> Result<R, Missing>,
    ) -> Result<R, Failure> {
        self.with_map_for(Patience::Caller, access).await
    }

    /// As [`Shared::with_map`], with the patience of the caller.
    pub(super) async fn with_map_for<R>(
        &self,
        patience: Patience,
        mut access: impl FnMut(&mut State) -> Result<R, Missing>,
    ) -> Result<R, Failure> {
        loop {
            let missing = match access(&mut self.lock()) {
                Ok(result) => return Ok(result),
                Err(missing) => missing,
            };
            self.with_patience(patience, || Box::pin(self.load(missing))).await?;
        }
    }

    /// Runs `operation`, in the background again and again until the store no longer fails.
    ///
    /// # Errors
    /// Returns the error of the operation, and the failure of the volume if it has failed meanwhile.
    pub(super) async fn with_patience<'a, R>(
        &self,
        patience: Patience,
        mut operation: impl FnMut() -> Part<'a, Result<R, Failure>>,
    ) -> Result<R, Failure> {
        let mut failures = 0;
        loop {
            match operation().await {
                Err(Failure::Store { .. }) if patience == Patience::Background => {
                    self.lock().check()?;
                    failures += 1;
                    self.access.back_off(failures).await;
                }
                other => return other,
            }
        }
    }

    async fn load(&self, missing: Missing) -> Result<(), Failure> {
        let (Missing::Index(_, id) | Missing::Leaf(_, id)) = missing;
        let access = self.access.of(id.ancestor)?;
        let is_found = match missing {
            Missing::Index(number, id) => {
                let page = access.page(id, Index::decode).await?;
                let pages = page.map(|page| inherited_pages(page.pages, id.ancestor));
                pages.map(|pages| self.lock().map.supply_index(number, id, pages)).is_some()
            }
            Missing::Leaf(number, id) => {
                let page = access.page(id, Leaf::decode).await?;
                let entries = page.map(|page| inherited_entries(page.entries, id.ancestor));
                entries.map(|entries| self.lock().map.supply_leaf(number, id, entries)).is_some()
            }
        };
        if is_found || self.is_replaced(missing) {
            return Ok(());
        }
        Err(self.lost(id.object()).await)
    }

    /// Whether the map has a newer page in place of the one that was missing.
    fn is_replaced(&self, missing: Missing) -> bool {
        let map = &mut self.lock().map;
        let now = match missing {
            Missing::Index(number, _) => map.index(number).map(|_| ()),
            Missing::Leaf(number, _) => map.leaf(number).map(|_| ()),
        };
        now != Err(missing)
    }

    /// Returns the reason why an object that the volume needs is missing: the collector of a later writer may
    /// have deleted it.
    pub(super) async fn lost(&self, name: Name) -> Failure {
        let own = Name::Claim(self.epoch).to_string();
        match self.access.list_some("epoch/", &own).await {
            Ok(later) if later.is_empty() => Failure::Lost(name),
            Ok(_) => {
                self.fail(&Failure::Fenced);
                Failure::Fenced
            }
            Err(failure) => failure,
        }
    }
}
