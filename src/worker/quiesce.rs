//! Snapshots that wait until the volume is quiesced. The worker reports each to the supervisor, which has the
//! privileges to freeze file systems, and passes its answer to the backend.
//!
//! Invariants: nothing blocks here; a snapshot gets exactly one answer, at the latest [`ANSWER_TIMEOUT`]
//! after it was reported, or at once without a supervisor. Without an answer, librbd would give up after 50
//! s, and the client that makes the snapshot would request it again without end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::protocol::FromWorker;
use cleat_backend::{Image, Waker};
use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long the supervisor may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);

/// The snapshot that waits. See the file's comment.
pub(super) struct SnapshotQuiesce {
    image: Arc<dyn Image>,
    clock: Arc<dyn Clock>,
    /// The snapshot that was last reported to the supervisor.
    reported: Option<u64>,
    /// Whether that snapshot has got its answer.
    answered: bool,
    /// When its timeout ends.
    deadline: Instant,
}

impl SnapshotQuiesce {
    /// Makes the state of a volume without a snapshot.
    pub(super) fn new(image: Arc<dyn Image>, clock: Arc<dyn Clock>) -> Self {
        let deadline = clock.now();
        Self { image, clock, reported: None, answered: false, deadline }
    }

    /// Makes snapshots of the volume wait, and wakes `waker` for each. With `in_charge`, from now on;
    /// otherwise once this process has taken the volume over.
    ///
    /// # Errors
    /// `Unsupported` if the backend does not announce snapshots.
    pub(super) fn watch(&self, waker: Waker, in_charge: bool) -> Result<()> {
        let quiesce = self.image.snapshot_quiesce().ok_or_else(|| {
            let message = "this volume's backend does not announce snapshots";
            Error::new(ErrorKind::Unsupported, message)
                .with_repair("map it without --quiesce: only RBD images and object volumes can")
        })?;
        quiesce.watch(waker, in_charge)
    }

    /// Whether a snapshot waits, or is being made.
    pub(super) fn is_pending(&self) -> bool {
        self.pending().is_some()
    }

    fn pending(&self) -> Option<u64> {
        self.image.snapshot_quiesce()?.pending()
    }

    fn pass_on(&self, number: u64, result: Result<(), i32>) -> bool {
        self.image.snapshot_quiesce().is_some_and(|quiesce| quiesce.answer(number, result))
    }

    /// The time until the snapshot that waits is refused; `None` without one.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.unanswered()?;
        Some(self.deadline.saturating_duration_since(now))
    }

    /// Returns what should be reported, if it was not reported yet. Refuses a snapshot that no supervisor
    /// will answer.
    pub(super) fn check(&mut self, supervised: bool) -> Option<FromWorker> {
        let now = self.clock.now();
        let pending = self.pending();
        if self.reported != pending {
            (self.reported, self.answered) = (pending, false);
            self.deadline = now + ANSWER_TIMEOUT;
        } else if self.answered || pending.is_none() || supervised && now < self.deadline {
            return None;
        }
        let refused = !supervised || now >= self.deadline;
        if let Some(number) = pending.filter(|_| refused) {
            tracing::warn!("no supervisor quiesces the volume: a snapshot of it is refused");
            self.answered = self.pass_on(number, Err(libc::EAGAIN));
            return None;
        }
        Some(FromWorker::SnapshotPending { snapshot: pending })
    }

    /// Returns the report of a snapshot without an answer, for a new supervisor.
    pub(super) fn unanswered(&self) -> Option<FromWorker> {
        let number = self.reported.filter(|_| !self.answered)?;
        Some(FromWorker::SnapshotPending { snapshot: Some(number) })
    }

    /// Passes on the supervisor's answer: 0, or the errno with which the snapshot fails.
    ///
    /// # Errors
    /// `NotFound` if that snapshot does not wait any more.
    pub(super) fn answer(&mut self, number: u64, errno: i32) -> Result<()> {
        let result = if errno == 0 { Ok(()) } else { Err(errno) };
        if self.reported == Some(number) {
            self.answered = true;
        }
        match self.pass_on(number, result) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::NotFound, "that snapshot does not wait any more")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_image::FakeImage;
    use cleat_core::clock::ManualClock;

    fn fixture() -> (Arc<FakeImage>, Arc<ManualClock>, SnapshotQuiesce) {
        let image = Arc::new(FakeImage::with_snapshots());
        let clock = Arc::new(ManualClock::new());
        let quiesce = SnapshotQuiesce::new(image.clone(), clock.clone());
        (image, clock, quiesce)
    }

    #[test]
    fn a_snapshot_is_reported_once_and_again_to_the_next_supervisor_while_it_waits() {
        let (image, _, mut quiesce) = fixture();
        assert_eq!((quiesce.check(true), quiesce.unanswered()), (None, None));
        *image.waiting.lock().unwrap() = Some(1);
        let report = Some(FromWorker::SnapshotPending { snapshot: Some(1) });
        assert_eq!((quiesce.check(true), quiesce.check(true)), (report.clone(), None));
        assert_eq!(quiesce.unanswered(), report);
        quiesce.answer(1, 0).unwrap();
        assert_eq!((quiesce.unanswered(), quiesce.check(true)), (None, None));
        *image.waiting.lock().unwrap() = None;
        assert_eq!(quiesce.check(true), Some(FromWorker::SnapshotPending { snapshot: None }));
        assert_eq!(quiesce.answer(1, 0).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn without_a_supervisor_a_snapshot_is_refused_once_whenever_it_came() {
        for supervised_before in [true, false] {
            let (image, _, mut quiesce) = fixture();
            *image.waiting.lock().unwrap() = Some(3);
            assert_eq!(quiesce.check(supervised_before).is_some(), supervised_before);
            // Without a supervisor, reports go nowhere.
            let _ = (quiesce.check(false), quiesce.check(false));
            assert_eq!(*image.answers.lock().unwrap(), [(3, Err(libc::EAGAIN))]);
        }
    }

    #[test]
    fn a_snapshot_is_refused_when_the_supervisor_does_not_answer_in_time() {
        let (image, clock, mut quiesce) = fixture();
        *image.waiting.lock().unwrap() = Some(5);
        assert!(quiesce.check(true).is_some());
        assert_eq!(quiesce.timeout(clock.now()), Some(ANSWER_TIMEOUT));
        clock.advance(ANSWER_TIMEOUT - Duration::from_millis(1));
        assert_eq!(quiesce.check(true), None);
        assert_eq!(*image.answers.lock().unwrap(), []);
        clock.advance(Duration::from_millis(1));
        assert_eq!(quiesce.check(true), None);
        assert_eq!(*image.answers.lock().unwrap(), [(5, Err(libc::EAGAIN))]);
        assert_eq!(quiesce.check(true), Some(FromWorker::SnapshotPending { snapshot: None }));
        assert_eq!(quiesce.timeout(clock.now()), None);
    }

    #[test]
    fn a_volume_that_does_not_announce_snapshots_is_refused() {
        let clock = Arc::new(ManualClock::new());
        let quiesce = SnapshotQuiesce::new(Arc::new(FakeImage::default()), clock);
        let error = quiesce.watch(Waker::new().unwrap(), true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.repair().unwrap().contains("--quiesce"), "{error}");
    }
}
