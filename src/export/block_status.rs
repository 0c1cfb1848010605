//! BLOCK_STATUS requests of one connection. A list of a volume's extents may take long, in a call that
//! blocks, so a thread beside the connection's makes these calls, one at a time. The first request starts
//! the thread; the kernel's driver never sends any.
//!
//! Invariants: at most [`MAX_UNANSWERED`] requests are unanswered (at the bound, the loop stops reading from
//! the socket); a reply has at most [`MAX_EXTENTS`] extents; each request is answered once, also after a
//! panic of the thread. The log has at most one line about failures in the interval of [`LogLimit`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use cleat_backend::{Image, Waker};
use cleat_core::clock::Clock;
use cleat_core::error::ErrorKind;
use cleat_core::request::IoError;
use cleat_core::volume::Extent;
use cleat_nbd::structured;

use super::log_limit::LogLimit;

/// Unanswered requests of one connection.
const MAX_UNANSWERED: usize = 16;

/// Extents of one reply, which then fits a small buffer.
const MAX_EXTENTS: usize = (4096 - structured::STATUS_HEADER_LEN) / structured::EXTENT_LEN;

/// The log lines about failures of the whole process, which serves one volume.
static FAILURES: Mutex<LogLimit> = Mutex::new(LogLimit::new(1));

/// The BLOCK_STATUS requests of a connection. See the file's comment.
pub(super) struct BlockStatus {
    image: Arc<dyn Image>,
    clock: Arc<dyn Clock>,
    answers: Arc<Answers>,
    /// To the thread, once there is one.
    sender: Option<Sender<Question>>,
    unanswered: usize,
}

/// The answer to a BLOCK_STATUS.
pub(super) struct Answer {
    /// The client's number for the request.
    pub(super) cookie: u64,
    /// The extents from the beginning of the range, or why there are none.
    pub(super) extents: Result<Vec<Extent>, IoError>,
}

/// Answers that the connection has not taken yet.
struct Answers {
    list: Mutex<Vec<Answer>>,
    waker: Waker,
}

/// A request for the thread. Dropping it answers it with an error.
struct Question {
    cookie: u64,
    offset: u64,
    length: u64,
    limit: usize,
    to: Option<Arc<Answers>>,
}

impl BlockStatus {
    /// Makes the state of a connection that `waker` wakes.
    pub(super) fn new(image: Arc<dyn Image>, waker: Waker, clock: Arc<dyn Clock>) -> Self {
        let answers = Arc::new(Answers { list: Mutex::default(), waker });
        Self { image, clock, answers, sender: None, unanswered: 0 }
    }

    /// The number of unanswered requests.
    pub(super) fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Whether another request may be asked.
    pub(super) fn has_room(&self) -> bool {
        self.unanswered < MAX_UNANSWERED
    }

    /// Asks for the extents of a range; with `one`, for the first only. Does not block. After a wake-up,
    /// [`BlockStatus::take`] returns the answer.
    pub(super) fn ask(&mut self, cookie: u64, offset: u64, length: u64, one: bool) {
        let to = Some(Arc::clone(&self.answers));
        let limit = if one { 1 } else { MAX_EXTENTS };
        let question = Question { cookie, offset, length, limit, to };
        self.unanswered += 1;
        if self.sender.is_none() {
            self.sender = self.start_thread();
        }
        // A question that cannot be sent is dropped, which answers it. Where the thread has panicked, the
        // next question starts another thread.
        self.sender.take_if(|sender| sender.try_send(question).is_err());
    }

    /// Takes the answers that have arrived.
    pub(super) fn take(&mut self) -> Vec<Answer> {
        if self.unanswered == 0 {
            return Vec::new();
        }
        let mut list = self.answers.list.lock().unwrap_or_else(PoisonError::into_inner);
        self.unanswered -= list.len();
        std::mem::take(&mut list)
    }

    fn start_thread(&self) -> Option<Sender<Question>> {
        let (sender, receiver) = bounded(MAX_UNANSWERED);
        let (image, clock) = (Arc::clone(&self.image), Arc::clone(&self.clock));
        let thread = std::thread::Builder::new().name("block-status".to_owned());
        match thread.spawn(move || answer_all(&*image, &*clock, &receiver)) {
            Ok(_) => Some(sender),
            Err(error) => {
                log_failure("cannot start the thread for block status", &error, self.clock.now());
                None
            }
        }
    }
}

/// The thread. It ends with the connection.
fn answer_all(image: &dyn Image, clock: &dyn Clock, questions: &Receiver<Question>) {
    for mut question in questions {
        let extents = list(image, &question).map_err(|error| {
            log_failure("a client's request for block status failed", &error.report(), clock.now());
            if error.kind() == ErrorKind::Fenced { IoError::Fenced } else { IoError::Broken }
        });
        question.answer(extents);
    }
}

/// Lists the extents; a volume that cannot list its holes is reported as data.
fn list(image: &dyn Image, question: &Question) -> cleat_core::error::Result<Vec<Extent>> {
    let Question { offset, length, limit, .. } = *question;
    match image.extents() {
        Some(extents) => extents.list(offset, length, limit),
        None => Ok(vec![Extent { length, hole: false }]),
    }
}

impl Question {
    fn answer(&mut self, extents: Result<Vec<Extent>, IoError>) {
        let Some(to) = self.to.take() else { return };
        let answer = Answer { cookie: self.cookie, extents };
        to.list.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        to.waker.wake();
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.answer(Err(IoError::Broken));
    }
}

fn log_failure(message: &'static str, error: &dyn std::fmt::Display, now: Instant) {
    let due = FAILURES.lock().unwrap_or_else(PoisonError::into_inner).count(now);
    if let Some(unlogged_before) = due {
        tracing::warn!(%error, unlogged_before, "{message}");
    }
}
