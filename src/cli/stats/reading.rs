//! Rates and latencies from two readings of the daemon's counters, in the form of the JSON schema.

use std::collections::BTreeMap;

use serde::Serialize;

use cleat_api::v1::{OpStats, StatsResponse, VolumeStats};
use cleat_statistics::quantile;

/// One reading.
#[derive(Debug, Serialize)]
pub(super) struct Reading {
    /// The time of the reading: the daemon's monotonic clock, in milliseconds.
    pub(super) at_ms: u64,
    /// The upper bounds of the buckets in all `latency_buckets`. The last bucket has none.
    pub(super) latency_bounds_ns: Vec<u64>,
    pub(super) volumes: Vec<VolumeReading>,
}

/// One volume in a reading.
#[derive(Debug, Serialize)]
pub(super) struct VolumeReading {
    pub(super) name: String,
    pub(super) device: String,
    pub(super) connections: u32,
    pub(super) in_flight: u32,
    /// The counters since the volume was mapped, by operation.
    pub(super) counters: BTreeMap<String, Counters>,
    /// The number of errors since the volume was mapped, by kind.
    pub(super) errors: BTreeMap<String, u64>,
    /// The rates since the previous reading, by operation; null with `--total`.
    pub(super) rates: Option<BTreeMap<String, Rates>>,
}

/// The counters of one operation.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Counters {
    pub(super) count: u64,
    pub(super) bytes: u64,
    pub(super) errors: u64,
    pub(super) total_ns: u64,
    pub(super) latency_buckets: Vec<u64>,
    pub(super) latency: Latency,
}

/// The rates of one operation between two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    pub(super) iops: f64,
    pub(super) bytes_per_s: f64,
    pub(super) errors_per_s: f64,
    /// Null if no request completed between the readings.
    pub(super) mean_latency_us: Option<f64>,
    pub(super) latency: Latency,
}

/// The distribution of latency: each value is the bound that this share of the requests stayed below. Null
/// without requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Latency {
    pub(super) p50_us: Option<f64>,
    pub(super) p90_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) p999_us: Option<f64>,
    pub(super) max_us: Option<f64>,
}

impl Reading {
    pub(super) fn new(before: Option<&StatsResponse>, now: &StatsResponse) -> Self {
        let bounds = &now.latency_bounds_ns;
        let elapsed_ms = before.map(|before| now.at_ms.saturating_sub(before.at_ms));
        let mut volumes: Vec<VolumeReading> = now
            .volumes
            .iter()
            .map(|volume| {
                let same = |old: &&VolumeStats| old.name == volume.name;
                let old = before.map(|before| before.volumes.iter().find(same));
                VolumeReading::new(volume, old.zip(elapsed_ms), bounds)
            })
            .collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { at_ms: now.at_ms, latency_bounds_ns: bounds.clone(), volumes }
    }
}

impl VolumeReading {
    /// Creates the values of a volume. `before` is the previous reading of this volume, if it had one, and the
    /// milliseconds since then.
    fn new(now: &VolumeStats, before: Option<(Option<&VolumeStats>, u64)>, bounds: &[u64]) -> Self {
        let counters = counters_by_name(now, bounds);
        let rates = before.map(|(old, elapsed_ms)| {
            let old = old.map(|old| counters_by_name(old, bounds)).unwrap_or_default();
            let rate = |(op, now): (&String, &Counters)| {
                (op.clone(), Rates::between(old.get(op), now, elapsed_ms, bounds))
            };
            counters.iter().map(rate).collect()
        });
        Self {
            name: now.name.clone(),
            device: now.device.clone(),
            connections: now.connections,
            in_flight: now.in_flight,
            counters,
            errors: now.errors.iter().map(|(kind, count)| (kind.clone(), *count)).collect(),
            rates,
        }
    }

    pub(super) fn rates(&self, op: &str) -> Rates {
        self.rates.as_ref().and_then(|rates| rates.get(op)).copied().unwrap_or_default()
    }

    pub(super) fn failed(&self) -> u64 {
        self.counters.values().map(|counters| counters.errors).sum()
    }
}

fn counters_by_name(volume: &VolumeStats, bounds: &[u64]) -> BTreeMap<String, Counters> {
    volume.ops.iter().map(|op| (op.op.clone(), Counters::new(op, bounds))).collect()
}

impl Counters {
    fn new(op: &OpStats, bounds: &[u64]) -> Self {
        Self {
            count: op.count,
            bytes: op.bytes,
            errors: op.errors,
            total_ns: op.total_ns,
            latency_buckets: op.latency_buckets.clone(),
            latency: Latency::new(&op.latency_buckets, bounds),
        }
    }

    /// Returns the mean latency since the volume was mapped.
    pub(super) fn mean_us(&self) -> Option<f64> {
        (self.count > 0).then(|| self.total_ns as f64 / 1000.0 / self.count as f64)
    }
}

impl Rates {
    /// Computes the rates from the counters of two readings. A count that has decreased belongs to another
    /// mapping with the same name, so the rates start from zero.
    fn between(before: Option<&Counters>, now: &Counters, elapsed_ms: u64, bounds: &[u64]) -> Self {
        let none = Counters::default();
        let before = before.filter(|before| before.count <= now.count).unwrap_or(&none);
        let seconds = elapsed_ms.max(1) as f64 / 1000.0;
        let delta = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let ended = delta(now.count, before.count);
        let spent_us = delta(now.total_ns, before.total_ns) / 1000.0;
        let earlier = before.latency_buckets.iter().copied().chain(std::iter::repeat(0));
        let buckets: Vec<u64> = now
            .latency_buckets
            .iter()
            .zip(earlier)
            .map(|(now, before)| now.saturating_sub(before))
            .collect();
        Self {
            iops: ended / seconds,
            bytes_per_s: delta(now.bytes, before.bytes) / seconds,
            errors_per_s: delta(now.errors, before.errors) / seconds,
            mean_latency_us: (ended > 0.0).then(|| spent_us / ended),
            latency: Latency::new(&buckets, bounds),
        }
    }
}

impl Latency {
    fn new(buckets: &[u64], bounds: &[u64]) -> Self {
        let below_us = |share| {
            // The last bucket has no bound; the last bound stands for it.
            let bound = |index: usize| bounds.get(index).or(bounds.last());
            quantile(buckets, share).and_then(bound).map(|ns| *ns as f64 / 1000.0)
        };
        Self {
            p50_us: below_us(0.5),
            p90_us: below_us(0.9),
            p99_us: below_us(0.99),
            p999_us: below_us(0.999),
            max_us: below_us(1.0),
        }
    }

    /// Returns the values in the order of the table's columns.
    pub(super) fn columns(&self) -> [Option<f64>; 5] {
        [self.p50_us, self.p90_us, self.p99_us, self.p999_us, self.max_us]
    }
}
