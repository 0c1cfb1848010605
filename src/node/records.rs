//! Writes the record of a mapping to the journal, off the event loop.
//!
//! A record has two places: the state directory and, if that does not take it, a copy in the runtime
//! directory. A write succeeds if one of them has the record. A record that is not in the state directory is
//! written there as soon as that is possible.
//!
//! Which actions need the record before they may run, and which do not, is in `src/ARCHITECTURE.md`. The
//! former use [`store`], the latter [`store_eventually`].

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::{Guard, Orders, Place};
use crate::planner::{Intent, Record};
use cleat_core::error::{Error, Result};

/// The timeout of one write to the state directory, earlier writes of the mapping included. It is short,
/// because a device may wait for the write, and the copy is as good.
const STATE_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout of one write to the runtime directory.
const COPY_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes the record of a mapping durably: a supervisor that starts after a crash of this one reads it.
///
/// Until the unmap is to be recorded (`Teardown::recorded`), the record keeps the intent that the mapping had:
/// an unmap that fails before, or whose supervisor crashes, leaves the mapping as it was.
///
/// # Errors
/// Returns the error of the state directory if neither directory takes the record: `NoSpace` if it is full,
/// `TimedOut` if its disk does not answer. The record is then written again later, as it is in memory at that
/// time.
pub(crate) async fn store(cx: &Context, guard: &Guard) -> Result<()> {
    store_within(cx, guard, STATE_TIMEOUT).await
}

/// Writes the record as [`store`] does, with another timeout for the state directory.
///
/// # Errors
/// As [`store`].
pub(crate) async fn store_within(cx: &Context, guard: &Guard, limit: Duration) -> Result<()> {
    let recorded = &guard.mapping().recorded;
    let record = next_revision(guard);
    // If this call is cancelled, the record is written again.
    recorded.set_place(Place::Memory("a write of the record was interrupted".to_owned()));
    let stored = store_in_state_directory(cx, guard, &record, limit.min(STATE_TIMEOUT), true).await;
    let Err(error) = stored else { return Ok(()) };
    recorded.set_may_have_copy(true);
    let journal = Arc::clone(&cx.records.journal);
    let write = move |_: &AtomicBool| journal.store_copy(&record);
    match cx.records.copies.write(&recorded.orders.copy, COPY_TIMEOUT, write).await {
        Ok(()) => {
            recorded.set_place(Place::Copy(cause(&error)));
            Ok(())
        }
        Err(other) => {
            let error = both_failed(error, &other);
            recorded.set_place(Place::Memory(cause(&error)));
            recorded.fail();
            Err(error)
        }
    }
}

/// Writes the record as [`store`] does, for a change that the next supervisor finds out by itself. If neither
/// directory takes the record, it is written again later.
pub(crate) async fn store_eventually(cx: &Context, guard: &Guard) {
    if let Err(error) = store(cx, guard).await {
        guard.mapping().recorded.take_failure();
        tracing::warn!(mapping = guard.mapping().name, "{}", error.report());
    }
}

/// Writes the record to the state directory if it is not there. The sweep repeats this until it succeeds.
pub(crate) async fn store_again(cx: &Context, guard: &Guard) {
    // A map that failed before its worker was recorded has no record, and needs none.
    if guard.record.worker.is_none() {
        return;
    }
    match guard.mapping().recorded.place() {
        Place::StateDirectory => {}
        Place::Copy(_) => {
            let record = next_revision(guard);
            // No caller gets an error, so the write may take effect after its timeout. On a disk that is always
            // slower than the timeout, it does.
            let stored = store_in_state_directory(cx, guard, &record, STATE_TIMEOUT, false).await;
            if let Err(error) = stored {
                tracing::debug!(mapping = guard.mapping().name, "{}", error.report());
            }
        }
        Place::Memory(_) => store_eventually(cx, guard).await,
    }
}

/// Writes `record` to the state directory, and removes its copy. `cancels`: the write takes no effect after
/// `limit`.
async fn store_in_state_directory(
    cx: &Context,
    guard: &Guard,
    record: &Arc<Record>,
    limit: Duration,
    cancels: bool,
) -> Result<()> {
    let recorded = &guard.mapping().recorded;
    let (journal, stored) = (Arc::clone(&cx.records.journal), Arc::clone(record));
    let write = move |cancelled: &AtomicBool| match cancels {
        true => journal.store_unless_cancelled(&stored, cancelled),
        false => journal.store(&stored),
    };
    cx.records.state_directory.write(&recorded.orders.record, limit, write).await?;
    recorded.set_place(Place::StateDirectory);
    if recorded.may_have_copy() {
        let (journal, id) = (Arc::clone(&cx.records.journal), record.mapping_id.clone());
        let remove = move || journal.remove_copy(&id);
        // A copy that stays has no effect, because its revision is lower.
        if cx.records.copies.remove(&recorded.orders.copy, COPY_TIMEOUT, remove).await.is_ok() {
            recorded.set_may_have_copy(false);
        }
    }
    Ok(())
}

/// Removes the record of a mapping durably. A record that the state directory keeps is marked as removed, and
/// removed later.
///
/// # Errors
/// Returns the error of the state directory if neither directory takes the change.
pub(crate) async fn remove(cx: &Context, guard: &Guard, deadline: Instant) -> Result<()> {
    let recorded = &guard.mapping().recorded;
    let id = guard.record.mapping_id.clone();
    let limit = STATE_TIMEOUT.min((deadline - Instant::now()) / 2);
    let Err(error) = remove_from_state_directory(cx, &id, &recorded.orders, limit).await else {
        if recorded.may_have_copy() {
            remove_traces(cx, &id, &recorded.orders).await.inspect_err(|_| recorded.fail())?;
        }
        return Ok(());
    };
    let (journal, marked) = (Arc::clone(&cx.records.journal), id.clone());
    let mark = move |_: &AtomicBool| journal.mark_removed(&marked);
    match cx.records.copies.write(&recorded.orders.copy, COPY_TIMEOUT, mark).await {
        Ok(()) => {
            cx.records.removals.insert(id, recorded.orders.clone());
            Ok(())
        }
        Err(other) => {
            recorded.fail();
            Err(both_failed(error, &other))
        }
    }
}

/// Removes the records that are marked as removed, as far as the state directory allows it.
pub(crate) async fn finish_removals(cx: &Context) {
    for (id, orders) in cx.records.removals.all() {
        match remove_everywhere(cx, &id, &orders).await {
            Ok(()) => cx.records.removals.remove(&id),
            Err(error) => tracing::debug!(id, "{}", error.report()),
        }
    }
}

/// After a failed write, finds out whether the state directory takes records again.
pub(crate) async fn check_state_directory(cx: &Context) {
    if cx.records.state_directory.problem().is_none() {
        return;
    }
    let journal = Arc::clone(&cx.records.journal);
    let write = move |_: &AtomicBool| journal.check_writable();
    let order = Orders::default().record;
    if let Err(error) = cx.records.state_directory.write(&order, STATE_TIMEOUT, write).await {
        tracing::debug!("{}", error.report());
    }
}

/// Removes a record that no mapping has.
///
/// # Errors
/// Returns the error of the first directory that refuses the removal.
pub(crate) async fn discard(cx: &Context, mapping_id: &str) -> Result<()> {
    remove_everywhere(cx, mapping_id, &Orders::default()).await
}

async fn remove_everywhere(cx: &Context, mapping_id: &str, orders: &Orders) -> Result<()> {
    remove_from_state_directory(cx, mapping_id, orders, STATE_TIMEOUT).await?;
    remove_traces(cx, mapping_id, orders).await
}

async fn remove_from_state_directory(
    cx: &Context,
    mapping_id: &str,
    orders: &Orders,
    limit: Duration,
) -> Result<()> {
    let (journal, id) = (Arc::clone(&cx.records.journal), mapping_id.to_owned());
    let remove = move || journal.remove(&id);
    cx.records.state_directory.remove(&orders.record, limit, remove).await
}

async fn remove_traces(cx: &Context, mapping_id: &str, orders: &Orders) -> Result<()> {
    let (journal, id) = (Arc::clone(&cx.records.journal), mapping_id.to_owned());
    let remove = move || journal.remove_traces(&id);
    cx.records.copies.remove(&orders.copy, COPY_TIMEOUT, remove).await
}

fn next_revision(guard: &Guard) -> Arc<Record> {
    let revision = guard.mapping().recorded.next_revision();
    let intent = match guard.record.intent {
        Intent::Unmapped if !guard.teardown.recorded => Intent::Mapped,
        intent => intent,
    };
    Arc::new(Record { revision, intent, ..guard.record.clone() })
}

/// Returns the error of the state directory, with the one of the runtime directory.
fn both_failed(error: Error, other: &Error) -> Error {
    let message = format!("{}; {}", error.report(), other.report());
    let repair = error.repair().unwrap_or_default().to_owned();
    Error::new(error.kind(), message).with_repair(repair)
}

/// Returns the text of an error with its repair, for the status of a mapping.
fn cause(error: &Error) -> String {
    match error.repair() {
        Some(repair) => format!("{}; {repair}", error.report()),
        None => error.report(),
    }
}
