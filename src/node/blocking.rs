//! Calls that may block, off the event loop: each on a thread of the runtime's pool.
//!
//! In a simulation, where everything happens on one thread in an order that a seed decides, they
//! run on the event loop, and the simulation says what passes before and after each.

use tokio::task::JoinHandle;

use cleat_core::error::{Error, ErrorKind, Result};

/// Runs `call` on a thread of its own. It goes on when nobody waits for it any more. `what` it is, is
/// for the reader of a trace.
pub(crate) fn spawn<T: Send + 'static>(
    what: &'static str,
    call: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    tracing::trace!(what, "off the event loop");
    #[cfg(feature = "fault")]
    if let Some(gate) = simulation::gate() {
        let (before, after) = gate(what);
        return tokio::spawn(async move {
            before.await;
            let result = call();
            after.await;
            result
        });
    }
    tokio::task::spawn_blocking(call)
}

/// Runs a call that may block for a moment, such as an fsync, off the event loop.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    spawn("a call that blocks", call)
        .await
        .map_err(|error| Error::new(ErrorKind::Internal, "a thread failed").with_source(error))?
}

/// Whether this thread simulates. Then there is no other thread.
pub(crate) fn is_simulated() -> bool {
    #[cfg(feature = "fault")]
    return simulation::gate().is_some();
    #[cfg(not(feature = "fault"))]
    false
}

/// The simulation's side. For tests.
#[cfg(feature = "fault")]
pub mod simulation {
    use std::cell::RefCell;
    use std::pin::Pin;
    use std::sync::Arc;

    /// Something that passes: a delay, or the end of everything.
    pub type Moment = Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Asked with every call: what passes before it, and between its effect and its return.
    pub type Gate = Arc<dyn Fn(&'static str) -> (Moment, Moment) + Send + Sync>;

    thread_local! {
        static GATE: RefCell<Option<Gate>> = const { RefCell::new(None) };
    }

    /// Has this thread simulate from now on, or no longer.
    pub fn install(gate: Option<Gate>) {
        GATE.set(gate);
    }

    pub(super) fn gate() -> Option<Gate> {
        GATE.with_borrow(Clone::clone)
    }
}
