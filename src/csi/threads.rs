//! Threads for calls that block. They are not those of the runtime's pool, which the supervisor needs.

use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// A bounded number of threads. Clones share the bound.
#[derive(Clone)]
pub(crate) struct Threads {
    free: Arc<Semaphore>,
    limit: usize,
}

impl Threads {
    /// Permits `limit` calls at the same time.
    pub(crate) fn new(limit: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Runs `work`, which may block, on a thread of its own. The thread continues if the returned future is dropped.
    ///
    /// # Errors
    /// Returns `Unavailable` if no thread becomes free until `deadline`, and the error of `work` otherwise.
    pub(crate) async fn run<T, E>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let permit = match timeout_at(deadline, Arc::clone(&self.free).acquire_owned()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) | Err(_) => {
                let message = format!("{} other calls wait for the storage", self.limit);
                return Err(Error::new(ErrorKind::Unavailable, message)
                    .with_repair("repeat the call later; check that the storage answers")
                    .into());
            }
        };
        let (sender, receiver) = oneshot::channel();
        let started = std::thread::Builder::new().name("csi-call".to_owned()).spawn(move || {
            let _permit = permit;
            // The receiver is gone if the call has been given up.
            let _ = sender.send(work());
        });
        started.map_err(|error| Error::from_io("cannot start a thread for the call", error))?;
        receiver.await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "internal: the call panicked").into())
        })
    }
}
