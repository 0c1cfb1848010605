//! Relocations, snapshots, roll-back, clones and the deletion of objects, in the log of one volume.
//!
//! The volume has one block. A log slot is one object, so a slot that is written holds data until the block
//! is written or relocated. A take-over is one step: it keeps any number of slots that were not confirmed yet,
//! and starts from any checkpoint that an opener may find.
//!
//! Deletions are not steps. The model records what any writer was ever permitted to delete. A state
//! violates the protocol if one of these objects is still needed, so it does not matter when, how often and
//! by which writer the deletion is executed.

use super::explore::{Label, Model, explore};

const SLOTS: usize = 7;

/// A checkpoint, by the number of slots that it covers. Checkpoint 0 is the empty volume.
type Checkpoint = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Record {
    None,
    Write,
    /// The block's data, which lay in slot `from` and was written in slot `value`.
    Move {
        from: u8,
        value: u8,
    },
    Base(Checkpoint),
    /// The first record of an opener.
    Open(Checkpoint),
    Snapshot {
        id: u8,
        base: Checkpoint,
    },
    Delete(u8),
    Rollback(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Cloner {
    Idle,
    Chosen(u8),
    Pinned(u8),
    Open(u8),
    /// A base of the clone is confirmed that refers to nothing of the volume.
    Own(u8),
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Deleter {
    Idle,
    HasToken(u8),
    HasListed(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    log: [Record; SLOTS],
    length: u8,
    confirmed: u8,
    openings: u8,
    snapshots: u8,
    /// Checkpoints that were written, as bits.
    written: u16,
    /// A relocation whose data was read: old slot and value.
    moving: Option<(u8, u8)>,
    /// Slots and checkpoints whose deletion some writer was permitted.
    free_slots: u16,
    free_checkpoints: u16,
    cloner: Cloner,
    deleter: Deleter,
    has_pin: bool,
    /// Tokens of deleters, and the tokens that were ever put or whose removal was sent, as bits.
    tokens: u8,
    tokens_put: u8,
    removals: u8,
}

/// The rules that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Conditional,
    Confirmed,
    KeepSnapshots,
    Tail,
    LaterSnapshots,
    DeletedSnapshots,
    SnapshotBase,
    LookForToken,
    TokenFirst,
    KeepToken,
    UniqueToken,
    OwnObjects,
    OwnBase,
}

struct Space {
    slots: u8,
    /// The maximum number of checkpoints besides the empty volume.
    checkpoints: u32,
    /// With a clone of the snapshot, and without relocations and roll-back.
    with_clone: bool,
    without: Option<Rule>,
}

/// What a view of the volume needs: slots and checkpoints, as bits.
#[derive(Clone, Copy, Default)]
struct Needs {
    slots: u16,
    checkpoints: u16,
}

impl Needs {
    fn and(self, other: Self) -> Self {
        Self { slots: self.slots | other.slots, checkpoints: self.checkpoints | other.checkpoints }
    }
}

type Steps = Vec<(Label, State)>;

impl Space {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// The slot that holds the block after `end` slots.
    fn place(&self, s: &State, end: u8) -> Option<u8> {
        let mut place = None;
        for (at, record) in (0..end).zip(s.log) {
            match record {
                Record::Write => place = Some(at),
                Record::Move { from, .. }
                    if place == Some(from) || !self.has(Rule::Conditional) =>
                {
                    place = Some(at);
                }
                Record::Rollback(id) => {
                    place = snapshot(s, id).and_then(|(at, _)| self.place(s, at));
                }
                _ => {}
            }
        }
        place
    }

    /// The needs of a snapshot for as long as it exists: the checkpoint before it, the slots from there, and
    /// the data.
    fn needs_of(&self, s: &State, id: u8) -> Needs {
        let Some((at, base)) = snapshot(s, id) else { return Needs::default() };
        let tail = if self.has(Rule::Tail) { range(base, at) } else { 0 };
        Needs { slots: tail | bit(self.place(s, at)), checkpoints: 1 << base }
    }

    /// The objects that the BASE record for `checkpoint` in slot `at` permits to delete.
    fn permit(&self, s: &mut State, checkpoint: Checkpoint, at: u8) {
        let mut keep = Needs { slots: bit(self.place(s, checkpoint)), checkpoints: 0 };
        for id in 0..s.snapshots {
            let Some((taken, _)) = snapshot(s, id) else { continue };
            let created_before = if self.has(Rule::LaterSnapshots) { at } else { checkpoint };
            let deleted_before = if self.has(Rule::DeletedSnapshots) { checkpoint } else { at };
            let is_deleted = deleted(s, id).is_some_and(|at| at < deleted_before);
            if taken < created_before && !is_deleted && self.has(Rule::KeepSnapshots) {
                keep = keep.and(self.needs_of(s, id));
            }
        }
        s.free_slots |= range(0, checkpoint) & !keep.slots;
        s.free_checkpoints |= range(0, checkpoint) & !keep.checkpoints;
    }

    fn append(&self, s: &State, what: &'static str, record: Record, next: &mut Steps) {
        if s.length >= self.slots || s.length - s.confirmed >= 2 {
            return;
        }
        let mut after = *s;
        after.log[usize::from(s.length)] = record;
        after.length += 1;
        if let (Record::Base(id), false) = (record, self.has(Rule::Confirmed)) {
            self.permit(&mut after, id, s.length);
        }
        next.push((("writer", what, s.length), after));
    }

    fn writer(&self, s: &State, next: &mut Steps) {
        self.append(s, "writes in", Record::Write, next);
        let base = newest_base(s, s.length);
        if let Some(id) = bits(s.written).filter(|id| *id > base).last() {
            self.append(s, "sends BASE in", Record::Base(id), next);
        }
        if s.confirmed < s.length {
            let mut after = *s;
            after.confirmed += 1;
            if let Record::Base(id) = s.log[usize::from(s.confirmed)] {
                self.permit(&mut after, id, s.confirmed);
            }
            next.push((("writer", "confirms", s.confirmed), after));
        }
        if bits(s.written).last() < Some(s.confirmed) && s.written.count_ones() <= self.checkpoints
        {
            let after = State { written: s.written | 1 << s.confirmed, ..*s };
            next.push((("writer", "writes checkpoint", s.confirmed), after));
        }
        if s.snapshots == 0 {
            let by_order = self.has(Rule::SnapshotBase);
            let base = newest_base(s, if by_order { s.length } else { s.confirmed });
            let counted = State { snapshots: s.snapshots + 1, ..*s };
            let record = Record::Snapshot { id: s.snapshots, base };
            self.append(&counted, "takes a snapshot in", record, next);
        }
        if self.with_clone {
            return;
        }
        match (s.moving, self.place(s, s.length)) {
            (Some((from, value)), _) => {
                let moved = State { moving: None, ..*s };
                self.append(&moved, "relocates in", Record::Move { from, value }, next);
            }
            (None, Some(from)) => {
                let moving = Some((from, value(s, from)));
                next.push((("collector", "reads", from), State { moving, ..*s }));
            }
            _ => {}
        }
        for id in (0..s.snapshots).filter(|id| exists(s, *id, s.length)) {
            self.append(s, "rolls back in", Record::Rollback(id), next);
            self.append(s, "deletes a snapshot in", Record::Delete(id), next);
        }
    }

    fn take_over(&self, s: &State, next: &mut Steps) {
        for cut in s.confirmed..=s.length.min(self.slots - 1) {
            let first = newest_base(s, cut);
            for base in bits(s.written).filter(|id| (first..=cut).contains(id)) {
                let mut after = *s;
                after.log[usize::from(cut)] = Record::Open(base);
                after.log[usize::from(cut) + 1..].fill(Record::None);
                after.length = cut + 1;
                after.openings += 1;
                for at in s.confirmed..cut {
                    if let Record::Base(id) = s.log[usize::from(at)] {
                        self.permit(&mut after, id, at);
                    }
                }
                self.permit(&mut after, base, cut);
                after.confirmed = cut + 1;
                after.moving = None;
                after.deleter = Deleter::Idle;
                next.push((("opener", "takes over in", cut), after));
            }
        }
    }

    fn cloner(&self, s: &State, next: &mut Steps) {
        let mut go = |what, id, after| next.push((("cloner", what, id), after));
        match s.cloner {
            Cloner::Idle => {
                if exists(s, 0, s.confirmed) {
                    go("chooses", 0, State { cloner: Cloner::Chosen(0), ..*s });
                }
            }
            Cloner::Chosen(id) => {
                go("pins", id, State { cloner: Cloner::Pinned(id), has_pin: true, ..*s });
            }
            Cloner::Pinned(id) if s.tokens != 0 && self.has(Rule::LookForToken) => {
                go("unpins", id, State { cloner: Cloner::Ended, has_pin: false, ..*s });
            }
            Cloner::Pinned(id) => go("is open", id, State { cloner: Cloner::Open(id), ..*s }),
            Cloner::Open(id) => {
                go("ends", id, State { cloner: Cloner::Ended, has_pin: false, ..*s });
                go("confirms an own base", id, State { cloner: Cloner::Own(id), ..*s });
                if !self.has(Rule::OwnBase) {
                    go("has copied and unpins", id, State { has_pin: false, ..*s });
                }
                if !self.has(Rule::OwnObjects) {
                    let free_slots = s.free_slots | self.needs_of(s, id).slots;
                    go("overwrites and collects", id, State { free_slots, ..*s });
                }
            }
            Cloner::Own(id) => {
                go("unpins", id, State { cloner: Cloner::Ended, has_pin: false, ..*s });
            }
            Cloner::Ended => {}
        }
    }

    /// The owner deletes snapshot 0, which may have a clone.
    fn deleter(&self, s: &State, next: &mut Steps) {
        let token = match self.has(Rule::UniqueToken) {
            true => (0..4).find(|token| s.tokens_put & 1 << token == 0),
            false => Some(0),
        };
        let mut go = |what, id, after| next.push((("deleter", what, id), after));
        match s.deleter {
            Deleter::Idle if exists(s, 0, s.length) && exists(s, 0, s.confirmed) => {
                if !self.has(Rule::TokenFirst) {
                    if !s.has_pin {
                        go("finds no pin", 0, State { deleter: Deleter::HasToken(0), ..*s });
                    }
                } else if let Some(token) = token {
                    let (tokens, tokens_put) = (s.tokens | 1 << token, s.tokens_put | 1 << token);
                    let deleter = Deleter::HasToken(token);
                    go("puts token", token, State { tokens, tokens_put, deleter, ..*s });
                }
                // What a crashed deleter has left.
                for token in bits(s.tokens.into()).filter(|token| s.removals & 1 << token == 0) {
                    go("sweeps token", token, State { removals: s.removals | 1 << token, ..*s });
                }
            }
            Deleter::Idle => {
                let is_gone = deleted(s, 0).is_some_and(|at| at < s.confirmed);
                if is_gone && !self.has(Rule::KeepToken) {
                    go("removes its tokens", 0, State { removals: s.tokens_put, ..*s });
                }
            }
            Deleter::HasToken(token) if !self.has(Rule::TokenFirst) => {
                let deleter = Deleter::HasListed(0);
                go("puts token", 0, State { tokens: s.tokens | 1 << token, deleter, ..*s });
            }
            Deleter::HasToken(token) if s.has_pin => {
                let removals = s.removals | 1 << token;
                go("finds a pin", token, State { deleter: Deleter::Idle, removals, ..*s });
            }
            Deleter::HasToken(token) => {
                go("finds no pin", token, State { deleter: Deleter::HasListed(token), ..*s });
            }
            Deleter::HasListed(token) => {
                // Its owner ends the attempt without the record, for example because the store fails.
                let removals = s.removals | 1 << token;
                go("gives up", token, State { deleter: Deleter::Idle, removals, ..*s });
                let after = State { deleter: Deleter::Idle, ..*s };
                self.append(&after, "deletes the snapshot in", Record::Delete(0), next);
            }
        }
        for token in bits((s.removals & s.tokens).into()) {
            let after = State { tokens: s.tokens & !(1 << token), ..*s };
            next.push((("store", "removes token", token), after));
        }
    }

    /// Checks what a recovery after `end` slots needs, from every checkpoint that it may choose.
    fn check(&self, s: &State, end: u8) -> Result<(), String> {
        let place = self.place(s, end);
        if place.map(|at| value(s, at)) != self.truth(s, end) {
            return Err(format!("after {end} slots, the block has old data"));
        }
        let missing = |needs: Needs, whose: &str| {
            let free = (needs.slots & s.free_slots, needs.checkpoints & s.free_checkpoints);
            let text = format!("{whose} lacks slots {:b}, checkpoints {:b}", free.0, free.1);
            if free == (0, 0) { Ok(()) } else { Err(text) }
        };
        for base in bits(s.written).filter(|id| (newest_base(s, end)..=end).contains(id)) {
            let needs = Needs { slots: range(base, end) | bit(place), checkpoints: 1 << base };
            missing(needs, "the volume")?;
            for at in base..end {
                if let Record::Rollback(id) = s.log[usize::from(at)] {
                    missing(self.whole(s, id), "the replay of a roll-back")?;
                }
            }
        }
        for id in (0..s.snapshots).filter(|id| exists(s, *id, end)) {
            missing(self.whole(s, id), "a snapshot")?;
        }
        match s.cloner {
            Cloner::Open(id) if end == s.confirmed => missing(self.whole(s, id), "a clone"),
            _ => Ok(()),
        }
    }

    /// The needs of a snapshot, whatever rule is switched off.
    fn whole(&self, s: &State, id: u8) -> Needs {
        let tail = snapshot(s, id).map_or(0, |(at, base)| range(base, at));
        let needs = self.needs_of(s, id);
        Needs { slots: needs.slots | tail, ..needs }
    }

    /// The slot of the write that the block has after `end` slots, whatever was relocated.
    fn truth(&self, s: &State, end: u8) -> Option<u8> {
        let mut truth = None;
        for (at, record) in (0..end).zip(s.log) {
            match record {
                Record::Write => truth = Some(at),
                Record::Rollback(id) => {
                    truth = snapshot(s, id).and_then(|(at, _)| self.truth(s, at));
                }
                _ => {}
            }
        }
        truth
    }
}

impl Model for Space {
    type State = State;

    fn initial(&self) -> State {
        State {
            log: [Record::None; SLOTS],
            length: 0,
            confirmed: 0,
            openings: 0,
            snapshots: 0,
            written: 1,
            moving: None,
            free_slots: 0,
            free_checkpoints: 0,
            cloner: Cloner::Idle,
            deleter: Deleter::Idle,
            has_pin: false,
            tokens: 0,
            tokens_put: 0,
            removals: 0,
        }
    }

    fn steps(&self, s: &State, next: &mut Steps) {
        self.writer(s, next);
        if s.openings == 0 {
            self.take_over(s, next);
        }
        if self.with_clone {
            self.cloner(s, next);
            self.deleter(s, next);
        }
    }

    fn violation(&self, s: &State) -> Option<String> {
        (s.confirmed..=s.length).find_map(|end| self.check(s, end).err())
    }
}

/// The slot and the base of a snapshot, if its record is in the log.
fn snapshot(s: &State, id: u8) -> Option<(u8, Checkpoint)> {
    (0..s.length).zip(s.log).find_map(|(at, record)| match record {
        Record::Snapshot { id: found, base } if found == id => Some((at, base)),
        _ => None,
    })
}

/// The slot in which a snapshot was deleted.
fn deleted(s: &State, id: u8) -> Option<u8> {
    (0..s.length).zip(s.log).find(|(_, record)| *record == Record::Delete(id)).map(|(at, _)| at)
}

fn exists(s: &State, id: u8, end: u8) -> bool {
    let is_before = |at: u8| at < end;
    snapshot(s, id).is_some_and(|(at, _)| is_before(at)) && !deleted(s, id).is_some_and(is_before)
}

/// The newest checkpoint that a record in the first `end` slots names.
fn newest_base(s: &State, end: u8) -> Checkpoint {
    let named = s.log[..usize::from(end)].iter().map(|record| match record {
        Record::Base(id) | Record::Open(id) => *id,
        _ => 0,
    });
    named.max().unwrap_or(0)
}

/// The slot in which the data at slot `at` was written first.
fn value(s: &State, at: u8) -> u8 {
    match s.log[usize::from(at)] {
        Record::Move { value, .. } => value,
        _ => at,
    }
}

fn bit(at: Option<u8>) -> u16 {
    at.map_or(0, |at| 1 << at)
}

fn range(from: u8, to: u8) -> u16 {
    (from..to).fold(0, |set, at| set | 1 << at)
}

fn bits(set: u16) -> impl Iterator<Item = u8> {
    (0..16).filter(move |bit| set & 1 << bit != 0)
}

#[test]
fn no_object_is_deleted_that_a_view_needs() {
    for (slots, checkpoints, with_clone) in [(5, 1, true), (5, 2, false), (6, 1, false)] {
        let found = explore(&Space { slots, checkpoints, with_clone, without: None });
        assert_eq!(found.violation, None);
        assert!(found.states > 100_000, "{} states", found.states);
    }
}

#[test]
fn every_rule_of_collection_and_snapshots_is_needed() {
    use Rule::{
        Conditional, Confirmed, DeletedSnapshots, KeepSnapshots, KeepToken, LaterSnapshots,
        LookForToken, OwnBase, OwnObjects, SnapshotBase, Tail, TokenFirst, UniqueToken,
    };
    let alone = [
        Conditional,
        Confirmed,
        KeepSnapshots,
        Tail,
        LaterSnapshots,
        DeletedSnapshots,
        SnapshotBase,
    ];
    let cloned = [LookForToken, TokenFirst, KeepToken, UniqueToken, OwnObjects, OwnBase];
    let rules = alone.map(|rule| (rule, false)).into_iter().chain(cloned.map(|rule| (rule, true)));
    for (rule, with_clone) in rules {
        let without = Some(rule);
        let found = explore(&Space { slots: 7, checkpoints: 2, with_clone, without });
        assert!(found.violation.is_some(), "without {rule:?}: {} states", found.states);
    }
}
