//! Formats sizes and parses durations.

use std::time::Duration;

/// The binary units, smallest first.
const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/// Formats a size with one decimal, such as `1.5 GiB`.
#[allow(clippy::cast_precision_loss, reason = "the exact value is in the JSON output")]
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

/// Parses a duration such as `5s`, `500ms` or `1m 30s`, from 1 ms to 24 h.
///
/// # Errors
/// Returns a message if `text` is not a duration or is out of range.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number with its unit, such as 5s or 500ms"))?;
    if duration < Duration::from_millis(1) || duration > Duration::from_secs(24 * 3600) {
        return Err("the duration must be between 1ms and 24h".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn durations_need_a_unit_and_are_bounded() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["5", "0s", "25h", "soon", ""] {
            assert!(duration(wrong).is_err(), "{wrong} was accepted");
        }
    }
}
