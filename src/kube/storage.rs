//! What the controller needs of the storage of a volume: the record that says who can write, and the means to
//! cut a client off. The composition implements it for each backend.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

pub use cleat_grants::storage::Fencing;

/// The timeout of a call to the storage.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The storages of the driver's volumes.
pub trait Storage: Debug + Send + Sync {
    /// Returns how the volume `handle`, a CSI volume handle, is attached. It does not access the volume.
    ///
    /// # Errors
    /// Returns an error that names the volume if the controller cannot attach it, for example because its storage
    /// cannot cut off a client: the volume is then refused, not granted.
    fn find(&self, handle: &str) -> Result<Backing>;
}

/// How a volume is attached.
#[derive(Debug, Clone)]
pub enum Backing {
    /// The volume exists on one node only, so that no other node can use it: it is attached there without a grant.
    Local {
        /// The node id, as in CSINode.
        node_id: String,
    },
    /// Several nodes reach the volume: a grant decides which may use it.
    Granted(Arc<dyn Fencing>),
}

/// Runs a call of the storage of the volume `handle`, which blocks, on a thread of its own, for at most 30 s.
///
/// # Errors
/// Returns `TimedOut` if it does not answer in time, and otherwise the error of the call.
pub(crate) async fn on_thread<T: Send + 'static>(
    storage: &Arc<dyn Fencing>,
    handle: &str,
    run: impl FnOnce(&dyn Fencing, Instant) -> Result<T> + Send + 'static,
) -> Result<T> {
    let storage = Arc::clone(storage);
    let deadline = SystemClock.now() + TIMEOUT;
    let running = tokio::task::spawn_blocking(move || run(storage.as_ref(), deadline));
    let ended = tokio::time::timeout(TIMEOUT, running).await;
    let failed = |kind, why: &str| {
        let message = format!("the storage of volume {handle}: {why}");
        Err(Error::new(kind, message))
    };
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => failed(ErrorKind::Internal, "the call has failed"),
        Err(_) => failed(ErrorKind::TimedOut, "it did not answer in time"),
    }
}
