//! Where two contents of a volume differ, from their maps alone.
//!
//! An object never changes, and no name is used twice. So a range has the same bytes in two contents if both maps refer
//! to the same place of the same object, or if neither refers to one. Pages of the map are objects, too: those that both
//! contents refer to need not be read. A range that the collector has copied between the two has another place, although its
//! bytes are the same.

use std::ops::Range;

use super::access::Failure;
use super::shared::{Shared, State};
use super::table::{Missing, Stored, below, split};
use crate::map::{Place, place_of};

/// How a range differs from an earlier content of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// It does not.
    Same,
    /// It has other data.
    Data,
    /// It reads as zeroes, and has had data.
    Zeroes,
}

/// A range with what a map has for it.
type Piece = (Range<u64>, Content);

/// What a map has for a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Zeroes,
    /// The place of the first byte.
    At(Place),
    /// Data that is in no object yet.
    Unplaced,
}

impl Content {
    /// The content of the rest behind so many bytes.
    fn skip(self, bytes: u64) -> Self {
        match self {
            Self::At(place) => Self::At(Place { at: place.at + short(bytes), ..place }),
            other => other,
        }
    }

    fn difference(self, since: Self) -> Difference {
        match self {
            Self::Unplaced => Difference::Data,
            _ if self == since => Difference::Same,
            Self::Zeroes => Difference::Zeroes,
            Self::At(_) => Difference::Data,
        }
    }
}

impl Shared {
    /// Splits a range into at most `limit` parts that differ in the same way from `since`. The parts are consecutive; they
    /// end early if the limit is reached.
    pub(super) async fn differences(
        &self,
        since: &Self,
        range: Range<u64>,
        limit: usize,
    ) -> Result<Vec<(Range<u64>, Difference)>, Failure> {
        self.check_range(range.start, range.end - range.start)?;
        if self.description.volume != since.description.volume {
            return Err(Failure::Invalid("the contents are of two volumes"));
        }
        let mut found: Vec<(Range<u64>, Difference)> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let parts = match self.same_until(since, at..range.end).await? {
                end if end > at => vec![(at..end, Difference::Same)],
                _ => {
                    let page_end = (at / self.page_bytes + 1) * self.page_bytes;
                    let part = at..range.end.min(page_end);
                    merge(&self.contents(part.clone()).await?, &since.contents(part).await?)
                }
            };
            for (part, difference) in parts {
                at = part.end;
                let is_full = found.len() == limit;
                match found.last_mut() {
                    Some((last, same)) if *same == difference => last.end = part.end,
                    _ if is_full => return Ok(found),
                    _ => found.push((part, difference)),
                }
            }
        }
        Ok(found)
    }

    /// Returns the end of the pages from the begin of the range on that are the same objects in both contents; the begin
    /// itself if the first page may differ.
    async fn same_until(&self, since: &Self, range: Range<u64>) -> Result<u64, Failure> {
        let number = range.start / self.page_bytes;
        let (index, _) = split(number);
        let below = range.start..range.end.min(below(index).end * self.page_bytes);
        if self.stored_index(index, &below).is_same(since.stored_index(index, &below)) {
            return Ok(below.end);
        }
        let page = range.start..range.end.min((number + 1) * self.page_bytes);
        let own = self.stored_leaf(number, &page).await?;
        let is_same = own.is_same(since.stored_leaf(number, &page).await?);
        Ok(if is_same { page.end } else { range.start })
    }

    /// Returns the page of the index that has what the volume has in the range.
    fn stored_index(&self, index: u64, range: &Range<u64>) -> Stored {
        let state = self.lock();
        match state.tail.covers(range) {
            true => Stored::Changed,
            false => state.map.stored_index(index),
        }
    }

    /// Returns the map page that has what the volume has in the range.
    async fn stored_leaf(&self, number: u64, range: &Range<u64>) -> Result<Stored, Failure> {
        self.with_map(|state| match state.tail.covers(range) {
            true => Ok(Stored::Changed),
            false => state.map.stored_leaf(number),
        })
        .await
    }

    /// Returns what the volume has in a range within a page.
    async fn contents(&self, range: Range<u64>) -> Result<Vec<Piece>, Failure> {
        let number = range.start / self.page_bytes;
        let base = number * self.page_bytes;
        self.with_map(|state| contents(state, number, base, &range)).await
    }
}

fn contents(
    state: &mut State,
    number: u64,
    base: u64,
    range: &Range<u64>,
) -> Result<Vec<Piece>, Missing> {
    let State { map, tail, .. } = state;
    let page = map.leaf(number)?;
    let mut found = Vec::new();
    for (part, in_tail) in tail.cover_of(range.clone()) {
        match (in_tail, page) {
            (Some(true), _) => found.push((part, Content::Unplaced)),
            (Some(false), _) | (None, None) => found.push((part, Content::Zeroes)),
            (None, Some(page)) => {
                let part = short(part.start - base)..short(part.end - base);
                found.extend(page.pieces(part).map(|(piece, entry)| {
                    let [begin, end] = [piece.start, piece.end].map(|at| base + u64::from(at));
                    let at = |entry| Content::At(place_of(entry, piece.start));
                    (begin..end, entry.map_or(Content::Zeroes, at))
                }));
            }
        }
    }
    Ok(found)
}

/// Compares the pieces of the same range in two contents.
fn merge(now: &[Piece], since: &[Piece]) -> Vec<(Range<u64>, Difference)> {
    let mut parts = Vec::new();
    let mut earlier = since.iter().peekable();
    for (range, content) in now {
        let mut at = range.start;
        while at < range.end
            && let Some((old, old_content)) = earlier.peek()
        {
            let end = range.end.min(old.end);
            let [new, old] = [(content, range), (old_content, old)]
                .map(|(content, piece)| content.skip(at - piece.start));
            parts.push((at..end, new.difference(old)));
            at = end;
            earlier.next_if(|(old, _)| old.end == end);
        }
    }
    parts
}

/// A position within a page or an extent.
fn short(position: u64) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}
