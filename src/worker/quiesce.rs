//! Snapshots that wait for the volume to be quiet: told to the supervisor, who sees to it, and has the
//! privilege to, and answered as it says. Nothing waits here, and nothing waits for a supervisor without
//! end: librbd would give up after 50 s, and who makes the snapshot asks it again, for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::protocol::FromWorker;
use cleat_backend::{Image, Waker};
use cleat_core::error::{Error, ErrorKind, Result};

/// For the supervisor to answer. Looked at every few seconds (`resize` wakes the control thread).
const PATIENCE: Duration = Duration::from_secs(40);

/// What is known of snapshots.
pub(super) struct SnapshotQuiesce {
    image: Arc<dyn Image>,
    /// The one that the supervisor knows of.
    told: Option<u64>,
    /// Whether that one waits no more.
    answered: bool,
    /// Until when it waits.
    until: Instant,
}

impl SnapshotQuiesce {
    /// Has `waker` woken by snapshots, where they are `wanted`.
    pub(super) fn start(
        image: Arc<dyn Image>,
        waker: Waker,
        wanted: bool,
        in_charge: bool,
    ) -> Result<Self> {
        if wanted {
            let quiesce = image.snapshot_quiesce().ok_or_else(|| {
                let message = "this volume's backend does not announce snapshots";
                Error::new(ErrorKind::Unsupported, message)
                    .with_repair("map it without --quiesce: only images of RBD can")
            })?;
            quiesce.watch(waker, in_charge)?;
        }
        Ok(Self { image, told: None, answered: false, until: Instant::now() })
    }

    /// Whether a snapshot waits, or is being made.
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting().is_some()
    }

    fn waiting(&self) -> Option<u64> {
        self.image.snapshot_quiesce()?.pending()
    }

    fn give(&self, number: u64, result: Result<(), i32>) -> bool {
        self.image.snapshot_quiesce().is_some_and(|quiesce| quiesce.answer(number, result))
    }

    /// What there is to tell, if it is not what was told last. Without a supervisor nobody will make the
    /// volume quiesce.
    pub(super) fn look(&mut self, supervised: bool) -> Option<FromWorker> {
        let waiting = self.waiting();
        if self.told != waiting {
            (self.told, self.answered) = (waiting, false);
            self.until = Instant::now() + PATIENCE;
        } else if self.answered || waiting.is_none() || supervised && Instant::now() < self.until {
            return None;
        }
        let deserted = !supervised || Instant::now() >= self.until;
        if let Some(number) = waiting.filter(|_| deserted) {
            tracing::warn!("no supervisor makes the volume quiet: a snapshot of it is refused");
            self.answered = self.give(number, Err(libc::EAGAIN));
            return None;
        }
        Some(FromWorker::SnapshotPending { snapshot: waiting })
    }

    /// To be told to another supervisor: that a snapshot waits which none has answered.
    pub(super) fn start_over(&self) -> Option<FromWorker> {
        let waiting = self.told.filter(|_| !self.answered);
        waiting.map(|waiting| FromWorker::SnapshotPending { snapshot: Some(waiting) })
    }

    /// The supervisor's answer: 0, or an errno why not.
    pub(super) fn answer(&mut self, number: u64, errno: i32) -> Result<()> {
        let result = if errno == 0 { Ok(()) } else { Err(errno) };
        if self.told == Some(number) {
            self.answered = true;
        }
        match self.give(number, result) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::NotFound, "that snapshot does not wait any more")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_image::FakeImage;

    fn fixture() -> (Arc<FakeImage>, SnapshotQuiesce) {
        let image = Arc::new(FakeImage::with_snapshots());
        let until = Instant::now();
        let quiesce = SnapshotQuiesce { image: image.clone(), told: None, answered: false, until };
        (image, quiesce)
    }

    #[test]
    fn a_snapshot_is_told_once_and_again_to_the_next_supervisor_while_it_waits() {
        let (image, mut quiesce) = fixture();
        assert_eq!((quiesce.look(true), quiesce.start_over()), (None, None));
        *image.waiting.lock().unwrap() = Some(1);
        let told = Some(FromWorker::SnapshotPending { snapshot: Some(1) });
        assert_eq!((quiesce.look(true), quiesce.look(true)), (told.clone(), None));
        assert_eq!(quiesce.start_over(), told);
        quiesce.answer(1, 0).unwrap();
        assert_eq!((quiesce.start_over(), quiesce.look(true)), (None, None));
        *image.waiting.lock().unwrap() = None;
        assert_eq!(quiesce.look(true), Some(FromWorker::SnapshotPending { snapshot: None }));
        assert_eq!(quiesce.answer(1, 0).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn without_a_supervisor_a_snapshot_is_refused_once_whenever_it_came() {
        for before in [true, false] {
            let (image, mut quiesce) = fixture();
            *image.waiting.lock().unwrap() = Some(3);
            assert_eq!(quiesce.look(before).is_some(), before);
            // What there is to tell then, nobody hears.
            let _ = (quiesce.look(false), quiesce.look(false));
            assert_eq!(*image.answers.lock().unwrap(), [(3, Err(libc::EAGAIN))]);
        }
    }

    #[test]
    fn a_supervisor_that_says_nothing_is_not_waited_for_without_end() {
        let (image, mut quiesce) = fixture();
        *image.waiting.lock().unwrap() = Some(5);
        assert!(quiesce.look(true).is_some());
        assert_eq!(quiesce.look(true), None);
        assert_eq!(*image.answers.lock().unwrap(), []);
        quiesce.until = Instant::now();
        assert_eq!(quiesce.look(true), None);
        assert_eq!(*image.answers.lock().unwrap(), [(5, Err(libc::EAGAIN))]);
        assert_eq!(quiesce.look(true), Some(FromWorker::SnapshotPending { snapshot: None }));
    }

    #[test]
    fn a_volume_that_tells_nothing_of_snapshots_is_refused() {
        let image: Arc<dyn Image> = Arc::new(FakeImage::default());
        let start = |wanted| {
            SnapshotQuiesce::start(Arc::clone(&image), Waker::new().unwrap(), wanted, true)
        };
        let error = start(true).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.repair().unwrap().contains("--quiesce"), "{error}");
        assert!(start(false).is_ok());
    }
}
