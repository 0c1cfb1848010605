//! The content of extents.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// The content of an extent: a part of an answer of the store, if the extent is stored as it is.
#[derive(Debug, Clone)]
pub(super) struct Content {
    answer: Arc<Vec<u8>>,
    part: Range<usize>,
    /// The bytes of all parts of the answer that were wanted.
    wanted: usize,
}

/// The share of an answer that nothing wants, and that is kept in memory with the rest: an eighth at most.
const MAX_WASTE: usize = 8;

impl Content {
    pub(super) fn part(answer: &Arc<Vec<u8>>, part: Range<usize>, wanted: usize) -> Self {
        Self { answer: Arc::clone(answer), part, wanted }
    }

    /// Returns the content in a form that may stay in memory: a copy, if too much of the answer would stay with it.
    pub(super) fn into_kept(self) -> Self {
        let waste = self.answer.len().saturating_sub(self.wanted);
        if waste > self.answer.len() / MAX_WASTE { self.to_vec().into() } else { self }
    }

    /// What is in memory as long as the content is.
    pub(super) fn answer(&self) -> &Arc<Vec<u8>> {
        &self.answer
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        let wanted = bytes.len();
        Self { answer: Arc::new(bytes), part: 0..wanted, wanted }
    }
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.answer.get(self.part.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_which_little_is_wanted_is_not_kept() {
        let answer = Arc::new(vec![7; 800]);
        for (wanted, is_kept) in [(800, true), (700, true), (699, false), (100, false)] {
            let content = Content::part(&answer, 100..200, wanted).into_kept();
            assert_eq!(*content, [7; 100]);
            assert_eq!(Arc::ptr_eq(content.answer(), &answer), is_kept, "{wanted}");
            assert_eq!(content.answer().len(), if is_kept { 800 } else { 100 });
        }
    }
}
