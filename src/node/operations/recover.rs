//! Restores the mappings of an earlier supervisor from the journal, the devices and the workers.
//!
//! Recovery decides nothing itself: it makes mappings from records and plans each of them. A map that did
//! not finish is undone. A device without a record is reported. It is removed only if the end of its
//! worker is proved and it has no holders.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use super::map::UNDO_TIMEOUT;
use crate::blocking::blocking;
use crate::context::Context;
use crate::journal::RejectedRecord;
use crate::mapping::{Mapping, Place};
use crate::planner::{Intent, Record, State};
use crate::reconcile::{reconcile_in_background, take_down};
use crate::records;
use cleat_core::error::{ErrorKind, Result};

/// The number of mappings that are restored at the same time.
const MAX_CONCURRENT: usize = 16;

/// The timeout for restoring all mappings before the daemon serves.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval between two attempts to read a record that could not be read.
const READ_INTERVAL: Duration = Duration::from_secs(5);

/// Restores the mappings of an earlier supervisor. Mappings that need longer than [`RECOVERY_TIMEOUT`] are
/// restored in the background, so that one backend that does not answer neither leaves other volumes
/// without a supervisor nor makes the service manager restart the daemon.
///
/// # Errors
/// Returns an error if the journal cannot be read, or if a void record cannot be processed.
pub(crate) async fn recover(cx: &Arc<Context>) -> Result<()> {
    let journal = Arc::clone(&cx.records.journal);
    let loaded = blocking(move || journal.load()).await?;
    let unreadable = report_rejected(cx, &loaded.rejected);
    if !unreadable.is_empty() {
        tokio::spawn(restore_later(Arc::downgrade(cx), unreadable));
    }
    cx.records.add_removals(loaded.marked);
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
    let mut tasks = tokio::task::JoinSet::new();
    for record in loaded.records {
        let copied = loaded.copied.contains(&record.mapping_id);
        let Some(mapping) = restore_mapping(cx, record, copied).await? else { continue };
        let (context, permits) = (Arc::clone(cx), Arc::clone(&permits));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            let recovered = mapping.until_forced(async {
                recover_mapping(&context, &mapping).await;
                Ok(())
            });
            if let Err(error) = recovered.await {
                tracing::info!(mapping = mapping.name, "{}", error.report());
            }
        });
    }
    let until = Instant::now() + RECOVERY_TIMEOUT;
    while let Ok(Some(ended)) = timeout_at(until, tasks.join_next()).await {
        if let Err(error) = ended {
            cx.found(format!("restoring a mapping failed: {error}"));
        }
    }
    if !tasks.is_empty() {
        let left = tasks.len();
        cx.found(format!("the daemon started while {left} mappings were still being restored"));
        tasks.detach_all();
    }
    Ok(())
}

/// Reports the records that cannot be used. Returns the ids of those that another attempt may read.
fn report_rejected(cx: &Context, rejected: &[RejectedRecord]) -> BTreeSet<String> {
    for rejected in rejected {
        cx.unmanaged.insert(rejected);
        cx.found(rejected.to_string());
    }
    let unreadable = rejected.iter().filter(|rejected| rejected.is_unreadable());
    unreadable.map(|rejected| rejected.mapping_id.clone()).collect()
}

/// Restores mappings whose records could not be read when the daemon started, as soon as they can be read.
async fn restore_later(context: Weak<Context>, mut unreadable: BTreeSet<String>) {
    while !unreadable.is_empty() {
        sleep(READ_INTERVAL).await;
        // A daemon that has ended must not be kept, since it holds the lock of the journal.
        let Some(cx) = context.upgrade() else { return };
        for mapping_id in unreadable.clone() {
            let (journal, id) = (Arc::clone(&cx.records.journal), mapping_id.clone());
            let loaded = match blocking(move || journal.load_one(&id)).await {
                Ok(loaded) if !loaded.rejected.iter().any(RejectedRecord::is_unreadable) => loaded,
                _ => continue,
            };
            unreadable.remove(&mapping_id);
            let mut restored = None;
            for record in loaded.records {
                let copied = loaded.copied.contains(&record.mapping_id);
                match restore_mapping(&cx, record, copied).await {
                    Ok(mapping) => restored = mapping,
                    Err(error) => cx.found(error.report()),
                }
            }
            // Only now: its device must not be taken for one without a record meanwhile.
            cx.unmanaged.remove(&mapping_id);
            report_rejected(&cx, &loaded.rejected);
            if let Some(mapping) = restored {
                recover_mapping(&cx, &mapping).await;
            }
        }
    }
}

/// Makes a mapping from a record, which is not in the state directory if `copied`. Returns `None` for a record
/// of an earlier boot or a duplicate name.
async fn restore_mapping(
    cx: &Context,
    record: Record,
    copied: bool,
) -> Result<Option<Arc<Mapping>>> {
    if record.boot_id != cx.settings.boot_id {
        cx.found(format!(
            "{} ({}) was mapped before the last boot, and is not mapped now",
            record.name, record.uri
        ));
        // If the removal fails, the sweep tries it again.
        cx.workers.remove_files(&record.mapping_id);
        if let Err(error) = records::discard(cx, &record.mapping_id).await {
            cx.found(format!("its record stays for now: {}", error.report()));
            cx.records.add_removals(BTreeSet::from([record.mapping_id]));
        }
        return Ok(None);
    }
    let (name, id) = (record.name.clone(), record.mapping_id.clone());
    let make = || Mapping::new(record, cx.work_queue.clone());
    let (mapping, guard) = cx.register.find_or_insert(&name, usize::MAX, make)?;
    if copied && guard.is_some() {
        let cause = "an earlier daemon could not write it to the state directory".to_owned();
        mapping.recorded.set_place(Place::Copy(cause));
        mapping.recorded.set_may_have_copy(true);
    }
    if guard.is_none() {
        cx.found(format!("{name} has two records; the one of mapping {id} is ignored"));
        return Ok(None);
    }
    Ok(Some(mapping))
}

async fn recover_mapping(cx: &Context, mapping: &Arc<Mapping>) {
    // After `RECOVERY_TIMEOUT` a call may have the guard. It then reconciles the mapping.
    if let Ok(mut guard) = mapping.try_lock() {
        guard.teardown.recorded = guard.record.intent != Intent::Mapped;
        if !guard.record.established && guard.record.intent == Intent::Mapped {
            guard.record.intent = Intent::Unmapped;
            let undone = take_down(cx, &mut guard, Instant::now() + UNDO_TIMEOUT).await;
            match undone {
                Ok(()) => {
                    cx.found(format!("an unfinished map of {} was undone", mapping.name));
                    return;
                }
                Err(error) if error.kind() == ErrorKind::InUse && !guard.teardown.recorded => {
                    // The device has holders already, so the map is completed instead.
                    guard.record.intent = Intent::Mapped;
                }
                Err(error) => {
                    let error = error.report();
                    cx.found(format!("undoing the map of {} failed: {error}", mapping.name));
                }
            }
        }
    }
    reconcile_in_background(cx, mapping).await;
    let view = mapping.view();
    match &view.state {
        State::Mapped => {
            tracing::info!(mapping = mapping.name, device = ?view.node(), "restored");
        }
        State::Failed(_) => cx.found(format!("{}: {}", mapping.name, view.message)),
        state => tracing::info!(mapping = mapping.name, ?state, "restored"),
    }
}
