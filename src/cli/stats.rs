//! `cleat stats`: what the volumes do, live.
//!
//! The daemon sends counters; the rates between two readings are made here.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use tokio_stream::StreamExt as _;
use tonic::Streaming;

use super::client::{self, Client, GRACE, QUERY_TIMEOUT, milliseconds};
use super::output::{self, Format, Table};
use super::{Globals, size};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::v1::{OpStats, StatsRequest, StatsResponse, VolumeStats};

pub(super) const EXAMPLES: &str = "\
Examples:
  All mappings, refreshed every second on a terminal, a line a second elsewhere:
    $ cleat stats

  One of them, ten readings, two seconds apart:
    $ cleat stats data --interval 2s --count 10

  The counters since the mapping's worker started, once:
    $ cleat stats data --total

  As a stream of JSON documents, one a line:
    $ cleat stats -o json | jq -c '.volumes[] | [.name, .rates.read.iops]'
";

/// Show operations, throughput and latency, live
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Stats {
    /// The mapping's name, its device or its URI; without it: all of them
    target: Option<String>,
    /// Time between two readings, from 100ms
    #[arg(long, value_name = "DURATION", value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// End after this many readings
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Show the counters since the worker started, once
    #[arg(long, conflicts_with_all = ["count", "interval"])]
    total: bool,
}

/// One reading in JSON.
#[derive(Debug, Serialize)]
struct Reading {
    /// Monotonic, of the daemon.
    at_ms: u64,
    volumes: Vec<Volume>,
}

/// One volume in a reading.
#[derive(Debug, Serialize)]
struct Volume {
    name: String,
    device: String,
    connections: u32,
    in_flight: u32,
    /// Since the worker started, by operation.
    counters: BTreeMap<String, Counters>,
    /// Since the worker started, by kind.
    errors: BTreeMap<String, u64>,
    /// Since the reading before, by operation; null with `--total`.
    rates: Option<BTreeMap<String, Rates>>,
}

/// What has been counted of one operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Counters {
    count: u64,
    bytes: u64,
    errors: u64,
    total_ns: u64,
}

/// What happened between two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
struct Rates {
    iops: f64,
    bytes_per_s: f64,
    errors_per_s: f64,
    /// Null when nothing ended in between.
    mean_latency_us: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// What the daemon answers; `Unavailable` when it ends the stream.
pub(super) fn run(globals: &Globals, args: Stats) -> Result<()> {
    let target = args.target.clone().unwrap_or_default();
    if args.total {
        return client::run(globals, async |client| total(globals, &client, target).await);
    }
    client::run(globals, async |client| live(globals, &client, target, &args).await)
}

async fn total(globals: &Globals, client: &Client, target: String) -> Result<()> {
    let mut stream = subscribe(client, StatsRequest { target, interval_ms: 0 }).await?;
    let response = next(client, &mut stream, QUERY_TIMEOUT).await?;
    let reading = Reading::new(None, &response);
    if globals.output == Some(Format::Json) {
        return output::json(&reading);
    }
    output::text(&totals_table(&reading))
}

async fn live(globals: &Globals, client: &Client, target: String, args: &Stats) -> Result<()> {
    let request = StatsRequest { target, interval_ms: milliseconds(args.interval) };
    let mut stream = subscribe(client, request).await?;
    let limit = args.interval + QUERY_TIMEOUT;
    // The first reading is what the first rates count from.
    let mut before = next(client, &mut stream, limit).await?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        let now = next(client, &mut stream, limit).await?;
        let reading = Reading::new(Some(&before), &now);
        if !show(globals, &reading, shown == 0)? {
            break;
        }
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Shows one reading; returns whether anybody still reads.
fn show(globals: &Globals, reading: &Reading, first: bool) -> Result<bool> {
    if globals.output == Some(Format::Json) {
        return output::json_line(reading);
    }
    let table = rates_table(reading, globals.output == Some(Format::Wide));
    if output::is_terminal() {
        // Home, the table, erase the rest of each line and of the screen: no flicker.
        let frame = table.replace('\n', "\x1b[K\r\n");
        let clear = if first { "\x1b[2J" } else { "" };
        return output::live(format!("{clear}\x1b[H{frame}\x1b[J").as_bytes());
    }
    let (heading, rows) = table.split_once('\n').unwrap_or((&table, ""));
    let heading = if first { format!("{heading}\n") } else { String::new() };
    output::live(format!("{heading}{rows}").as_bytes())
}

async fn subscribe(client: &Client, request: StatsRequest) -> Result<Streaming<StatsResponse>> {
    client.call(QUERY_TIMEOUT, async |mut node| node.stats(request).await).await
}

async fn next(
    client: &Client,
    stream: &mut Streaming<StatsResponse>,
    limit: Duration,
) -> Result<StatsResponse> {
    match tokio::time::timeout(limit + GRACE, stream.next()).await {
        Ok(Some(Ok(response))) => Ok(response),
        Ok(Some(Err(status))) => Err(client.error(&status)),
        Ok(None) => Err(Error::new(ErrorKind::Unavailable, "the daemon ended the statistics")
            .with_repair("see whether it was stopped: systemctl status cleat")),
        Err(_) => Err(Error::new(ErrorKind::TimedOut, "the daemon sends no more statistics")
            .with_repair("look into its log: journalctl -u cleat")),
    }
}

impl Reading {
    fn new(before: Option<&StatsResponse>, now: &StatsResponse) -> Self {
        let elapsed_ms = before.map(|before| now.at_ms.saturating_sub(before.at_ms));
        let mut volumes: Vec<Volume> = now
            .volumes
            .iter()
            .map(|volume| {
                let same = |old: &&VolumeStats| old.name == volume.name;
                let old = before.map(|before| before.volumes.iter().find(same));
                Volume::new(volume, old.zip(elapsed_ms))
            })
            .collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { at_ms: now.at_ms, volumes }
    }
}

impl Volume {
    /// `before`: the reading before, which may not have this volume, and how long ago it was.
    fn new(now: &VolumeStats, before: Option<(Option<&VolumeStats>, u64)>) -> Self {
        let counters = counters_by_name(now);
        let rates = before.map(|(old, elapsed_ms)| {
            let old = old.map(counters_by_name).unwrap_or_default();
            let rate = |(op, now): (&String, &Counters)| {
                let old = old.get(op).copied().unwrap_or_default();
                (op.clone(), Rates::between(old, *now, elapsed_ms))
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

    fn rates(&self, op: &str) -> Rates {
        self.rates.as_ref().and_then(|rates| rates.get(op)).copied().unwrap_or_default()
    }

    fn failed(&self) -> u64 {
        self.counters.values().map(|counters| counters.errors).sum()
    }
}

fn counters_by_name(volume: &VolumeStats) -> BTreeMap<String, Counters> {
    volume.ops.iter().map(|op| (op.op.clone(), Counters::from(op))).collect()
}

impl From<&OpStats> for Counters {
    fn from(op: &OpStats) -> Self {
        Self { count: op.count, bytes: op.bytes, errors: op.errors, total_ns: op.total_ns }
    }
}

impl Rates {
    /// Counters that went down were started anew, with a new worker: they count from zero.
    #[allow(clippy::cast_precision_loss)] // Rates are for the eye; 53 bits are enough.
    fn between(before: Counters, now: Counters, elapsed_ms: u64) -> Self {
        let before = if now.count < before.count { Counters::default() } else { before };
        let seconds = elapsed_ms.max(1) as f64 / 1000.0;
        let delta = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let ended = delta(now.count, before.count);
        let spent_us = delta(now.total_ns, before.total_ns) / 1000.0;
        Self {
            iops: ended / seconds,
            bytes_per_s: delta(now.bytes, before.bytes) / seconds,
            errors_per_s: delta(now.errors, before.errors) / seconds,
            mean_latency_us: (ended > 0.0).then(|| spent_us / ended),
        }
    }
}

/// Operations that move no data and are summed up in the table.
const OTHERS: [&str; 3] = ["trim", "write_zeroes", "cache"];

fn rates_table(reading: &Reading, wide: bool) -> String {
    let mut headings =
        vec!["NAME", "READ/s", "MB/s", "MEAN", "WRITE/s", "MB/s", "MEAN", "FLUSH/s", "MEAN"];
    headings.extend(["BUSY", "ERRORS"]);
    if wide {
        headings.extend(["OTHER/s", "DEVICE", "CONNECTIONS"]);
    }
    let mut table = Table::new(&headings).align_right(1..12);
    for volume in &reading.volumes {
        let mut cells = vec![volume.name.clone()];
        for op in ["read", "write"] {
            let rates = volume.rates(op);
            cells.extend([
                format!("{:.0}", rates.iops),
                format!("{:.1}", rates.bytes_per_s / 1e6),
                latency(rates.mean_latency_us),
            ]);
        }
        let flush = volume.rates("flush");
        cells.extend([
            format!("{:.0}", flush.iops),
            latency(flush.mean_latency_us),
            volume.in_flight.to_string(),
            volume.failed().to_string(),
        ]);
        if wide {
            let others: f64 = OTHERS.iter().map(|op| volume.rates(op).iops).sum();
            let connections = volume.connections.to_string();
            cells.extend([format!("{others:.0}"), volume.device.clone(), connections]);
        }
        table.row(cells);
    }
    table.render()
}

fn totals_table(reading: &Reading) -> String {
    let mut table = Table::new(&["NAME", "OPERATION", "COUNT", "BYTES", "ERRORS", "MEAN"])
        .align_right([2, 3, 4, 5]);
    for volume in &reading.volumes {
        for (op, counters) in &volume.counters {
            let mean = Rates::between(Counters::default(), *counters, 1000).mean_latency_us;
            table.row(vec![
                volume.name.clone(),
                op.clone(),
                counters.count.to_string(),
                size::human(counters.bytes),
                counters.errors.to_string(),
                latency(mean),
            ]);
        }
    }
    let mut text = table.render();
    for volume in &reading.volumes {
        for (kind, count) in volume.errors.iter().filter(|(_, count)| **count > 0) {
            text.push_str(&output::printable(&format!("{}: {count} failed: {kind}", volume.name)));
            text.push('\n');
        }
    }
    text
}

fn latency(mean_us: Option<f64>) -> String {
    match mean_us {
        None => String::new(),
        Some(us) if us < 1000.0 => format!("{us:.0} us"),
        Some(us) if us < 1_000_000.0 => format!("{:.1} ms", us / 1000.0),
        Some(us) => format!("{:.1} s", us / 1_000_000.0),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = size::duration(text)?;
    if interval < Duration::from_millis(100) {
        return Err("readings lie at least 100ms apart".to_owned());
    }
    Ok(interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading_of(at_ms: u64, count: u64, bytes: u64, total_ns: u64) -> StatsResponse {
        let read = OpStats { op: "read".into(), count, bytes, errors: 0, total_ns };
        let volume = VolumeStats {
            name: "data".into(),
            ops: vec![read],
            in_flight: 3,
            ..Default::default()
        };
        StatsResponse { volumes: vec![volume], at_ms }
    }

    #[test]
    fn rates_are_what_happened_between_two_readings() {
        let before = reading_of(1000, 100, 4096 * 100, 5_000_000);
        let now = reading_of(3000, 300, 4096 * 300, 25_000_000);
        let reading = Reading::new(Some(&before), &now);
        let rates = reading.volumes[0].rates("read");
        assert_eq!(rates.iops, 100.0);
        assert_eq!(rates.bytes_per_s, 409_600.0);
        assert_eq!(rates.mean_latency_us, Some(100.0));
        assert_eq!(reading.volumes[0].rates("write"), Rates::default());
        let table = rates_table(&reading, false);
        let row = table.lines().nth(1).expect("one volume");
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells[..5], ["data", "100", "0.4", "100", "us"]);
    }

    #[test]
    fn a_new_worker_counts_from_zero() {
        let reading =
            Reading::new(Some(&reading_of(0, 900, 900, 900)), &reading_of(1000, 10, 10, 10));
        assert_eq!(reading.volumes[0].rates("read").iops, 10.0);
    }

    #[test]
    fn a_volume_mapped_between_two_readings_counts_from_zero() {
        let before = StatsResponse { volumes: Vec::new(), at_ms: 0 };
        let reading = Reading::new(Some(&before), &reading_of(500, 10, 10, 10));
        assert_eq!(reading.volumes[0].rates("read").iops, 20.0);
    }

    #[test]
    fn a_single_reading_has_no_rates() {
        let reading = Reading::new(None, &reading_of(500, 10, 1 << 20, 50_000));
        assert!(reading.volumes[0].rates.is_none());
        assert!(totals_table(&reading).contains("1.0 MiB"));
        let json = serde_json::to_value(&reading).expect("it is JSON");
        assert!(json["volumes"][0]["rates"].is_null());
        assert_eq!(json["volumes"][0]["counters"]["read"]["count"], 10);
    }
}
