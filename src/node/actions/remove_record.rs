//! Removes the record of a mapping. Then the mapping does not exist any more.

use std::sync::Arc;

use tokio::time::Instant;

use super::refuse_io::stop_refusing_io;
use crate::context::Context;
use crate::mapping::{Change, Guard};
use crate::records;
use cleat_core::error::Result;
use cleat_statistics::Page;

pub(crate) async fn remove_record(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    if let Err(error) = stop_refusing_io(guard, deadline).await {
        // It has no volume: it cannot write, and it has been killed.
        tracing::warn!(mapping = guard.mapping().name, "{}", error.report());
    }
    if let Some(bytes) = guard.statistics.as_ref().map(Page::unsaved).filter(|bytes| *bytes > 0) {
        let (mapping, uri) = (&guard.mapping().name, &guard.record.uri);
        tracing::warn!(
            mapping,
            uri,
            bytes,
            "acknowledged writes that no flush has covered were not in the store: they are given up"
        );
    }
    // The record is removed last: without it no supervisor would look for the socket.
    cx.workers.remove_files(&guard.record.mapping_id);
    records::remove(cx, guard, deadline).await?;
    guard.teardown.removed = true;
    let mapping = Arc::clone(guard.mapping());
    cx.register.remove(&mapping);
    let _ = cx.changes.send(Change { view: mapping.view(), removed: true });
    Ok(())
}
