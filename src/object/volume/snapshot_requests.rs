//! Requests about snapshots: each appends one record to the log.

use super::Config;
use super::access::Failure;
use super::recovery::recover_snapshot;
use super::shared::{Patience, Shared, State};
use super::snapshots::Snapshots;
use super::tasks::Part;
use crate::codec::{MAX_NAME_BYTES, MAX_SNAPSHOTS, Record, Snapshot};
use crate::name::{Position, SnapshotId};
use crate::rules::{Rule, applies};

impl Shared {
    pub(super) async fn take_snapshot(
        &self,
        name: &str,
        created_at_s: u64,
    ) -> Result<SnapshotId, Failure> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(Failure::Invalid("the name of a snapshot has 1 to 255 bytes"));
        }
        self.admit(0).await?;
        let id = self.wait(|state| self.append_snapshot(state, name, created_at_s)).await??;
        self.flush().await?;
        Ok(id)
    }

    /// Appends the record, unless a checkpoint must be written first.
    fn append_snapshot(
        &self,
        state: &mut State,
        name: &str,
        created_at_s: u64,
    ) -> Option<Result<SnapshotId, Failure>> {
        if state.snapshots.existing().any(|snapshot| snapshot.name == name) {
            return Some(Err(Failure::Invalid("a snapshot with this name exists already")));
        }
        if state.snapshots.existing().count() >= MAX_SNAPSHOTS {
            return Some(Err(Failure::Invalid("the volume has 1024 snapshots already")));
        }
        if !state.snapshots.can_take() {
            if state.snapshots.wants_checkpoint() && !state.checkpoints.wanted {
                state.checkpoints.wanted = true;
                state.changed();
            }
            return None;
        }
        let State { tail, snapshots, .. } = &mut *state;
        let slot = self.position(tail.next());
        let record = u32::try_from(tail.open_records()).unwrap_or(u32::MAX);
        let (id, start, cuts) = snapshots.next(self.epoch);
        let mut history = crate::codec::History { base: start.base, cuts: cuts.to_vec() };
        history.cuts.push(Position { slot: slot.slot + 1, ..slot });
        let snapshot = Snapshot {
            id,
            at: (slot, record),
            name: name.to_owned(),
            created_at_s,
            size: self.size(),
            next_page: start.next_page,
            history,
        };
        tail.append_snapshot(Record::Snapshot(snapshot.clone()));
        snapshots.add(snapshot);
        state.interrupt_kept();
        state.limit_collection();
        Some(Ok(id))
    }

    pub(super) async fn delete_snapshot(&self, id: SnapshotId) -> Result<(), Failure> {
        if self.lock().snapshots.find(id).is_none() {
            return Err(Failure::NoSnapshot);
        }
        let mut deletion = self.forbid_clones(id).await?;
        self.admit(0).await?;
        {
            let mut state = self.lock();
            state.check()?;
            // From here on the snapshot is deleted, by this attempt or by one beside it.
            deletion.keep_token();
            if state.snapshots.find(id).is_none() {
                return Err(Failure::NoSnapshot);
            }
            let slot = state.tail.append_snapshot(Record::DeleteSnapshot(id));
            state.snapshots.delete(id, self.position(slot));
            state.interrupt_kept();
            // Its space is freed after the checkpoint that covers the record.
            state.checkpoints.wanted = true;
            state.changed();
        }
        self.flush().await?;
        if !applies(Rule::KeepToken) {
            let _ = self.access.delete(deletion.token()).await;
        }
        Ok(())
    }

    pub(super) async fn roll_back(&self, id: SnapshotId) -> Result<(), Failure> {
        self.admit(0).await?;
        let slot = {
            let mut state = self.lock();
            state.check()?;
            if state.snapshots.find(id).is_none() {
                return Err(Failure::NoSnapshot);
            }
            let slot = state.tail.append_snapshot(Record::RollBack(id));
            state.snapshots.roll_back(self.position(slot));
            state.interrupt_kept();
            slot
        };
        self.flush().await?;
        self.wait(|state| (state.tail.first > slot).then_some(())).await
    }

    /// Applies a roll-back in slot `at`.
    pub(super) async fn apply_roll_back(
        &self,
        id: SnapshotId,
        at: Position,
        patience: Patience,
    ) -> Result<(), Failure> {
        let snapshot = {
            let mut state = self.lock();
            state.snapshots.roll_back(at);
            state.snapshots.find_any(id).cloned()
        };
        let snapshot = snapshot.ok_or(Failure::Unsupported("a roll-back to no snapshot"))?;
        let content = self
            .with_patience(patience, || self.content_of(&snapshot, self.config.clone()))
            .await?;
        self.become_content_of(content, at);
        Ok(())
    }

    /// Returns the content of a snapshot.
    pub(super) fn content_of<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        config: Config,
    ) -> Part<'a, Result<Self, Failure>> {
        let (access, description) = (self.access.clone(), &self.description);
        Box::pin(async move {
            match recover_snapshot(access, config, description, (self.epoch, snapshot)).await {
                // A later writer may have deleted the snapshot.
                Err(Failure::Lost(name)) => Err(self.lost(name).await),
                other => other,
            }
        })
    }

    pub(super) async fn view_snapshot(
        &self,
        id: SnapshotId,
        config: Config,
    ) -> Result<Self, Failure> {
        let found = self.lock().snapshots.find(id).cloned();
        let snapshot = found.ok_or(Failure::NoSnapshot)?;
        self.content_of(&snapshot, config).await
    }

    pub(super) fn snapshots(&self) -> Vec<Snapshot> {
        let existing = |snapshots: &Snapshots| snapshots.existing().cloned().collect();
        existing(&self.lock().snapshots)
    }
}
