//! The content of a volume from its history: the checkpoint from which the history starts, and the slots above it.

use super::Config;
use super::access::{Access, Ancestor, Failure};
use super::check::is_defect;
use super::opening::{Kept, Opened, SLOTS_AHEAD};
use super::shared::{Patience, Shared};
use super::tasks::{Ahead, Part, all};
use super::{Volume, table, usage};
use crate::codec::{
    Checkpoint, Damage, Description, History, LogObject, PageId, Parent, Slot, Snapshot, Usage,
};
use crate::name::{Name, Position};

/// The end of a history: before the record with this number in the slot.
type End = Option<(Position, u32)>;

/// Loads the checkpoint from which a history starts, and replays the slots above it.
pub(super) async fn recover(
    access: Access,
    config: Config,
    description: &Description,
    mut opened: Opened,
) -> Result<Shared, Failure> {
    let tail_memory = opened.tail_memory.take();
    let shared = replay_all(access, config, description, opened, None).await?;
    tail_memory.map_or(Ok(()), |prepared| shared.continue_with(prepared))?;
    shared.begin_epoch();
    Ok(shared)
}

impl Shared {
    /// The open record of the own epoch is in the store.
    pub(super) fn begin_epoch(&self) {
        // The first checkpoint permits to delete what earlier writers have left.
        let mut state = self.lock();
        let is_second = self.epoch > 1;
        (state.checkpoints.wanted, state.checkpoints.new_slots) = (is_second, is_second.into());
        // The own first slot has nothing but the open record.
        state.usage.add(self.position(0), 0);
        state.limit_collection();
    }
}

/// Returns the content of a snapshot, for an opener of `epoch`.
pub(super) async fn recover_snapshot(
    access: Access,
    config: Config,
    description: &Description,
    (epoch, snapshot): (u64, &Snapshot),
) -> Result<Shared, Failure> {
    let history = snapshot.history.clone();
    let opened = Opened { epoch, history, kept: Kept::default(), tail_memory: None };
    replay_all(access, config, description, opened, Some(snapshot.at)).await
}

/// Loads the checkpoint from which a history starts, and replays the slots above it, up to `end`.
pub(super) async fn replay_all(
    access: Access,
    config: Config,
    description: &Description,
    opened: Opened,
    end: End,
) -> Result<Shared, Failure> {
    let (shared, lost) = replay_damaged(access, config, description, opened, end).await?;
    lost.into_iter().next().map_or(Ok(shared), Err)
}

/// As [`replay_all`], also if pages of the usage are lost or damaged. Returns why they cannot be read; the usage has
/// nothing of their objects then.
pub(super) async fn replay_damaged(
    access: Access,
    config: Config,
    description: &Description,
    mut opened: Opened,
    end: End,
) -> Result<(Shared, Vec<Failure>), Failure> {
    let mut usage = usage::Table::new(config.object_bytes);
    let base = opened.history.base;
    let (mut checkpoint, mut lost) = (None, Vec::new());
    if let Some(at) = base {
        let found = read_checkpoint(&access, at).await?;
        let ids: Vec<PageId> = found.usage.iter().flatten().copied().collect();
        let reads = ids.iter().map(|id| usage_page(&access, *id));
        for (id, page) in ids.iter().zip(all(reads, SLOTS_AHEAD).await?) {
            match page {
                Ok(page) => usage.load(*id, &page),
                Err(failure) => lost.push(failure),
            }
        }
        checkpoint = Some(found);
    }
    let size = checkpoint.as_ref().map_or(description.size, |checkpoint| checkpoint.size);
    if Volume::check_size(size, description.page_bytes).is_err() {
        let name = base.map_or(Name::Description, Name::Checkpoint);
        return Err(Failure::Damaged { name, range: None, damage: Damage::Field("size") });
    }
    let root = checkpoint.as_mut().map_or_else(Vec::new, |found| std::mem::take(&mut found.index));
    let leaves = size.div_ceil(description.page_bytes.into());
    let inherited = match (base, &description.parent, access.parent()) {
        (None, Some(parent), Some(ancestor)) => Some(inherit(ancestor, parent, &config).await?),
        // A clone that was flattened has a checkpoint.
        (None, Some(_), None) => return Err(Failure::Lost(Name::Description)),
        _ => None,
    };
    let map = inherited.unwrap_or_else(|| table::Table::new(root, leaves, config.map_bytes));
    let shared = Shared::new(access, config, opened.epoch, (description, size), (map, usage));
    if let Some(checkpoint) = checkpoint {
        shared.lock().snapshots.load(base, checkpoint);
    }
    let mut slots = slots(&opened.history);
    // The next objects are read while the records of one are applied.
    let mut objects = Ahead::default();
    loop {
        while objects.len() < SLOTS_AHEAD
            && let Some(at) = slots.next()
        {
            let kept = opened.kept.take(at);
            objects.push(Box::pin(replayed_object(&shared.access, at, kept)));
        }
        let Some(object) = objects.next().await else { break };
        if let (at, Some(object)) = object? {
            replay(&shared, at, object, end).await?;
        }
    }
    drop((objects, slots));
    shared.lock().snapshots.follow(opened.history.cuts);
    Ok((shared, lost))
}

/// A page of the usage, or why it is lost or damaged.
type UsagePage = Result<Usage, Failure>;

fn usage_page(access: &Access, id: PageId) -> Part<'_, Result<UsagePage, Failure>> {
    Box::pin(async move {
        let found = access.page(id, Usage::decode).await;
        match found.and_then(|page| page.ok_or(Failure::Lost(id.object()))) {
            Err(failure) if !is_defect(&failure) => Err(failure),
            page => Ok(page),
        }
    })
}

/// The slots above the checkpoint from which a history starts.
pub(super) fn slots(history: &History) -> impl Iterator<Item = Position> {
    let base = history.base;
    history.cuts.iter().flat_map(move |cut| {
        let from = base.filter(|base| base.epoch == cut.epoch).map_or(0, |base| base.slot + 1);
        (from..cut.slot).map(move |slot| Position { epoch: cut.epoch, slot })
    })
}

/// Returns the map of the snapshot from which a volume was cloned.
fn inherit<'a>(
    ancestor: &'a Ancestor,
    parent: &'a Parent,
    config: &Config,
) -> Part<'a, Result<table::Table, Failure>> {
    let (access, config) = (ancestor.access.clone(), config.clone());
    let snapshot = (u64::MAX, &parent.snapshot);
    Box::pin(async move {
        let content = recover_snapshot(access, config, &ancestor.description, snapshot).await?;
        Ok(content.into_inherited())
    })
}

/// Reads a checkpoint that something refers to.
pub(super) async fn read_checkpoint(access: &Access, at: Position) -> Result<Checkpoint, Failure> {
    let (name, identity) = (Name::Checkpoint(at), access.identity(at.epoch, at.slot));
    let found = access.decode(name, |bytes| Checkpoint::decode(identity, bytes)).await?;
    found.ok_or(Failure::Lost(name))
}

/// Reads the header of a log object.
pub(super) async fn log_object(access: &Access, at: Position) -> Result<LogObject, Failure> {
    let (name, identity) = (Name::Slot(at), access.identity(at.epoch, at.slot));
    let decode = |bytes: &[u8]| LogObject::decode(identity, bytes);
    access.decode(name, decode).await?.ok_or(Failure::Lost(name))
}

/// Reads what a slot has; `None` if it is empty.
pub(super) async fn read_slot(access: &Access, at: Position) -> Result<Option<Slot>, Failure> {
    let identity = access.identity(at.epoch, at.slot);
    access.decode(Name::Slot(at), |bytes| Slot::decode(identity, bytes)).await
}

/// Reads the header of a log object for a replay, unless it was kept. The first slot of an epoch had nothing but the
/// open record; if it was collected, it is empty or has a seal, and there is nothing to replay.
async fn replayed_object(
    access: &Access,
    at: Position,
    kept: Option<LogObject>,
) -> Result<(Position, Option<LogObject>), Failure> {
    if kept.is_some() {
        return Ok((at, kept));
    }
    if at.slot > 0 {
        return Ok((at, Some(log_object(access, at).await?)));
    }
    match read_slot(access, at).await? {
        Some(Slot::Log(object)) => Ok((at, Some(object))),
        Some(Slot::Seal(_)) | None => Ok((at, None)),
    }
}

async fn replay(
    shared: &Shared,
    at: Position,
    mut object: LogObject,
    end: End,
) -> Result<(), Failure> {
    let header_bytes = u32::try_from(object.encode().len()).unwrap_or(u32::MAX);
    if let Some((_, records)) = end.filter(|(slot, _)| *slot == at) {
        object.records.truncate(records as usize);
    }
    shared.apply_slot(at, header_bytes, &object.records, Patience::Caller).await
}
