//! A set of numbers that takes memory for each range in it, and not for each number.

use std::collections::BTreeMap;
use std::ops::Range;

/// The memory of a range in bytes, about.
pub(super) const RANGE_BYTES: usize = 32;

/// The set. Its ranges do not touch each other.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// The end of each range, by its first number.
    ends: BTreeMap<u64, u64>,
}

impl Ranges {
    /// The memory of the set in bytes, about.
    pub(super) fn bytes(&self) -> usize {
        self.ends.len() * RANGE_BYTES
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.ends.range(..=number).next_back().is_some_and(|(_, end)| number < *end)
    }

    pub(super) fn insert(&mut self, number: u64) {
        if self.contains(number) {
            return;
        }
        let mut range = number..number + 1;
        if let Some((begin, end)) = self.ends.range(..number).next_back()
            && *end == range.start
        {
            range.start = *begin;
        }
        if let Some(end) = self.ends.remove(&range.end) {
            range.end = end;
        }
        self.ends.insert(range.start, range.end);
    }

    /// Removes all numbers of a range.
    pub(super) fn remove(&mut self, range: &Range<u64>) {
        let parts: Vec<Range<u64>> = self.within(range.clone()).collect();
        let Some(first) = parts.first() else { return };
        if let Some((begin, end)) = self.ends.range(..=first.start).next_back() {
            let whole = *begin..*end;
            self.ends.remove(&whole.start);
            self.add(whole.start..range.start);
            self.add(range.end..whole.end);
        }
        for part in &parts[1..] {
            if let Some(end) = self.ends.remove(&part.start) {
                self.add(range.end..end);
            }
        }
    }

    /// The parts of the set that lie in a range, in their order.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let before = self.ends.range(..range.start).next_back();
        let first = before.filter(|(_, end)| **end > range.start);
        let all = first.into_iter().chain(self.ends.range(range.clone()));
        all.map(move |(begin, end)| range.start.max(*begin)..range.end.min(*end))
    }

    /// Adds a range, unless it is empty. Nothing touches it.
    fn add(&mut self, range: Range<u64>) {
        if range.start < range.end {
            self.ends.insert(range.start, range.end);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const END: u64 = 24;

    fn runs(numbers: &BTreeSet<u64>) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        for number in numbers {
            match found.last_mut() {
                Some(last) if last.end == *number => last.end += 1,
                _ => found.push(*number..number + 1),
            }
        }
        found
    }

    proptest! {
        #[test]
        fn it_has_the_same_numbers_as_a_set_and_one_range_for_each_run(
            changes in proptest::collection::vec((0..END, 0..8_u64), 0..60),
        ) {
            let (mut ranges, mut numbers) = (Ranges::default(), BTreeSet::new());
            for (number, length) in changes {
                if length < 6 {
                    ranges.insert(number);
                    numbers.insert(number);
                } else {
                    let removed = number..number + length;
                    ranges.remove(&removed);
                    numbers.retain(|number| !removed.contains(number));
                }
                prop_assert_eq!(ranges.within(0..END + 8).collect::<Vec<_>>(), runs(&numbers));
                prop_assert_eq!(ranges.bytes(), runs(&numbers).len() * RANGE_BYTES);
                for number in 0..END {
                    prop_assert_eq!(ranges.contains(number), numbers.contains(&number));
                }
                let some = numbers.range(3..17).copied().collect();
                prop_assert_eq!(ranges.within(3..17).collect::<Vec<_>>(), runs(&some));
            }
        }
    }
}
