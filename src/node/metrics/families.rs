//! The names and texts of the metrics. Later builds may add metrics; existing names keep their meaning.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::scrape::{Scrape, VolumeCounters, VolumeSample};
use crate::planner::State;
use cleat_core::request::{IoError, Op};
use cleat_core::space::SpaceUse;
use cleat_statistics::{BUCKETS, FIRST_BUCKET_NS, OpSnapshot};

/// The buckets of the statistics page that are shown: 4 microseconds to 69 seconds. Faster requests are
/// counted in the first one, slower ones in `+Inf`.
const SHOWN_BUCKETS: std::ops::Range<usize> = 2..27;

/// The states. Each volume has a sample for each of them, with the value 1 for its present one.
const STATES: [&str; 5] = ["mapping", "mapped", "recovering", "failed", "unmapping"];

/// The operations that are shown before their first request; the others are shown after it.
const ALWAYS_SHOWN: [Op; 3] = [Op::Read, Op::Write, Op::Flush];

/// Converts an OpenMetrics text to Prometheus' older format (text/plain; version=0.0.4). There a family has
/// the name of its samples with their suffix, an info is a gauge, and there is no end marker.
pub(super) fn classic(text: &str) -> String {
    let mut classic = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let descriptor = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '));
        let kind = lines.peek().and_then(|line| line.rsplit_once(' '));
        if let (Some((family, help)), Some((_, kind))) = (descriptor, kind) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            for part in ["# HELP ", family, suffix, " ", help, "\n"] {
                classic.push_str(part);
            }
            for part in ["# TYPE ", family, suffix, " ", kind, "\n"] {
                classic.push_str(part);
            }
            lines.next();
        } else if line != "# EOF" {
            classic.push_str(line);
            classic.push('\n');
        }
    }
    classic
}

/// Formats a scrape as an OpenMetrics text.
///
/// # Errors
/// Returns an error if prometheus-client refuses a name or a value.
pub(super) fn text(scrape: Scrape) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("cleat");
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = Writer(&mut encoder);
        self.encode_daemon(&mut writer)?;
        self.encode_mappings(&mut writer)?;
        self.encode_requests(&mut writer)?;
        self.encode_now(&mut writer)
    }
}

type Label<'a> = (&'static str, &'a str);

/// Writes one family after the other.
struct Writer<'e, 'd>(&'e mut DescriptorEncoder<'d>);

impl Writer<'_, '_> {
    fn family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        mut samples: impl FnMut(&mut Samples<'_>) -> fmt::Result,
    ) -> fmt::Result {
        samples(&mut Samples(self.0.encode_descriptor(name, help, None, kind)?))
    }

    fn gauges<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([Label<'a>; N], f64)>,
    ) -> fmt::Result {
        let mut values = values;
        self.family(name, help, MetricType::Gauge, |samples| {
            values.try_for_each(|(labels, value)| {
                samples.labelled(&labels, |encoder| encoder.encode_gauge(&value))
            })
        })
    }

    fn counters<'a, const N: usize, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = ([Label<'a>; N], V)>,
    ) -> fmt::Result {
        let mut values = values;
        self.family(name, help, MetricType::Counter, |samples| {
            values.try_for_each(|(labels, value)| {
                samples.labelled(&labels, |e| e.encode_counter::<NoLabelSet, _, u64>(&value, None))
            })
        })
    }
}

/// The samples of one family.
struct Samples<'a>(MetricEncoder<'a>);

impl Samples<'_> {
    fn labelled<const N: usize>(
        &mut self,
        labels: &[Label<'_>; N],
        encode: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        match N {
            0 => encode(&mut self.0),
            _ => encode(&mut self.0.encode_family(labels)?),
        }
    }
}

impl Scrape {
    fn encode_daemon(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        writer.family("build", "The daemon's version", MetricType::Info, |samples| {
            samples.0.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
        })?;
        let one = |value: f64| std::iter::once(([], value));
        writer.gauges(
            "start_time_seconds",
            "When the daemon started, in seconds since the epoch",
            one(self.started_at_s as f64),
        )?;
        writer.gauges(
            "findings",
            "Problems that the daemon found when it started",
            one(self.findings as f64),
        )?;
        writer.gauges(
            "service_problems",
            "Services beside the control API that do not work, such as the agent for grants",
            one(self.service_problems as f64),
        )?;
        writer.gauges(
            "state_directory_writable",
            "Whether the state directory took the last record of a mapping",
            one(f64::from(u8::from(self.state_directory_writable))),
        )?;
        writer.gauges(
            "kernel_reachable",
            "Whether the kernel's nbd devices could be listed for this scrape",
            one(f64::from(u8::from(self.orphans.is_some()))),
        )?;
        writer.gauges(
            "orphan_devices",
            "Devices with an identity of cleat but without a record",
            self.orphans.iter().map(|count| ([], *count as f64)),
        )?;
        let load = &self.kernel;
        let calls = [("command", load.commands), ("wait", load.waits)];
        writer.gauges(
            "kernel_calls",
            "Calls to the kernel in progress, stuck ones included",
            calls.iter().map(|(kind, count)| ([("kind", *kind)], *count as f64)),
        )?;
        writer.gauges(
            "kernel_calls_stuck",
            "Calls to the kernel that exceeded their timeout and have not returned",
            one(load.stuck as f64),
        )?;
        writer.counters(
            "log_lines_dropped",
            "Lines of the daemon's log that were dropped because the reader was too slow",
            std::iter::once(([], self.log_lines_dropped)),
        )?;
        writer.counters(
            "api_calls",
            "Answered calls of the control API",
            self.calls.iter().map(|((method, code), count)| {
                ([("method", method.as_str()), ("code", *code)], *count)
            }),
        )
    }

    fn encode_mappings(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let in_state = |state: &str| self.volumes.iter().filter(|v| state_of(v) == state).count();
        writer.gauges(
            "mappings",
            "Mappings by state",
            STATES.iter().map(|state| ([("state", *state)], in_state(state) as f64)),
        )?;
        writer.family("volume", "The identity of a mapping", MetricType::Info, |samples| {
            self.volumes.iter().try_for_each(|volume| {
                let view = &volume.view;
                let device = view.node().map(|n| n.to_string_lossy().into_owned());
                samples.0.encode_info(&[
                    ("volume", view.record.name.as_str()),
                    ("mapping_id", &view.record.mapping_id),
                    ("device", device.as_deref().unwrap_or_default()),
                    ("uri", &view.record.uri),
                    ("mode", if view.is_read_only() { "read-only" } else { "read-write" }),
                ])
            })
        })?;
        let states = self.volumes.iter().flat_map(|volume| {
            let is = state_of(volume);
            STATES.iter().map(move |state| {
                ([name(volume), ("state", *state)], f64::from(u8::from(is == *state)))
            })
        });
        writer.gauges("volume_state", "1 for the current state of the mapping", states)?;
        writer.gauges(
            "volume_fenced",
            "Whether this node must not use the volume any more: another client owns it, or it was replaced",
            self.each(|volume| Some(f64::from(u8::from(volume.view.is_fenced())))),
        )?;
        writer.gauges(
            "volume_replaced",
            "Whether another volume was found in place of the mapping's volume",
            self.each(|volume| Some(f64::from(u8::from(volume.view.is_replaced())))),
        )?;
        writer.gauges(
            "volume_sync_failed",
            "Whether a sync of the volume failed, so that acknowledged writes may be lost",
            self.each(|volume| Some(f64::from(u8::from(volume.view.record.sync_failed)))),
        )?;
        writer.gauges(
            "volume_size_bytes",
            "The size of the device",
            self.each(|volume| volume.size.map(|size| size as f64)),
        )?;
        let starts = self.volumes.iter().map(|v| ([name(v)], v.view.record.generation));
        writer.counters(
            "volume_worker_starts",
            "Workers that were started for the mapping",
            starts,
        )?;
        writer.counters(
            "volume_reconnects",
            "Reconnects of the device; dead connections that are replaced together count once",
            self.by_volume(|counters| counters.reconnects),
        )
    }

    fn encode_requests(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        writer.counters(
            "volume_operations",
            "Completed requests, failed ones included",
            self.by_op(|counts| counts.count),
        )?;
        writer.counters(
            "volume_bytes",
            "Bytes of successful requests",
            self.by_op(|counts| counts.bytes),
        )?;
        let errors = self.counters().flat_map(|(volume, counters)| {
            let errors = IoError::ALL.iter().zip(&counters.snapshot.errors);
            errors
                .filter(|(_, count)| **count > 0)
                .map(move |(kind, count)| ([name(volume), ("kind", kind.name())], *count))
        });
        writer.counters("volume_errors", "Failed requests, by kind of error", errors)?;
        writer.counters(
            "volume_stalled_seconds",
            "Time in past outages of the backend, summed over the connections",
            self.by_volume(|counters| seconds(counters.snapshot.stalled_ns)),
        )?;
        writer.counters(
            "volume_limited_seconds",
            "Time in which a rate limit delayed requests, summed over the connections",
            self.by_volume(|counters| seconds(counters.snapshot.limited_ns)),
        )?;
        writer.family(
            "volume_request_duration_seconds",
            "Time from the arrival of a request to its reply",
            MetricType::Histogram,
            |samples| {
                self.ops().try_for_each(|(volume, op, counts)| {
                    let (sum, count, buckets) = histogram(counts);
                    samples.labelled(&[name(volume), ("op", op.name())], |encoder| {
                        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
                    })
                })
            },
        )
    }

    fn encode_now(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        writer.gauges(
            "volume_queued_requests",
            "Requests that wait for an unreachable backend",
            self.by_volume(|counters| counters.snapshot.queued as f64),
        )?;
        writer.gauges(
            "volume_unsaved_bytes",
            "Data of acknowledged writes that is in memory and not in the store yet",
            self.by_volume(|counters| counters.snapshot.unsaved as f64),
        )?;
        writer.gauges(
            "volume_write_amplification",
            "Bytes put to the store for each byte that was written, since the worker has opened the volume",
            self.ratios(SpaceUse::write_amplification),
        )?;
        writer.gauges(
            "volume_space_amplification",
            "Bytes of data in the volume's objects for each byte of it that the volume needs",
            self.ratios(SpaceUse::space_amplification),
        )?;
        writer.gauges(
            "volume_outage_seconds",
            "Duration of the current outage of the backend; 0 if there is none",
            self.by_volume(|counters| match counters.snapshot.outage_since_ns {
                0 => 0.0,
                since => seconds(self.boot_now_ns.saturating_sub(since)),
            }),
        )?;
        writer.gauges(
            "volume_connections",
            "Connections of the device that a worker serves",
            self.by_volume(|counters| counters.snapshot.connections as f64),
        )?;
        writer.gauges(
            "volume_in_flight_requests",
            "Requests in flight",
            self.by_volume(|counters| counters.snapshot.in_flight as f64),
        )?;
        writer.gauges(
            "volume_oldest_request_seconds",
            "Age of the oldest request in flight; 0 if there is none",
            self.by_volume(|counters| match counters.snapshot.oldest_ns {
                0 => 0.0,
                since => seconds(self.now_ns.saturating_sub(since)),
            }),
        )
    }

    fn each<'a>(
        &'a self,
        value: impl Fn(&VolumeSample) -> Option<f64> + 'a,
    ) -> impl Iterator<Item = ([Label<'a>; 1], f64)> {
        self.volumes.iter().filter_map(move |volume| Some(([name(volume)], value(volume)?)))
    }

    fn counters(&self) -> impl Iterator<Item = (&VolumeSample, &VolumeCounters)> {
        self.volumes.iter().filter_map(|volume| Some((volume, volume.counters.as_ref()?)))
    }

    /// The volumes for which the ratio is defined.
    fn ratios<'a>(
        &'a self,
        ratio: impl Fn(&SpaceUse) -> Option<f64> + 'a,
    ) -> impl Iterator<Item = ([Label<'a>; 1], f64)> {
        self.counters().filter_map(move |(volume, counters)| {
            Some(([name(volume)], ratio(&counters.snapshot.space)?))
        })
    }

    fn by_volume<'a, T>(
        &'a self,
        value: impl Fn(&VolumeCounters) -> T + 'a,
    ) -> impl Iterator<Item = ([Label<'a>; 1], T)> {
        self.counters().map(move |(volume, counters)| ([name(volume)], value(counters)))
    }

    fn ops(&self) -> impl Iterator<Item = (&VolumeSample, Op, &OpSnapshot)> {
        self.counters().flat_map(|(volume, counters)| {
            Op::ALL
                .into_iter()
                .map(|op| (op, counters.snapshot.op(op)))
                .filter(|(op, counts)| counts.count > 0 || ALWAYS_SHOWN.contains(op))
                .map(move |(op, counts)| (volume, op, counts))
        })
    }

    fn by_op<'a>(
        &'a self,
        value: impl Fn(&OpSnapshot) -> u64 + 'a,
    ) -> impl Iterator<Item = ([Label<'a>; 2], u64)> {
        self.ops()
            .map(move |(volume, op, counts)| ([name(volume), ("op", op.name())], value(counts)))
    }
}

fn name(volume: &VolumeSample) -> Label<'_> {
    ("volume", volume.view.record.name.as_str())
}

fn state_of(volume: &VolumeSample) -> &'static str {
    match volume.view.state {
        State::Mapping => STATES[0],
        State::Mapped => STATES[1],
        State::Recovering => STATES[2],
        State::Failed(_) => STATES[3],
        State::Unmapping | State::Held(_) | State::Unmapped => STATES[4],
    }
}

/// Returns the sum in seconds, the count, and the number of requests in each shown bucket.
fn histogram(counts: &OpSnapshot) -> (f64, u64, Vec<(f64, u64)>) {
    // The worker can write any value to the page, so the sum must not overflow.
    let max = u64::MAX / (2 * BUCKETS as u64);
    let sum = |range: &[u64]| range.iter().map(|count| (*count).min(max)).sum::<u64>();
    let mut from = 0;
    let mut buckets = Vec::with_capacity(SHOWN_BUCKETS.len() + 1);
    for index in SHOWN_BUCKETS {
        buckets.push((seconds(FIRST_BUCKET_NS << index), sum(&counts.latency[from..=index])));
        from = index + 1;
    }
    buckets.push((f64::INFINITY, sum(&counts.latency[from..])));
    // The sum of the buckets, since `count` may be a request ahead and the two must agree.
    (seconds(counts.total_ns), sum(&counts.latency), buckets)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_calls::KernelLoad;
    use crate::mapping::Mapping;
    use crate::planner::tests::record;
    use cleat_statistics::Snapshot;

    fn scrape(snapshot: Snapshot) -> Scrape {
        let (work_queue, _) = tokio::sync::mpsc::channel(1);
        let view = Mapping::new(record(1, true), work_queue).view();
        let counters = Some(VolumeCounters { snapshot, reconnects: 0 });
        Scrape {
            volumes: vec![VolumeSample { view, size: Some(4096), counters }],
            started_at_s: 1,
            findings: 0,
            service_problems: 0,
            state_directory_writable: false,
            log_lines_dropped: 0,
            orphans: None,
            kernel: KernelLoad { commands: 1, waits: 2, stuck: 3 },
            calls: Vec::new(),
            now_ns: 3_000_000_000,
            boot_now_ns: 5_000_000_000,
        }
    }

    #[test]
    fn buckets_are_cumulative_in_seconds_and_contain_all_requests() {
        let mut snapshot = Snapshot::default();
        let read = &mut snapshot.ops[Op::Read as usize];
        (read.count, read.total_ns) = (7, 1_500_000_000);
        (read.latency[0], read.latency[2], read.latency[3], read.latency[31]) = (1, 2, 3, 1);
        let text = text(scrape(snapshot)).unwrap();
        let name = "cleat_volume_request_duration_seconds";
        for line in [
            format!("{name}_bucket{{le=\"0.000004096\",volume=\"v\",op=\"read\"}} 3\n"),
            format!("{name}_bucket{{le=\"0.000008192\",volume=\"v\",op=\"read\"}} 6\n"),
            format!("{name}_bucket{{le=\"68.719476736\",volume=\"v\",op=\"read\"}} 6\n"),
            format!("{name}_bucket{{le=\"+Inf\",volume=\"v\",op=\"read\"}} 7\n"),
            format!("{name}_sum{{volume=\"v\",op=\"read\"}} 1.5\n"),
            format!("{name}_count{{volume=\"v\",op=\"read\"}} 7\n"),
        ] {
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[test]
    fn a_page_with_extreme_values_is_shown() {
        let mut snapshot =
            Snapshot { in_flight: u64::MAX, oldest_ns: u64::MAX, ..Default::default() };
        for op in &mut snapshot.ops {
            (op.count, op.bytes, op.latency) = (u64::MAX, u64::MAX, [u64::MAX; BUCKETS]);
        }
        snapshot.errors.fill(u64::MAX);
        let text = text(scrape(snapshot)).unwrap();
        assert!(text.contains("cleat_volume_oldest_request_seconds{volume=\"v\"} 0.0\n"), "{text}");
    }

    #[test]
    fn amplifications_are_shown_where_they_are_defined() {
        let space = SpaceUse {
            put_bytes: 300,
            written_bytes: 200,
            object_bytes: 90,
            live_bytes: 0,
            ..SpaceUse::default()
        };
        let shown = text(scrape(Snapshot { space, ..Snapshot::default() })).unwrap();
        assert!(shown.contains("cleat_volume_write_amplification{volume=\"v\"} 1.5\n"), "{shown}");
        assert!(!shown.contains("cleat_volume_space_amplification{"), "{shown}");
        let space = SpaceUse { written_bytes: 0, live_bytes: 40, ..space };
        let shown = text(scrape(Snapshot { space, ..Snapshot::default() })).unwrap();
        assert!(!shown.contains("cleat_volume_write_amplification{"), "{shown}");
        assert!(shown.contains("cleat_volume_space_amplification{volume=\"v\"} 2.25\n"), "{shown}");
    }

    #[test]
    fn the_classic_format_names_families_as_their_samples() {
        let text = "# HELP a Some a\n# TYPE a info\na_info{x=\"# EOF\"} 1\n# HELP b_c Some counter\n\
                    # TYPE b_c counter\nb_c_total 2\n# HELP d A d\n# TYPE d gauge\n# EOF\n";
        assert_eq!(
            classic(text),
            "# HELP a_info Some a\n# TYPE a_info gauge\na_info{x=\"# EOF\"} 1\n\
             # HELP b_c_total Some counter\n# TYPE b_c_total counter\nb_c_total 2\n\
             # HELP d A d\n# TYPE d gauge\n"
        );
    }

    #[test]
    fn orphans_are_left_out_if_the_kernel_did_not_answer() {
        let text = text(scrape(Snapshot::default())).unwrap();
        assert!(text.contains("cleat_kernel_reachable 0.0\n"), "{text}");
        assert!(text.contains("cleat_state_directory_writable 0.0\n"), "{text}");
        assert!(!text.contains("\ncleat_orphan_devices "), "{text}");
        assert!(text.contains("cleat_kernel_calls_stuck 3.0\n"), "{text}");
    }
}
