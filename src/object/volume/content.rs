//! The content of extents.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// The content of an extent: a part of an answer of the store, if the extent is stored as it is.
#[derive(Debug, Clone)]
pub(super) struct Content {
    answer: Arc<Vec<u8>>,
    part: Range<usize>,
}

impl Content {
    pub(super) fn part(answer: &Arc<Vec<u8>>, part: Range<usize>) -> Self {
        Self { answer: Arc::clone(answer), part }
    }

    /// What is in memory as long as the content is.
    pub(super) fn answer(&self) -> &Arc<Vec<u8>> {
        &self.answer
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        Self { part: 0..bytes.len(), answer: Arc::new(bytes) }
    }
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.answer.get(self.part.clone()).unwrap_or_default()
    }
}
