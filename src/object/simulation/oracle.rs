//! What the volume must contain: a prefix of the writes, not shorter than the last acknowledged flush.

use std::collections::BTreeMap;

/// The sectors of the simulated volume.
pub(super) const SECTORS: usize = 96;

/// The content of each sector: the stamp of the write that it has, 0 for zeroes.
pub(super) type Image = [u64; SECTORS];

/// The volume and its snapshots, by their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) image: Image,
    pub(super) snapshots: BTreeMap<String, Image>,
}

/// A change of the volume.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// A write of one stamp to a range of sectors; stamp 0 makes them zero.
    Write { begin: usize, end: usize, stamp: u64 },
    /// A snapshot is taken.
    Take(String),
    /// A snapshot is deleted.
    Delete(String),
    /// The volume gets the content of a snapshot.
    RollBack(String),
}

impl Change {
    fn apply(&self, to: &mut Content) {
        match self {
            Self::Write { begin, end, stamp } => to.image[*begin..*end].fill(*stamp),
            Self::Take(name) => drop(to.snapshots.insert(name.clone(), to.image)),
            Self::Delete(name) => drop(to.snapshots.remove(name)),
            Self::RollBack(name) => {
                to.image = to.snapshots.get(name).copied().unwrap_or(to.image);
            }
        }
    }
}

struct Writer {
    initial: Content,
    changes: Vec<Change>,
    current: Content,
    /// The changes that were acknowledged as durable.
    acknowledged: usize,
    /// The changes that the next process of the same mapping must find.
    kept: usize,
    /// The changes that the next opener has found.
    cut: Option<usize>,
    /// It has continued the changes of an earlier process.
    is_merged: bool,
}

impl Writer {
    /// Returns the greatest number of changes after which the volume has this content.
    fn find(&self, content: &Content) -> Option<usize> {
        let mut past = self.initial.clone();
        let mut found = (past == *content).then_some(0);
        for (number, change) in self.changes.iter().enumerate() {
            change.apply(&mut past);
            if past == *content {
                found = Some(number + 1);
            }
        }
        found
    }
}

/// The writers that have opened the volume, by their epoch, and the first violation.
#[derive(Default)]
pub(super) struct Oracle {
    writers: BTreeMap<u64, Writer>,
    pub(super) violation: Option<String>,
    pub(super) flushes: u64,
    /// How often a process has continued with the tail memory of one that had ended.
    pub(super) continued: u64,
    /// The snapshots whose content was read, and the roll-backs.
    pub(super) snapshots_read: u64,
    pub(super) roll_backs: u64,
    /// The content of every snapshot that was ever taken. No two have the same name.
    taken: BTreeMap<String, Image>,
    /// The reads of clones, and the clones that were flattened and read afterwards.
    pub(super) clones_read: u64,
    pub(super) flattened: u64,
    stamp: u64,
}

impl Oracle {
    pub(super) fn violate(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    /// The writer of `epoch` has opened the volume and has read `content`. `before` is the epoch of the last process
    /// with the same tail memory.
    pub(super) fn opened(&mut self, epoch: u64, content: Content, before: Option<u64>) {
        self.snapshots_read += content.snapshots.len() as u64;
        if self.writers.contains_key(&epoch) {
            return self.violate(format!("epoch {epoch} has two writers"));
        }
        let newest = self.writers.range(..epoch).next_back().map(|(newest, _)| *newest);
        let later = self.writers.range(epoch..).next();
        let continues = before.filter(|before| newest == Some(*before));
        if let (Some(before), None) = (continues, later) {
            return self.continues(epoch, content, before);
        }
        let is_merged = later.is_some_and(|(_, later)| later.is_merged);
        let differs = later.is_some_and(|(_, later)| match later.is_merged {
            true => later.find(&content).is_none(),
            false => later.initial != content,
        });
        if continues.is_none() && differs {
            let text = format!("epoch {epoch} and a later one have different histories");
            return self.violate(text);
        }
        let (cut, has_later) = (later.map(|_| 0), later.is_some());
        if is_merged {
            // The later one has the changes of those before.
        } else if let Some((before, parent)) = self.writers.range_mut(..epoch).next_back() {
            let found = parent.find(&content);
            let (acknowledged, before) = (parent.acknowledged, *before);
            match found {
                Some(found) => {
                    if continues.is_none() {
                        parent.cut.get_or_insert(found);
                    }
                    if found < acknowledged {
                        self.violate(format!(
                            "epoch {epoch} has {found} changes of epoch {before}, \
                             and {acknowledged} were acknowledged"
                        ));
                    }
                }
                None => self.violate(format!(
                    "the volume of epoch {epoch} is no prefix of the changes of epoch {before}"
                )),
            }
        } else if !has_later && (content.image != [0; SECTORS] || !content.snapshots.is_empty()) {
            self.violate(format!("the volume of epoch {epoch} is not empty"));
        }
        let current = content.clone();
        let (changes, acknowledged, kept, is_merged) = (Vec::new(), 0, 0, false);
        let writer =
            Writer { initial: content, changes, current, acknowledged, kept, cut, is_merged };
        self.writers.insert(epoch, writer);
    }

    /// The process of `epoch` continues the changes of the one of `before`, which has ended.
    fn continues(&mut self, epoch: u64, content: Content, before: u64) {
        let Some(mut writer) = self.writers.remove(&before) else { return };
        let must = writer.kept.max(writer.acknowledged);
        match writer.find(&content) {
            Some(found) if found >= must => {
                writer.changes.truncate(found);
                (writer.current, writer.kept, writer.is_merged) = (content, found, true);
            }
            found => self.violate(format!(
                "epoch {epoch} continues with {found:?} changes of epoch {before}, and {must} were acknowledged"
            )),
        }
        self.continued += 1;
        self.writers.insert(epoch, writer);
    }

    /// All changes that the writer has begun were acknowledged, and survive its process.
    pub(super) fn kept(&mut self, epoch: u64) {
        if let Some(writer) = self.writers.get_mut(&epoch) {
            writer.kept = writer.changes.len();
        }
    }

    /// The writer begins a write. Returns its stamp.
    pub(super) fn begin(&mut self, epoch: u64, begin: usize, end: usize, is_zero: bool) -> u64 {
        self.stamp += 1;
        let stamp = if is_zero { 0 } else { self.stamp };
        self.change(epoch, Change::Write { begin, end, stamp });
        stamp
    }

    /// The writer begins to take a snapshot. Returns its name, which no other one has.
    pub(super) fn take(&mut self, epoch: u64) -> String {
        self.stamp += 1;
        let name = self.stamp.to_string();
        self.change(epoch, Change::Take(name.clone()));
        name
    }

    /// The writer begins a change.
    pub(super) fn change(&mut self, epoch: u64, change: Change) {
        self.roll_backs += u64::from(matches!(change, Change::RollBack(_)));
        if let Some(writer) = self.writers.get_mut(&epoch) {
            change.apply(&mut writer.current);
            if let Change::Take(name) = &change {
                self.taken.insert(name.clone(), writer.current.image);
            }
            writer.changes.push(change);
        }
    }

    /// The last change, a deletion, was refused.
    pub(super) fn keep(&mut self, epoch: u64) {
        let Some(writer) = self.writers.get_mut(&epoch) else { return };
        let Some(Change::Delete(name)) = writer.changes.pop() else { return };
        let image = self.taken[&name];
        writer.current.snapshots.insert(name, image);
    }

    /// The changes that the writer has begun.
    pub(super) fn changes(&self, epoch: u64) -> usize {
        self.writers.get(&epoch).map_or(0, |writer| writer.changes.len())
    }

    /// A flush of the first `count` changes was acknowledged.
    pub(super) fn acknowledged(&mut self, epoch: u64, count: usize) {
        self.flushes += 1;
        let Some(writer) = self.writers.get_mut(&epoch) else { return };
        writer.acknowledged = writer.acknowledged.max(count);
        if let Some(cut) = writer.cut.filter(|cut| *cut < count) {
            let text = format!("epoch {epoch} acknowledges {count} changes after its cut at {cut}");
            self.violate(text);
        }
    }

    /// The writer has read `found` from the sector `begin` on.
    pub(super) fn read(&mut self, epoch: u64, begin: usize, found: &[u64]) {
        let Some(writer) = self.writers.get(&epoch) else { return };
        let expected = &writer.current.image[begin..begin + found.len()];
        if expected != found {
            let text = format!("epoch {epoch} reads {found:?} at sector {begin}, not {expected:?}");
            self.violate(text);
        }
    }

    /// The content of a snapshot that was taken.
    pub(super) fn taken(&self, name: &str) -> Option<Image> {
        self.taken.get(name).copied()
    }

    /// A clone, whose sectors are `expected`, was read.
    pub(super) fn read_clone(&mut self, name: &str, expected: &Image, found: &Image) {
        self.clones_read += 1;
        if expected != found {
            self.violate(format!("a clone of {name} reads {found:?}, not {expected:?}"));
        }
    }

    /// A stamp that no other write has.
    pub(super) fn next_stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    /// The writer has read a snapshot.
    pub(super) fn read_snapshot(&mut self, epoch: u64, name: &str, found: &Image) {
        self.snapshots_read += 1;
        let Some(writer) = self.writers.get(&epoch) else { return };
        let expected = writer.current.snapshots.get(name);
        if expected != Some(found) {
            let text =
                format!("epoch {epoch} reads {found:?} in snapshot {name}, not {expected:?}");
            self.violate(text);
        }
    }
}
