//! Holds: no request of the volume runs while another client takes snapshots of several volumes, so that they show
//! the same moment. The client asks through the storage, and so gets the answer (`cleat_backend::WriteHold`).
//!
//! Invariants: requests run only when the other client cannot take the volume for held, that is, after it has ended
//! the hold, or after a refusal is stored; a hold ends after [`MAX_HOLD`] at the latest, if the storage answers.
//! Without an answer of the storage, requests could not succeed either.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat_backend::{Image, Waker};
use cleat_core::clock::Clock;
use cleat_core::error::Result;
use cleat_export::server::Server;

/// The longest time for which requests are held.
const MAX_HOLD: Duration = Duration::from_secs(10);

/// How long a hold waits for requests that run.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The interval at which a refusal is tried again that could not be stored.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What the holds need of the connections of a volume.
pub(super) trait Connected {
    /// Lets all requests end and starts no others, or fails within `limit` and continues.
    fn pause(&self, limit: Duration) -> Result<()>;

    /// Continues.
    fn resume(&self);
}

impl Connected for Server {
    fn pause(&self, limit: Duration) -> Result<()> {
        Server::pause(self, limit).map(drop)
    }

    fn resume(&self) {
        Server::resume(self);
    }
}

/// The hold of a volume. See the file's comment.
pub(super) struct WriteHold {
    image: Arc<dyn Image>,
    clock: Arc<dyn Clock>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Requests run.
    Free,
    /// No request runs for hold `number`, until it is not wanted any more or until `until`.
    Held { number: u64, until: Instant },
    /// All requests fail. The other client may take the volume for held.
    Failing { number: u64 },
    /// Requests run. Hold `number` was refused.
    Refused { number: u64 },
}

impl WriteHold {
    /// Makes the state of a volume that is not held. Holds wake `waker`.
    pub(super) fn new(image: Arc<dyn Image>, clock: Arc<dyn Clock>, waker: Waker) -> Self {
        if let Some(hold) = image.write_hold() {
            hold.watch(waker);
        }
        Self { image, clock, state: State::Free }
    }

    /// Whether requests are held.
    pub(super) fn is_active(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// The time until the hold ends by itself; `None` without one.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        let State::Held { until, .. } = self.state else { return None };
        Some(until.saturating_duration_since(now))
    }

    /// Begins or ends the hold as the other client wants. `obstacle` is the reason for which none can begin.
    pub(super) fn check(&mut self, connections: &impl Connected, obstacle: Option<&str>) {
        let wanted = self.image.write_hold().and_then(|hold| hold.wanted());
        match self.state {
            State::Held { number, .. } if wanted != Some(number) => {
                connections.resume();
                tracing::info!("the requests of the volume are not held any more");
                self.state = State::Free;
            }
            State::Held { until, .. } if self.clock.now() >= until => {
                let why = format!("the snapshots took longer than {MAX_HOLD:?}");
                if let Err(error) = self.end(connections, &why) {
                    let error = error.report();
                    tracing::warn!(%error, "the requests of the volume stay held");
                    let until = self.clock.now() + RETRY_INTERVAL;
                    self.state = match self.state {
                        State::Held { number, .. } => State::Held { number, until },
                        other => other,
                    };
                }
            }
            _ => {}
        }
        match (self.state, wanted) {
            (State::Refused { number }, Some(wanted)) if number == wanted => {}
            (State::Free | State::Refused { .. }, Some(wanted)) => {
                self.begin(wanted, connections, obstacle);
            }
            (State::Refused { .. }, None) => self.state = State::Free,
            _ => {}
        }
    }

    fn begin(&mut self, number: u64, connections: &impl Connected, obstacle: Option<&str>) {
        let Some(hold) = self.image.write_hold() else { return };
        self.state = State::Refused { number };
        let paused = match obstacle {
            Some(obstacle) => Err(obstacle.to_owned()),
            None => connections.pause(PAUSE_TIMEOUT).map_err(|error| error.report()),
        };
        if let Err(why) = paused {
            tracing::info!("the requests of the volume are not held for a group snapshot: {why}");
            if let Err(error) = hold.refuse(number, &why) {
                // The other client gets no answer, which is a refusal, too.
                tracing::warn!(error = %error.report(), "the refusal cannot be stored");
            }
            return;
        }
        self.state = State::Held { number, until: self.clock.now() + MAX_HOLD };
        tracing::info!("the requests of the volume are held for a group snapshot");
        if let Err(error) = hold.confirm(number) {
            tracing::warn!(error = %error.report(), "the confirmation cannot be stored");
            // It may be stored nevertheless, or later.
            self.state = State::Held { number, until: self.clock.now() };
        }
    }

    /// Ends a hold for `reason`, and lets requests run. Does nothing without one.
    ///
    /// # Errors
    /// Returns the backend's error; the requests stay held then.
    pub(super) fn end(&mut self, connections: &impl Connected, reason: &str) -> Result<()> {
        let (State::Held { number, .. } | State::Failing { number }) = self.state else {
            return Ok(());
        };
        if let Some(hold) = self.image.write_hold()
            && hold.wanted() == Some(number)
        {
            hold.refuse(number, reason)?;
        }
        connections.resume();
        self.state = State::Refused { number };
        tracing::info!("the requests of the volume are not held any more: {reason}");
        Ok(())
    }

    /// Lets the held requests fail, because all requests fail now.
    pub(super) fn pass_failing(&mut self, connections: &impl Connected) {
        if let State::Held { number, .. } = self.state {
            connections.resume();
            self.state = State::Failing { number };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use cleat_core::clock::ManualClock;
    use cleat_core::error::{Error, ErrorKind};

    use super::*;
    use crate::fake_image::FakeImage;

    /// Connections that record what is asked of them.
    #[derive(Default)]
    struct FakeConnections {
        calls: Mutex<Vec<&'static str>>,
        hang: bool,
    }

    impl Connected for FakeConnections {
        fn pause(&self, _: Duration) -> Result<()> {
            self.calls.lock().unwrap().push("pause");
            let hangs = || Error::new(ErrorKind::TimedOut, "a request hangs");
            if self.hang { Err(hangs()) } else { Ok(()) }
        }

        fn resume(&self) {
            self.calls.lock().unwrap().push("resume");
        }
    }

    impl FakeConnections {
        fn taken(&self) -> Vec<&'static str> {
            std::mem::take(&mut *self.calls.lock().unwrap())
        }
    }

    struct Fixture {
        image: Arc<FakeImage>,
        clock: Arc<ManualClock>,
        connections: FakeConnections,
        hold: WriteHold,
    }

    fn fixture() -> Fixture {
        let image = Arc::new(FakeImage::default());
        let clock = Arc::new(ManualClock::new());
        let hold = WriteHold::new(image.clone(), clock.clone(), Waker::new().unwrap());
        Fixture { image, clock, connections: FakeConnections::default(), hold }
    }

    impl Fixture {
        fn wanted(&self, number: Option<u64>) {
            self.image.hold.lock().unwrap().wanted = number;
        }

        fn answers(&self) -> Vec<(u64, bool)> {
            std::mem::take(&mut self.image.hold.lock().unwrap().answers)
        }

        fn set_storage_answers(&self, answers: bool) {
            self.image.hold.lock().unwrap().fails = !answers;
        }

        fn check(&mut self) -> Vec<&'static str> {
            self.hold.check(&self.connections, None);
            self.connections.taken()
        }
    }

    #[test]
    fn requests_are_held_from_the_confirmation_to_the_end() {
        let mut f = fixture();
        assert!(f.check().is_empty());
        f.wanted(Some(3));
        assert_eq!((f.check(), f.answers()), (vec!["pause"], vec![(3, true)]));
        assert!(f.hold.is_active() && f.check().is_empty());
        f.wanted(None);
        assert_eq!(f.check(), ["resume"]);
        assert!(!f.hold.is_active() && f.answers().is_empty());
        // Another client replaces the hold.
        f.wanted(Some(5));
        f.check();
        f.wanted(Some(6));
        assert_eq!(f.check(), ["resume", "pause"]);
        assert_eq!(f.answers(), [(5, true), (6, true)]);
    }

    #[test]
    fn a_hold_that_is_not_ended_is_withdrawn_before_requests_run() {
        let mut f = fixture();
        f.wanted(Some(1));
        f.check();
        assert_eq!(f.hold.timeout(f.clock.now()), Some(MAX_HOLD));
        f.clock.advance(MAX_HOLD);
        f.set_storage_answers(false);
        assert!(f.check().is_empty() && f.hold.is_active(), "the confirmation still stands");
        assert_eq!(f.hold.timeout(f.clock.now()), Some(RETRY_INTERVAL));
        f.set_storage_answers(true);
        f.clock.advance(RETRY_INTERVAL);
        f.answers();
        assert_eq!((f.check(), f.answers()), (vec!["resume"], vec![(1, false)]));
        assert!(f.check().is_empty() && f.answers().is_empty(), "it is not begun again");
    }

    #[test]
    fn a_confirmation_that_may_be_stored_is_withdrawn() {
        let mut f = fixture();
        f.wanted(Some(1));
        f.set_storage_answers(false);
        assert_eq!(f.check(), ["pause"]);
        assert!(f.check().is_empty() && f.hold.is_active());
        f.set_storage_answers(true);
        f.clock.advance(RETRY_INTERVAL);
        assert_eq!(f.check(), ["resume"]);
    }

    #[test]
    fn a_hold_is_refused_with_a_reason_and_once() {
        let mut f = fixture();
        f.wanted(Some(1));
        f.hold.check(&f.connections, Some("it cannot be"));
        assert!(f.connections.taken().is_empty());
        assert_eq!(f.answers(), [(1, false)]);
        assert!(f.check().is_empty() && f.answers().is_empty());
        f.wanted(Some(2));
        f.connections.hang = true;
        assert_eq!((f.check(), f.answers()), (vec!["pause"], vec![(2, false)]));
    }

    #[test]
    fn new_connections_and_failing_requests_end_a_hold() {
        let mut f = fixture();
        f.hold.end(&f.connections, "none").unwrap();
        f.wanted(Some(1));
        f.check();
        f.set_storage_answers(false);
        f.hold.end(&f.connections, "new connections").unwrap_err();
        assert!(f.connections.taken().is_empty() && f.hold.is_active());
        f.hold.pass_failing(&f.connections);
        assert_eq!(f.connections.taken(), ["resume"]);
        f.hold.end(&f.connections, "requests run again").unwrap_err();
        f.set_storage_answers(true);
        f.answers();
        f.hold.end(&f.connections, "requests run again").unwrap();
        assert_eq!(f.answers(), [(1, false)]);
    }

    #[test]
    fn a_volume_without_holds_is_left_alone() {
        let mut f = fixture();
        f.image.hold.lock().unwrap().missing = true;
        f.wanted(Some(1));
        assert!(f.check().is_empty());
    }
}
