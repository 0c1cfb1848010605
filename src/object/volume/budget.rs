//! What the collector may copy beside the requests of clients.
//!
//! The engine has no clock, so the embedder grants bytes at its own times. Only copies are limited: deletions free space
//! and cost no bandwidth.

/// The budget of the collector.
#[derive(Debug)]
pub(super) struct Budget {
    /// What may be copied without another grant, in bytes. The last copy may exceed it, and makes it negative. `None`:
    /// there is no limit.
    left: Option<i64>,
    /// The largest value of `left`.
    max: i64,
    /// The bytes that were copied.
    copied: u64,
}

impl Budget {
    /// Makes a budget that holds at most `max` bytes, and holds them now; with `None`, one without a limit.
    pub(super) fn new(max: Option<u64>) -> Self {
        let most = max.map_or(i64::MAX, signed);
        Self { left: max.map(|_| most), max: most, copied: 0 }
    }

    /// Adds bytes. What is not used is kept up to the limit.
    pub(super) fn grant(&mut self, bytes: u64) {
        if let Some(left) = &mut self.left {
            *left = left.saturating_add(signed(bytes)).min(self.max);
        }
    }

    /// Whether something may be copied now.
    pub(super) fn is_open(&self) -> bool {
        self.left.is_none_or(|left| left > 0)
    }

    /// Takes a copy of this many bytes from the budget. Returns false if it must wait; `is_urgent` copies never do.
    pub(super) fn take(&mut self, bytes: u64, is_urgent: bool) -> bool {
        if !is_urgent && !self.is_open() {
            return false;
        }
        if let Some(left) = &mut self.left {
            // Urgent copies leave no debt that would delay all later ones.
            *left = left.saturating_sub(signed(bytes)).max(-self.max);
        }
        self.copied += bytes;
        true
    }

    /// The bytes that were copied.
    pub(super) fn copied(&self) -> u64 {
        self.copied
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_wait_for_grants_unless_they_are_urgent() {
        let mut budget = Budget::new(Some(100));
        assert!(budget.take(60, false) && budget.take(60, false), "the last one may exceed it");
        assert!(!budget.take(1, false) && !budget.is_open());
        budget.grant(20);
        assert!(!budget.take(1, false), "20 bytes were copied too many");
        assert!(budget.take(500, true));
        budget.grant(100);
        assert!(!budget.take(1, false), "the debt is as large as the limit, and not larger");
        budget.grant(1_000);
        assert!(budget.take(100, false), "a grant is kept up to the limit");
        assert!(!budget.take(1, false));
        assert_eq!(budget.copied(), 60 + 60 + 500 + 100);
        let mut unlimited = Budget::new(None);
        assert!(unlimited.take(u64::MAX >> 1, false) && unlimited.take(1, false));
        assert_eq!(unlimited.copied(), (u64::MAX >> 1) + 1);
    }
}
