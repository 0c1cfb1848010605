//! The deadline of a call: that of the caller, which gRPC transmits as `grpc-timeout`, or a default.

use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;

/// The timeout of calls without a deadline: kubelet's own.
const DEFAULT: Duration = Duration::from_secs(120);

/// The longest timeout.
const MAX: Duration = Duration::from_secs(3600);

/// The time before the caller's deadline that is kept for the answer. After the deadline the caller would
/// see a bare DEADLINE_EXCEEDED instead of the cause.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Returns the deadline for the work of a call with these headers.
pub(crate) fn of(headers: &MetadataMap) -> Instant {
    let header = headers.get("grpc-timeout").and_then(|value| value.to_str().ok());
    let timeout = header.and_then(parse).unwrap_or(DEFAULT).min(MAX);
    Instant::now() + (timeout - ANSWER_TIME.min(timeout / 5))
}

/// Parses the value of `grpc-timeout` (gRPC over HTTP2, "Timeout"): at most 8 digits and a unit.
fn parse(value: &str) -> Option<Duration> {
    let unit = value.chars().last()?;
    let digits = value.strip_suffix(unit)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_grpc() {
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("14999874u"), Some(Duration::from_micros(14_999_874)));
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "S", "1", "-1S", "123456789S", "1x", "1 S", "é"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
