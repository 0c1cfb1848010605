//! Repairs that end anywhere, and others that follow.

use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use super::{Damaged, config, descriptions, on, with_two_checkpoints};
use crate::clone_tests::Stores;
use crate::name::Name;
use crate::store::{Pending, Store, StoreError};
use crate::tests::Memory;
use crate::volume::Failure;

/// A store whose client dies: after some operations that change something, nothing is executed and nothing is answered.
struct Dying {
    memory: Arc<Memory>,
    left: AtomicU64,
}

impl Dying {
    fn is_alive(&self) -> bool {
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }
}

impl Store for Dying {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        match self.is_alive() {
            true => self.memory.create(name, bytes),
            false => Box::pin(std::future::pending()),
        }
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.memory.read(name, range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.memory.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        match self.is_alive() {
            true => self.memory.delete(name),
            false => Box::pin(std::future::pending()),
        }
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.memory.back_off(attempt)
    }
}

/// Runs a future until it waits for a store that has died. The stores answer at once, so it waits for nothing else.
fn run<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    // Parts wake each other.
    for _ in 0..1000 {
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(result);
        }
    }
    None
}

/// Repairs the volume with a client that dies after `changes`. Returns whether it lived to the end.
fn repair_until(damaged: &mut Damaged, changes: u64) -> bool {
    let memory = Arc::clone(&damaged.memory);
    let store: Arc<dyn Store> = Arc::new(Dying { memory, left: AtomicU64::new(changes) });
    let nonce = u8::try_from(100 + changes % 100).unwrap();
    let place = Stores(&[store]).find(0, nonce, damaged.key.as_ref()).unwrap();
    let done = run(async {
        let epoch = place.claim_next("dying").await?;
        place.repair(epoch, config(), &mut on).await?;
        place.release(epoch).await
    });
    done.is_some_and(|result: Result<(), Failure>| {
        result.unwrap();
        true
    })
}

/// Each death leaves a volume that another repair completes, also one that dies in turn.
fn survives(damage: impl Fn(&Damaged)) {
    for description in [&descriptions()[0], &descriptions()[3]] {
        let mut changes = 0;
        loop {
            let mut damaged = with_two_checkpoints(description);
            damage(&damaged);
            let lived = repair_until(&mut damaged, changes);
            if changes % 3 == 1 {
                repair_until(&mut damaged, changes / 2 + 3);
            }
            let found = damaged.plan();
            assert_eq!((found.refusals.len(), found.defects.len()), (0, 0), "{changes}: {found:?}");
            damaged.repair();
            damaged.is_intact();
            if lived {
                break;
            }
            changes += 1;
        }
        assert!(changes > 6, "{changes} changes");
    }
}

#[test]
fn a_checkpoint_is_rebuilt_by_the_second_repair_if_the_first_one_dies() {
    survives(|damaged| damaged.remove(*damaged.names("ckpt/").last().unwrap()));
}

#[test]
fn everything_else_is_repaired_by_the_second_repair_if_the_first_one_dies() {
    // Only objects that nothing refers to.
    survives(|_| {});
    for kind in 0..4 {
        // The last pages are those of the newest checkpoint: a leaf, another one, the index, the accounting.
        survives(|damaged| {
            let pages: Vec<Name> = damaged.names("page/");
            damaged.damage(pages[pages.len() - 1 - kind]);
        });
    }
}
