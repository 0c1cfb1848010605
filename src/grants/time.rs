//! Wall-clock times in the object. They are for users and for timeouts; no rule compares them.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The form in which times are written. The format `date-time` of the API server also permits years that cannot be read,
/// and other time zones.
#[cfg(feature = "schema")]
const PATTERN: &str = "^(19[7-9][0-9]|[2-9][0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\
    T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?Z$";

/// The maximum length of a time.
#[cfg(feature = "schema")]
const MAX_LENGTH: usize = 30;

/// A wall-clock time in seconds since the Unix epoch, in RFC 3339 in JSON.
///
/// Any text is read: a node writes times into its entry, and one that cannot be read must not hide the rest of the
/// object. It counts as the Unix epoch, as one before it does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// Returns whether about `seconds` have passed at `now`: times are whole seconds, so it may be almost a second less. A
    /// time in the future counts as not passed.
    pub fn is_older_than(self, seconds: u64, now: Self) -> bool {
        now.0.saturating_sub(self.0) >= seconds
    }

    fn parse(text: &str) -> Self {
        let time = text.parse::<Timestamp>().ok();
        Self(time.and_then(|time| u64::try_from(time.as_second()).ok()).unwrap_or_default())
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = Timestamp::MAX.as_second();
        let second = i64::try_from(self.0).map_or(last, |second| second.min(last));
        Timestamp::from_second(second).unwrap_or(Timestamp::UNIX_EPOCH).fmt(f)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self::parse(&text))
    }
}

/// The schema of a time.
#[cfg(feature = "schema")]
impl schemars::JsonSchema for Time {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Time".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string", "format": "date-time", "pattern": PATTERN, "maxLength": MAX_LENGTH,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_read_as_a_time() {
        let day = 1_893_456_000;
        for (text, expected) in [
            ("2030-01-01T00:00:00Z", day),
            ("2030-01-01T00:00:00.5Z", day),
            ("2030-01-01T01:00:00+01:00", day),
            ("2030-01-01t00:00:00z", day),
            ("2030-02-31T00:00:00Z", 0),
            ("1969-12-31T23:59:59Z", 0),
            ("9999-12-31T23:59:59-01:00", 0),
            ("10000-01-01T00:59:59Z", 0),
            ("0000-00-00T00:00:00Z", 0),
            ("yesterday", 0),
            ("", 0),
        ] {
            assert_eq!(Time::parse(text), Time(expected), "{text}");
        }
    }

    #[test]
    fn every_time_is_written_in_the_form_of_the_schema() {
        assert_eq!(Time(0).to_string(), "1970-01-01T00:00:00Z");
        assert_eq!(Time(1_893_456_000).to_string(), "2030-01-01T00:00:00Z");
        for time in [Time(253_402_300_800), Time(u64::MAX)] {
            let text = time.to_string();
            assert!(text.starts_with("9999-12-30T") && text.len() == 20, "{text}");
        }
    }
}
