//! Writes the record of a mapping to the journal, off the event loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use crate::blocking::blocking;
use crate::context::Context;
use crate::journal::Journal;
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};

/// For a disk to take a record, its queue included.
const JOURNAL_LIMIT: Duration = Duration::from_secs(10);

/// Stores the record, off the event loop.
pub(crate) async fn store(cx: &Context, guard: &Guard) -> Result<()> {
    let record = guard.record.clone();
    write(cx, guard, move |journal, cancelled| journal.store_unless_cancelled(&record, cancelled))
        .await
}

/// Writes to the journal. A call that gives way in the middle, or waits in vain, leaves its write
/// under way: the next one of the mapping waits for it, so that they reach the disk in their order.
/// Where one was waited for in vain, the record is written again once the disk answers: whoever
/// waited was told that it had failed, and it may have come true all the same.
pub(crate) async fn write(
    cx: &Context,
    guard: &Guard,
    write: impl FnOnce(&Journal, &AtomicBool) -> Result<()> + Send + 'static,
) -> Result<()> {
    let journal = Arc::clone(&cx.journal);
    let given_up = Arc::new(AtomicBool::new(false));
    let is_given_up = Arc::clone(&given_up);
    let write = async {
        let turn = guard.mapping().write_permit().await;
        let write = move || {
            let _turn = turn;
            write(&journal, &is_given_up)
        };
        blocking(write).await
    };
    timeout(JOURNAL_LIMIT, write).await.unwrap_or_else(|_| {
        given_up.store(true, Ordering::SeqCst);
        guard.mapping().store_again_later();
        let message = "the disk of the journal does not take a record: its write still waits";
        Err(Error::new(ErrorKind::TimedOut, message).with_repair(
            "see what the file system of the state directory waits for: dmesg, \
             /proc/pressure/io",
        ))
    })
}

/// Writes the record again where an earlier write was given up.
pub(crate) async fn store_again(cx: &Context, guard: &Guard) -> Result<()> {
    if !guard.mapping().is_record_uncertain() || guard.record.worker.is_none() {
        return Ok(());
    }
    store(cx, guard).await?;
    guard.mapping().set_record_certain();
    Ok(())
}
