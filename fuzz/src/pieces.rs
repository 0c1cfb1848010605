//! Splits a byte stream into pieces, as a network might.

use cleat_core::random::Random;

/// The maximum number of pieces if a stream is split at random.
const PIECES_MAX: usize = 64;

/// Takes one byte off `data`; 0 when it is empty.
pub(crate) fn take(data: &mut &[u8]) -> u8 {
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    *data = rest;
    *first
}

/// Returns where the pieces of a stream of `len` bytes end, in order; the last one is `len`. `seed` 0
/// gives one piece, 1 a piece for each byte, other values random pieces.
pub(crate) fn ends(seed: u8, len: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = match seed {
        0 => Vec::new(),
        1 => (1..len).collect(),
        _ => {
            let random = Random::seeded(seed.into());
            let below = |bound: usize| usize::try_from(random.next()).unwrap_or(0) % bound;
            let pieces = 1 + below(PIECES_MAX);
            (0..pieces).map(|_| below(len + 1)).collect()
        }
    };
    ends.push(len);
    ends.sort_unstable();
    ends
}
