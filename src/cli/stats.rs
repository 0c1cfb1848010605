//! `cleat stats`: shows the statistics of volumes, live.
//!
//! The daemon sends counters. `reading` computes the rates between two readings.

mod reading;

use std::time::Duration;

use tokio_stream::StreamExt as _;
use tonic::Streaming;

use super::client::{self, Client, QUERY_TIMEOUT, REPLY_MARGIN, milliseconds};
use super::output::{self, Format, Table};
use super::{Globals, size};
use cleat_api::v1::{StatsRequest, StatsResponse};
use cleat_core::error::{Error, ErrorKind, Result};
use reading::{Latency, Reading};

pub(super) const EXAMPLES: &str = "\
Examples:
  All mappings, every second (a terminal is refreshed, other output gets new lines):
    $ cleat stats

  One of them, ten readings, two seconds apart:
    $ cleat stats data --interval 2s --count 10

  The latency of each operation that was used in the last two seconds:
    $ cleat stats data --latency --interval 2s

  The counters since the volume was mapped, once:
    $ cleat stats data --total

  A stream of JSON documents, one per line:
    $ cleat stats -o json | jq -c '.volumes[] | [.name, .rates.read.iops]'
";

/// Show operations, throughput and latency, live
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Stats {
    /// The mapping's name, device or URI [default: all mappings]
    target: Option<String>,
    /// The time between two readings, at least 100ms
    #[arg(long, value_name = "DURATION", value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// Stop after this many readings
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Show the distribution of the latency of each operation: the percentiles 50, 90, 99 and 99.9 and the
    /// maximum, rounded up to a power of two
    #[arg(long, conflicts_with = "total")]
    latency: bool,
    /// Show the counters since the volume was mapped, once
    #[arg(long, conflicts_with_all = ["count", "interval"])]
    total: bool,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error, or `Unavailable` if the daemon ends the stream.
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
    // The first reading is only the base of the first rates.
    let mut before = next(client, &mut stream, limit).await?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        let now = next(client, &mut stream, limit).await?;
        let reading = Reading::new(Some(&before), &now);
        if !show(globals, &reading, args.latency, shown == 0)? {
            break;
        }
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Prints one reading. Returns false if the reader has closed stdout.
fn show(globals: &Globals, reading: &Reading, latency: bool, first: bool) -> Result<bool> {
    if globals.output == Some(Format::Json) {
        return output::json_line(reading);
    }
    let table = match latency {
        true => latency_table(reading),
        false => rates_table(reading, globals.output == Some(Format::Wide)),
    };
    if output::is_terminal() {
        // Overwriting in place, and erasing the rest of each line and of the screen, avoids flicker.
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
    match tokio::time::timeout(limit + REPLY_MARGIN, stream.next()).await {
        Ok(Some(Ok(response))) => Ok(response),
        Ok(Some(Err(status))) => Err(client.error(&status)),
        Ok(None) => Err(Error::new(ErrorKind::Unavailable, "the daemon has ended the statistics")
            .with_repair("check whether it was stopped with `systemctl status cleat`")),
        Err(_) => Err(Error::new(ErrorKind::TimedOut, "the daemon has stopped sending statistics")
            .with_repair("check its log with `journalctl -u cleat`")),
    }
}

/// Operations without data, which the table shows as a sum.
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

/// The headings of [`Latency::columns`].
const LATENCY: [&str; 5] = ["P50", "P90", "P99", "P99.9", "MAX"];

fn latency_cells(latencies: &Latency) -> impl Iterator<Item = String> {
    latencies.columns().into_iter().map(latency)
}

/// Returns a table with a line for each operation that was used since the previous reading.
fn latency_table(reading: &Reading) -> String {
    let headings = [&["NAME", "OPERATION", "/s", "MEAN"][..], &LATENCY].concat();
    let mut table = Table::new(&headings).align_right(2..9);
    for volume in &reading.volumes {
        let rates = volume.rates.iter().flatten().filter(|(_, rates)| rates.iops > 0.0);
        for (op, rates) in rates {
            let mut cells = vec![volume.name.clone(), op.clone(), format!("{:.0}", rates.iops)];
            cells.push(latency(rates.mean_latency_us));
            cells.extend(latency_cells(&rates.latency));
            table.row(cells);
        }
    }
    table.render()
}

fn totals_table(reading: &Reading) -> String {
    let headings =
        [&["NAME", "OPERATION", "COUNT", "BYTES", "ERRORS", "MEAN"][..], &LATENCY].concat();
    let mut table = Table::new(&headings).align_right(2..11);
    for volume in &reading.volumes {
        for (op, counters) in &volume.counters {
            let mut cells = vec![
                volume.name.clone(),
                op.clone(),
                counters.count.to_string(),
                size::human(counters.bytes),
                counters.errors.to_string(),
                latency(counters.mean_us()),
            ];
            cells.extend(latency_cells(&counters.latency));
            table.row(cells);
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

fn latency(us: Option<f64>) -> String {
    match us {
        None => String::new(),
        Some(us) if us < 1000.0 => format!("{us:.0} us"),
        Some(us) if us < 1_000_000.0 => format!("{:.1} ms", us / 1000.0),
        Some(us) => format!("{:.1} s", us / 1_000_000.0),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = size::duration(text)?;
    if interval < Duration::from_millis(100) {
        return Err("the interval must be at least 100ms".to_owned());
    }
    Ok(interval)
}

#[cfg(test)]
mod tests {
    use super::reading::Rates;
    use super::*;
    use cleat_api::v1::{OpStats, VolumeStats};

    fn reading_of(at_ms: u64, count: u64, bytes: u64, total_ns: u64) -> StatsResponse {
        let read = OpStats { op: "read".into(), count, bytes, total_ns, ..Default::default() };
        let volume = VolumeStats {
            name: "data".into(),
            ops: vec![read],
            in_flight: 3,
            ..Default::default()
        };
        StatsResponse { volumes: vec![volume], at_ms, latency_bounds_ns: vec![1024, 2048, 4096] }
    }

    fn with_buckets(mut response: StatsResponse, buckets: [u64; 4]) -> StatsResponse {
        response.volumes[0].ops[0].latency_buckets = buckets.to_vec();
        response
    }

    #[test]
    fn quantiles_are_those_of_the_interval() {
        let before = with_buckets(reading_of(0, 1000, 0, 0), [1000, 0, 0, 0]);
        let now = with_buckets(reading_of(1000, 1100, 0, 0), [1050, 45, 4, 1]);
        let reading = Reading::new(Some(&before), &now);
        let of_interval = reading.volumes[0].rates("read").latency.columns();
        assert_eq!(of_interval, [1.024, 2.048, 4.096, 4.096, 4.096].map(Some));
        let in_all = reading.volumes[0].counters["read"].latency.columns();
        assert_eq!(in_all, [1.024, 1.024, 2.048, 4.096, 4.096].map(Some));
        let table = latency_table(&reading);
        let cells: Vec<&str> = table.lines().nth(1).expect("a line").split_whitespace().collect();
        assert_eq!(cells[..7], ["data", "read", "100", "0", "us", "1", "us"]);
        // Without requests, and without buckets from the daemon, there is no latency.
        let idle = Reading::new(Some(&now), &now);
        assert_eq!(idle.volumes[0].rates("read").latency, Latency::default());
        assert_eq!(latency_table(&idle).lines().count(), 1);
        let old = Reading::new(Some(&reading_of(0, 0, 0, 0)), &reading_of(1000, 5, 0, 0));
        assert_eq!(old.volumes[0].rates("read").latency, Latency::default());
    }

    #[test]
    fn rates_are_computed_between_two_readings() {
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
        let before = StatsResponse::default();
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
