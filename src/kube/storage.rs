//! What the controller needs of the storage of a volume: the record that says who can write, and the means to
//! cut a client off. The composition implements it for each backend.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

pub use cleat_grants::storage::Fencing;

/// The timeout of a call to the storage.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How long a call may take before it is late.
const LATE: Duration = Duration::from_secs(5);

/// The maximum number of calls of one place while one of them is late. Without this limit, the volumes of a storage that
/// hangs would keep all workers, and those of other storages would wait.
const MAX_BESIDE_LATE: usize = 4;

/// The storages of the driver's volumes.
pub trait Storage: Debug + Send + Sync {
    /// Returns how the volume `handle`, a CSI volume handle, is attached. It does not access the volume.
    ///
    /// # Errors
    /// Returns an error that names the volume if the controller cannot attach it, for example because its storage
    /// cannot cut off a client: the volume is then refused, not granted.
    fn find(&self, handle: &str) -> Result<Backing>;

    /// Returns the places of volumes that are configured. A place is what the handles of its volumes begin with,
    /// without the last `/`. Reads files, and accesses no volume.
    ///
    /// # Errors
    /// Returns the error of reading the configuration.
    fn places(&self) -> Result<BTreeSet<String>>;

    /// Returns the handles of all volumes in a place, also of those without a PersistentVolume; nothing for a place whose
    /// volumes need no grant. Blocks until `deadline` or somewhat longer, as the storage does.
    ///
    /// # Errors
    /// Returns `TimedOut` if the list is not complete at the deadline, and the error of the storage otherwise.
    fn volumes_in(&self, place: &str, deadline: Instant) -> Result<Vec<String>>;
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

/// Returns where a volume is stored: its handle without the name of the volume.
pub(crate) fn place(handle: &str) -> &str {
    handle.rsplit_once('/').map_or("", |(place, _)| place)
}

/// Returns whether a call has failed because the storage did not answer, so that its other volumes need not be asked for.
pub(crate) fn has_not_answered(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Unavailable)
}

/// The calls that run, by place, also those whose caller has given up.
#[derive(Debug, Clone, Default)]
pub(crate) struct StorageCalls(Arc<Mutex<BTreeMap<String, Place>>>);

/// The calls of one place.
#[derive(Debug, Default)]
struct Place {
    /// When each call has begun, by its number.
    running: BTreeMap<u64, Instant>,
    next: u64,
}

/// A call that runs. It ends when this is dropped.
#[derive(Debug)]
struct Running {
    calls: StorageCalls,
    place: String,
    number: u64,
}

impl StorageCalls {
    /// Begins a call about `what` in a place.
    ///
    /// # Errors
    /// Returns `Unavailable` if the calls of the place hang.
    fn begin(&self, place: &str, what: &str, now: Instant) -> Result<Running> {
        let place = place.to_owned();
        let mut all = self.lock();
        let known = all.entry(place.clone()).or_default();
        let running = &mut known.running;
        let oldest = running.values().map(|begun| now.saturating_duration_since(*begun)).max();
        let is_late = oldest.is_some_and(|age| age >= LATE);
        if is_late && running.len() >= MAX_BESIDE_LATE {
            let (count, age) = (running.len(), oldest.unwrap_or_default().as_secs());
            let message = format!(
                "the storage of {what} is not asked: {count} calls to {place} have not ended, the oldest since {age} s"
            );
            let repair = "check that the storage answers, for example with ceph status";
            return Err(Error::new(ErrorKind::Unavailable, message).with_repair(repair));
        }
        let number = known.next;
        known.next += 1;
        known.running.insert(number, now);
        drop(all);
        Ok(Running { calls: self.clone(), place, number })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Place>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut all = self.calls.lock();
        let Some(known) = all.get_mut(&self.place) else { return };
        known.running.remove(&self.number);
        if known.running.is_empty() {
            all.remove(&self.place);
        }
    }
}

/// Runs a call of the storage of the volume `handle`, as [`call`] does.
pub(crate) async fn on_thread<T: Send + 'static>(
    calls: &StorageCalls,
    storage: &Arc<dyn Fencing>,
    handle: &str,
    run: impl FnOnce(&dyn Fencing, Instant) -> Result<T> + Send + 'static,
) -> Result<T> {
    let storage = Arc::clone(storage);
    let run = move |deadline| run(storage.as_ref(), deadline);
    call(calls, place(handle), &format!("volume {handle}"), run).await
}

/// Lists the volumes in a place, as [`call`] does.
pub(crate) async fn list(
    calls: &StorageCalls,
    storage: &Arc<dyn Storage>,
    place: &str,
) -> Result<Vec<String>> {
    let (storage, listed) = (Arc::clone(storage), place.to_owned());
    let run = move |deadline| storage.volumes_in(&listed, deadline);
    call(calls, place, &format!("the volumes in {place}"), run).await
}

/// Runs a call of a storage about `what`, which blocks, on a thread of its own, for at most 30 s.
///
/// # Errors
/// Returns `TimedOut` if it does not answer in time, `Unavailable` at once if other calls of its place hang, and otherwise
/// the error of the call.
async fn call<T: Send + 'static>(
    calls: &StorageCalls,
    place: &str,
    what: &str,
    run: impl FnOnce(Instant) -> Result<T> + Send + 'static,
) -> Result<T> {
    let now = SystemClock.now();
    let (deadline, call) = (now + TIMEOUT, calls.begin(place, what, now)?);
    let running = tokio::task::spawn_blocking(move || {
        let _call = call;
        run(deadline)
    });
    let ended = tokio::time::timeout(TIMEOUT, running).await;
    let failed = |kind, why: &str| {
        let message = format!("the storage of {what}: {why}");
        Err(Error::new(kind, message))
    };
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => failed(ErrorKind::Internal, "the call has failed"),
        Err(_) => failed(ErrorKind::TimedOut, "it did not answer in time"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::fake;

    /// Runs a call that waits until the sender of the channel is dropped.
    fn hang(
        calls: &StorageCalls,
        handle: &'static str,
    ) -> (mpsc::Sender<()>, tokio::task::JoinHandle<Result<()>>) {
        let (release, released) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        let calls = calls.clone();
        let call = tokio::spawn(async move {
            let storage: Arc<dyn Fencing> = Arc::new(fake::OneRecord::default());
            let wait = move |_: &dyn Fencing, _: Instant| {
                begin.send(()).unwrap();
                let _ = released.recv();
                Ok(())
            };
            on_thread(&calls, &storage, handle, wait).await
        });
        tokio::task::block_in_place(|| begun.recv().unwrap());
        (release, call)
    }

    async fn ask(calls: &StorageCalls, handle: &str) -> Result<()> {
        let storage: Arc<dyn Fencing> = Arc::new(fake::OneRecord::default());
        on_thread(calls, &storage, handle, |_, _| Ok(())).await
    }

    /// Makes all calls that run late.
    fn make_late(calls: &StorageCalls) {
        let all = &mut *calls.lock();
        let begun = all.values_mut().flat_map(|known| known.running.values_mut());
        begun.for_each(|begun| *begun = begun.checked_sub(LATE).unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_storage_that_hangs_is_not_asked_for_more_volumes_until_a_call_has_ended() {
        let calls = StorageCalls::default();
        let mut hanging: Vec<_> =
            (0..MAX_BESIDE_LATE).map(|_| hang(&calls, "rbd/lost/p//v")).collect();
        assert!(ask(&calls, "rbd/lost/p//w").await.is_ok(), "the calls are not late yet");
        make_late(&calls);
        let error = ask(&calls, "rbd/lost/p//w").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("4 calls to rbd/lost/p/ have not ended"), "{error}");
        assert!(ask(&calls, "rbd/other/p//w").await.is_ok());
        // A caller that has given up does not count less: its call runs.
        let (release, call) = hanging.pop().unwrap();
        call.abort();
        assert!(call.await.is_err());
        assert!(ask(&calls, "rbd/lost/p//w").await.is_err());
        drop(release);
        while calls.lock()["rbd/lost/p/"].running.len() == MAX_BESIDE_LATE {
            tokio::task::yield_now().await;
        }
        assert!(ask(&calls, "rbd/lost/p//w").await.is_ok());
    }
}
