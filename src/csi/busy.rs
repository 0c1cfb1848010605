//! One call at a time for each volume. A second one is refused at once (ABORTED), and the caller repeats it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

/// The volumes with a call in progress.
#[derive(Debug, Clone, Default)]
pub(crate) struct Busy(Arc<Mutex<HashMap<String, (&'static str, Instant)>>>);

/// Keeps a volume busy until it is dropped.
#[derive(Debug)]
pub(crate) struct Claimed {
    busy: Busy,
    id: String,
}

impl Busy {
    /// Marks the volume `id` as busy with `call`.
    ///
    /// # Errors
    /// Returns `Aborted`, with the call in progress, if it is busy.
    pub(crate) fn claim(&self, id: &str, call: &'static str) -> Result<Claimed> {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((other, since)) = calls.get(id) {
            let seconds = since.elapsed().as_secs();
            let message = format!("{other} for volume {id} has been in progress for {seconds} s");
            return Err(
                Error::new(ErrorKind::Aborted, message).with_repair("repeat the call later")
            );
        }
        calls.insert(id.to_owned(), (call, Instant::now()));
        Ok(Claimed { busy: self.clone(), id: id.to_owned() })
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.busy.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_one_call_at_a_time() {
        let busy = Busy::default();
        let first = busy.claim("v", "NodeStageVolume").unwrap();
        let error = busy.claim("v", "NodeUnstageVolume").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted);
        assert!(error.message().contains("NodeStageVolume for volume v"), "{error}");
        let _other = busy.claim("w", "NodeStageVolume").unwrap();
        drop(first);
        busy.claim("v", "NodeUnstageVolume").unwrap();
    }
}
