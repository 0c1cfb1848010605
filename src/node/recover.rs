//! What an earlier supervisor left: journal, devices and workers brought together again.
//!
//! Recovery decides nothing by itself: it makes mappings out of records and has each planned anew.
//! A map that was never answered is undone. What has no record is reported, and removed only when
//! its worker is proved gone and nobody holds it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::executor::{Executor, blocking};
use super::mapping::{Intent, Record, State};
use super::volume::Volume;
use super::workers::Probe;
use cleat_core::error::{ErrorKind, Result};

/// Mappings that are brought back at the same time.
const AT_ONCE: usize = 16;

/// For all mappings together, before the daemon serves.
const RECOVERY_LIMIT: Duration = Duration::from_secs(10);

/// For undoing a map that a crash cut short.
const UNDO_LIMIT: Duration = Duration::from_secs(20);

impl Executor {
    /// Brings everything back that an earlier supervisor left. What needs longer than
    /// [`RECOVERY_LIMIT`] goes on by itself: a backend that hangs keeps no other volume without a
    /// supervisor, and the service manager from ending one that it takes for stuck.
    ///
    /// # Errors
    /// When the journal cannot be read at all.
    pub async fn recover(self: &Arc<Self>) -> Result<()> {
        let journal = Arc::clone(&self.journal);
        let loaded = blocking(move || journal.load()).await?;
        for (path, reason) in loaded.corrupt {
            self.found(format!("the record {} was put aside: it {reason}", path.display()));
        }
        let room = Arc::new(Semaphore::new(AT_ONCE));
        let mut tasks = tokio::task::JoinSet::new();
        for record in loaded.records {
            let Some(volume) = self.revive(record).await? else { continue };
            let (executor, room) = (Arc::clone(self), Arc::clone(&room));
            tasks.spawn(async move {
                // The semaphore is never closed.
                let _permit = room.acquire().await;
                let brought = volume.giving_way(async {
                    executor.bring_back(&volume).await;
                    Ok(())
                });
                if let Err(error) = brought.await {
                    tracing::info!(mapping = volume.name, "{}", error.report());
                }
            });
        }
        let until = Instant::now() + RECOVERY_LIMIT;
        while let Ok(Some(ended)) = timeout_at(until, tasks.join_next()).await {
            if let Err(error) = ended {
                self.found(format!("bringing back a mapping failed: {error}"));
            }
        }
        if !tasks.is_empty() {
            let left = tasks.len();
            self.found(format!(
                "{left} mappings took long to bring back; the daemon began without"
            ));
            tasks.detach_all();
        }
        Ok(())
    }

    /// Makes a mapping of a record, unless the record is void.
    async fn revive(&self, record: Record) -> Result<Option<Arc<Volume>>> {
        if record.boot_id != self.settings.boot_id {
            self.found(format!(
                "{} ({}) was mapped before the last boot and is mapped no more",
                record.name, record.uri
            ));
            // Left there, it is as void at the next start.
            if let Err(error) = self.void(record).await {
                self.found(error.report());
            }
            return Ok(None);
        }
        let (name, id) = (record.name.clone(), record.mapping_id.clone());
        let make = || Volume::new(record, self.attention.clone());
        let (volume, guard) = self.register.find_or_insert(&name, usize::MAX, make)?;
        if guard.is_none() {
            self.found(format!("{name} has two records; that of mapping {id} is left alone"));
            return Ok(None);
        }
        Ok(Some(volume))
    }

    async fn void(&self, record: Record) -> Result<()> {
        let journal = Arc::clone(&self.journal);
        self.workers.forget(&record.mapping_id);
        blocking(move || journal.withdraw(&record.mapping_id)).await
    }

    async fn bring_back(&self, volume: &Arc<Volume>) {
        // Nobody else can have it yet; if somebody did, that one would look after it.
        if let Ok(mut guard) = volume.enter() {
            guard.renounced = guard.record.intent != Intent::Mapped;
            if !guard.record.established && guard.record.intent == Intent::Mapped {
                guard.record.intent = Intent::Unmapped;
                let undone = self.take_down(&mut guard, Instant::now() + UNDO_LIMIT).await;
                match undone {
                    Ok(()) => {
                        self.found(format!("an unfinished map of {} was undone", volume.name));
                        return;
                    }
                    Err(error) if error.kind() == ErrorKind::InUse && !guard.renounced => {
                        // Somebody uses it already: finish it instead.
                        guard.record.intent = Intent::Mapped;
                    }
                    Err(error) => {
                        let error = error.report();
                        self.found(format!("undoing the map of {} failed: {error}", volume.name));
                    }
                }
            }
        }
        self.tend(volume).await;
        let view = volume.view();
        match &view.state {
            State::Mapped => {
                tracing::info!(mapping = volume.name, device = ?view.node(), "still mapped");
            }
            State::Failed(_) => self.found(format!("{}: {}", volume.name, view.message)),
            state => tracing::info!(mapping = volume.name, ?state, "brought back"),
        }
    }

    /// Removes or reports devices of ours without a record.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub async fn clear_orphans(&self, deadline: Instant) -> Result<()> {
        let orphans = self.orphans(deadline).await?;
        let mut known = self.register.ids();
        known.extend(orphans.iter().map(|(_, identity)| identity.mapping_id().to_owned()));
        for (device, identity) in orphans {
            let name = format!("/dev/nbd{} ({})", device.index, identity.as_str());
            // Absent proves nothing: the worker may belong to a daemon with other directories.
            if self.workers.probe(identity.mapping_id()) != Probe::Refused {
                self.found(format!("{name} has no record; it was left alone"));
                continue;
            }
            match self.drop_orphan(device.index, identity, deadline).await {
                Ok(()) => self.found(format!("{name} had no record and no worker: disconnected")),
                Err(error) => {
                    self.found(format!("{name} has no record and no worker: {}", error.report()));
                }
            }
        }
        // What is left of mappings that have ended otherwise.
        for (id, _) in self.workers.sockets().iter().filter(|(id, _)| !known.contains(id)) {
            if self.workers.probe(id) == Probe::Refused {
                self.workers.forget(id);
            }
        }
        Ok(())
    }

    /// Keeps something that an operator should know, and logs it.
    pub(super) fn found(&self, finding: String) {
        const KEPT: usize = 64;
        tracing::warn!("{finding}");
        let mut findings = self.findings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if findings.len() < KEPT {
            findings.push(finding);
        }
    }
}
