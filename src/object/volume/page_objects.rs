//! How many pages of each object with pages are needed, so that the object is deleted with the last of them.

use std::collections::BTreeMap;

use crate::codec::PageId;

/// The objects with pages that this epoch has written.
#[derive(Default)]
pub(super) struct PageObjects {
    /// The number of pages in each that are needed.
    needed: BTreeMap<u64, usize>,
    /// Some are missing here.
    is_incomplete: bool,
}

/// What is known of the object of a page that is no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Other pages in it are needed.
    Needed,
    /// Nothing else in it is needed.
    Nothing,
    /// It is not known: an earlier epoch has written the object, or the volume was rolled back since.
    Unknown,
}

impl PageObjects {
    /// An object was put, with a number of pages that are needed.
    pub(super) fn add(&mut self, number: u64, pages: usize) {
        self.needed.insert(number, pages);
    }

    /// A page is no longer needed that this volume has written.
    pub(super) fn supersede(&mut self, page: PageId, epoch: u64) -> Rest {
        if page.length == 0 {
            return Rest::Nothing;
        }
        let needed = self.needed.get_mut(&page.number).filter(|_| page.epoch == epoch);
        let Some(needed) = needed else { return Rest::Unknown };
        *needed -= 1;
        if *needed > 0 {
            return Rest::Needed;
        }
        self.needed.remove(&page.number);
        Rest::Nothing
    }

    /// Whether the number of needed pages is known for all objects of the epoch. A sweep must find the others.
    pub(super) fn are_known(&self) -> bool {
        !self.is_incomplete
    }

    /// The volume has another content, which may need pages that were not needed before.
    pub(super) fn forget(&mut self) {
        self.is_incomplete |= !self.needed.is_empty();
        self.needed.clear();
    }
}
