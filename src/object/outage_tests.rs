//! Tests of an outage of the store that lasts for longer than a request is repeated.

use std::future::ready;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::store::{Pending, Store, StoreError};
use crate::tests::{Memory, byte_at, create, open, with_volume, yield_once};
use crate::volume::{Config, Failure, Volume};

/// The map pages that the tests use.
const PAGES: u64 = 8;

/// The failures of one outage: more than the attempts of a request.
const FAILURES: u32 = 50;

/// A store that fails to read pages of the map.
struct Failing {
    memory: Memory,
    failures: AtomicU32,
    error: StoreError,
}

impl Failing {
    fn new(error: StoreError) -> Arc<Self> {
        Arc::new(Self { memory: Memory::default(), failures: AtomicU32::new(0), error })
    }

    fn begin_outage(&self) {
        self.failures.store(FAILURES, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.failures.load(Ordering::Relaxed) == 0
    }
}

impl Store for Failing {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.memory.create(name, bytes)
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        let less = |left: u32| left.checked_sub(1);
        let fails = name.starts_with("page/")
            && self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        match fails {
            true => Box::pin(ready(Err(self.error.clone()))),
            false => self.memory.read(name, range),
        }
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.memory.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.memory.delete(name)
    }

    fn back_off(&self, _attempt: u32) -> Pending<'_, ()> {
        Box::pin(yield_once())
    }
}

/// Writes one sector to each page.
async fn write_all(volume: &Volume, byte: u8) -> Result<(), Failure> {
    for page in 0..PAGES {
        volume.write(page << 20, &[byte; 512]).await?;
    }
    volume.flush().await
}

/// Waits until the map has everything, and a checkpoint with it was written. `before` checkpoints precede it.
async fn settle(volume: &Volume, before: u64) -> Result<(), Failure> {
    volume.request_checkpoint();
    while volume.status().checkpoints <= before || volume.status().tail_bytes > 0 {
        assert_eq!(volume.failure(), None);
        yield_once().await;
    }
    Ok(())
}

/// Opens a volume whose map is in the store and not in memory.
fn prepare(failing: &Arc<Failing>) -> Volume {
    let store: Arc<dyn Store> = Arc::<Failing>::clone(failing);
    create(&store, PAGES << 20);
    let config = Config { map_bytes: 4 << 10, ..Config::default() };
    let first = open(&store, 1, config.clone()).unwrap();
    with_volume(&first, async {
        write_all(&first, 1).await?;
        settle(&first, 0).await
    })
    .unwrap();
    let second = open(&store, 2, config).unwrap();
    // The first checkpoint of a writer follows its open.
    with_volume(&second, async { settle(&second, 0).await }).unwrap();
    second
}

#[test]
fn a_long_outage_while_the_map_is_loaded_does_not_end_the_volume() {
    for error in [StoreError::Unclear("503".into()), StoreError::Refused("403".into())] {
        let failing = Failing::new(error);
        let volume = prepare(&failing);
        with_volume(&volume, async {
            failing.begin_outage();
            for byte in [2, 3] {
                let before = volume.status().checkpoints;
                write_all(&volume, byte).await?;
                settle(&volume, before).await?;
                assert!(failing.is_over(), "no page was loaded");
            }
            for page in 0..PAGES {
                assert_eq!(byte_at(&volume, page << 20).await?, 3);
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_read_during_an_outage_ends_with_the_error_and_succeeds_later() {
    let failing = Failing::new(StoreError::Unclear("503".into()));
    let volume = prepare(&failing);
    with_volume(&volume, async {
        failing.begin_outage();
        let mut failed = 0;
        while !failing.is_over() {
            let read = byte_at(&volume, 0).await;
            failed += u32::from(matches!(read, Err(Failure::Store { .. })));
        }
        assert!((2..FAILURES / 4).contains(&failed), "{failed} reads have failed");
        assert_eq!(byte_at(&volume, 0).await, Ok(1));
        Ok(())
    })
    .unwrap();
}
