//! Runs calls that may block on threads of the runtime's pool, off the event loop.
//!
//! In a simulation everything runs on one thread in an order that depends on a seed. There, these calls
//! run on the event loop, and the simulation determines the delays before and after each.

use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use cleat_core::error::{Error, ErrorKind, Result};

/// A call in a box: what runs it is then in the program once for each type of results, not once for each call.
type Call<T> = Box<dyn FnOnce() -> T + Send>;

/// Runs `call` on a separate thread. It continues when the returned handle is dropped. `what` describes it
/// in traces.
pub(crate) fn spawn<T: Send + 'static>(
    what: &'static str,
    call: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    run(what, Box::new(call))
}

fn run<T: Send + 'static>(what: &'static str, call: Call<T>) -> JoinHandle<T> {
    tracing::trace!(what, "runs off the event loop");
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

/// The maximum number of calls of [`blocking`] in progress.
pub(crate) const MAX_CALLS: usize = 24;

/// The permits of [`blocking`].
static CALLS: Semaphore = Semaphore::const_new(MAX_CALLS);

/// Runs a call that may block for a short time, such as the start of a process, off the event loop. Calls of
/// the kernel and writes of the journal have threads of their own.
///
/// # Errors
/// Returns the call's error, and `Internal` if the call panics.
pub fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> impl Future<Output = Result<T>> {
    with_shared_limit(Box::new(call))
}

async fn with_shared_limit<T: Send + 'static>(call: Call<Result<T>>) -> Result<T> {
    // Simulations of several threads must not influence each other. The semaphore is never closed.
    let permit = if is_simulated() { None } else { CALLS.acquire().await.ok() };
    let call = Box::new(move || {
        let _permit = permit;
        call()
    });
    joined(call).await
}

/// Runs a call as [`blocking`] does, for a caller that limits the number of its calls itself.
///
/// # Errors
/// As [`blocking`].
pub(crate) fn with_own_limit<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> impl Future<Output = Result<T>> {
    joined(Box::new(call))
}

async fn joined<T: Send + 'static>(call: Call<Result<T>>) -> Result<T> {
    run("a call that blocks", call).await.map_err(|error| {
        Error::new(ErrorKind::Internal, "internal: a blocking call panicked").with_source(error)
    })?
}

/// Returns whether this thread runs a simulation, which has no other threads.
pub(crate) fn is_simulated() -> bool {
    #[cfg(feature = "fault")]
    return simulation::gate().is_some();
    #[cfg(not(feature = "fault"))]
    false
}

/// Controls blocking calls in a simulation. For tests.
#[cfg(feature = "fault")]
pub mod simulation {
    use std::cell::RefCell;
    use std::pin::Pin;
    use std::sync::Arc;

    /// A delay of a call. It never ends if the simulated supervisor crashes meanwhile.
    pub type Delay = Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Returns for each call the delay before it, and the delay between its effect and its return.
    pub type Gate = Arc<dyn Fn(&'static str) -> (Delay, Delay) + Send + Sync>;

    thread_local! {
        static GATE: RefCell<Option<Gate>> = const { RefCell::new(None) };
    }

    /// Makes this thread run a simulation with `gate`; with `None`, ends the simulation.
    pub fn install(gate: Option<Gate>) {
        GATE.set(gate);
    }

    pub(super) fn gate() -> Option<Gate> {
        GATE.with_borrow(Clone::clone)
    }
}
