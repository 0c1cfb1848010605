//! Sizes and durations as people write them.

use std::time::Duration;

/// Binary units, smallest first.
const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/// Parses a size: a whole number of bytes, or with `K`, `M`, `G`, `T` or `P` (powers of 1024; `KiB`
/// and so on mean the same).
///
/// # Errors
/// What is wrong with `text`, as a sentence.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let example = "write a whole number of bytes, or with K, M, G, T or P, such as 10G";
    let number: u64 = number.parse().map_err(|_| format!("`{text}` is no size: {example}"))?;
    let factor = if unit.is_empty() || unit == "B" {
        1
    } else {
        let short = unit.strip_suffix("iB").unwrap_or(unit);
        let position = UNITS.iter().position(|known| short.eq_ignore_ascii_case(&known[..1]));
        let power = position.ok_or_else(|| format!("`{unit}` is no unit of size: {example}"))?;
        1024_u64.pow(u32::try_from(power).unwrap_or(u32::MAX) + 1)
    };
    number.checked_mul(factor).ok_or_else(|| format!("{text} is more than 2^64 bytes"))
}

/// A size for the eye, rounded to three digits or so: `1.5 GiB`.
#[allow(clippy::cast_precision_loss)] // For the eye only; the exact figure stands in the JSON.
pub(super) fn human(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Parses a duration such as `5s`, `500ms`, `1m 30s`; above zero and at most an hour.
///
/// # Errors
/// What is wrong with `text`, as a sentence.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number with its unit, such as 5s or 500ms"))?;
    if duration < Duration::from_millis(1) || duration > Duration::from_secs(3600) {
        return Err("a time limit lies between 1ms and 1h".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_powers_of_1024() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("512B"), Ok(512));
        assert_eq!(parse("10G"), Ok(10 << 30));
        assert_eq!(parse("10GiB"), Ok(10 << 30));
        assert_eq!(parse("3k"), Ok(3 << 10));
        for wrong in ["", "G", "-1", "1.5G", "10GB", "10 G", "10X", "99999999P", "0x10"] {
            assert!(parse(wrong).is_err(), "{wrong} was taken for a size");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_decimal() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(1 << 20), "1.0 MiB");
        assert_eq!(human((1 << 20) - 1), "1.0 MiB");
        assert_eq!(human(3 << 29), "1.5 GiB");
        assert_eq!(human(u64::MAX), "16384.0 PiB");
    }

    #[test]
    fn durations_have_a_unit_and_a_bound() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["5", "0s", "2h", "soon", ""] {
            assert!(duration(wrong).is_err(), "{wrong} was taken for a duration");
        }
    }
}
