//! What the volume must contain: a prefix of the writes, not shorter than the last acknowledged flush.

use std::collections::BTreeMap;

/// The sectors of the simulated volume.
pub(super) const SECTORS: usize = 96;

/// The content of each sector: the stamp of the write that it has, 0 for zeroes.
pub(super) type Image = [u64; SECTORS];

/// A write of one stamp to a range of sectors; stamp 0 makes them zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) stamp: u64,
}

impl Write {
    fn apply(self, image: &mut Image) {
        image[self.begin..self.end].fill(self.stamp);
    }
}

struct Writer {
    initial: Image,
    writes: Vec<Write>,
    current: Image,
    /// The writes that were acknowledged as durable.
    acknowledged: usize,
    /// The writes that the next opener has found.
    cut: Option<usize>,
}

/// The writers that have opened the volume, by their epoch, and the first violation.
#[derive(Default)]
pub(super) struct Oracle {
    writers: BTreeMap<u64, Writer>,
    pub(super) violation: Option<String>,
    pub(super) flushes: u64,
    stamp: u64,
}

impl Oracle {
    pub(super) fn violate(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    /// The writer of `epoch` has opened the volume and has read `image`.
    pub(super) fn opened(&mut self, epoch: u64, image: Image) {
        if self.writers.contains_key(&epoch) {
            return self.violate(format!("epoch {epoch} has two writers"));
        }
        let later = self.writers.range(epoch..).next();
        if later.is_some_and(|(_, later)| later.initial != image) {
            let text = format!("epoch {epoch} and a later one have different histories");
            return self.violate(text);
        }
        let cut = later.map(|_| 0);
        if let Some((before, parent)) = self.writers.range_mut(..epoch).next_back() {
            let mut content = parent.initial;
            let mut found = (content == image).then_some(0);
            for (number, write) in parent.writes.iter().enumerate() {
                write.apply(&mut content);
                if content == image {
                    found = Some(number + 1);
                }
            }
            let (acknowledged, before) = (parent.acknowledged, *before);
            match found {
                Some(found) => {
                    parent.cut.get_or_insert(found);
                    if found < acknowledged {
                        self.violate(format!(
                            "epoch {epoch} has {found} writes of epoch {before}, \
                             and {acknowledged} were acknowledged"
                        ));
                    }
                }
                None => self.violate(format!(
                    "the volume of epoch {epoch} is no prefix of the writes of epoch {before}"
                )),
            }
        } else if image != [0; SECTORS] {
            self.violate(format!("the volume of epoch {epoch} is not empty"));
        }
        let writer =
            Writer { initial: image, writes: Vec::new(), current: image, acknowledged: 0, cut };
        self.writers.insert(epoch, writer);
    }

    /// The writer begins a write. Returns its stamp.
    pub(super) fn begin(&mut self, epoch: u64, begin: usize, end: usize, is_zero: bool) -> u64 {
        self.stamp += 1;
        let stamp = if is_zero { 0 } else { self.stamp };
        if let Some(writer) = self.writers.get_mut(&epoch) {
            let write = Write { begin, end, stamp };
            writer.writes.push(write);
            write.apply(&mut writer.current);
        }
        stamp
    }

    /// The writes that the writer has begun.
    pub(super) fn written(&self, epoch: u64) -> usize {
        self.writers.get(&epoch).map_or(0, |writer| writer.writes.len())
    }

    /// A flush of the first `count` writes was acknowledged.
    pub(super) fn acknowledged(&mut self, epoch: u64, count: usize) {
        self.flushes += 1;
        let Some(writer) = self.writers.get_mut(&epoch) else { return };
        writer.acknowledged = writer.acknowledged.max(count);
        if let Some(cut) = writer.cut.filter(|cut| *cut < count) {
            let text = format!("epoch {epoch} acknowledges {count} writes after its cut at {cut}");
            self.violate(text);
        }
    }

    /// The writer has read `found` from the sector `begin` on.
    pub(super) fn read(&mut self, epoch: u64, begin: usize, found: &[u64]) {
        let Some(writer) = self.writers.get(&epoch) else { return };
        let expected = &writer.current[begin..begin + found.len()];
        if expected != found {
            let text = format!("epoch {epoch} reads {found:?} at sector {begin}, not {expected:?}");
            self.violate(text);
        }
    }
}
