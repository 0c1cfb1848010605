//! Connections to clusters that wait for the next call.
//!
//! Sidecars call in groups, and a connection to a cluster costs more than most calls: round trips to the
//! monitors, and a dozen threads of librados. So a connection is kept for a short time after its call.
//!
//! - A connection serves one call at a time, and only calls with the same location, client and key.
//! - After an error that the connection may have caused, all waiting ones are closed.
//! - All are closed when no call has ended for a time.

use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_core::error::ErrorKind;
use zeroize::Zeroizing;

/// How long connections wait after the last call.
const WAIT: Duration = Duration::from_secs(10);

/// The maximum number of connections that wait. The oldest one is closed if there are more.
const MAX_WAITING: usize = 4;

/// What calls must have in common to use the same connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    /// The URI of the store, with the client's name.
    pub(crate) uri: String,
    /// The client's keyring; empty for the configured one.
    pub(crate) keyring: Zeroizing<Vec<u8>>,
}

/// The waiting connections. Clones share them.
pub(crate) struct Connections<S> {
    shared: Arc<Shared<S>>,
}

struct Shared<S> {
    wait: Duration,
    waiting: Mutex<Waiting<S>>,
    returned: Condvar,
}

struct Waiting<S> {
    /// The newest last.
    stores: Vec<(Key, S)>,
    /// How many connections were returned.
    returns: u64,
    /// Whether a thread will close them.
    has_closer: bool,
}

/// A connection in use. When this is dropped, it waits for the next call, or is closed if it has no key.
pub(crate) struct Connection<S: Send + 'static> {
    /// `None` only while it is dropped.
    store: Option<S>,
    key: Option<Key>,
    origin: Connections<S>,
}

impl<S> Clone for Connections<S> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S: Send + 'static> Default for Connections<S> {
    fn default() -> Self {
        Self::new(WAIT)
    }
}

impl<S: Send + 'static> Connections<S> {
    /// Creates a set that closes its connections `wait` after the last call.
    fn new(wait: Duration) -> Self {
        let waiting = Waiting { stores: Vec::new(), returns: 0, has_closer: false };
        let (waiting, returned) = (Mutex::new(waiting), Condvar::new());
        Self { shared: Arc::new(Shared { wait, waiting, returned }) }
    }

    /// Returns a waiting connection with `key`, or the one that `connect` opens. One without a key is always opened.
    ///
    /// # Errors
    /// Returns the error of `connect`.
    pub(crate) fn get<E>(
        &self,
        key: Option<Key>,
        connect: impl FnOnce() -> Result<S, E>,
    ) -> Result<Connection<S>, E> {
        let store = match key.as_ref().and_then(|key| self.shared.take(key)) {
            Some(store) => store,
            None => connect()?,
        };
        Ok(Connection { store: Some(store), key, origin: self.clone() })
    }

    /// Closes the waiting connections if `error`, with which a call ended, may come from a broken one: from a
    /// cluster that does not answer, a client that was fenced, or permissions that have changed.
    pub(crate) fn close_after(&self, error: ErrorKind) {
        let is_answer = matches!(
            error,
            ErrorKind::InvalidArgument
                | ErrorKind::NotFound
                | ErrorKind::AlreadyExists
                | ErrorKind::InUse
        );
        if !is_answer {
            drop(self.shared.take_all());
        }
    }

    /// Keeps a connection for the next call.
    fn keep(&self, key: Key, store: S) {
        let mut waiting = self.shared.lock();
        if !waiting.has_closer {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("csi-connections".to_owned());
            // Without a thread that would close it, it is not kept.
            let Ok(_) = thread.spawn(move || shared.close_after_wait()) else { return };
            waiting.has_closer = true;
        }
        waiting.stores.push((key, store));
        let surplus = (waiting.stores.len() > MAX_WAITING).then(|| waiting.stores.remove(0));
        waiting.returns += 1;
        drop(waiting);
        self.shared.returned.notify_all();
        drop(surplus);
    }
}

impl<S> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, Waiting<S>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, key: &Key) -> Option<S> {
        let mut waiting = self.lock();
        let newest = waiting.stores.iter().rposition(|(known, _)| known == key)?;
        Some(waiting.stores.remove(newest).1)
    }

    /// Takes all connections. Closing one blocks, so the caller drops them without the lock.
    fn take_all(&self) -> Vec<(Key, S)> {
        std::mem::take(&mut self.lock().stores)
    }

    /// Closes all connections once none has been returned for the wait.
    fn close_after_wait(&self) {
        let mut waiting = self.lock();
        loop {
            let seen = waiting.returns;
            let (changed, wait) = self
                .returned
                .wait_timeout_while(waiting, self.wait, |waiting| waiting.returns == seen)
                .unwrap_or_else(PoisonError::into_inner);
            waiting = changed;
            if wait.timed_out() {
                waiting.has_closer = false;
                let stores = std::mem::take(&mut waiting.stores);
                drop(waiting);
                return drop(stores);
            }
        }
    }
}

impl<S: Send + 'static> Deref for Connection<S> {
    type Target = S;

    #[expect(clippy::expect_used, reason = "only drop takes it")]
    fn deref(&self) -> &S {
        self.store.as_ref().expect("a connection in use")
    }
}

impl<S: Send + 'static> Drop for Connection<S> {
    fn drop(&mut self) {
        // After a panic, nothing is known about its state.
        if let (Some(store), Some(key), false) =
            (self.store.take(), self.key.take(), std::thread::panicking())
        {
            self.origin.keep(key, store);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A connection with a number. `open` counts those that are not closed.
    struct Numbered {
        number: usize,
        open: Arc<AtomicUsize>,
    }

    impl Drop for Numbered {
        fn drop(&mut self) {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }

    struct Fixture {
        connections: Connections<Numbered>,
        made: AtomicUsize,
        open: Arc<AtomicUsize>,
    }

    impl Fixture {
        fn new(wait: Duration) -> Self {
            let (made, open) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
            Self { connections: Connections::new(wait), made, open }
        }

        fn get(&self, uri: &str, keyring: &str) -> Connection<Numbered> {
            let keyring = Zeroizing::new(keyring.as_bytes().to_vec());
            let key = Key { uri: uri.to_owned(), keyring };
            let connect = || {
                let number = self.made.fetch_add(1, Ordering::Relaxed);
                self.open.fetch_add(1, Ordering::Relaxed);
                Ok::<_, Infallible>(Numbered { number, open: Arc::clone(&self.open) })
            };
            self.connections.get(Some(key), connect).unwrap()
        }

        fn open(&self) -> usize {
            self.open.load(Ordering::Relaxed)
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_call_uses_the_connection_of_an_earlier_one_with_the_same_key() {
        let fixture = Fixture::new(LONG);
        assert_eq!(fixture.get("a", "").number, 0);
        assert_eq!(fixture.get("a", "").number, 0);
        assert_eq!(fixture.get("b", "").number, 1);
        assert_eq!(fixture.get("a", "other key").number, 2);
        let (first, second) = (fixture.get("a", ""), fixture.get("a", ""));
        assert_eq!((first.number, second.number), (0, 3), "one call at a time");
    }

    #[test]
    fn an_error_of_the_storage_closes_the_waiting_connections() {
        let fixture = Fixture::new(LONG);
        drop(fixture.get("a", ""));
        fixture.connections.close_after(ErrorKind::NotFound);
        assert_eq!(fixture.open(), 1, "the volume does not exist: the connection works");
        let used = fixture.get("b", "");
        fixture.connections.close_after(ErrorKind::Fenced);
        assert_eq!(fixture.open(), 1, "only the one in use is left");
        assert_eq!(used.number, 1);
        assert_eq!(fixture.get("a", "").number, 2);
    }

    #[test]
    fn the_number_of_waiting_connections_is_bounded() {
        let fixture = Fixture::new(LONG);
        let used: Vec<_> = (0..10).map(|number| fixture.get(&number.to_string(), "")).collect();
        drop(used);
        assert_eq!(fixture.open(), MAX_WAITING);
        assert_eq!(fixture.get("9", "").number, 9, "the oldest ones were closed");
    }

    #[test]
    fn connections_are_closed_after_a_time_without_calls() {
        let fixture = Fixture::new(Duration::from_millis(20));
        for _ in 0..2 {
            drop(fixture.get("a", ""));
            while fixture.open() > 0 {
                std::thread::yield_now();
            }
        }
        assert_eq!(fixture.made.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_connection_without_a_key_is_closed_after_its_call() {
        let connections = Connections::<()>::new(LONG);
        drop(connections.get(None, || Ok::<_, Infallible>(())));
        assert!(connections.shared.lock().stores.is_empty());
    }

    #[test]
    fn a_connection_in_which_a_call_panicked_is_closed() {
        let fixture = Fixture::new(LONG);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _used = fixture.get("a", "");
            panic!("of the test");
        }));
        assert!(caught.is_err());
        assert_eq!(fixture.open(), 0);
    }
}
