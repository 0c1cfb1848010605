//! Virtual time, and one thread for everything: the supervisor's runtime, whose clock moves only
//! when nothing is left to do, and the world, which gets its turn before that.
//!
//! The runtime asks before it parks. As long as the world still moves, it is kept from parking: it
//! only looks at its descriptors and goes on. Two rounds without any movement, and it may park; with
//! a paused clock that is a jump to the next timer.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::world::World;

/// Rounds of a life after which something must be wrong.
const MAX_ROUNDS: u32 = 300_000;

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
    /// World time at the beginning of the life that is running, and the runtime's time then.
    static BASE: Cell<Option<(Instant, Option<tokio::time::Instant>)>> = const { Cell::new(None) };
}

/// What time it is in this thread's world. It goes on from life to life.
pub(crate) fn now() -> Instant {
    match BASE.get() {
        None => Instant::now(),
        Some((base, None)) => base,
        Some((base, Some(since))) => base + since.elapsed(),
    }
}

/// Begins a world.
pub(crate) fn reset() {
    let now = Instant::now();
    BEGAN.set(Some(now));
    BASE.set(Some((now, None)));
}

/// How old this thread's world is.
pub(crate) fn elapsed() -> Duration {
    BEGAN.get().map_or(Duration::ZERO, |began| now().saturating_duration_since(began))
}

/// Lets time pass between two lives.
pub(crate) fn pass(time: Duration) {
    BASE.set(Some((now() + time, None)));
}

/// Asked by the runtime before it parks.
#[derive(Default)]
pub(crate) struct Pulse {
    idle: Notify,
    rest: AtomicBool,
}

/// A runtime for one life of a supervisor.
pub(crate) fn runtime(pulse: &Arc<Pulse>) -> Runtime {
    let pulse = Arc::clone(pulse);
    Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .on_thread_park(move || {
            if !pulse.rest.swap(false, Ordering::Relaxed) {
                pulse.idle.notify_one();
            }
        })
        .build()
        .expect("a test process has descriptors left")
}

/// Begins a life: its runtime's clock is the world's from here on.
pub(crate) fn begin() {
    BASE.set(Some((now(), Some(tokio::time::Instant::now()))));
}

/// Ends a life. To be called while its runtime runs.
pub(crate) fn end() {
    BASE.set(Some((now(), None)));
}

/// Gives the world its turns, for as long as a life lasts.
pub(crate) async fn beat(pulse: Arc<Pulse>, world: World) {
    let mut quiet = 0;
    for _ in 0..MAX_ROUNDS {
        if quiet < 2 {
            pulse.idle.notified().await;
        } else {
            quiet = 0;
            pulse.rest.store(true, Ordering::Relaxed);
            let next = world.next_due().unwrap_or(Duration::from_secs(3600));
            // Something of the supervisor's may come first.
            let _ = tokio::time::timeout(next, pulse.idle.notified()).await;
        }
        quiet = if world.turn() { 0 } else { quiet + 1 };
    }
    world.violation("the supervisor and the world do not come to rest".into());
    world.crash();
}
