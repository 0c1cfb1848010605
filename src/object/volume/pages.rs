//! Pages on their way to the store: a checkpoint puts many of them as one object.

use super::access::{Failure, Put};
use super::shared::Shared;
use crate::codec::{Identity, PageId};
use crate::name::{Name, Nonce};

/// The length from which on an object with pages is put, in bytes.
pub(super) const OBJECT_BYTES: usize = 4 << 20;

/// An object with pages that is not complete.
pub(super) struct PageWriter<'a> {
    shared: &'a Shared,
    /// The number of the object.
    number: u64,
    bytes: Vec<u8>,
    pages: usize,
}

impl<'a> PageWriter<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self { shared, number: 0, bytes: Vec::new(), pages: 0 }
    }

    /// Adds a page. The page is in the store after the next [`PageWriter::finish`].
    pub(super) async fn add(
        &mut self,
        encode: impl FnOnce(Identity, Nonce) -> Vec<u8>,
    ) -> Result<PageId, Failure> {
        let shared = self.shared;
        if self.pages == 0 {
            self.number = shared.next_page();
        }
        let (epoch, number) = (shared.epoch, self.number);
        let page = encode(shared.access.identity(epoch, number), shared.access.nonce);
        let [at, length] = match shared.description.shared_pages {
            true => [self.bytes.len(), page.len()],
            false => [0, 0],
        };
        // Both are less than the limits of an object and of a page.
        let [at, length] = [at, length].map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX));
        self.bytes.extend(page);
        self.pages += 1;
        let full = OBJECT_BYTES.min(shared.config.object_bytes);
        if self.bytes.len() >= full || !shared.description.shared_pages {
            self.finish().await?;
        }
        Ok(PageId { ancestor: 0, epoch, number, at, length })
    }

    /// Puts the pages that were not put yet.
    pub(super) async fn finish(&mut self) -> Result<(), Failure> {
        if self.pages == 0 {
            return Ok(());
        }
        let name = Name::Page { epoch: self.shared.epoch, number: self.number };
        self.shared.put(name, &self.bytes).await?;
        if self.shared.description.shared_pages {
            self.shared.lock().checkpoints.pages.add(self.number, self.pages);
        }
        self.bytes.clear();
        self.pages = 0;
        Ok(())
    }
}

impl Shared {
    /// Creates an object of a checkpoint of this epoch.
    pub(super) async fn put(&self, name: Name, bytes: &[u8]) -> Result<(), Failure> {
        match self.access.put(name, bytes, u32::MAX).await? {
            Put::Own => Ok(()),
            Put::Foreign => Err(Failure::Fenced),
        }
    }

    fn next_page(&self) -> u64 {
        let mut state = self.lock();
        let number = state.checkpoints.next_page;
        state.checkpoints.next_page += 1;
        number
    }
}
