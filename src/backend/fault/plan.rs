//! The fault plan: which requests fail or are delayed; its text, and the random choice.
//!
//! ```text
//! latency=10ms        delay each request by this time (at most 1h)
//! jitter=5ms          and by up to this much more, evenly distributed
//! hang=true           delay it until the plan is replaced
//! error=KIND          then fail it: retry, fenced, nospace, invalid, readonly, unsupported,
//!                     nomemory, shutdown, broken
//! rate=0.1            only this share of the requests (default 1: all)
//! ops=read,write      only these operations: read, write, flush, trim, write_zeroes, cache (default: all)
//! from=1G  to=2G      only requests that touch these bytes (not FLUSH, which has no range)
//! seed=42             the seed of the random choices (default 0)
//! fail_sync=true      the next sync of the volume fails, as for a lost page; independent of the other keys
//! drop_syncs=true     syncs and the durable mark of writes with FUA are left out, and their requests succeed;
//!                     independent of the other keys
//! ```
//!
//! In a `fault:` URI each key has the prefix `fault.`; in a plan set at run time it may have it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::uri::{Options, Size, invalid, parse_size_or_zero};
use cleat_core::error::{Error, Result};
use cleat_core::request::{IoError, Op, Request};

/// The prefix of the options of a URI that belong to the plan.
pub(super) const PREFIX: &str = "fault.";

/// The faults of a volume. The default has none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Plan {
    latency: Duration,
    jitter: Duration,
    hang: bool,
    error: Option<IoError>,
    /// The share of the requests, in millionths; `None` for all.
    rate: Option<u32>,
    /// The operations: bit n stands for `Op::ALL[n]`; zero for all.
    ops: u8,
    from: Option<u64>,
    to: Option<u64>,
    seed: u64,
    fail_sync: bool,
    drop_syncs: bool,
}

/// The fault of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestFault {
    /// The delay; `None` until the plan is replaced.
    pub(super) delay: Option<Duration>,
    /// The error after the delay; `None` if the request is then served.
    pub(super) error: Option<IoError>,
}

const MAX_DELAY: Duration = Duration::from_secs(3600);
const MILLION: u32 = 1_000_000;

const KEYS: [&str; 11] = [
    "latency",
    "jitter",
    "hang",
    "error",
    "rate",
    "ops",
    "from",
    "to",
    "seed",
    "fail_sync",
    "drop_syncs",
];

impl Plan {
    /// Parses the options of the plan, without the prefix.
    pub(crate) fn parse(mut options: Options) -> Result<Self> {
        let plan = Self {
            latency: delay(&mut options, "latency")?,
            jitter: delay(&mut options, "jitter")?,
            hang: options.flag("hang")?.unwrap_or(false),
            error: options.take("error").map(|text| kind(&text)).transpose()?,
            rate: options.take("rate").map(|text| rate(&text)).transpose()?.flatten(),
            ops: options.take("ops").map_or(Ok(0), |text| ops(&text))?,
            from: options.take("from").map(|text| parse_size_or_zero(&text)).transpose()?,
            to: options.take("to").map(|text| parse_size_or_zero(&text)).transpose()?,
            seed: options.take("seed").map_or(Ok(0), |text| {
                text.parse().map_err(|_| invalid(format!("seed is a number, not {text:?}")))
            })?,
            fail_sync: options.flag("fail_sync")?.unwrap_or(false),
            drop_syncs: options.flag("drop_syncs")?.unwrap_or(false),
        };
        options.finish("the fault plan", &KEYS)?;
        if plan.from.unwrap_or(0) >= plan.to.unwrap_or(u64::MAX) {
            return Err(invalid("the fault plan's range is empty: from must be below to"));
        }
        Ok(plan)
    }

    /// Returns the options that were set, in canonical order.
    pub(crate) fn options(&self) -> Vec<(String, String)> {
        let mut options = Vec::new();
        let mut add = |key: &str, value: Option<String>| {
            options.extend(value.map(|value| (key.to_owned(), value)));
        };
        let delay = |d: Duration| (!d.is_zero()).then(|| format!("{}us", d.as_micros()));
        add("latency", delay(self.latency).map(short));
        add("jitter", delay(self.jitter).map(short));
        add("hang", self.hang.then(|| "true".to_owned()));
        add("error", self.error.map(|kind| kind.name().to_owned()));
        let share = |millionths| f64::from(millionths) / f64::from(MILLION);
        add("rate", self.rate.map(|millionths| share(millionths).to_string()));
        let chosen = Op::ALL.iter().enumerate().filter(|(bit, _)| self.ops & 1 << bit != 0);
        let names: Vec<&str> = chosen.map(|(_, op)| op.name()).collect();
        add("ops", (!names.is_empty()).then(|| names.join(",")));
        add("from", self.from.map(|at| Size(at).to_string()));
        add("to", self.to.map(|at| Size(at).to_string()));
        add("seed", (self.seed != 0).then(|| self.seed.to_string()));
        add("fail_sync", self.fail_sync.then(|| "true".to_owned()));
        add("drop_syncs", self.drop_syncs.then(|| "true".to_owned()));
        options
    }

    /// Returns whether the next sync fails, and removes this from the plan.
    pub(super) fn take_fail_sync(&mut self) -> bool {
        std::mem::take(&mut self.fail_sync)
    }

    /// Returns whether the volume makes nothing durable and reports success.
    pub(super) fn drops_syncs(&self) -> bool {
        self.drop_syncs
    }

    /// Returns whether the plan simulates a backend that cannot be reached, or is full.
    pub(super) fn is_outage(&self) -> bool {
        matches!(self.error, Some(IoError::Retry | IoError::NoSpace))
    }

    /// Returns the fault of the volume's request number `number`; `None` if it has none.
    pub(super) fn fault_of(&self, number: u64, request: &Request) -> Option<RequestFault> {
        let delayed = !self.latency.is_zero() || !self.jitter.is_zero();
        if !(delayed || self.hang || self.error.is_some()) || !self.affects(request) {
            return None;
        }
        let random = mix(self.seed ^ mix(number));
        if self.rate.is_some_and(|rate| random % u64::from(MILLION) >= u64::from(rate)) {
            return None;
        }
        let jitter = micros(self.jitter);
        let extra = if jitter == 0 { 0 } else { mix(random) % (jitter + 1) };
        let delay = (!self.hang).then(|| self.latency + Duration::from_micros(extra));
        Some(RequestFault { delay, error: self.error })
    }

    fn affects(&self, request: &Request) -> bool {
        let bit = Op::ALL.iter().position(|op| *op == request.op).unwrap_or(0);
        if self.ops != 0 && self.ops & 1 << bit == 0 {
            return false;
        }
        if self.from.is_none() && self.to.is_none() {
            return true;
        }
        request.offset < self.to.unwrap_or(u64::MAX)
            && request.offset.saturating_add(request.length) > self.from.unwrap_or(0)
            && request.length > 0
    }
}

impl FromStr for Plan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = Options::parse(text)?;
        options.merge(PREFIX)?;
        Self::parse(options)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> =
            self.options().iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&pairs.join("&"))
    }
}

fn delay(options: &mut Options, key: &str) -> Result<Duration> {
    let Some(text) = options.take(key) else { return Ok(Duration::ZERO) };
    let delay = humantime::parse_duration(&text).map_err(|e| {
        invalid(format!("{key} is a time, not {text:?}"))
            .with_repair("times are written as 10ms, 250us or 2s")
            .with_source(e)
    })?;
    if delay > MAX_DELAY {
        return Err(invalid(format!("{key} is at most 1h")).with_repair("use hang=true"));
    }
    // Rounded to microseconds, the resolution of the canonical text and of the timers.
    Ok(Duration::from_micros(micros(delay)))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn kind(text: &str) -> Result<IoError> {
    IoError::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
        let names = IoError::ALL.map(IoError::name);
        invalid(format!("no error kind is called {text:?}"))
            .with_repair(format!("error kinds are {}", names.join(", ")))
    })
}

fn rate(text: &str) -> Result<Option<u32>> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    let share = share.ok_or_else(|| invalid(format!("rate is from 0 to 1, not {text:?}")))?;
    // The share is in range, as checked above. A share of 1 means all.
    #[allow(clippy::cast_possible_truncation, reason = "from 0 to 1000000")]
    let millionths = (share * f64::from(MILLION)).round() as u32;
    Ok((millionths < MILLION).then_some(millionths))
}

fn ops(text: &str) -> Result<u8> {
    let mut ops = 0;
    for name in text.split(',') {
        let bit = Op::ALL.iter().position(|op| op.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Op::ALL.iter().map(|op| op.name()).collect();
            invalid(format!("no operation is called {name:?}"))
                .with_repair(format!("operations are {}", names.join(", ")))
        })?;
        ops |= 1 << bit;
    }
    Ok(ops)
}

/// Shortens whole milliseconds: `1500us` stays, `2000us` becomes `2ms`.
fn short(us: String) -> String {
    us.strip_suffix("000us").filter(|ms| !ms.is_empty()).map(|ms| format!("{ms}ms")).unwrap_or(us)
}

/// Computes the finaliser of splitmix64: every bit of the result depends on every bit of `x`.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cleat_core::request::Flags;

    fn request(op: Op, offset: u64, length: u64) -> Request {
        Request { op, flags: Flags::default(), offset, length }
    }

    #[test]
    fn a_plan_affects_only_the_requests_that_it_names() {
        let plan: Plan = "error=nospace&ops=write,trim&from=1M&to=2M".parse().unwrap();
        let fails = |op, offset, length| plan.fault_of(0, &request(op, offset, length)).is_some();
        assert!(fails(Op::Write, 1 << 20, 512));
        assert!(fails(Op::Trim, (1 << 20) - 1, 2));
        assert!(!fails(Op::Write, (1 << 20) - 512, 512));
        assert!(!fails(Op::Write, 2 << 20, 512));
        assert!(!fails(Op::Read, 1 << 20, 512));
        assert_eq!(Plan::default().fault_of(0, &request(Op::Read, 0, 1)), None);
    }

    #[test]
    fn the_seed_determines_which_requests_fail_at_a_given_rate() {
        let hits = |text: &str| -> Vec<u64> {
            let plan: Plan = text.parse().unwrap();
            (0..10_000).filter(|n| plan.fault_of(*n, &request(Op::Read, 0, 1)).is_some()).collect()
        };
        let first = hits("error=broken&rate=0.1&seed=42");
        assert!((800..1200).contains(&first.len()), "{}", first.len());
        assert_eq!(first, hits("fault.error=broken&fault.rate=0.1&fault.seed=42"));
        assert_ne!(first, hits("error=broken&rate=0.1&seed=43"));
        assert_eq!(hits("error=broken&rate=0").len(), 0);
    }

    #[test]
    fn an_error_names_its_cause() {
        for (text, cause) in [
            ("latency=10", "latency is a time"),
            ("latency=2h", "latency is at most 1h"),
            ("error=oops", "no error kind is called \"oops\""),
            ("rate=1.5", "rate is from 0 to 1"),
            ("ops=read,write,x", "no operation is called \"x\""),
            ("from=2M&to=1M", "from must be below to"),
            ("speed=1", "has no option \"speed\""),
            ("latency=1s&fault.latency=2s", "is given twice"),
        ] {
            let error = text.parse::<Plan>().expect_err(text);
            assert!(error.message().contains(cause), "{text}: {}", error.message());
        }
    }

    proptest! {
        #[test]
        fn round_trip(
            latency_us in 0_u64..3_600_000_000, jitter_us in 0_u64..10_000_000, hang: bool,
            error in prop::option::of(0..IoError::ALL.len()), rate in prop::option::of(0..MILLION),
            ops in 0_u8..64, from in prop::option::of(0_u64..1 << 40),
            length in prop::option::of(1_u64..1 << 40), seed: u64, fail_sync: bool,
            drop_syncs: bool,
        ) {
            let plan = Plan {
                latency: Duration::from_micros(latency_us),
                jitter: Duration::from_micros(jitter_us),
                hang,
                error: error.map(|index| IoError::ALL[index]),
                rate,
                ops,
                from,
                to: length.map(|length| from.unwrap_or(0) + length),
                seed,
                fail_sync,
                drop_syncs,
            };
            prop_assert_eq!(plan.to_string().parse::<Plan>().ok(), Some(plan));
        }
    }
}
