//! Virtual time on one thread. The supervisor's runtime moves its clock only when nothing is left to do;
//! before that, the world takes its turns.
//!
//! The runtime calls a hook before it parks. While the world still changes, the hook prevents that: the
//! runtime only polls its descriptors and continues. After two rounds without a change it may park, which
//! with a paused clock is a jump to the next timer.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cleat_core::clock::Clock;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::world::World;

/// The maximum number of rounds in a life. More rounds are a failure.
const MAX_ROUNDS: u32 = 300_000;

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
    /// World time at the beginning of the life that is running, and the runtime's time then.
    static BASE: Cell<Option<(Instant, Option<tokio::time::Instant>)>> = const { Cell::new(None) };
}

/// The current time in this thread's world. It continues from life to life.
#[allow(clippy::disallowed_methods, reason = "an `Instant` has no other origin")]
pub(crate) fn now() -> Instant {
    match BASE.get() {
        None => Instant::now(),
        Some((base, None)) => base,
        Some((base, Some(since))) => base + since.elapsed(),
    }
}

/// Resets the time for a new world.
#[allow(clippy::disallowed_methods, reason = "an `Instant` has no other origin")]
pub(crate) fn reset() {
    let now = Instant::now();
    BEGAN.set(Some(now));
    BASE.set(Some((now, None)));
}

/// The age of this thread's world.
pub(crate) fn elapsed() -> Duration {
    BEGAN.get().map_or(Duration::ZERO, |began| now().saturating_duration_since(began))
}

/// Advances the time between two lives.
pub(crate) fn pass(time: Duration) {
    BASE.set(Some((now() + time, None)));
}

/// The clock of one supervisor in this thread's world. The wall clock runs, and each supervisor finds it set
/// to another time.
#[derive(Debug)]
pub(crate) struct WorldClock {
    set_to: Duration,
}

/// The earliest wall time, since the Unix epoch: 2030-01-01T00:00:00Z.
const WALL_START: Duration = Duration::from_secs(1_893_456_000);

/// The wall clock is set to a time within ten years.
const WALL_SPAN_S: u64 = 10 * 365 * 86_400;

impl WorldClock {
    /// Makes the clock of a supervisor. `chance` determines the wall time.
    pub(crate) fn new(chance: u64) -> Self {
        Self { set_to: WALL_START + Duration::from_secs(chance % WALL_SPAN_S) }
    }
}

impl Clock for WorldClock {
    fn now(&self) -> Instant {
        now()
    }

    fn monotonic_ns(&self) -> u64 {
        // Not 0, which several counters use for "never".
        u64::try_from(elapsed().as_nanos()).unwrap_or(u64::MAX).saturating_add(1_000_000_000)
    }

    fn boot_ns(&self) -> u64 {
        self.monotonic_ns()
    }

    fn wall(&self) -> SystemTime {
        UNIX_EPOCH + self.set_to + elapsed()
    }
}

/// Connects the runtime's park hook with the world.
#[derive(Default)]
pub(crate) struct Pulse {
    idle: Notify,
    rest: AtomicBool,
}

/// Makes a runtime for one life of a supervisor.
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

/// Begins a life: from now on the runtime's clock is the world's clock.
pub(crate) fn begin() {
    BASE.set(Some((now(), Some(tokio::time::Instant::now()))));
}

/// Ends a life. Must be called while its runtime is running.
pub(crate) fn end() {
    BASE.set(Some((now(), None)));
}

/// Runs the turns of the world until the life ends.
pub(crate) async fn beat(pulse: Arc<Pulse>, world: World) {
    let mut quiet = 0;
    for _ in 0..MAX_ROUNDS {
        if quiet < 2 {
            pulse.idle.notified().await;
        } else {
            quiet = 0;
            pulse.rest.store(true, Ordering::Relaxed);
            let next = world.next_due().unwrap_or(Duration::from_secs(3600));
            // An event of the supervisor may come first.
            let _ = tokio::time::timeout(next, pulse.idle.notified()).await;
        }
        quiet = if world.turn() { 0 } else { quiet + 1 };
    }
    world.violation("the supervisor and the world do not come to rest".into());
    world.crash();
}
