//! Who reads the sockets during a planned hand-over: one word of the page, which both workers share.
//!
//! The old worker offers it to the next generation once its connections are at rest. Whoever changes
//! the word from "offered" first has the sockets: the new one by taking it, the old one by taking it
//! back. So there is never a second reader, and whoever of the three processes dies or stops, one
//! look at the word tells who serves.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use super::{HANDOVER, Page};

/// In the lowest two bits, beside the generation that it was offered to.
const HELD: u64 = 0;
const OFFERED: u64 = 1;
const TAKEN: u64 = 2;

impl Page {
    /// Offers the sockets to the worker of `generation`. Only who serves may.
    pub fn offer_handover(&self, generation: u64) {
        self.memory.words()[HANDOVER].store(word(generation, OFFERED), Release);
    }

    /// Takes the sockets, as the worker of `generation`. From here on they are its own.
    pub fn accept_handover(&self, generation: u64) -> bool {
        self.change(generation, OFFERED, TAKEN)
    }

    /// Takes back what was offered to `generation`. False when it was faster.
    pub fn withdraw_handover(&self, generation: u64) -> bool {
        self.change(generation, OFFERED, HELD)
    }

    /// Offers again what `generation` has taken and not used: it has not read a byte.
    pub fn decline_handover(&self, generation: u64) {
        self.change(generation, TAKEN, OFFERED);
    }

    /// Whether the worker of `generation` has taken the sockets.
    pub fn is_handed_over_to(&self, generation: u64) -> bool {
        self.memory.words()[HANDOVER].load(Acquire) == word(generation, TAKEN)
    }

    fn change(&self, generation: u64, from: u64, to: u64) -> bool {
        let (from, to) = (word(generation, from), word(generation, to));
        self.memory.words()[HANDOVER].compare_exchange(from, to, AcqRel, Acquire).is_ok()
    }
}

fn word(generation: u64, state: u64) -> u64 {
    generation << 2 | state
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn one_of_two_gets_it() {
        let (page, file) = Page::create().unwrap();
        let other = Page::from_fd(file).unwrap();
        for generation in 1..500 {
            page.offer_handover(generation);
            let start = Barrier::new(2);
            let (taken, back) = std::thread::scope(|scope| {
                let taking = scope.spawn(|| {
                    start.wait();
                    other.accept_handover(generation)
                });
                start.wait();
                let back = page.withdraw_handover(generation);
                (taking.join().unwrap(), back)
            });
            assert!(taken != back);
            assert_eq!(page.is_handed_over_to(generation), taken);
        }
    }

    #[test]
    fn an_earlier_offer_counts_no_more() {
        let (page, _file) = Page::create().unwrap();
        assert!(!page.accept_handover(1) && !page.withdraw_handover(1));
        page.offer_handover(1);
        assert!(page.withdraw_handover(1) && !page.accept_handover(1));
        page.offer_handover(2);
        assert!(!page.accept_handover(1) && !page.withdraw_handover(1));
        assert!(page.accept_handover(2) && !page.withdraw_handover(2));
        page.decline_handover(2);
        assert!(page.withdraw_handover(2));
    }
}
