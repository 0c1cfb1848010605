//! The I/O policy of a mapping: what happens to requests while the backend is unreachable, and the rate
//! limits. The policy is part of the mapping's record and can be changed while the device is in use.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// The I/O policy of one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// What happens to requests while the backend is unreachable.
    pub outage: OnOutage,
    /// The rate limits, which hold at any time.
    pub limits: RateLimits,
    /// Whether connections poll before they sleep.
    pub busy_poll: BusyPoll,
}

impl Policy {
    /// Reads a policy that another build may have written. A policy that this build does not know is
    /// replaced by the default, with a warning in the log: under the default no request fails that might
    /// succeed later. Refusing the record instead would lose the mapping.
    ///
    /// # Errors
    /// Returns the error of `source` if its input is malformed.
    pub fn understood<'de, D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(source)?;
        Ok(Self::deserialize(&value).unwrap_or_else(|error| {
            tracing::warn!(%value, %error, "unknown policy of another build: using the default");
            Self::default()
        }))
    }
}

/// The outage policy: what happens to a request that the backend cannot serve at the moment.
///
/// Its text form is: `queue`, `queue:30s` or `fail`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OnOutage {
    /// The request waits and is retried, without a limit.
    #[default]
    Queue,
    /// The request waits and is retried until the outage has lasted for this time. After that, requests
    /// fail until the outage is over.
    QueueFor(Duration),
    /// The request fails at once.
    Fail,
}

/// Whether a connection looks for new requests and completions for up to 50 µs before it sleeps.
///
/// Its text form is `auto` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BusyPoll {
    /// It does while requests follow each other closely, and no other thread wants the processor.
    #[default]
    Auto,
    /// It sleeps at once.
    Off,
}

/// The rate limits of a mapping, over all its connections. Zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RateLimits {
    /// Requests per second; flushes are not counted.
    pub iops: u64,
    /// Bytes read and written per second.
    pub bytes_per_s: u64,
}

/// The longest time limit of [`OnOutage::QueueFor`].
pub const MAX_QUEUE_TIME: Duration = Duration::from_secs(86_400);
/// The highest limit of requests per second: above what any device reaches, and low enough that the
/// arithmetic cannot overflow.
pub const MAX_IOPS: u64 = 100_000_000;
/// The lowest limit of bytes per second, one page: a slower device would appear broken.
pub const MIN_BYTES_PER_S: u64 = 4096;
/// The highest limit of bytes per second, one pebibyte.
pub const MAX_BYTES_PER_S: u64 = 1 << 50;

/// A change of a policy. A field that is `None` leaves its part unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Change {
    /// See [`Policy::outage`].
    pub outage: Option<OnOutage>,
    /// See [`RateLimits::iops`].
    pub iops: Option<u64>,
    /// See [`RateLimits::bytes_per_s`].
    pub bytes_per_s: Option<u64>,
    /// See [`Policy::busy_poll`].
    pub busy_poll: Option<BusyPoll>,
}

impl Change {
    /// Returns `policy` with this change applied.
    pub fn apply(self, policy: Policy) -> Policy {
        let Policy { outage, limits, busy_poll } = policy;
        Policy {
            outage: self.outage.unwrap_or(outage),
            limits: RateLimits {
                iops: self.iops.unwrap_or(limits.iops),
                bytes_per_s: self.bytes_per_s.unwrap_or(limits.bytes_per_s),
            },
            busy_poll: self.busy_poll.unwrap_or(busy_poll),
        }
    }

    /// Returns whether the change changes nothing.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}

impl OnOutage {
    /// Returns how long an outage may last before requests fail; `None` means without a limit.
    pub fn max_queue_time(self) -> Option<Duration> {
        match self {
            Self::Queue => None,
            Self::QueueFor(limit) => Some(limit),
            Self::Fail => Some(Duration::ZERO),
        }
    }
}

impl fmt::Display for BusyPoll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "off",
        })
    }
}

impl FromStr for BusyPoll {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => {
                let shown: String = text.chars().take(40).collect();
                let message = format!("{shown:?} is not a setting of busy polling");
                Err(Error::new(ErrorKind::InvalidArgument, message).with_repair("use auto or off"))
            }
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
                .with_repair("use queue (no limit), queue:30s (fail after 30 s) or fail")
        };
        let limit = match text {
            "queue" => return Ok(Self::Queue),
            "fail" => return Ok(Self::Fail),
            _ => text.strip_prefix("queue:"),
        };
        let shown: String = text.chars().take(40).collect();
        let limit = limit.and_then(|limit| humantime::parse_duration(limit).ok());
        let limit = limit.ok_or_else(|| wrong(format!("{shown:?} is not an outage policy")))?;
        // Whole milliseconds, so that the text loses nothing.
        let limit = Duration::from_millis(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        if !(Duration::from_millis(1)..=MAX_QUEUE_TIME).contains(&limit) {
            return Err(wrong(format!("{shown:?}: the time must be between 1ms and 1day")));
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
    /// Checks that each limit is zero or within its bounds.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a limit out of bounds.
    pub fn check(self) -> Result<Self> {
        let Self { iops, bytes_per_s } = self;
        let invalid = |message| {
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("use another limit, or 0 for no limit"))
        };
        if iops > MAX_IOPS {
            return invalid(format!("a limit of {iops} requests per second is above {MAX_IOPS}"));
        }
        if bytes_per_s != 0 && !(MIN_BYTES_PER_S..=MAX_BYTES_PER_S).contains(&bytes_per_s) {
            return invalid(format!(
                "a limit of {bytes_per_s} bytes per second is not between {MIN_BYTES_PER_S} \
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
    fn outage_policies_are_parsed_and_printed() {
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
    fn settings_of_busy_polling_are_parsed_and_printed() {
        for setting in [BusyPoll::Auto, BusyPoll::Off] {
            assert_eq!(setting.to_string().parse::<BusyPoll>().unwrap(), setting);
        }
        for text in ["", "on", "Auto"] {
            assert!(text.parse::<BusyPoll>().expect_err(text).repair().is_some());
        }
    }

    #[test]
    fn a_record_without_a_policy_has_the_default() {
        assert_eq!(serde_json::from_str::<Policy>("{}").unwrap(), Policy::default());
        let policy = Policy {
            outage: OnOutage::QueueFor(Duration::from_secs(5)),
            limits: RateLimits { iops: 7, bytes_per_s: 1 << 20 },
            busy_poll: BusyPoll::Off,
        };
        let text = serde_json::to_string(&policy).unwrap();
        assert!(text.contains("\"queue:5s\""), "{text}");
        assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
        assert!(serde_json::from_str::<Policy>("{\"outage\":\"perhaps\"}").is_err());
    }

    #[test]
    fn rate_limits_out_of_bounds_are_refused() {
        let limits = |iops, bytes_per_s| RateLimits { iops, bytes_per_s }.check();
        assert!(limits(0, 0).is_ok() && limits(1, MIN_BYTES_PER_S).is_ok());
        assert!(limits(MAX_IOPS + 1, 0).is_err());
        assert!(limits(0, 1).is_err() && limits(0, u64::MAX).is_err());
    }
}
