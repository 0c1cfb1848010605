//! Snapshots that wait for the volume to be quiet. librbd's callback only counts and wakes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cleat_backend::Waker;
use cleat_core::error::{Error, ErrorKind, Result};

/// What is known of them. Ends with the image's closing; who waits then is refused.
pub(crate) struct Snapshots {
    watch: librbd::QuiesceWatch,
    /// Odd while one waits or is being made.
    number: Arc<AtomicU64>,
    waker: Arc<OnceLock<Waker>>,
}

impl Snapshots {
    /// Is told of them from now on, and lets all of them go on until [`Snapshots::attend`].
    pub(crate) fn watch(image: &Arc<librbd::Image>, name: &str) -> Result<Self> {
        let number = Arc::new(AtomicU64::new(0));
        let waker = Arc::new(OnceLock::<Waker>::new());
        let (counter, awaited) = (Arc::clone(&number), Arc::clone(&waker));
        let told = move |what| {
            // librbd lets one in after the other, so these two take turns; but a failure has ended one
            // already, and those that stand by are never told to begin.
            let odd = counter.load(Ordering::SeqCst) % 2 == 1;
            if odd == (what == librbd::Quiesce::End) {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            awaited.get().into_iter().for_each(Waker::wake);
        };
        let watch = image.watch_quiesce(Some(0), told).map_err(|error| {
            let kind = match error.errno() {
                Some(libc::ENOSYS) => ErrorKind::Unsupported,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("{name} cannot be watched for snapshots"))
                .with_repair("update librbd1 (Ceph 16 can), or map it without --quiesce")
                .with_source(error)
        })?;
        Ok(Self { watch, number, waker })
    }

    /// Has `waker` woken when one begins to wait, and when it is over. Not `in_charge`, all of them go
    /// on at once.
    pub(crate) fn attend(&self, waker: Waker, in_charge: bool) {
        // Whoever serves the volume does so once.
        let _ = self.waker.set(waker);
        if in_charge {
            self.take_charge();
        }
    }

    /// The number of the one that waits, or is being made.
    pub(crate) fn waiting(&self) -> Option<u64> {
        Some(self.number.load(Ordering::SeqCst)).filter(|number| number % 2 == 1)
    }

    /// Answers one: it may be made, or why not. Says whether it waited for that.
    pub(crate) fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        if self.waiting() != Some(number) {
            return false;
        }
        if result.is_err() {
            // It is over; where it was told so meanwhile, this is no more its number.
            let order = Ordering::SeqCst;
            let _ = self.number.compare_exchange(number, number + 1, order, order);
        }
        self.watch.complete(result)
    }

    /// From now on all of them are told again.
    pub(crate) fn take_charge(&self) {
        self.watch.set_default_answer(None);
    }

    /// From now on they are refused, one that waits included: its answer would keep the lock, which
    /// is about to be given up.
    pub(crate) fn refuse(&self) {
        self.watch.set_default_answer(Some(libc::EAGAIN));
    }
}
