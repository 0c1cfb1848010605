//! Counts of times in buckets that are at most 3 % wide, so that a percentile needs no list of all times.

/// See the file's comment.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
}

/// Each power of two has `1 << SHARES_LOG2` buckets.
const SHARES_LOG2: u32 = 5;

impl Histogram {
    /// Returns a histogram without times.
    pub fn new() -> Self {
        Self { counts: vec![0; bucket(u64::MAX) + 1] }
    }

    /// Counts a time in nanoseconds.
    pub fn add(&mut self, time_ns: u64) {
        self.counts[bucket(time_ns)] += 1;
    }

    /// Adds the times of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }

    /// Returns the time in nanoseconds below which `share` (0 to 1) of the times are; 0 without a time.
    pub fn percentile_ns(&self, share: f64) -> u64 {
        let total: u64 = self.counts.iter().sum();
        let mut left = (total as f64 * share).ceil() as u64;
        for (index, count) in self.counts.iter().enumerate() {
            if left <= *count {
                return if total == 0 { 0 } else { upper_bound_ns(index) };
            }
            left -= count;
        }
        0
    }
}

fn bucket(time_ns: u64) -> usize {
    let bits = u64::BITS - time_ns.leading_zeros();
    let shift = bits.saturating_sub(SHARES_LOG2 + 1);
    ((shift as usize) << SHARES_LOG2) + (time_ns >> shift) as usize
}

fn upper_bound_ns(bucket: usize) -> u64 {
    let shift = (bucket >> SHARES_LOG2).saturating_sub(1);
    let value = (bucket - (shift << SHARES_LOG2)) as u64;
    ((value + 1) << shift) - 1
}
