//! A store that remembers why it fails, so that the supervisor can show it, and since when puts fail, so that
//! requests do not wait for longer than the outage policy permits.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use cleat_core::clock::Clock;
use cleat_object::store::{Pending, Store, StoreError};

/// How long puts fail before the requests that wait for them end. Reads are repeated for about as long.
const OUTAGE_AFTER: Duration = Duration::from_secs(5);

/// How long the store may not answer before that counts as a failure. A call that is in progress continues.
const HANGS_AFTER: Duration = Duration::from_secs(10);

/// The store of a volume.
pub(crate) struct Watched {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Why the last operation has failed.
    reason: Option<String>,
    puts: Puts,
    /// How many puts have failed after `OUTAGE_AFTER`, in all outages.
    late_failures: u64,
    wakers: Vec<Waker>,
    /// The puts and the other operations without an answer, with the moment when they began.
    open_puts: BTreeMap<u64, Instant>,
    open_others: BTreeMap<u64, Instant>,
    /// The number of the next operation.
    next: u64,
    /// When the last answer came, to a put and to another operation.
    put_answered: Option<Instant>,
    other_answered: Option<Instant>,
}

impl State {
    fn open(&mut self, is_put: bool) -> &mut BTreeMap<u64, Instant> {
        if is_put { &mut self.open_puts } else { &mut self.open_others }
    }
}

/// An operation without an answer. It ends when this is dropped.
struct Open<'a> {
    watched: &'a Watched,
    number: u64,
    is_put: bool,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.watched.lock().open(self.is_put).remove(&self.number);
    }
}

/// The puts since the last one that has succeeded.
#[derive(Default)]
struct Puts {
    /// When the first one that failed had begun.
    failing_since: Option<Instant>,
    /// Why the last one has failed.
    reason: Option<String>,
    /// Whether one has failed after `OUTAGE_AFTER`.
    is_outage: bool,
}

impl Watched {
    pub(crate) fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        Self { store, clock, state: Mutex::default() }
    }

    /// Returns why puts fail or, if they do not, why the last operation has failed; `None` if it has succeeded.
    pub(crate) fn reason(&self) -> Option<String> {
        let state = self.lock();
        state.puts.reason.clone().or_else(|| state.reason.clone())
    }

    /// Whether puts fail, and have failed for some time.
    pub(crate) fn is_in_outage(&self) -> bool {
        self.lock().puts.is_outage
    }

    /// Looks for operations that the store does not answer, which would end only after their timeout. Must be called
    /// about each second.
    pub(crate) fn look_for_hangs(&self) {
        let now = self.clock.now();
        let mut state = self.lock();
        // The time since an operation began, and since any was answered.
        let hangs = |open: &BTreeMap<u64, Instant>, answered: Option<Instant>| {
            let began = open.values().min().copied()?;
            let since = answered.map_or(began, |answered| answered.max(began));
            (now.saturating_duration_since(since) >= HANGS_AFTER).then_some(since)
        };
        let reason = |since: Instant| {
            let seconds = now.saturating_duration_since(since).as_secs();
            format!("the store has not answered for {seconds} s")
        };
        if let Some(since) = hangs(&state.open_others, state.other_answered) {
            state.reason = Some(reason(since));
        }
        if let Some(since) = hangs(&state.open_puts, state.put_answered) {
            if !state.puts.is_outage {
                tracing::warn!(reason = reason(since), "the store fails");
            }
            state.puts.failing_since.get_or_insert(since);
            state.puts.reason = Some(reason(since));
            state.puts.is_outage = true;
            state.late_failures += 1;
            state.wakers.drain(..).for_each(Waker::wake);
        }
    }

    /// Records that an operation begins.
    fn begin(&self, is_put: bool) -> Open<'_> {
        let now = self.clock.now();
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.open(is_put).insert(number, now);
        Open { watched: self, number, is_put }
    }

    /// Runs an operation that waits for puts. Returns `None` if a put fails during an outage before the operation has
    /// ended, which is dropped then.
    pub(crate) async fn unless_outage<T>(&self, operation: impl Future<Output = T>) -> Option<T> {
        let mut operation = pin!(operation);
        let before = self.lock().late_failures;
        poll_fn(|context| {
            if let Poll::Ready(result) = operation.as_mut().poll(context) {
                return Poll::Ready(Some(result));
            }
            let mut state = self.lock();
            if state.late_failures > before {
                return Poll::Ready(None);
            }
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch<'a, T: 'a>(
        &'a self,
        is_put: bool,
        operation: Pending<'a, Result<T, StoreError>>,
    ) -> Pending<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let open = self.begin(is_put);
            let result = operation.await;
            drop(open);
            let reason = match &result {
                Ok(_) | Err(StoreError::NotFound | StoreError::Exists) => None,
                Err(error) => Some(error.to_string()),
            };
            let now = self.clock.now();
            let mut state = self.lock();
            match is_put {
                true => state.put_answered = Some(now),
                false => state.other_answered = Some(now),
            }
            if state.reason.is_none() && reason.is_some() {
                tracing::warn!(reason, "the store fails");
            }
            state.reason = reason;
            result
        })
    }

    /// Counts a put that began at `began`, and wakes what waits for puts.
    fn count_put(&self, began: Instant, result: &Result<(), StoreError>) {
        let now = self.clock.now();
        let mut state = self.lock();
        match result {
            Ok(()) | Err(StoreError::Exists) => state.puts = Puts::default(),
            Err(error) => {
                let since = *state.puts.failing_since.get_or_insert(began);
                state.puts.reason = Some(error.to_string());
                if now.saturating_duration_since(since) >= OUTAGE_AFTER {
                    state.puts.is_outage = true;
                    state.late_failures += 1;
                }
            }
        }
        state.wakers.drain(..).for_each(Waker::wake);
    }
}

impl Store for Watched {
    fn place(&self) -> u64 {
        self.store.place()
    }

    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let began = self.clock.now();
            let result = self.watch(true, self.store.create(name, bytes)).await;
            self.count_put(began, &result);
            result
        })
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.watch(false, self.store.read(name, range))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.watch(false, self.store.list(prefix, after))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.watch(false, self.store.delete(name))
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.store.back_off(attempt)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Context;

    use cleat_core::clock::ManualClock;

    use super::*;

    /// A store whose puts can be made to fail. It has no objects.
    #[derive(Default)]
    struct Full(AtomicBool);

    impl Store for Full {
        fn create<'a>(&'a self, _: &'a str, _: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
            let is_full = self.0.load(Ordering::Relaxed);
            let unclear = || Err(StoreError::Unclear("No space left on device".to_owned()));
            Box::pin(async move { if is_full { unclear() } else { Ok(()) } })
        }

        fn read<'a>(
            &'a self,
            _: &'a str,
            _: Range<u64>,
        ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
            Box::pin(async { Err(StoreError::NotFound) })
        }

        fn list<'a>(
            &'a self,
            _: &'a str,
            _: &'a str,
        ) -> Pending<'a, Result<Vec<String>, StoreError>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn delete<'a>(&'a self, _: &'a str) -> Pending<'a, Result<(), StoreError>> {
            Box::pin(async { Ok(()) })
        }

        fn back_off(&self, _: u32) -> Pending<'_, ()> {
            Box::pin(std::future::pending())
        }
    }

    fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A store that does not answer puts.
    struct Hanging;

    impl Store for Hanging {
        fn create<'a>(&'a self, _: &'a str, _: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
            Box::pin(std::future::pending())
        }

        fn read<'a>(
            &'a self,
            _: &'a str,
            _: Range<u64>,
        ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
            Box::pin(std::future::pending())
        }

        fn list<'a>(
            &'a self,
            _: &'a str,
            _: &'a str,
        ) -> Pending<'a, Result<Vec<String>, StoreError>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn delete<'a>(&'a self, _: &'a str) -> Pending<'a, Result<(), StoreError>> {
            Box::pin(async { Ok(()) })
        }

        fn back_off(&self, _: u32) -> Pending<'_, ()> {
            Box::pin(std::future::pending())
        }
    }

    #[test]
    fn a_store_that_does_not_answer_is_an_outage_before_the_timeout_of_the_put() {
        let clock = Arc::new(ManualClock::new());
        let store = Watched::new(Arc::new(Hanging), clock.clone());
        let mut context = Context::from_waker(Waker::noop());
        let mut put = store.create("name", b"");
        let mut waiting = Box::pin(store.unless_outage(std::future::pending::<()>()));
        assert!(put.as_mut().poll(&mut context).is_pending());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        clock.advance(HANGS_AFTER / 2);
        store.look_for_hangs();
        assert!(!store.is_in_outage() && store.reason().is_none());
        clock.advance(HANGS_AFTER / 2);
        // A listing that is answered says nothing about puts.
        assert!(poll(store.list("", "")).is_ready());
        store.look_for_hangs();
        assert!(store.is_in_outage());
        assert_eq!(store.reason().as_deref(), Some("the store has not answered for 10 s"));
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(None));
        // What was dropped needs no answer; a read that hangs is shown, too.
        drop(put);
        let store = Watched::new(Arc::new(Hanging), clock.clone());
        drop(store.create("name", b""));
        let mut read = store.read("name", 0..1);
        assert!(read.as_mut().poll(&mut context).is_pending());
        clock.advance(HANGS_AFTER);
        store.look_for_hangs();
        assert!(!store.is_in_outage() && store.reason().is_some());
    }

    #[test]
    fn a_request_that_waits_for_puts_ends_when_they_have_failed_for_some_time() {
        let (full, clock) = (Arc::new(Full::default()), Arc::new(ManualClock::new()));
        let store = Watched::new(Arc::clone(&full) as Arc<dyn Store>, clock.clone());
        let put = || assert!(poll(store.create("name", b"")).is_ready());
        let mut waiting = Box::pin(store.unless_outage(std::future::pending::<()>()));
        let mut poll_waiting = || waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        put();
        full.0.store(true, Ordering::Relaxed);
        put();
        clock.advance(OUTAGE_AFTER / 2);
        put();
        assert!(poll_waiting().is_pending());
        assert!(!store.is_in_outage());
        clock.advance(OUTAGE_AFTER / 2);
        put();
        assert!(store.is_in_outage());
        assert_eq!(poll_waiting(), Poll::Ready(None));
        // Others wait for the next put, and reads do not end the outage.
        let mut later = Box::pin(store.unless_outage(std::future::pending::<()>()));
        assert!(later.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(poll(store.read("name", 0..1)).is_ready());
        assert!(store.reason().is_some_and(|reason| reason.contains("No space")));
        put();
        assert_eq!(later.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(None));
        // It waits beyond the end of this outage: the next one ends it at once, however short it is.
        let mut long = Box::pin(store.unless_outage(std::future::pending::<()>()));
        let mut poll_long = || long.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll_long().is_pending());
        full.0.store(false, Ordering::Relaxed);
        put();
        assert!(poll_long().is_pending());
        full.0.store(true, Ordering::Relaxed);
        put();
        clock.advance(OUTAGE_AFTER);
        put();
        assert_eq!(poll_long(), Poll::Ready(None));
        full.0.store(false, Ordering::Relaxed);
        put();
        assert!(!store.is_in_outage());
        assert_eq!(store.reason(), None);
        assert_eq!(poll(store.unless_outage(async { 7 })), Poll::Ready(Some(7)));
    }
}
