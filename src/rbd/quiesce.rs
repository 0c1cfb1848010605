//! Snapshots that wait until the volume is quiesced. librbd's callback only counts and wakes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cleat_backend::Waker;
use cleat_core::error::{Error, ErrorKind, Result};

/// The registration for snapshots of an open image. Dropping it rejects a snapshot that waits.
pub(crate) struct Snapshots {
    watch: librbd::QuiesceWatch,
    /// The number of the present or the last snapshot. Odd while one waits or is being taken.
    number: Arc<AtomicU64>,
    waker: Arc<OnceLock<Waker>>,
}

impl Snapshots {
    /// Registers for snapshots of `image`. Until [`Snapshots::set_waker`] all snapshots proceed without
    /// waiting.
    ///
    /// # Errors
    /// Returns `Unsupported` if the library has no quiesce callbacks.
    pub(crate) fn watch(image: &Arc<librbd::Image>, name: &str) -> Result<Self> {
        let number = Arc::new(AtomicU64::new(0));
        let waker = Arc::new(OnceLock::<Waker>::new());
        let (counter, shared_waker) = (Arc::clone(&number), Arc::clone(&waker));
        let notify = move |event| {
            // librbd serialises snapshots, so begin and end normally alternate. There are two exceptions:
            // a rejected snapshot was counted as ended already, and one that proceeds without waiting has
            // no begin.
            let odd = counter.load(Ordering::SeqCst) % 2 == 1;
            if odd == (event == librbd::Quiesce::End) {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            shared_waker.get().into_iter().for_each(Waker::wake);
        };
        let watch = image.watch_quiesce(Some(0), notify).map_err(|error| {
            let kind = match error.errno() {
                Some(libc::ENOSYS) => ErrorKind::Unsupported,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("cannot watch {name} for snapshots"))
                .with_repair("update librbd1 to Ceph 16 or later, or map without --quiesce")
                .with_source(error)
        })?;
        Ok(Self { watch, number, waker })
    }

    /// Wakes `waker` from now on when a snapshot starts to wait and when it has ended. Unless `active`,
    /// all snapshots proceed without waiting until [`Snapshots::activate`].
    pub(crate) fn set_waker(&self, waker: Waker, active: bool) {
        // It is called at most once per open image.
        let _ = self.waker.set(waker);
        if active {
            self.activate();
        }
    }

    /// Returns the number of the snapshot that waits or is being taken.
    pub(crate) fn pending(&self) -> Option<u64> {
        Some(self.number.load(Ordering::SeqCst)).filter(|number| number % 2 == 1)
    }

    /// Lets snapshot `number` proceed, or rejects it with an errno. Returns whether it was waiting.
    pub(crate) fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        if self.pending() != Some(number) {
            return false;
        }
        if result.is_err() {
            // A rejected snapshot has ended. If the callback has counted the end already, the number
            // differs and stays.
            let order = Ordering::SeqCst;
            let _ = self.number.compare_exchange(number, number + 1, order, order);
        }
        self.watch.complete(result)
    }

    /// Makes all further snapshots wait for an answer.
    pub(crate) fn activate(&self) {
        self.watch.set_default_answer(None);
    }

    /// Rejects all further snapshots, and one that waits. The exclusive lock is about to be released, and
    /// a waiting snapshot would block the release.
    pub(crate) fn reject(&self) {
        self.watch.set_default_answer(Some(libc::EAGAIN));
    }
}
