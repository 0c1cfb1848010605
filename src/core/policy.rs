//! What the owner of a mapping decides about its I/O: what happens to requests while the backend
//! cannot be reached, and how fast the mapping may go. Part of the mapping's record, and changed live.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// The whole of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// While the backend cannot be reached.
    pub outage: OnOutage,
    /// At any time.
    pub limits: RateLimits,
}

impl Policy {
    /// For what builds write to each other: where a later one has put a policy that this one does not
    /// know, it is the default, under which nothing fails that might succeed later. That is better than
    /// not to know the mapping at all.
    ///
    /// # Errors
    /// None of its own.
    pub fn understood<'de, D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(source)?;
        Ok(Self::deserialize(&value).unwrap_or_else(|error| {
            tracing::warn!(%value, %error, "a policy of another build; the default holds");
            Self::default()
        }))
    }
}

/// What becomes of a request that the backend cannot serve just now.
///
/// As text: `queue`, `queue:30s` or `fail`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OnOutage {
    /// It waits and is repeated, however long that takes.
    #[default]
    Queue,
    /// It waits and is repeated, until the outage has lasted for so long; then, and for as long as
    /// the outage goes on, requests fail.
    QueueFor(Duration),
    /// It fails at once.
    Fail,
}

/// The most that a mapping may do, on all its connections together. Zero is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RateLimits {
    /// Requests per second, flushes not counted.
    pub iops: u64,
    /// Bytes read and written per second.
    pub bytes_per_s: u64,
}

/// Bounds of what can be asked for.
pub const MAX_PATIENCE: Duration = Duration::from_secs(86_400);
/// Above what any device does, and far below what the arithmetic carries.
pub const MAX_IOPS: u64 = 100_000_000;
/// A page a second: below it a device would rather be taken for a broken one.
pub const MIN_BYTES_PER_S: u64 = 4096;
/// A pebibyte a second.
pub const MAX_BYTES_PER_S: u64 = 1 << 50;

/// What is to become different; `None` stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Change {
    /// While the backend cannot be reached.
    pub outage: Option<OnOutage>,
    /// See [`RateLimits::iops`].
    pub iops: Option<u64>,
    /// See [`RateLimits::bytes_per_s`].
    pub bytes_per_s: Option<u64>,
}

impl Change {
    /// The policy with the change made.
    pub fn apply(self, policy: Policy) -> Policy {
        let Policy { outage, limits } = policy;
        Policy {
            outage: self.outage.unwrap_or(outage),
            limits: RateLimits {
                iops: self.iops.unwrap_or(limits.iops),
                bytes_per_s: self.bytes_per_s.unwrap_or(limits.bytes_per_s),
            },
        }
    }

    /// Whether it asks for nothing.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}

impl OnOutage {
    /// How long an outage may last before requests fail; `None`: for ever.
    pub fn patience(self) -> Option<Duration> {
        match self {
            Self::Queue => None,
            Self::QueueFor(limit) => Some(limit),
            Self::Fail => Some(Duration::ZERO),
        }
    }
}

impl fmt::Display for OnOutage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue => f.write_str("queue"),
            Self::QueueFor(limit) => {
                let text = humantime::format_duration(*limit).to_string();
                write!(f, "queue:{}", text.replace(' ', ""))
            }
            Self::Fail => f.write_str("fail"),
        }
    }
}

impl FromStr for OnOutage {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why: String| {
            Error::new(ErrorKind::InvalidArgument, why)
                .with_repair("write queue (for ever), queue:30s (so long, then fail) or fail")
        };
        let limit = match text {
            "queue" => return Ok(Self::Queue),
            "fail" => return Ok(Self::Fail),
            _ => text.strip_prefix("queue:"),
        };
        let shown: String = text.chars().take(40).collect();
        let limit = limit.and_then(|limit| humantime::parse_duration(limit).ok());
        let limit = limit
            .ok_or_else(|| wrong(format!("{shown:?} does not say what to do in an outage")))?;
        // Whole milliseconds, so that the text loses nothing.
        let limit = Duration::from_millis(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        if !(Duration::from_millis(1)..=MAX_PATIENCE).contains(&limit) {
            return Err(wrong(format!("{shown:?}: requests wait from 1ms to a day, or for ever")));
        }
        Ok(Self::QueueFor(limit))
    }
}

impl TryFrom<String> for OnOutage {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<OnOutage> for String {
    fn from(on_outage: OnOutage) -> Self {
        on_outage.to_string()
    }
}

impl RateLimits {
    /// Checks what came from outside.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn check(self) -> Result<Self> {
        let Self { iops, bytes_per_s } = self;
        let invalid = |message| {
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("give another limit, or 0 for none"))
        };
        if iops > MAX_IOPS {
            return invalid(format!("a limit of {iops} requests per second is above {MAX_IOPS}"));
        }
        if bytes_per_s != 0 && !(MIN_BYTES_PER_S..=MAX_BYTES_PER_S).contains(&bytes_per_s) {
            return invalid(format!(
                "a limit of {bytes_per_s} bytes per second does not lie between {MIN_BYTES_PER_S} \
                 and {MAX_BYTES_PER_S}"
            ));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_do_in_an_outage_is_read_and_written() {
        for (text, meaning) in [
            ("queue", OnOutage::Queue),
            ("fail", OnOutage::Fail),
            ("queue:30s", OnOutage::QueueFor(Duration::from_secs(30))),
            ("queue:1m30s", OnOutage::QueueFor(Duration::from_secs(90))),
            ("queue:2500ms", OnOutage::QueueFor(Duration::from_millis(2500))),
        ] {
            let read: OnOutage = text.parse().unwrap();
            assert_eq!(read, meaning, "{text}");
            assert_eq!(read.to_string().parse::<OnOutage>().unwrap(), meaning, "{text}");
        }
        for text in ["", "wait", "queue:", "queue:0s", "queue:2days", "queue:5", "fail:1s"] {
            let error = text.parse::<OnOutage>().expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.repair().is_some());
        }
    }

    #[test]
    fn a_record_without_a_policy_has_the_default() {
        assert_eq!(serde_json::from_str::<Policy>("{}").unwrap(), Policy::default());
        let policy = Policy {
            outage: OnOutage::QueueFor(Duration::from_secs(5)),
            limits: RateLimits { iops: 7, bytes_per_s: 1 << 20 },
        };
        let text = serde_json::to_string(&policy).unwrap();
        assert!(text.contains("\"queue:5s\""), "{text}");
        assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
        assert!(serde_json::from_str::<Policy>("{\"outage\":\"perhaps\"}").is_err());
    }

    #[test]
    fn limits_have_bounds() {
        let limits = |iops, bytes_per_s| RateLimits { iops, bytes_per_s }.check();
        assert!(limits(0, 0).is_ok() && limits(1, MIN_BYTES_PER_S).is_ok());
        assert!(limits(MAX_IOPS + 1, 0).is_err());
        assert!(limits(0, 1).is_err() && limits(0, u64::MAX).is_err());
    }
}
