//! A store that remembers why it fails, so that the supervisor can show it, and since when puts fail, so that
//! requests do not wait for longer than the outage policy permits.

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
        operation: Pending<'a, Result<T, StoreError>>,
    ) -> Pending<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let result = operation.await;
            let reason = match &result {
                Ok(_) | Err(StoreError::NotFound | StoreError::Exists) => None,
                Err(error) => Some(error.to_string()),
            };
            let mut state = self.lock();
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
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let began = self.clock.now();
            let result = self.watch(self.store.create(name, bytes)).await;
            self.count_put(began, &result);
            result
        })
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.watch(self.store.read(name, range))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.watch(self.store.list(prefix, after))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.watch(self.store.delete(name))
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
