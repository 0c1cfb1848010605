//! The work queue: each object is worked on by one task at a time, and a failed one waits with a backoff.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use cleat_core::random::Random;

/// The first delay after a failure.
pub(crate) const FAILED: Duration = Duration::from_secs(1);

/// The first delay after a write has conflicted with another one. The present state was read.
pub(crate) const CONFLICT: Duration = Duration::from_millis(50);

/// The longest delay.
const MAX_DELAY: Duration = Duration::from_secs(300);

/// What to do with an object after it was worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing until it changes.
    Done,
    /// Look at it again after this time, or when it changes.
    After(Duration),
    /// It has failed: try again after a backoff that begins with this time, or when it changes.
    Failed(Duration),
}

/// The queue.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Notify,
    random: Random,
}

#[derive(Debug)]
struct State<T> {
    /// The objects that wait, by time.
    due: BTreeSet<(Instant, T)>,
    times: BTreeMap<T, Instant>,
    /// The objects that are worked on, and whether they have changed since.
    running: HashMap<T, bool>,
    failures: HashMap<T, Failures>,
}

/// The failures of an object since its last success.
#[derive(Debug)]
struct Failures {
    count: u32,
    /// When the wait after the last failure ends.
    until: Instant,
}

impl<T: Clone + Debug + Eq + Hash + Ord> Queue<T> {
    pub(crate) fn new(random: Random) -> Self {
        let (due, times) = (BTreeSet::new(), BTreeMap::new());
        let state = State { due, times, running: HashMap::new(), failures: HashMap::new() };
        Self { state: Mutex::new(state), changed: Notify::new(), random }
    }

    /// Adds an object that has changed. If it is worked on at the moment, it comes again afterwards.
    pub(crate) fn add(&self, object: T) {
        let mut state = self.lock();
        match state.running.get_mut(&object) {
            Some(changed) => *changed = true,
            None => state.schedule(object, Instant::now()),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the next object that is due. It must be given back with [`Queue::done`].
    pub(crate) async fn next(&self) -> T {
        loop {
            let wait = {
                let mut state = self.lock();
                let now = Instant::now();
                match state.due.first().cloned() {
                    Some((at, object)) if at <= now => {
                        state.due.pop_first();
                        state.times.remove(&object);
                        state.running.insert(object.clone(), false);
                        let more = !state.due.is_empty();
                        drop(state);
                        if more {
                            // Another task waits for the next object while this one is busy.
                            self.changed.notify_one();
                        }
                        return object;
                    }
                    Some((at, _)) => Some(at),
                    None => None,
                }
            };
            match wait {
                Some(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = self.changed.notified() => {}
                    }
                }
                None => self.changed.notified().await,
            }
        }
    }

    /// Ends the work on an object.
    pub(crate) fn done(&self, object: T, next: Next) {
        let mut state = self.lock();
        let changed = state.running.remove(&object).unwrap_or_default();
        let now = Instant::now();
        let delay = match next {
            Next::Done | Next::After(_) => {
                state.failures.remove(&object);
                if let Next::After(delay) = next { Some(delay) } else { None }
            }
            Next::Failed(first) => {
                let new = || Failures { count: 0, until: now };
                let failures = state.failures.entry(object.clone()).or_insert_with(new);
                Some(failures.next(now, first, &self.random))
            }
        };
        // A failed object that has changed meanwhile is tried at once.
        let delay = if changed { Some(Duration::ZERO) } else { delay };
        if let Some(delay) = delay {
            state.schedule(object, now + delay);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the number of objects that are due or worked on.
    pub(crate) fn len(&self) -> usize {
        let (state, now) = (self.lock(), Instant::now());
        state.running.len() + state.due.iter().take_while(|(at, _)| *at <= now).count()
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Failures {
    /// Returns the wait after a failure. A failure before the end of the last wait, because the object has changed,
    /// does not make the waits longer: an object that changes often must not wait for minutes when its storage answers
    /// again.
    fn next(&mut self, now: Instant, first: Duration, random: &Random) -> Duration {
        if now < self.until {
            let rest = self.until - now;
            return random.backoff(self.count, first, MAX_DELAY).min(rest);
        }
        self.count = self.count.saturating_add(1);
        let wait = random.backoff(self.count, first, MAX_DELAY);
        self.until = now + wait;
        wait
    }
}

impl<T: Clone + Eq + Hash + Ord> State<T> {
    /// Schedules an object. The earlier of two times counts.
    fn schedule(&mut self, object: T, at: Instant) {
        if let Some(known) = self.times.get(&object).copied() {
            if known <= at {
                return;
            }
            self.due.remove(&(known, object.clone()));
        }
        self.times.insert(object.clone(), at);
        self.due.insert((at, object));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue<&'static str> {
        Queue::new(Random::seeded(1))
    }

    #[tokio::test(start_paused = true)]
    async fn row_02_and_08_an_object_is_worked_on_by_one_task_and_again_if_it_has_changed() {
        let queue = queue();
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.add("a");
        let soon = tokio::time::timeout(Duration::from_secs(60), queue.next());
        assert!(soon.await.is_err(), "it is still worked on");
        queue.done("a", Next::Done);
        assert_eq!(queue.next().await, "a");
        queue.done("a", Next::Done);
        let never = tokio::time::timeout(Duration::from_secs(60), queue.next());
        assert!(never.await.is_err(), "it has not changed");
    }

    #[tokio::test(start_paused = true)]
    async fn row_20_and_25_a_failed_object_waits_longer_each_time() {
        let queue = queue();
        queue.add("a");
        let mut waits = Vec::new();
        for _ in 0..12 {
            let before = Instant::now();
            assert_eq!(queue.next().await, "a");
            waits.push(before.elapsed().as_secs());
            queue.done("a", Next::Failed(FAILED));
        }
        assert_eq!(waits[..4], [0, 1, 2, 4]);
        assert!((300..=375).contains(&waits[11]), "{waits:?}");
        // A change is looked at without a delay.
        queue.add("a");
        let before = Instant::now();
        assert_eq!(queue.next().await, "a");
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_after_changes_do_not_make_the_waits_longer() {
        let queue = queue();
        queue.add("a");
        for _ in 0..50 {
            assert_eq!(queue.next().await, "a");
            queue.add("a");
            queue.done("a", Next::Failed(FAILED));
        }
        assert_eq!(queue.next().await, "a");
        queue.done("a", Next::Failed(FAILED));
        for longest in [2, 3, 5] {
            let before = Instant::now();
            assert_eq!(queue.next().await, "a");
            assert!(before.elapsed() <= Duration::from_secs(longest), "{:?}", before.elapsed());
            queue.done("a", Next::Failed(FAILED));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_task_takes_over_the_wait_of_a_busy_one() {
        let queue = std::sync::Arc::new(queue());
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.done("a", Next::After(Duration::from_secs(10)));
        let take = || {
            let queue = std::sync::Arc::clone(&queue);
            tokio::spawn(async move { queue.next().await })
        };
        let (first, second) = (take(), take());
        tokio::time::sleep(Duration::from_secs(1)).await;
        queue.add("b");
        // Neither of the two gives its object back.
        let mut taken = [first.await.unwrap(), second.await.unwrap()];
        taken.sort_unstable();
        assert_eq!(taken, ["a", "b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_earlier_of_two_times_counts() {
        let queue = queue();
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.done("a", Next::After(Duration::from_secs(10)));
        queue.add("b");
        assert_eq!(queue.next().await, "b");
        let before = Instant::now();
        assert_eq!(queue.next().await, "a");
        assert_eq!(before.elapsed().as_secs(), 10);
    }
}
