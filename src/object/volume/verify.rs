//! Comparison of the accounting with a scan of the map.

use std::collections::BTreeMap;

use super::access::Failure;
use super::shared::Shared;
use crate::name::Position;

impl Shared {
    /// Compares the live bytes of every log object with the map.
    ///
    /// # Errors
    /// Returns an error if they differ, or if a page of the map cannot be read.
    pub(super) async fn check_accounting(&self) -> Result<(), Failure> {
        let mut found = BTreeMap::<Position, u32>::new();
        for number in 0..self.size().div_ceil(self.page_bytes) {
            let entries = self
                .with_map(|state| {
                    Ok(state.map.leaf(number)?.map_or(Vec::new(), |page| page.entries().to_vec()))
                })
                .await?;
            for entry in entries.into_iter().filter(|entry| entry.ancestor == 0) {
                *found.entry(entry.object).or_default() += entry.length;
            }
        }
        let state = self.lock();
        let known = state.usage.objects().filter(|(_, object)| object.live > 0);
        let known: BTreeMap<_, _> = known.map(|(at, object)| (at, object.live)).collect();
        match known == found {
            true => Ok(()),
            false => Err(Failure::Invalid("the accounting differs from the map")),
        }
    }
}
