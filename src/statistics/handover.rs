//! The handover word of the page, which determines which of two workers reads the sockets in a handover.
//!
//! The old worker offers the sockets to the next generation when its connections are idle. The worker that
//! first changes the word from "offered" owns the sockets: the new worker by accepting the offer, or the old
//! worker by withdrawing it. So there is never a second reader. If the supervisor or a worker dies or hangs,
//! the word still shows which worker serves.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use super::{HANDOVER, Page};

// The states, in the lowest two bits. The other bits are the generation that gets the offer.
const HELD: u64 = 0;
const OFFERED: u64 = 1;
const TAKEN: u64 = 2;

impl Page {
    /// Offers the sockets to the worker of `generation`. Only the worker that owns the sockets may call this.
    pub fn offer_handover(&self, generation: u64) {
        self.memory.words()[HANDOVER].store(word(generation, OFFERED), Release);
    }

    /// Accepts the offer as the worker of `generation`. Returns whether this worker owns the sockets now; false
    /// means that there is no offer for it.
    pub fn accept_handover(&self, generation: u64) -> bool {
        self.change(generation, OFFERED, TAKEN)
    }

    /// Withdraws the offer to `generation`. Returns false if there is no such offer any more, because that
    /// worker has accepted it.
    pub fn withdraw_handover(&self, generation: u64) -> bool {
        self.change(generation, OFFERED, HELD)
    }

    /// Restores the offer that `generation` has accepted. That worker must not have read any bytes.
    pub fn decline_handover(&self, generation: u64) {
        self.change(generation, TAKEN, OFFERED);
    }

    /// Returns whether the worker of `generation` has accepted the sockets.
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
    fn exactly_one_worker_gets_the_sockets() {
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
    fn an_earlier_offer_is_no_longer_valid() {
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
