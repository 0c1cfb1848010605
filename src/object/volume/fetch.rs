//! Bytes of extents: from the cache, or from the store with as few reads as possible.
//!
//! Two steps: the stored bytes of an extent are fetched, and then the extent is opened, which verifies it.

use std::borrow::Cow;
use std::sync::Arc;

use super::access::Failure;
use super::content::Content;
use super::shared::Shared;
use super::stored::Stored;
use super::tasks::{Part, all};
use crate::codec::Entry;

/// The reads of objects that one request has in flight.
pub(super) const READS_IN_FLIGHT: usize = 16;

/// How extents are read.
#[derive(Clone, Copy)]
pub(super) struct Reads {
    /// The maximum length of one read in bytes.
    pub(super) max_bytes: u64,
    /// The reads that are in flight at the same time.
    pub(super) in_flight: usize,
}

/// Those of a request.
pub(super) const OF_REQUEST: Reads = Reads { max_bytes: 1 << 20, in_flight: READS_IN_FLIGHT };

/// An extent that a request needs.
pub(super) trait Need: Send {
    /// An entry of the extent.
    fn entry(&self) -> &Entry;

    /// The first byte of the entry's page in the volume.
    fn base(&self) -> u64;

    /// Takes the content of the extent.
    fn take(self, content: Content);
}

/// Extents that one read of an object has.
struct Run<N> {
    needs: Vec<(Stored, N)>,
    first: Stored,
    /// The one that ends last.
    last: Stored,
}

impl Shared {
    /// Fetches and opens extents, which must be in the order of [`Stored`], each once.
    ///
    /// # Errors
    /// Returns the first failure. Some of the extents may have been taken.
    pub(super) async fn fetch<N: Need>(&self, needs: Vec<N>, reads: Reads) -> Result<(), Failure> {
        let rest = match self.access.has_cache() {
            true => self.fetch_cached(needs).await?,
            false => needs,
        };
        let rest = rest.into_iter().map(|need| (self.access.stored(need.entry()), need));
        let runs = runs(rest, reads.max_bytes).into_iter();
        let runs = runs.map(|run| -> Part<'_, _> { Box::pin(self.fetch_run(run)) });
        all(runs, reads.in_flight).await.map(drop)
    }

    /// Takes what the cache has, and returns the rest.
    async fn fetch_cached<N: Need>(&self, needs: Vec<N>) -> Result<Vec<N>, Failure> {
        let reads = needs.into_iter().map(|need| -> Part<'_, Result<Option<N>, Failure>> {
            Box::pin(async move {
                let stored = self.access.stored(need.entry());
                let access = self.access.of(stored.ancestor())?;
                let key = stored.key(access.cached_volume());
                let Some(bytes) = access.cached(key).await else { return Ok(Some(need)) };
                // The bytes of the cache prove nothing: another process may have changed them.
                match access.unpack(need.entry(), need.base(), &bytes).await {
                    Ok(Cow::Owned(data)) => need.take(data.into()),
                    Ok(Cow::Borrowed(_)) => need.take(bytes.into()),
                    Err(_) => return Ok(Some(need)),
                }
                Ok(None)
            })
        });
        Ok(all(reads, READS_IN_FLIGHT).await?.into_iter().flatten().collect())
    }

    /// Reads the extents of a run with one read, and keeps them in the cache.
    async fn fetch_run<N: Need>(&self, run: Run<N>) -> Result<(), Failure> {
        let Run { needs, first, last } = run;
        let name = first.name();
        let access = self.access.of(first.ancestor())?;
        let range = first.begin()..last.end();
        let answer = access.read(name, range.clone()).await?.ok_or(Failure::Lost(name))?;
        let answer = Arc::new(answer);
        let wanted = needs.iter().map(|(stored, _)| index(stored.end() - stored.begin())).sum();
        for (stored, need) in needs {
            let part = [stored.begin(), stored.end()].map(|at| index(at - range.start));
            let part = part[0]..part[1];
            // An object that is too short does not pass the verification.
            let bytes = answer.get(part.clone()).unwrap_or_default();
            let data = access.unpack(need.entry(), need.base(), bytes).await?;
            access.cache(stored.key(access.cached_volume()), bytes);
            need.take(match data {
                Cow::Borrowed(_) => Content::part(&answer, part, wanted),
                Cow::Owned(data) => data.into(),
            });
        }
        Ok(())
    }

    /// Reads and opens the extent of an entry from the store. `base` is the first byte of the entry's page.
    pub(super) async fn read_extent(&self, entry: &Entry, base: u64) -> Result<Vec<u8>, Failure> {
        let stored = self.access.stored(entry);
        let name = stored.name();
        let access = self.access.of(stored.ancestor())?;
        let bytes = access.read(name, stored.begin()..stored.end()).await?;
        let bytes = bytes.ok_or(Failure::Lost(name))?;
        access.unpack(entry, base, &bytes).await.map(Cow::into_owned)
    }
}

/// Joins extents that are near each other in the same object.
fn runs<N>(needs: impl Iterator<Item = (Stored, N)>, max_bytes: u64) -> Vec<Run<N>> {
    let mut runs: Vec<Run<N>> = Vec::new();
    for (stored, need) in needs {
        match runs.last_mut().filter(|run| stored.continues(&run.first, &run.last, max_bytes)) {
            Some(run) => {
                run.needs.push((stored, need));
                if stored.end() > run.last.end() {
                    run.last = stored;
                }
            }
            None => runs.push(Run { needs: vec![(stored, need)], first: stored, last: stored }),
        }
    }
    runs
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}
