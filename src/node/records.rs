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

/// The timeout of one write to the journal, earlier writes of the mapping included.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes the record of a mapping to the journal.
///
/// # Errors
/// As [`write`].
pub(crate) async fn store(cx: &Context, guard: &Guard) -> Result<()> {
    let record = guard.record.clone();
    write(cx, guard, move |journal, cancelled| journal.store_unless_cancelled(&record, cancelled))
        .await
}

/// Runs `write` on a thread, with a flag that is set after the timeout.
///
/// A write continues when its call ends early. The next write of the mapping waits for it, so that the disk
/// gets them in their order. After a timeout the record is written again when the disk answers: the call
/// was reported as failed, but the write may have taken effect.
///
/// # Errors
/// Returns the error of `write`, and `TimedOut` if the disk does not answer within [`JOURNAL_TIMEOUT`].
pub(crate) async fn write(
    cx: &Context,
    guard: &Guard,
    write: impl FnOnce(&Journal, &AtomicBool) -> Result<()> + Send + 'static,
) -> Result<()> {
    let journal = Arc::clone(&cx.journal);
    let cancelled = Arc::new(AtomicBool::new(false));
    let is_cancelled = Arc::clone(&cancelled);
    let write = async {
        let permit = guard.mapping().write_permit().await;
        let write = move || {
            let _permit = permit;
            write(&journal, &is_cancelled)
        };
        blocking(write).await
    };
    timeout(JOURNAL_TIMEOUT, write).await.unwrap_or_else(|_| {
        cancelled.store(true, Ordering::SeqCst);
        guard.mapping().store_again_later();
        let message =
            "the journal's disk did not write a record in time, and the write still waits";
        Err(Error::new(ErrorKind::TimedOut, message)
            .with_repair("check the disk of the state directory: see dmesg and /proc/pressure/io"))
    })
}

/// Writes the record again if the outcome of an earlier write is unknown.
///
/// # Errors
/// As [`write`].
pub(crate) async fn store_again(cx: &Context, guard: &Guard) -> Result<()> {
    if !guard.mapping().is_record_uncertain() || guard.record.worker.is_none() {
        return Ok(());
    }
    store(cx, guard).await?;
    guard.mapping().set_record_certain();
    Ok(())
}
