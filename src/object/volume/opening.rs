//! The claim of an epoch and the take-over of the earlier ones. FORMAT.md has the rules, 1 to 7 and 10.

use std::collections::BTreeMap;

use super::access::{Access, Failure, Put, behind, prefix_of, slot};
use super::keep::{Keep, Prepared};
use super::tasks::Ahead;
use crate::codec::{Claim, History, LogObject, MAX_CUTS, Record, Slot};
use crate::name::{Name, Position};
use crate::rules::{Rule, applies};

/// The slots after which an opener that still finds records seals a slot ahead, and how far ahead.
const AHEAD: u64 = if cfg!(test) { 3 } else { 64 };

/// The slots that an opener reads at the same time.
pub(super) const SLOTS_AHEAD: usize = 16;

/// The records that an opener keeps in memory until it replays them; it reads the others again.
const MAX_KEPT_RECORDS: usize = 256 << 10;

/// A take-over that is committed.
pub(super) struct Opened {
    /// The own epoch.
    pub(super) epoch: u64,
    /// What precedes it.
    pub(super) history: History,
    /// Log objects that were read, for the replay.
    pub(super) kept: Kept,
    /// The tail memory, if the opener has one.
    pub(super) tail_memory: Option<Prepared>,
}

/// What precedes an epoch.
pub(super) struct Before {
    pub(super) history: History,
    /// The newest epoch that was opened, with its cut.
    pub(super) newest: Option<Position>,
}

/// Log objects that were read.
#[derive(Default)]
pub(super) struct Kept {
    objects: BTreeMap<Position, LogObject>,
    records: usize,
}

impl Kept {
    fn keep(&mut self, at: Position, object: LogObject) {
        self.records += object.records.len();
        if self.records <= MAX_KEPT_RECORDS {
            self.objects.insert(at, object);
        }
    }

    /// Takes the object of a slot.
    pub(super) fn take(&mut self, at: Position) -> Option<LogObject> {
        self.objects.remove(&at)
    }
}

/// What happens to the first slot of an epoch that is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gap {
    /// It gets a seal.
    Seal,
    /// It stays empty: a reader takes what is there.
    Leave,
}

/// How the end of an epoch is looked for.
#[derive(Debug, Clone, Copy)]
struct Search {
    gap: Gap,
    /// The checkpoint that covers the first slot may be lost. The slot has nothing but the open record.
    may_lack_first: bool,
}

/// What an opener has found in an epoch.
#[derive(Default)]
struct End {
    /// The number of slots that count.
    cut: u64,
    /// The newest checkpoint from which a replay may start.
    base: Option<Position>,
    /// What precedes the epoch, if its first record was read.
    open: Option<History>,
    /// The first slot existed, and does not exist now.
    lacks_first: bool,
}

impl End {
    fn start_from(&mut self, base: Option<Position>) {
        self.base = self.base.max(base);
    }
}

/// Ends all epochs before the claimed one, and commits the take-over.
pub(super) async fn take_over(
    access: &Access,
    epoch: u64,
    keep: Option<&Keep>,
) -> Result<Opened, Failure> {
    match commit(access, epoch, keep).await {
        Err(failure) if is_missing(&failure) && is_superseded(access, epoch).await? => {
            Err(Failure::Fenced)
        }
        other => other,
    }
}

/// Whether the failure may be caused by the collector of a later writer.
pub(super) fn is_missing(failure: &Failure) -> bool {
    matches!(failure, Failure::Lost(_))
}

/// Whether a later epoch than `epoch` is claimed.
pub(super) async fn is_superseded(access: &Access, epoch: u64) -> Result<bool, Failure> {
    let own = Name::Claim(epoch).to_string();
    Ok(!access.list_some("epoch/", &own).await?.is_empty())
}

/// Creates the claim of the first epoch above all that exist.
pub(super) async fn claim_next(access: &Access, owner: &str) -> Result<u64, Failure> {
    loop {
        let epoch = newest_epoch(access).await? + 1;
        if claim(access, epoch, owner).await? || !applies(Rule::Claim) {
            return Ok(epoch);
        }
    }
}

/// Returns the greatest epoch that exists; 0 if the volume was never claimed.
pub(super) async fn newest_epoch(access: &Access) -> Result<u64, Failure> {
    let claims = access.list("epoch/", "").await?;
    let mut newest = claims.iter().filter_map(epoch_of).max().unwrap_or(0);
    loop {
        let more = access.list_some("log/", &behind("log", newest)).await?;
        let epochs = more.iter().filter_map(|text| epoch_of(&Name::parse(text)?));
        let Some(found) = epochs.max() else { return Ok(newest) };
        newest = found;
    }
}

/// Creates the claim of an epoch. Returns whether this opener has got it.
pub(super) async fn claim(access: &Access, epoch: u64, owner: &str) -> Result<bool, Failure> {
    let identity = access.identity(epoch, 0);
    let claim = Claim { identity, nonce: access.nonce, owner: owner.to_owned() };
    let put = access.put_soon(Name::Claim(epoch), &claim.encode()).await?;
    Ok(put == Put::Own)
}

/// Returns what precedes the claimed epoch. Its writers can add nothing from then on.
pub(super) async fn end_earlier(
    access: &Access,
    epoch: u64,
    kept: &mut Kept,
) -> Result<Before, Failure> {
    history_before(access, epoch, Search { gap: Gap::Seal, may_lack_first: false }, kept).await
}

/// As [`end_earlier`], or with [`Gap::Leave`] without a change, for a volume whose newest checkpoint may be lost.
///
/// # Errors
/// As [`end_earlier`]; also `Lost` if an epoch has log objects and no beginning.
pub(super) async fn end_damaged(
    access: &Access,
    epoch: u64,
    gap: Gap,
    kept: &mut Kept,
) -> Result<Before, Failure> {
    let search = Search { gap, may_lack_first: true };
    let before = history_before(access, epoch, search, kept).await?;
    let newest = before.newest.map_or(0, |cut| cut.epoch);
    for name in access.list("log/", &behind("log", newest)).await? {
        let Name::Slot(at) = name else { continue };
        let identity = access.identity(at.epoch, at.slot);
        let found = access.decode(name, |bytes| Slot::decode(identity, bytes)).await?;
        // Its writer has committed the epoch before, and the objects that prove it are lost.
        if matches!(found, Some(Slot::Log(_))) {
            return Err(Failure::Lost(slot(at.epoch, 0)));
        }
    }
    Ok(before)
}

/// Returns the history of the volume as it is now. Changes nothing, so the writer may continue.
pub(super) async fn observe(access: &Access) -> Result<Opened, Failure> {
    let epoch = newest_epoch(access).await? + 1;
    let mut kept = Kept::default();
    let search = Search { gap: Gap::Leave, may_lack_first: false };
    let Before { history, .. } = history_before(access, epoch, search, &mut kept).await?;
    Ok(Opened { epoch, history, kept, tail_memory: None })
}

async fn history_before(
    access: &Access,
    epoch: u64,
    search: Search,
    kept: &mut Kept,
) -> Result<Before, Failure> {
    for earlier in (1..epoch).rev() {
        let end = end_of(access, earlier, search, kept).await?;
        if end.cut > 0 {
            let is_first = earlier == 1 || end.base.is_some_and(|base| base.epoch == earlier);
            if end.lacks_first && !is_first {
                return Err(Failure::Lost(slot(earlier, 0)));
            }
            let newest = Some(Position { epoch: earlier, slot: end.cut });
            return Ok(Before { history: history_of(earlier, end), newest });
        }
    }
    Ok(Before { history: History { base: None, cuts: Vec::new() }, newest: None })
}

async fn commit(access: &Access, epoch: u64, keep: Option<&Keep>) -> Result<Opened, Failure> {
    let mut kept = Kept::default();
    let Before { history, newest } = end_earlier(access, epoch, &mut kept).await?;
    if history.cuts.len() > MAX_CUTS {
        return Err(Failure::Unsupported("too many take-overs without a checkpoint"));
    }
    let tail_memory = keep.map(|keep| keep.prepare(access, newest, epoch)).transpose()?;
    if applies(Rule::Commit) {
        create_first(access, epoch, &history).await?;
    }
    Ok(Opened { epoch, history, kept, tail_memory })
}

/// Creates slot 0 of the own epoch: this opener is the writer from then on.
pub(super) async fn create_first(
    access: &Access,
    epoch: u64,
    history: &History,
) -> Result<(), Failure> {
    let records = vec![Record::Open(history.clone())];
    let identity = access.identity(epoch, 0);
    let object = LogObject { identity, nonce: access.nonce, confirmed: 0, records };
    match access.put_soon(slot(epoch, 0), &object.encode()).await? {
        Put::Own => Ok(()),
        Put::Foreign => Err(Failure::Fenced),
    }
}

/// The history of the volume up to the end of an epoch that was opened.
fn history_of(epoch: u64, end: End) -> History {
    let mut cuts = end.open.map_or_else(Vec::new, |history| history.cuts);
    let first = end.base.filter(|base| base.epoch == epoch).map_or(1, |base| base.slot + 1);
    cuts.retain(|cut| end.base.is_none_or(|base| base < *cut));
    // An epoch with nothing but its open record is left out.
    if end.cut > first {
        cuts.push(Position { epoch, slot: end.cut });
    }
    History { base: end.base, cuts }
}

/// Finds the end of an epoch. With [`Gap::Seal`], its writer cannot go beyond.
async fn end_of(
    access: &Access,
    epoch: u64,
    search: Search,
    kept: &mut Kept,
) -> Result<End, Failure> {
    let gap = search.gap;
    let mut end = End::default();
    let newest = newest_checkpoint(access, epoch).await?;
    end.start_from(newest.map(|slot| Position { epoch, slot }));
    let mut at = newest.map_or(0, |slot| slot + 1);
    let (mut found, mut missing) = (0, None);
    let mut slots = Slots::new(access, epoch);
    loop {
        let slot_at = match slots.read(at).await? {
            Some(slot) => slot,
            // It may have been filled since.
            None => slot_or_seal(access, epoch, at, gap).await?,
        };
        if let Slot::Log(object) = slot_at {
            note(&mut end, &object);
            kept.keep(Position { epoch, slot: at }, object);
            at += 1;
            found += 1;
            if found % AHEAD == 0 && gap == Gap::Seal {
                seal_ahead(access, epoch, at + AHEAD * (found / AHEAD)).await?;
            }
            continue;
        }
        let covering = newest_checkpoint(access, epoch).await?.filter(|slot| *slot >= at);
        if let Some(slot) = covering.filter(|_| applies(Rule::Recheck)) {
            end.start_from(Some(Position { epoch, slot }));
            at = slot + 1;
            continue;
        }
        if applies(Rule::Witness) && has_witness(access, epoch, at).await? {
            if at == 0 && search.may_lack_first {
                end.lacks_first = true;
                at = 1;
                continue;
            }
            // Without a seal, the writer may have filled the slot since it was read.
            if gap == Gap::Seal || missing == Some(at) {
                return Err(Failure::Lost(slot(epoch, at)));
            }
            missing = Some(at);
            continue;
        }
        end.cut = at;
        return Ok(end);
    }
}

/// Takes from a log object what a later opener needs to know.
fn note(end: &mut End, object: &LogObject) {
    for record in &object.records {
        match record {
            Record::Open(history) => {
                end.start_from(history.base);
                end.open = Some(history.clone());
            }
            Record::Base(base) if applies(Rule::Rebase) => end.start_from(Some(*base)),
            _ => {}
        }
    }
}

/// Returns the newest checkpoint of an epoch.
async fn newest_checkpoint(access: &Access, epoch: u64) -> Result<Option<u64>, Failure> {
    let names = access.list(&prefix_of("ckpt", epoch), "").await?;
    let slots = names.iter().filter_map(|name| match name {
        Name::Checkpoint(at) => Some(at.slot),
        _ => None,
    });
    Ok(slots.max())
}

/// The slots of an epoch, in their order. Some are read ahead, which changes nothing: objects never change, and an opener
/// that read the slots one after the other could have found the same.
struct Slots<'a> {
    access: &'a Access,
    epoch: u64,
    /// The next slot.
    next: u64,
    /// The slots from the next one on.
    ahead: Ahead<'a, Result<Option<Slot>, Failure>>,
    /// The slots to read at the same time. It begins with one, since most epochs that end well have few above their
    /// checkpoint.
    depth: usize,
}

impl<'a> Slots<'a> {
    fn new(access: &'a Access, epoch: u64) -> Self {
        Self { access, epoch, next: 0, ahead: Ahead::default(), depth: 1 }
    }

    /// Reads a slot; `None` if it was empty.
    async fn read(&mut self, number: u64) -> Result<Option<Slot>, Failure> {
        if number != self.next {
            (self.next, self.ahead, self.depth) = (number, Ahead::default(), 1);
        }
        let (access, epoch) = (self.access, self.epoch);
        while self.ahead.len() < self.depth {
            let number = self.next + self.ahead.len() as u64;
            self.ahead.push(Box::pin(async move {
                let (name, identity) = (slot(epoch, number), access.identity(epoch, number));
                access.decode(name, |bytes| Slot::decode(identity, bytes)).await
            }));
        }
        self.depth = SLOTS_AHEAD.min(self.depth * 2);
        self.next += 1;
        self.ahead.next().await.unwrap_or(Ok(None))
    }
}

/// Reads a slot. If it is empty, it counts as sealed, and with [`Gap::Seal`] it gets a seal.
async fn slot_or_seal(access: &Access, epoch: u64, number: u64, gap: Gap) -> Result<Slot, Failure> {
    let (name, identity) = (slot(epoch, number), access.identity(epoch, number));
    loop {
        if let Some(found) = access.decode(name, |bytes| Slot::decode(identity, bytes)).await? {
            return Ok(found);
        }
        if gap == Gap::Leave || !applies(Rule::Seal) {
            return Ok(Slot::Seal(access.nonce));
        }
        let seal = Slot::encode_seal(identity, access.nonce);
        if access.put_soon(name, &seal).await? == Put::Own {
            return Ok(Slot::Seal(access.nonce));
        }
    }
}

/// Creates a seal in a slot that a fast writer has not reached yet. If it has, the next one is further ahead.
async fn seal_ahead(access: &Access, epoch: u64, number: u64) -> Result<(), Failure> {
    let seal = Slot::encode_seal(access.identity(epoch, number), access.nonce);
    access.put_soon(slot(epoch, number), &seal).await.map(|_| ())
}

/// Whether an object behind slot `number` was sent after the slot was confirmed.
async fn has_witness(access: &Access, epoch: u64, number: u64) -> Result<bool, Failure> {
    let after = slot(epoch, number).to_string();
    for name in access.list(&prefix_of("log", epoch), &after).await? {
        let Name::Slot(at) = name else { continue };
        let identity = access.identity(epoch, at.slot);
        let found = access.decode(name, |bytes| Slot::decode(identity, bytes)).await?;
        if let Some(Slot::Log(object)) = found
            && object.confirmed > number
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn epoch_of(name: &Name) -> Option<u64> {
    match name {
        Name::Claim(epoch) => Some(*epoch),
        Name::Slot(at) => Some(at.epoch),
        _ => None,
    }
}
