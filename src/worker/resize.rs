//! The volume's size, asked for and changed on a thread of its own: a backend that hangs must not
//! take the control thread with it, which has to answer for the worker all the same.
//!
//! The thread also reads the size as often as the backend asks for
//! ([`Image::size_check_interval`]), so that a volume that has grown at the backend is noticed. A
//! backend that is notified of changes stores the size that [`Image::size`] returns and wakes the control
//! thread.

use std::sync::Arc;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

use cleat_backend::{Image, Waker};
use cleat_core::error::{Error, ErrorKind, Result};

/// Enough for what a backend's library does; touched pages are what costs memory.
const STACK_BYTES: usize = 256 << 10;

/// What the control thread knows of the size, and the way to the thread that asks.
pub(super) struct Resizer {
    image: Arc<dyn Image>,
    orders: Sender<(u64, SizeRequest)>,
    answers: Receiver<(u64, Result<u64>)>,
    /// The number of the last order.
    last: u64,
    /// Orders that have not been answered, whoever waits for them.
    under_way: u32,
    /// The order whose answer the supervisor waits for.
    owed: Option<u64>,
    /// What the supervisor knows.
    told: u64,
}

/// What the supervisor may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SizeRequest {
    Refresh,
    Resize(u64),
    Shrink(u64),
}

impl Resizer {
    /// Starts the thread, which ends with this; `waker` wakes the control thread.
    pub(super) fn start(image: Arc<dyn Image>, waker: Waker) -> Result<Self> {
        let (orders, incoming) = bounded(1);
        // An order under way and one that waits: nobody ever waits to answer.
        let (outgoing, answers) = bounded(2);
        image.watch_changes(waker.clone());
        let thread = SizeThread { image: Arc::clone(&image), waker, failing: false };
        std::thread::Builder::new()
            .name("size".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || thread.run(&incoming, &outgoing))
            .map_err(|e| Error::from_io("cannot start the thread that asks for the size", e))?;
        let told = image.size();
        Ok(Self { image, orders, answers, last: 0, under_way: 0, owed: None, told })
    }

    /// Has the thread carry `order` out; the answer comes through [`Resizer::answer`].
    ///
    /// # Errors
    /// `Unavailable` while earlier orders are stuck at the backend.
    pub(super) fn order(&mut self, order: SizeRequest) -> Result<()> {
        self.last += 1;
        match self.orders.try_send((self.last, order)) {
            Ok(()) => {
                self.owed = Some(self.last);
                self.under_way += 1;
                Ok(())
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                let message = "the backend has not answered earlier questions for the size";
                Err(Error::new(ErrorKind::Unavailable, message)
                    .with_repair("see whether the backend can be reached"))
            }
        }
    }

    /// The answer that the supervisor waits for, once it is there.
    pub(super) fn answer(&mut self) -> Option<Result<u64>> {
        while let Ok((number, answer)) = self.answers.try_recv() {
            self.under_way -= 1;
            if self.owed == Some(number) {
                self.owed = None;
                self.told = *answer.as_ref().unwrap_or(&self.told);
                return Some(answer);
            }
        }
        None
    }

    /// Orders that the backend may not have carried out yet.
    pub(super) fn under_way(&self) -> u32 {
        self.under_way
    }

    /// The size, where it is not the one that the supervisor knows. Not while it waits for an
    /// answer, which says it too.
    pub(super) fn change(&mut self) -> Option<u64> {
        let size = self.image.size();
        let changed = self.owed.is_none() && size != self.told;
        changed.then(|| {
            self.told = size;
            size
        })
    }

    /// Another supervisor is told `size`; it waits for no answer of ours.
    pub(super) fn start_over(&mut self, size: u64) {
        self.owed = None;
        self.told = size;
    }
}

/// The thread.
struct SizeThread {
    image: Arc<dyn Image>,
    waker: Waker,
    failing: bool,
}

impl SizeThread {
    fn run(mut self, orders: &Receiver<(u64, SizeRequest)>, answers: &Sender<(u64, Result<u64>)>) {
        let interval = self.image.size_check_interval();
        loop {
            let received = match interval {
                Some(interval) => orders.recv_timeout(interval),
                None => orders.recv().map_err(RecvTimeoutError::from),
            };
            match received {
                Ok((number, order)) => {
                    let answer = self.carry_out(order);
                    if answers.send((number, answer)).is_err() {
                        return;
                    }
                    self.waker.wake();
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.look();
                    // Even without a change: the control thread has other conditions to check that nothing
                    // notifies it of.
                    self.waker.wake();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn carry_out(&self, order: SizeRequest) -> Result<u64> {
        match order {
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

    fn look(&mut self) {
        let before = self.image.size();
        match self.image.refresh_size() {
            Ok(size) => {
                self.failing = false;
                if size != before {
                    tracing::info!(before, size, "the volume has another size at the backend");
                }
            }
            Err(error) => {
                // Once: a backend that is away for hours must not fill the log.
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!("the volume's size cannot be asked for: {}", error.report());
                }
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

    use super::*;
    use crate::fake_image::FakeImage;

    fn answer(resizer: &mut Resizer) -> Result<u64> {
        let until = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(answer) = resizer.answer() {
                return answer;
            }
            assert!(std::time::Instant::now() < until, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_order_is_answered_and_tells_no_change_besides() {
        let image = Arc::new(FakeImage::default());
        let mut resizer = Resizer::start(image.clone(), Waker::new().unwrap()).unwrap();
        assert_eq!(resizer.change(), None);
        resizer.order(SizeRequest::Resize(4096)).unwrap();
        assert_eq!(answer(&mut resizer).unwrap(), 4096);
        assert_eq!(resizer.change(), None);
        resizer.order(SizeRequest::Shrink(512)).unwrap();
        assert_eq!(answer(&mut resizer).unwrap_err().kind(), ErrorKind::Unsupported);
        // As a backend does that is told of changes.
        image.grow(8192).unwrap();
        assert_eq!((resizer.change(), resizer.change()), (Some(8192), None));
    }

    #[test]
    fn a_backend_that_hangs_costs_two_orders_and_no_answer_goes_to_the_wrong_one() {
        let image = Arc::new(FakeImage::default());
        let mut resizer = Resizer::start(image.clone(), Waker::new().unwrap()).unwrap();
        let hangs = image.turn.lock().unwrap();
        resizer.order(SizeRequest::Resize(512)).unwrap();
        while resizer.image.size() == 0 {
            std::thread::yield_now();
        }
        // Another supervisor comes and asks, too.
        resizer.start_over(512);
        resizer.order(SizeRequest::Resize(1024)).unwrap();
        let error = resizer.order(SizeRequest::Refresh).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(resizer.answer().is_none());
        drop(hangs);
        assert_eq!(answer(&mut resizer).unwrap(), 1024);
        assert!(resizer.answer().is_none());
    }
}
