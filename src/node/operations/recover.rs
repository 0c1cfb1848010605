//! What an earlier supervisor left: journal, devices and workers brought together again.
//!
//! Recovery decides nothing by itself: it makes mappings out of records and has each planned anew.
//! A map that was never answered is undone. What has no record is reported, and removed only when
//! its worker is proved gone and nobody holds it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::map::UNDO_LIMIT;
use crate::blocking::blocking;
use crate::context::Context;
use crate::mapping::Mapping;
use crate::planner::{Intent, Record, State};
use crate::reconcile::{reconcile_in_background, take_down};
use cleat_core::error::{ErrorKind, Result};

/// Mappings that are brought back at the same time.
const AT_ONCE: usize = 16;

/// For all mappings together, before the daemon serves.
const RECOVERY_LIMIT: Duration = Duration::from_secs(10);

/// Brings everything back that an earlier supervisor left. What needs longer than
/// [`RECOVERY_LIMIT`] goes on by itself: a backend that hangs keeps no other volume without a
/// supervisor, and the service manager from ending one that it takes for stuck.
///
/// # Errors
/// When the journal cannot be read at all.
pub(crate) async fn recover(cx: &Arc<Context>) -> Result<()> {
    let journal = Arc::clone(&cx.journal);
    let loaded = blocking(move || journal.load()).await?;
    for rejected in loaded.rejected {
        cx.found(rejected.to_string());
    }
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = tokio::task::JoinSet::new();
    for record in loaded.records {
        let Some(mapping) = restore_mapping(cx, record).await? else { continue };
        let (context, room) = (Arc::clone(cx), Arc::clone(&room));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _permit = room.acquire().await;
            let brought = mapping.until_forced(async {
                recover_mapping(&context, &mapping).await;
                Ok(())
            });
            if let Err(error) = brought.await {
                tracing::info!(mapping = mapping.name, "{}", error.report());
            }
        });
    }
    let until = Instant::now() + RECOVERY_LIMIT;
    while let Ok(Some(ended)) = timeout_at(until, tasks.join_next()).await {
        if let Err(error) = ended {
            cx.found(format!("bringing back a mapping failed: {error}"));
        }
    }
    if !tasks.is_empty() {
        let left = tasks.len();
        cx.found(format!("{left} mappings took long to bring back; the daemon began without"));
        tasks.detach_all();
    }
    Ok(())
}

/// Makes a mapping of a record, unless the record is void.
async fn restore_mapping(cx: &Context, record: Record) -> Result<Option<Arc<Mapping>>> {
    if record.boot_id != cx.settings.boot_id {
        cx.found(format!(
            "{} ({}) was mapped before the last boot and is mapped no more",
            record.name, record.uri
        ));
        // Left there, it is as void at the next start.
        if let Err(error) = remove_record(cx, record).await {
            cx.found(error.report());
        }
        return Ok(None);
    }
    let (name, id) = (record.name.clone(), record.mapping_id.clone());
    let make = || Mapping::new(record, cx.work_queue.clone());
    let (mapping, guard) = cx.register.find_or_insert(&name, usize::MAX, make)?;
    if guard.is_none() {
        cx.found(format!("{name} has two records; that of mapping {id} is left alone"));
        return Ok(None);
    }
    Ok(Some(mapping))
}

async fn remove_record(cx: &Context, record: Record) -> Result<()> {
    let journal = Arc::clone(&cx.journal);
    cx.workers.sockets.remove(&record.mapping_id);
    blocking(move || journal.remove(&record.mapping_id)).await
}

async fn recover_mapping(cx: &Context, mapping: &Arc<Mapping>) {
    // Nobody else can have it yet; if somebody did, that one would look after it.
    if let Ok(mut guard) = mapping.try_lock() {
        guard.teardown.recorded = guard.record.intent != Intent::Mapped;
        if !guard.record.established && guard.record.intent == Intent::Mapped {
            guard.record.intent = Intent::Unmapped;
            let undone = take_down(cx, &mut guard, Instant::now() + UNDO_LIMIT).await;
            match undone {
                Ok(()) => {
                    cx.found(format!("an unfinished map of {} was undone", mapping.name));
                    return;
                }
                Err(error) if error.kind() == ErrorKind::InUse && !guard.teardown.recorded => {
                    // Somebody uses it already: finish it instead.
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
            tracing::info!(mapping = mapping.name, device = ?view.node(), "still mapped");
        }
        State::Failed(_) => cx.found(format!("{}: {}", mapping.name, view.message)),
        state => tracing::info!(mapping = mapping.name, ?state, "brought back"),
    }
}
