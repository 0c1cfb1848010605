//! The search for objects that nothing refers to, by listing them: the remains of writers that crashed, puts that
//! arrived late, and what only deleted snapshots have needed.

use std::collections::BTreeSet;

use super::access::{Failure, prefix_of};
use super::recovery::read_checkpoint;
use super::shared::{Shared, State};
use super::snapshots::Start;
use crate::codec::{Index, PageId, Slot};
use crate::name::{Name, Position, SnapshotId};
use crate::rules::{Rule, applies};

/// The names that one look at the map is compared with.
pub(super) const SWEPT_AT_ONCE: usize = 16 << 10;

/// The kind of the tokens.
const TOKENS: &str = "dead";

/// The objects among which a sweep looks for those that nothing refers to.
#[derive(Clone, Copy)]
pub(super) enum Reach {
    /// Those of earlier epochs.
    Earlier,
    /// Also pages and checkpoints of this epoch that precede the confirmed checkpoint.
    Own(Start),
}

/// Objects with pages, by epoch and number.
pub(super) type Pages = BTreeSet<(u64, u64)>;

impl Shared {
    /// Deletes the objects within `reach` that neither the newest base nor a snapshot needs. Ends early if the volume
    /// is rolled back meanwhile.
    ///
    /// # Errors
    /// Returns the error of the store; a part is deleted then.
    pub(super) async fn sweep(&self, reach: Reach) -> Result<(), Failure> {
        for kind in ["log", "page", "ckpt", TOKENS] {
            self.sweep_kind(kind, reach).await?;
        }
        Ok(())
    }

    /// Deletes the tokens of earlier writers for snapshots that exist: such a snapshot cannot be cloned. Needs no base,
    /// because the open record of this writer fixes what they have deleted.
    ///
    /// # Errors
    /// As [`Shared::sweep`].
    pub(super) async fn sweep_tokens(&self) -> Result<(), Failure> {
        self.sweep_kind(TOKENS, Reach::Earlier).await
    }

    async fn sweep_kind(&self, kind: &str, reach: Reach) -> Result<(), Failure> {
        let mut after = String::new();
        let end = self.end_of(kind, reach);
        loop {
            let mut names = Vec::new();
            let mut is_end = false;
            while names.len() < SWEPT_AT_ONCE && !is_end {
                let some = self.access.list_some(&format!("{kind}/"), &after).await?;
                is_end = some.is_empty() || some.iter().any(|name| *name >= end);
                let earlier = some.into_iter().take_while(|name| *name < end);
                names.extend(earlier.inspect(|name| after.clone_from(name)));
            }
            let names = names.iter().filter_map(|text| Name::parse(text)).collect();
            self.sweep_names(names).await?;
            if is_end {
                return Ok(());
            }
        }
    }

    /// The first name behind those that a sweep looks at.
    fn end_of(&self, kind: &str, reach: Reach) -> String {
        match (kind, reach) {
            ("page", Reach::Own(Start { base: Some(at), next_page })) if at.epoch == self.epoch => {
                Name::Page { epoch: at.epoch, number: next_page }.to_string()
            }
            ("ckpt", Reach::Own(Start { base: Some(at), .. })) if at.epoch == self.epoch => {
                Name::Checkpoint(at).to_string()
            }
            // All tokens.
            (TOKENS, _) => "dead0".to_owned(),
            _ => prefix_of(kind, self.epoch),
        }
    }

    async fn sweep_names(&self, names: Vec<Name>) -> Result<(), Failure> {
        let page = |name: &Name| match name {
            Name::Page { epoch, number } => Some((*epoch, *number)),
            _ => None,
        };
        let mut superfluous: Pages = names.iter().filter_map(page).collect();
        let walked = match superfluous.is_empty() {
            true => Vec::new(),
            false => self.remove_referenced(&mut superfluous).await?,
        };
        for name in names {
            let is_needed = {
                let state = self.lock();
                if state.snapshots.is_rolled_back() {
                    return Ok(());
                }
                self.is_needed(&state, name, &superfluous, &walked)
            };
            if !is_needed && self.may_delete(name).await? {
                self.access.delete(name).await?;
            }
        }
        Ok(())
    }

    /// Removes from `pages` those that the map, the usage or a snapshot refers to. Returns the snapshots whose pages
    /// were looked at; others may have been taken meanwhile.
    pub(super) async fn remove_referenced(
        &self,
        pages: &mut Pages,
    ) -> Result<Vec<SnapshotId>, Failure> {
        let starts = self.lock().snapshots.starts();
        let mut seen = BTreeSet::new();
        for base in starts.iter().filter_map(|(_, base)| *base).collect::<BTreeSet<_>>() {
            self.remove_pages_of(base, pages, &mut seen).await?;
        }
        self.visit_pages(|_, id| remove(pages, id)).await?;
        Ok(starts.into_iter().map(|(id, _)| id).collect())
    }

    /// Removes from `pages` those of a checkpoint. `seen` has the pages of the index that were read before.
    async fn remove_pages_of(
        &self,
        base: Position,
        pages: &mut Pages,
        seen: &mut BTreeSet<PageId>,
    ) -> Result<(), Failure> {
        let checkpoint = read_checkpoint(&self.access, base).await?;
        checkpoint.usage.iter().flatten().for_each(|id| remove(pages, *id));
        for id in checkpoint.index.into_iter().flatten() {
            remove(pages, id);
            // A page of a parent refers to pages of parents only.
            if id.ancestor != 0 || !seen.insert(id) {
                continue;
            }
            let index = self.access.page(id, Index::decode).await?;
            let index = index.ok_or(Failure::Lost(id.object()))?;
            index.pages.into_iter().flatten().for_each(|id| remove(pages, id));
        }
        Ok(())
    }

    /// Whether an object of a sweep is needed. Nothing has referred to the pages in `superfluous`, but for snapshots that
    /// are not in `walked`.
    pub(super) fn is_needed(
        &self,
        state: &State,
        name: Name,
        superfluous: &Pages,
        walked: &[SnapshotId],
    ) -> bool {
        state.garbage.is_held(name)
            || match name {
                Name::Slot(at) => state.usage.contains(at),
                Name::Page { epoch, number } => {
                    !superfluous.contains(&(epoch, number))
                        || state.snapshots.may_need_page(epoch, number, walked)
                }
                Name::Checkpoint(at) => state.snapshots.need_checkpoint(at),
                // A token of an earlier writer that has not deleted the snapshot.
                Name::Token { snapshot, epoch, .. } => {
                    epoch >= self.epoch || state.snapshots.find(snapshot).is_none()
                }
                _ => false,
            }
    }

    /// Whether an object of an earlier epoch is not a seal. It must be read for that.
    pub(super) async fn may_delete(&self, name: Name) -> Result<bool, Failure> {
        let Name::Slot(at) = name else { return Ok(true) };
        if !applies(Rule::KeepSeals) {
            return Ok(true);
        }
        let identity = self.access.identity(at.epoch, at.slot);
        match self.access.decode(name, |bytes| Slot::decode(identity, bytes)).await {
            Ok(Some(Slot::Log(_))) => Ok(true),
            Ok(_) | Err(Failure::Damaged { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

fn remove(pages: &mut Pages, id: PageId) {
    if id.ancestor == 0 {
        pages.remove(&(id.epoch, id.number));
    }
}
