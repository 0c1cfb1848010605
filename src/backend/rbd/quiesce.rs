//! Snapshots that wait for the volume to be quiet. librbd's callback only counts and wakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::Waker;
use crate::error::{Error, ErrorKind, Result};

/// What is known of them. Ends with the image's closing; who waits then is refused.
pub(super) struct Snapshots {
    watch: librbd::QuiesceWatch,
    /// Odd while one waits or is being made.
    number: Arc<AtomicU64>,
}

impl Snapshots {
    /// Has `waker` woken when one begins to wait, and when it is over. Not `in_charge`, all of them go
    /// on at once.
    pub(super) fn watch(
        image: &Arc<librbd::Image>,
        name: &str,
        waker: Waker,
        in_charge: bool,
    ) -> Result<Self> {
        let number = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&number);
        let told = move |what| {
            // librbd lets one in after the other, so these two take turns; but a failure has ended one
            // already, and those that stand by are never told to begin.
            let odd = counter.load(Ordering::SeqCst) % 2 == 1;
            if odd == (what == librbd::Quiesce::End) {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            waker.wake();
        };
        let standing = if in_charge { None } else { Some(0) };
        let watch = image.watch_quiesce(standing, told).map_err(|error| {
            let kind = match error.errno() {
                Some(libc::ENOSYS) => ErrorKind::Unsupported,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("{name} cannot be watched for snapshots"))
                .with_repair("update librbd1 (Ceph 16 can), or map it without --quiesce")
                .with_source(error)
        })?;
        Ok(Self { watch, number })
    }

    /// The number of the one that waits, or is being made.
    pub(super) fn waiting(&self) -> Option<u64> {
        Some(self.number.load(Ordering::SeqCst)).filter(|number| number % 2 == 1)
    }

    /// Answers one: it may be made, or why not. Says whether it waited for that.
    pub(super) fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
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
    pub(super) fn take_charge(&self) {
        self.watch.stand(None);
    }

    /// From now on they are refused, one that waits included: its answer would keep the lock, which
    /// is about to be given up.
    pub(super) fn refuse(&self) {
        self.watch.stand(Some(libc::EAGAIN));
    }
}
