//! BLOCK_STATUS. To walk over a volume's extents may take long, in a call that waits, so a thread beside
//! the connection's asks the volume, one question after the other. It is started by the first one; the
//! kernel's driver never asks any.
//!
//! Bounds: with [`MAX_QUESTIONS`] unanswered, the loop stops reading from the socket; each answer has
//! [`MAX_EXTENTS`] extents at most; of questions that fail, the log has one line in [`TELL_EVERY`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::connection::Connection;
use cleat_backend::{Image, Waker};
use cleat_core::error::ErrorKind;
use cleat_core::request::IoError;
use cleat_core::volume::Extent;
use cleat_nbd::structured;
use cleat_nbd::wire::simple_reply;

/// BlockStatus of one connection that are not answered.
const MAX_QUESTIONS: usize = 16;

/// Extents of one answer, which then fits a small buffer.
const MAX_EXTENTS: usize = (4096 - structured::STATUS_HEADER_LEN) / structured::EXTENT_LEN;

/// Clients ask as often as they like, over as many connections, and must not fill the log with it.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Of the whole process, which has one volume.
static FAILURES: Mutex<Failures> = Mutex::new(Failures { told: None, untold: 0 });

/// Failures, of which the first is told, and later ones in numbers.
struct Failures {
    told: Option<Instant>,
    untold: u64,
}

impl Failures {
    /// Counts one. When it is to be told: how many were not, since the one that was.
    fn count(&mut self, now: Instant) -> Option<u64> {
        if self.told.is_some_and(|told| now.duration_since(told) < TELL_EVERY) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

fn tell(message: &'static str, error: &dyn std::fmt::Display) {
    let due = FAILURES.lock().unwrap_or_else(PoisonError::into_inner).count(Instant::now());
    if let Some(before) = due {
        tracing::warn!(%error, before, "{message}");
    }
}

/// What a connection asks of its volume.
pub(super) struct BlockStatus {
    image: Arc<dyn Image>,
    answers: Arc<Answers>,
    /// To the thread, once there is one.
    sender: Option<Sender<Question>>,
    unanswered: usize,
}

struct Answers {
    list: Mutex<Vec<Answer>>,
    waker: Waker,
}

struct Answer {
    cookie: u64,
    extents: Result<Vec<Extent>, IoError>,
}

/// Answered when it is dropped, too: with an error.
struct Question {
    cookie: u64,
    offset: u64,
    length: u64,
    limit: usize,
    to: Option<Arc<Answers>>,
}

/// The thread; ends with the connection.
fn survey(image: &dyn Image, questions: &Receiver<Question>) {
    for question in questions {
        let Question { offset, length, limit, .. } = question;
        let extents = extents_of(image, offset, length, limit).map_err(|error| {
            tell("a client's question for block status failed", &error.report());
            if error.kind() == ErrorKind::Fenced { IoError::Fenced } else { IoError::Broken }
        });
        question.answer(extents);
    }
}

/// The extents of a range; one of data where the backend does not report holes.
fn extents_of(
    image: &dyn Image,
    offset: u64,
    length: u64,
    limit: usize,
) -> cleat_core::error::Result<Vec<Extent>> {
    match image.extents() {
        Some(extents) => extents.list(offset, length, limit),
        None => Ok(vec![Extent { length, hole: false }]),
    }
}

impl Question {
    fn answer(mut self, extents: Result<Vec<Extent>, IoError>) {
        self.give(extents);
    }

    fn give(&mut self, extents: Result<Vec<Extent>, IoError>) {
        let Some(to) = self.to.take() else { return };
        let answer = Answer { cookie: self.cookie, extents };
        to.list.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        to.waker.wake();
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.give(Err(IoError::Broken));
    }
}

impl BlockStatus {
    pub(super) fn new(image: Arc<dyn Image>, waker: Waker) -> Self {
        let answers = Arc::new(Answers { list: Mutex::default(), waker });
        Self { image, answers, sender: None, unanswered: 0 }
    }

    /// How many are not answered.
    pub(super) fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Whether another one may be asked.
    pub(super) fn has_room(&self) -> bool {
        self.unanswered < MAX_QUESTIONS
    }

    fn ask(&mut self, cookie: u64, offset: u64, length: u64, limit: usize) {
        let to = Some(Arc::clone(&self.answers));
        let question = Question { cookie, offset, length, limit, to };
        self.unanswered += 1;
        if self.sender.is_none() {
            let (sender, receiver) = bounded(MAX_QUESTIONS);
            let image = Arc::clone(&self.image);
            let thread = std::thread::Builder::new().name("block-status".to_owned());
            match thread.spawn(move || survey(&*image, &receiver)) {
                Ok(_) => self.sender = Some(sender),
                Err(error) => tell("no thread for a client's block status", &error),
            }
        }
        // A question that cannot be asked is dropped, which answers it; where the thread has died of a
        // panic, the next one starts another.
        self.sender.take_if(|sender| sender.try_send(question).is_err());
    }

    fn take(&mut self) -> Vec<Answer> {
        if self.unanswered == 0 {
            return Vec::new();
        }
        let mut list = self.answers.list.lock().unwrap_or_else(PoisonError::into_inner);
        self.unanswered -= list.len();
        std::mem::take(&mut list)
    }
}

impl Connection {
    /// Asks the volume.
    pub(super) fn ask_status(&mut self, cookie: u64, offset: u64, length: u64, one: bool) {
        if self.fail_io {
            return self.sending.push(&simple_reply(cookie, Err(IoError::Broken)));
        }
        self.block_status.ask(cookie, offset, length, if one { 1 } else { MAX_EXTENTS });
    }

    /// Replies to what the volume has answered.
    pub(super) fn tell_statuses(&mut self) {
        for Answer { cookie, extents } in self.block_status.take() {
            let extents = match extents {
                Ok(extents) if !self.fail_io && !extents.is_empty() => extents,
                failed => {
                    let error = failed.err().unwrap_or(IoError::Broken);
                    self.sending.push(&simple_reply(cookie, Err(error)));
                    continue;
                }
            };
            match self.pool.take(structured::status_len(extents.len())) {
                Some(mut buffer) => {
                    structured::put_status(buffer.payload_mut(), cookie, &extents);
                    self.sending.push_buffer(buffer, &mut self.pool);
                }
                None => {
                    // Payloads have all the memory; the client asks for the rest.
                    let mut bytes = [0; structured::STATUS_HEADER_LEN + structured::EXTENT_LEN];
                    structured::put_status(&mut bytes, cookie, &extents[..1]);
                    self.sending.push(&bytes);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_told_and_the_rest_in_numbers() {
        let mut failures = Failures { told: None, untold: 0 };
        let start = Instant::now();
        assert_eq!(failures.count(start), Some(0));
        for ms in 0..1000 {
            assert_eq!(failures.count(start + Duration::from_millis(ms)), None);
        }
        assert_eq!(failures.count(start + TELL_EVERY), Some(1000));
        assert_eq!(failures.count(start + TELL_EVERY), None);
        assert_eq!(failures.count(start + 3 * TELL_EVERY), Some(1));
    }
}
