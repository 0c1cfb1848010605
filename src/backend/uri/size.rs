//! The notation of sizes: `4096`, `512M`, `1G`, `1Gi`. Every unit is a power of 1024.

use std::fmt;

use super::{invalid, shown};
use cleat_core::error::Result;

/// The largest size of a volume, in bytes: 4 EiB, so that offsets fit everywhere.
pub const MAX_SIZE: u64 = 1 << 62;

const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];

/// Parses a size in bytes: digits, then optionally one of K, M, G, T, P, E in upper or lower case, then
/// optionally an `i`.
///
/// # Errors
/// Returns `InvalidArgument` for any other text, for zero, and above 4 EiB.
pub fn parse_size(text: &str) -> Result<u64> {
    let wrong = || {
        invalid(format!("{:?} is not a size", shown(text))).with_repair(
            "sizes are written as 4096, 512M, 1G or 1Gi; every unit is a power of 1024",
        )
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    if digits == 0 || text.len() > 24 {
        return Err(wrong());
    }
    let (number, unit) = text.split_at(digits);
    let unit = unit.strip_suffix('i').filter(|rest| !rest.is_empty()).unwrap_or(unit);
    let mut letters = unit.chars();
    let power = match (letters.next(), letters.next()) {
        (None, _) => 0,
        (Some(letter), None) => {
            1 + UNITS.iter().position(|u| letter.eq_ignore_ascii_case(u)).ok_or_else(wrong)?
        }
        _ => return Err(wrong()),
    };
    let size = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << (10 * power)))
        .filter(|size| *size <= MAX_SIZE)
        .ok_or_else(|| invalid(format!("{text:?} is above the largest size, 4E")))?;
    if size == 0 {
        return Err(invalid("a size must be greater than zero"));
    }
    Ok(size)
}

/// Parses a size as [`parse_size`] does, and accepts `0`, which stands for no limit or no size.
///
/// # Errors
/// Fails as [`parse_size`] does.
pub fn parse_size_or_zero(text: &str) -> Result<u64> {
    if text == "0" { Ok(0) } else { parse_size(text) }
}

/// Bytes, printed with the largest unit that divides them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut number = self.0;
        let mut unit = None;
        for letter in UNITS {
            if number == 0 || !number.is_multiple_of(1024) {
                break;
            }
            number /= 1024;
            unit = Some(letter);
        }
        match unit {
            Some(unit) => write!(f, "{number}{unit}"),
            None => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, size) in
            [("4096", 4096), ("1k", 1024), ("1Ki", 1024), ("3G", 3 << 30), ("4E", MAX_SIZE)]
        {
            assert_eq!(parse_size(text).expect(text), size);
        }
        for text in ["", "G", "1i", "1GiB", "-1", "1.5G", "1 G", "5E", "99999999999999999999"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(size in 1..=MAX_SIZE) {
            prop_assert_eq!(parse_size(&Size(size).to_string()).ok(), Some(size));
        }
    }
}
