//! Which ranges of the volume have data.

use std::ops::Range;

use super::access::Failure;
use super::shared::Shared;

/// A range, and whether it has data. Other ranges read as zeroes.
pub(super) type Extent = (Range<u64>, bool);

impl Shared {
    /// Splits a range into at most `limit` parts that have data or have none. The parts are consecutive; they end
    /// early if the limit is reached.
    pub(super) async fn extents(
        &self,
        range: Range<u64>,
        limit: usize,
    ) -> Result<Vec<Extent>, Failure> {
        self.check_range(range.start, range.end - range.start)?;
        let mut found: Vec<Extent> = Vec::new();
        for (number, part) in self.parts(range) {
            let base = number * self.page_bytes;
            let part = base + u64::from(part.start)..base + u64::from(part.end);
            for (piece, has_data) in self.extents_of_page(number, part).await? {
                let is_full = found.len() == limit;
                match found.last_mut() {
                    Some((last, same)) if *same == has_data => last.end = piece.end,
                    _ if is_full => return Ok(found),
                    _ => found.push((piece, has_data)),
                }
            }
        }
        Ok(found)
    }

    async fn extents_of_page(&self, number: u64, part: Range<u64>) -> Result<Vec<Extent>, Failure> {
        let base = number * self.page_bytes;
        self.with_map(|state| {
            state.map.leaf(number)?;
            let mut extents = Vec::new();
            for (range, in_tail) in state.tail.cover_of(part.clone()) {
                if let Some(has_data) = in_tail {
                    extents.push((range, has_data));
                    continue;
                }
                let Some(page) = state.map.leaf(number)? else {
                    extents.push((range, false));
                    continue;
                };
                let [first, last] =
                    [range.start, range.end].map(|at| u32::try_from(at - base).unwrap_or(u32::MAX));
                extents.extend(page.pieces(first..last).map(|(piece, entry)| {
                    let [begin, end] = [piece.start, piece.end].map(|at| base + u64::from(at));
                    (begin..end, entry.is_some())
                }));
            }
            Ok(extents)
        })
        .await
    }
}
