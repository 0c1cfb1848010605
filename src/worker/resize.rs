//! Reads and changes the volume's size on a thread of its own, so that a backend that hangs does not block
//! the control thread.
//!
//! The thread also reads the size when the backend requests it ([`Image::size_checks`]): at an interval, or with
//! each ping of the supervisor. So the worker notices a volume that has grown at the backend. A backend that is
//! notified of changes stores the size that [`Image::size`] returns and wakes the control thread.
//!
//! Invariants: at most two requests are unanswered, one that the thread executes and one that waits; an
//! answer is sent to the supervisor only if it belongs to the supervisor's last request; at most one check
//! is pending, and it takes no place of a request while the backend hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use cleat_backend::{Image, SizeChecks, Waker};
use cleat_core::error::{Error, ErrorKind, Result};

/// Enough for the library of a backend. Only touched pages use memory.
const STACK_BYTES: usize = 256 << 10;

/// The maximum number of requests without an answer: one that is executed, and one that waits.
const MAX_UNANSWERED: usize = 2;

/// The control thread's end of the queues to the thread. See the file's comment.
pub(super) struct Resizer {
    image: Arc<dyn Image>,
    tasks: Sender<Task>,
    answers: Receiver<(u64, Result<u64>)>,
    /// Whether the thread has a check to execute, or executes it.
    checking: Arc<AtomicBool>,
    /// The number of the last request.
    last: u64,
    /// Requests without an answer, of earlier supervisors, too.
    unanswered: u32,
    /// The request whose answer the supervisor waits for.
    awaited: Option<u64>,
    /// The size that was last reported to the supervisor.
    reported: u64,
}

/// A request of the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SizeRequest {
    Refresh,
    Resize(u64),
    Shrink(u64),
}

/// What the thread is to do.
#[derive(Debug, Clone, Copy)]
enum Task {
    /// A request with its number.
    Request(u64, SizeRequest),
    /// Read the size. Without an answer: a change wakes the control thread.
    Check,
}

impl Resizer {
    /// Starts the thread, which ends when the resizer is dropped. `waker` wakes the control thread.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub(super) fn start(image: Arc<dyn Image>, waker: Waker) -> Result<Self> {
        // For a request that waits, and a check.
        let (tasks, incoming) = bounded(2);
        // The thread never waits to send an answer.
        let (outgoing, answers) = bounded(MAX_UNANSWERED);
        image.watch_changes(waker.clone());
        let checking = Arc::new(AtomicBool::new(false));
        let is_checking = Arc::clone(&checking);
        let thread =
            SizeThread { image: Arc::clone(&image), waker, checking: is_checking, failing: false };
        std::thread::Builder::new()
            .name("size".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || thread.run(&incoming, &outgoing))
            .map_err(|e| Error::from_io("cannot start the thread for sizes", e))?;
        let reported = image.size();
        Ok(Self {
            image,
            tasks,
            answers,
            checking,
            last: 0,
            unanswered: 0,
            awaited: None,
            reported,
        })
    }

    /// Passes `request` to the thread. [`Resizer::answer`] returns the answer later.
    ///
    /// # Errors
    /// `Unavailable` while earlier requests wait for the backend.
    pub(super) fn request(&mut self, request: SizeRequest) -> Result<()> {
        self.last += 1;
        let has_room = (self.unanswered as usize) < MAX_UNANSWERED;
        if has_room && self.tasks.try_send(Task::Request(self.last, request)).is_ok() {
            self.awaited = Some(self.last);
            self.unanswered += 1;
            return Ok(());
        }
        let message = "the backend has not answered earlier requests for the size";
        Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair("check whether the backend can be reached"))
    }

    /// Has the thread read the size, if the backend requests that of a ping. Does nothing while an earlier check or
    /// request waits for the backend: a request reads the size, too. Never blocks.
    pub(super) fn check_on_ping(&self) {
        let is_due = self.image.size_checks() == SizeChecks::OnRequest && self.unanswered == 0;
        if is_due && !self.checking.swap(true, Ordering::AcqRel) {
            // There is room: no request is unanswered, and no other check is pending.
            let _ = self.tasks.try_send(Task::Check);
        }
    }

    /// Returns the answer that the supervisor waits for, once the backend has given it.
    pub(super) fn answer(&mut self) -> Option<Result<u64>> {
        while let Ok((number, answer)) = self.answers.try_recv() {
            self.unanswered -= 1;
            if self.awaited == Some(number) {
                self.awaited = None;
                self.reported = *answer.as_ref().unwrap_or(&self.reported);
                return Some(answer);
            }
        }
        None
    }

    /// The number of requests that the backend may not have executed yet.
    pub(super) fn unanswered(&self) -> u32 {
        self.unanswered
    }

    /// Returns the size if it differs from the one that was last reported. Returns `None` while the
    /// supervisor waits for an answer, which contains the size.
    pub(super) fn change(&mut self) -> Option<u64> {
        let size = self.image.size();
        let changed = self.awaited.is_none() && size != self.reported;
        changed.then(|| {
            self.reported = size;
            size
        })
    }

    /// Starts over with a new supervisor, to which `size` is reported. It does not get the answers to the
    /// requests of the last one.
    pub(super) fn start_over(&mut self, size: u64) {
        self.awaited = None;
        self.reported = size;
    }
}

/// The thread for sizes.
struct SizeThread {
    image: Arc<dyn Image>,
    waker: Waker,
    /// See [`Resizer::checking`].
    checking: Arc<AtomicBool>,
    /// Whether the last read failed.
    failing: bool,
}

impl SizeThread {
    fn run(mut self, tasks: &Receiver<Task>, answers: &Sender<(u64, Result<u64>)>) {
        let checks = self.image.size_checks();
        loop {
            let received = match checks {
                SizeChecks::Every(interval) => tasks.recv_timeout(interval),
                SizeChecks::Never | SizeChecks::OnRequest => {
                    tasks.recv().map_err(RecvTimeoutError::from)
                }
            };
            match received {
                Ok(Task::Request(number, request)) => {
                    let answer = self.execute(request);
                    if answers.send((number, answer)).is_err() {
                        return;
                    }
                    self.waker.wake();
                }
                Ok(Task::Check) => {
                    let has_changed = self.refresh();
                    self.checking.store(false, Ordering::Release);
                    if has_changed {
                        self.waker.wake();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.refresh();
                    // Also without a change: the control thread checks conditions that cause no event.
                    self.waker.wake();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn execute(&self, request: SizeRequest) -> Result<u64> {
        match request {
            SizeRequest::Refresh => {}
            SizeRequest::Resize(size) => match self.image.resize() {
                Some(resize) => resize.grow(size)?,
                None => return Err(unsupported("this volume cannot be resized")),
            },
            SizeRequest::Shrink(size) => match self.image.shrink() {
                Some(shrink) => shrink.shrink_to(size)?,
                None => return Err(unsupported("this volume cannot be made smaller")),
            },
        }
        self.image.refresh_size()
    }

    /// Reads the size. Returns whether it has changed.
    fn refresh(&mut self) -> bool {
        let before = self.image.size();
        match self.image.refresh_size() {
            Ok(size) => {
                self.failing = false;
                if size != before {
                    tracing::info!(before, size, "the volume has another size at the backend");
                }
                size != before
            }
            Err(error) => {
                // Logged once: a backend that does not answer for hours must not fill the log.
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!("cannot read the volume's size: {}", error.report());
                }
                false
            }
        }
    }
}

fn unsupported(message: &str) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cleat_backend::Resize;
    use cleat_core::clock::{Clock, SystemClock};

    use super::*;
    use crate::fake_image::FakeImage;

    fn answer(resizer: &mut Resizer) -> Result<u64> {
        let deadline = SystemClock.now() + Duration::from_secs(10);
        loop {
            if let Some(answer) = resizer.answer() {
                return answer;
            }
            assert!(SystemClock.now() < deadline, "no answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_request_is_answered_and_its_size_is_not_reported_again() {
        let image = Arc::new(FakeImage::default());
        let mut resizer = Resizer::start(image.clone(), Waker::new().unwrap()).unwrap();
        assert_eq!(resizer.change(), None);
        resizer.request(SizeRequest::Resize(4096)).unwrap();
        assert_eq!(answer(&mut resizer).unwrap(), 4096);
        assert_eq!(resizer.change(), None);
        resizer.request(SizeRequest::Shrink(512)).unwrap();
        assert_eq!(answer(&mut resizer).unwrap_err().kind(), ErrorKind::Unsupported);
        // As a backend does that gets notifications of changes.
        image.grow(8192).unwrap();
        assert_eq!((resizer.change(), resizer.change()), (Some(8192), None));
    }

    #[test]
    fn the_size_is_read_at_the_interval_of_the_backend() {
        let image =
            Arc::new(FakeImage::with_size_checks(SizeChecks::Every(Duration::from_millis(1))));
        let waker = Waker::new().unwrap();
        let resizer = Resizer::start(image.clone(), waker).unwrap();
        let deadline = SystemClock.now() + Duration::from_secs(10);
        while image.size_reads.load(Ordering::SeqCst) < 3 {
            assert!(SystemClock.now() < deadline, "the size is not read");
            std::thread::yield_now();
        }
        drop(resizer);
    }

    #[test]
    fn a_ping_reads_the_size_only_where_the_backend_requests_it() {
        let waker = Waker::new().unwrap();
        let image = Arc::new(FakeImage::with_size_checks(SizeChecks::OnRequest));
        let mut resizer = Resizer::start(image.clone(), waker.clone()).unwrap();
        image.grow_at_backend(4096);
        resizer.check_on_ping();
        let deadline = SystemClock.now() + Duration::from_secs(10);
        while resizer.change() != Some(4096) {
            assert!(SystemClock.now() < deadline, "the new size is not reported");
            std::thread::yield_now();
        }
        let other = Arc::new(FakeImage::default());
        let mut resizer = Resizer::start(other.clone(), waker).unwrap();
        resizer.check_on_ping();
        // The thread would have executed the check before the request.
        resizer.request(SizeRequest::Refresh).unwrap();
        answer(&mut resizer).unwrap();
        assert_eq!(other.size_reads.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn while_a_backend_hangs_checks_take_no_place_of_a_request() {
        let image = Arc::new(FakeImage::with_size_checks(SizeChecks::OnRequest));
        let mut resizer = Resizer::start(image.clone(), Waker::new().unwrap()).unwrap();
        let hangs = image.turn.lock().unwrap();
        resizer.check_on_ping();
        // Neither this check, which the thread may not have begun, nor a further one takes the place of the request.
        resizer.check_on_ping();
        resizer.request(SizeRequest::Resize(4096)).unwrap();
        resizer.check_on_ping();
        drop(hangs);
        assert_eq!(answer(&mut resizer).unwrap(), 4096);
        assert_eq!(image.size_reads.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn while_a_backend_hangs_two_requests_fit_and_each_gets_its_own_answer() {
        let image = Arc::new(FakeImage::default());
        let mut resizer = Resizer::start(image.clone(), Waker::new().unwrap()).unwrap();
        let hangs = image.turn.lock().unwrap();
        resizer.request(SizeRequest::Resize(512)).unwrap();
        while resizer.image.size() == 0 {
            std::thread::yield_now();
        }
        // Another supervisor adopts the worker and sends a request, too.
        resizer.start_over(512);
        resizer.request(SizeRequest::Resize(1024)).unwrap();
        let error = resizer.request(SizeRequest::Refresh).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(resizer.answer().is_none());
        drop(hangs);
        assert_eq!(answer(&mut resizer).unwrap(), 1024);
        assert!(resizer.answer().is_none());
    }
}
