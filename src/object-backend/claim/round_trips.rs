//! How many requests of a take-over follow each other: with a store that is far away, they are its time.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cleat_core::clock::SystemClock;
use cleat_object::codec::Description;
use cleat_object::name::{Nonce, VolumeId};
use cleat_object::store::directory::Directory;
use cleat_object::store::{Pending, Store, StoreError};
use cleat_object::volume::{Config, Place, Volume};

use super::*;
use crate::executor::block_until;
use crate::timeouts::after;

/// A store whose requests end when the next round begins. All requests of a round are on their way together.
struct Rounds {
    store: Directory,
    round: AtomicU64,
}

impl Rounds {
    /// Waits for the next round, and then executes a request.
    fn trip<'a, T: Send + 'a>(&'a self, request: Pending<'a, T>) -> Pending<'a, T> {
        let end = self.round.load(Ordering::Relaxed) + 1;
        Box::pin(async move {
            let is_over = || self.round.load(Ordering::Relaxed) >= end;
            poll_fn(|_| if is_over() { Poll::Ready(()) } else { Poll::Pending }).await;
            block_until(after(Duration::from_secs(60)), request).expect("a directory answers")
        })
    }

    /// Runs a future. Returns the number of its rounds, too.
    fn count<T>(&self, future: impl Future<Output = T>) -> (T, u64) {
        let before = self.round.load(Ordering::Relaxed);
        let mut future = pin!(future);
        loop {
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return (result, self.round.load(Ordering::Relaxed) - before);
            }
            self.round.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Store for Rounds {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.trip(self.store.create(name, bytes))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.trip(self.store.read(name, range))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.trip(self.store.list(prefix, after))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.trip(self.store.delete(name))
    }

    fn back_off(&self, _: u32) -> Pending<'_, ()> {
        self.trip(Box::pin(std::future::ready(())))
    }
}

/// Opens the volume as a worker does, without the wait for a client that has a claim.
async fn take_over(store: Arc<Rounds>, number: u8) -> (Volume, u64) {
    let nonce = Nonce([number; 16]);
    let place = Place::find_alone(store, nonce).await.unwrap();
    let claimant = Claimant {
        node: format!("node-{number}"),
        mapping_id: format!("mapping-{number}"),
        take_over: true,
        ..Claimant::default()
    };
    let attempt = Attempt {
        place: &place,
        name: "v",
        claimant: &claimant,
        purpose: Purpose::Open,
        usage: Use::Serve,
        only: None,
        clock: &SystemClock,
    };
    let epoch = attempt.acquire().await.unwrap().unwrap();
    (place.open(epoch, Config::default()).await.unwrap(), epoch)
}

/// The round trips of a take-over from a writer that has written `slots` objects since its checkpoint.
fn round_trips(slots: u64) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let inner = Directory::open(directory.path(), 1).unwrap();
    let store = Arc::new(Rounds { store: inner, round: AtomicU64::new(0) });
    let description = Description::new(VolumeId([1; 16]), Nonce([2; 16]), 1 << 30, 1 << 20);
    store.count(Volume::create(Arc::clone(&store) as _, &description)).0.unwrap();
    let ((writer, _), _) = store.count(take_over(Arc::clone(&store), 10));
    let writing = async {
        for number in 0..slots {
            writer.write(number * 4096, &[1; 4096]).await.unwrap();
            writer.flush().await.unwrap();
        }
    };
    store.count(async {
        let (mut run, mut writing) = (pin!(writer.run()), pin!(writing));
        poll_fn(|context| {
            assert!(run.as_mut().poll(context).is_pending(), "the volume has failed");
            writing.as_mut().poll(context)
        })
        .await;
    });
    store.count(take_over(Arc::clone(&store), 20)).1
}

#[test]
fn a_take_over_has_a_fixed_number_of_round_trips_and_one_for_some_slots() {
    let trips = [0, 1, 16, 160].map(round_trips);
    // docs/object.md has these numbers.
    assert!(trips[0] <= 15 && trips[1] <= 15, "{trips:?}");
    assert!(trips[2] <= 15 + 2 && trips[3] <= 15 + 16, "{trips:?}");
}
