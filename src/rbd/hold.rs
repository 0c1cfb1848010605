//! Holds: a record in the image's metadata by which a client has the writer of an image hold its requests, while it
//! takes snapshots of several images. The client writes the record, and the writer writes its answer into it.
//!
//! librbd's own groups cannot do this for images in use: `rbd_group_snap_create` requests the exclusive lock of each
//! image, which a claim does not give away (EROFS). Their snapshots are not of use for clones, either: before
//! Ceph 19, librbd clones only snapshots of the user namespace.
//!
//! The record names one client by its address and the generation of its claim. So a record that an earlier client
//! has left, or that a clone has inherited, is not for the present one.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cleat_backend::Waker;
use cleat_core::error::{Error, ErrorKind, Result};
use librbd::Image;
use serde::{Deserialize, Serialize};

use crate::claim::record::Client;
use crate::errors::image_error;
use crate::timeouts::{answer, with_timeout};

/// The metadata key.
pub(crate) const KEY: &str = "cleat.hold";

/// The maximum length of a record, in bytes.
const MAX_RECORD: usize = 4096;

/// The maximum length of a reason, in characters.
const MAX_REASON: usize = 200;

/// The timeout of writing an answer. The thread that waits also answers the supervisor.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A hold that a client wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// A random number, which tells this hold from others.
    id: u64,
    /// The address of the client that should hold its requests.
    client: String,
    /// The generation of its claim.
    generation: u64,
    pub(crate) state: State,
}

/// The answer of the writer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// There is none yet.
    Wanted,
    /// No request runs.
    Held,
    /// Requests run, for this reason.
    Refused(String),
}

impl Record {
    /// Makes the record of a new hold for `writer`.
    pub(crate) fn new(id: u64, writer: &Client) -> Self {
        let (client, generation) = (writer.address.clone(), writer.generation);
        Self { id, client, generation, state: State::Wanted }
    }

    /// Parses a record. Returns `None` for text that is none.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        (text.len() <= MAX_RECORD).then(|| serde_json::from_str(text).ok()).flatten()
    }

    /// Returns the JSON text of the record.
    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write a hold as JSON").with_source(error)
        })
    }

    /// Returns whether both are the same hold, whatever the answer is.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.id, &self.client, self.generation) == (other.id, &other.client, other.generation)
    }

    fn is_for(&self, client: &Client) -> bool {
        (&self.client, self.generation) == (&client.address, client.generation)
    }
}

/// The hold that is wanted of this process. The background thread follows the record, and the owner of the volume
/// reads it.
#[derive(Default)]
pub(crate) struct Wanted {
    current: Mutex<Current>,
    waker: OnceLock<Waker>,
}

#[derive(Default)]
struct Current {
    /// The number of the last hold.
    number: u64,
    record: Option<Record>,
}

impl Wanted {
    /// Wakes `waker` when the wanted hold changes.
    pub(crate) fn watch(&self, waker: Waker) {
        // The owner of the volume calls this once.
        let _ = self.waker.set(waker);
    }

    /// Follows the record in the image, which has the text `text`. `own` is the claim of this process.
    pub(crate) fn follow(&self, text: Option<&str>, own: Option<&Client>) {
        let found = text.and_then(Record::parse);
        let found = found.filter(|record| own.is_some_and(|own| record.is_for(own)));
        let mut current = self.lock();
        let is_known = match (&current.record, &found) {
            (Some(known), Some(found)) => known.is_same(found),
            (None, found) => found.is_none(),
            (Some(_), None) => false,
        };
        if is_known {
            return;
        }
        // An answered record that is not known was answered by this process before it was gone for a while.
        current.record = found.filter(|found| found.state == State::Wanted);
        current.number += 1;
        drop(current);
        self.waker.get().into_iter().for_each(Waker::wake);
    }

    /// Returns the number of the hold that is wanted.
    pub(crate) fn number(&self) -> Option<u64> {
        let current = self.lock();
        current.record.is_some().then_some(current.number)
    }

    /// Writes the answer to hold `number` into `image`.
    ///
    /// # Errors
    /// Returns `Aborted` if that hold is not wanted any more, and the cluster's error otherwise.
    pub(crate) fn answer(
        &self,
        number: u64,
        state: State,
        image: &Arc<Image>,
        name: &str,
    ) -> Result<()> {
        let current = self.lock();
        let wanted = current.record.clone().filter(|_| current.number == number);
        drop(current);
        let wanted = wanted.ok_or_else(|| {
            Error::new(ErrorKind::Aborted, format!("that hold of {name} is not wanted any more"))
        })?;
        let text = Record { state, ..wanted }.text()?;
        let (image, what, name) = (Arc::clone(image), answer(name), name.to_owned());
        // Without the lock: a change under the lock would notify this client again.
        let put = move || image.metadata_put(KEY, &text).map_err(|e| image_error(e, &name));
        with_timeout(ANSWER_TIMEOUT, &what, put)
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the state in which requests run for `reason`.
pub(crate) fn refused(reason: &str) -> State {
    State::Refused(reason.chars().take(MAX_REASON).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(address: &str, generation: u64) -> Client {
        Client { address: address.to_owned(), generation, ..Client::default() }
    }

    fn follow(wanted: &Wanted, record: &Record, own: &Client) -> Option<u64> {
        wanted.follow(Some(&record.text().unwrap()), Some(own));
        wanted.number()
    }

    #[test]
    fn only_a_hold_for_the_present_claim_is_wanted() {
        let (wanted, own) = (Wanted::default(), client("1.2.3.4:0/5", 7));
        let record = Record::new(1, &own);
        for other in [client("1.2.3.4:0/5", 8), client("1.2.3.4:0/6", 7)] {
            assert_eq!(follow(&wanted, &record, &other), None);
        }
        wanted.follow(Some(&record.text().unwrap()), None);
        assert_eq!(wanted.number(), None, "the image is not claimed");
        for garbage in ["", "{}", &"x".repeat(MAX_RECORD + 1)] {
            wanted.follow(Some(garbage), Some(&own));
            assert_eq!(wanted.number(), None, "{garbage}");
        }
        assert!(follow(&wanted, &record, &own).is_some());
    }

    #[test]
    fn each_hold_has_its_own_number_and_an_answer_does_not_change_it() {
        let (wanted, own) = (Wanted::default(), client("1.2.3.4:0/5", 7));
        let first = Record::new(1, &own);
        let number = follow(&wanted, &first, &own);
        assert!(number.is_some());
        let held = Record { state: State::Held, ..first.clone() };
        assert_eq!(follow(&wanted, &held, &own), number);
        let second = follow(&wanted, &Record::new(2, &own), &own);
        assert!(second.is_some() && second != number);
        wanted.follow(None, Some(&own));
        assert_eq!(wanted.number(), None);
        assert_eq!(follow(&wanted, &held, &own), None, "it was answered already");
    }

    #[test]
    fn a_reason_fits_the_record() {
        let record = Record {
            state: refused(&"\u{1}ü".repeat(5000)),
            ..Record::new(1, &client("a:1/2", 1))
        };
        assert_eq!(Record::parse(&record.text().unwrap()), Some(record));
    }
}
