//! `cleat volume diff`.

use serde::Serialize;

use super::capability;
use crate::cli::Globals;
use crate::cli::output::{self, Format};
use cleat_backend::changes::{Change, Changes, Content, Contents};
use cleat_backend::uri::VolumeUri;
use cleat_core::error::{Error, ErrorKind, Result};

const EXAMPLES: &str = "\
Examples:
  What was written since a snapshot, and between two snapshots:
    $ cleat volume diff rbd:volumes/data --since monday
    $ cleat volume diff s3://bucket/data@tuesday --since monday

  The number of bytes that an incremental backup would copy:
    $ cleat volume diff rbd:volumes/data@tuesday --since monday -o json |
        jq '[.changes[] | select(.content == \"data\").length] | add'

  Which ranges of a volume have data:
    $ cleat volume diff dir:/var/lib/volumes/data
";

/// The number of ranges that are read at a time.
const LIMIT: usize = 10_000;

/// Show which ranges of a volume have changed since a snapshot
///
/// Prints the offset and the length of each range, in bytes, and whether it has data now or reads as zeroes. Reads no
/// data, and needs no daemon. A range that was written with the same data counts as changed. A volume in use is compared
/// in several steps; name a snapshot for the state at one moment. Supports RBD images and volumes of objects (rbd:, dir:,
/// s3:, gs:, az:), but not encrypted RBD images.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Diff {
    /// The volume, or the later snapshot of it
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,

    /// The name of the earlier snapshot; without it, all ranges with data are shown
    #[arg(long, value_name = "SNAPSHOT")]
    since: Option<String>,
}

/// What is compared, for JSON.
#[derive(Debug, Serialize)]
struct Compared<'a> {
    volume: &'a str,
    since: Option<&'a str>,
    size_bytes: u64,
}

pub(super) fn diff(globals: &Globals, args: &Diff) -> Result<()> {
    let (place, name, snapshot) = args.uri.store_location()?;
    let connected = place.connect()?;
    let store = capability(connected.changes(), &place, "record of their changes")?;
    let (snapshot, since) = (snapshot.as_deref(), args.since.as_deref());
    let contents = Contents { name: &name, snapshot, since };
    let first = store.changes(&contents, 0, LIMIT)?;
    let volume = args.uri.to_string();
    let compared = Compared { volume: &volume, since, size_bytes: first.size_bytes };
    let next = |from| store.changes(&contents, from, LIMIT);
    match globals.output {
        Some(Format::Json) => print_json(&compared, first, next),
        _ => print_table(first, next),
    }
}

/// Prints a table. The ranges are printed as they are found: there may be more than fit into memory.
fn print_table(first: Changes, next: impl Fn(u64) -> Result<Changes>) -> Result<()> {
    output::text(&format!("{:>16} {:>14}  CONTENT\n", "OFFSET", "LENGTH"))?;
    each_part(first, next, |ranges| {
        let lines = ranges.iter().map(|Change { offset, length, content }| {
            let content = match content {
                Content::Data => "data",
                Content::Zeroes => "zeroes",
            };
            format!("{offset:>16} {length:>14}  {content}\n")
        });
        output::live(lines.collect::<String>().as_bytes())
    })
}

/// Prints one JSON document, the ranges as they are found.
fn print_json(
    compared: &Compared<'_>,
    first: Changes,
    next: impl Fn(u64) -> Result<Changes>,
) -> Result<()> {
    let head = line(compared)?;
    let head = head.strip_suffix('}').unwrap_or(&head);
    output::text(&format!("{head},\"changes\":[\n"))?;
    let mut separator = "";
    each_part(first, next, |ranges| {
        let mut text = String::new();
        for range in ranges {
            text.push_str(separator);
            text.push_str(&line(range)?);
            separator = ",\n";
        }
        output::live(text.as_bytes())
    })?;
    output::text("\n]}\n")
}

/// Passes the ranges to `print`, part by part, until it returns false: nobody reads them any more.
fn each_part(
    first: Changes,
    next: impl Fn(u64) -> Result<Changes>,
    mut print: impl FnMut(&[Change]) -> Result<bool>,
) -> Result<()> {
    let mut part = first;
    while print(&part.ranges)? && part.until < part.size_bytes {
        part = next(part.until)?;
    }
    Ok(())
}

fn line(value: &impl Serialize) -> Result<String> {
    output::line(value).map_err(|error| {
        Error::new(ErrorKind::Internal, "internal: cannot print as JSON").with_source(error)
    })
}
