//! `cleat volume fsck` and `scrub`.

use super::{Tracker, capability, short};
use crate::cli::output::{self, Format};
use crate::cli::{Globals, exit};
use cleat_backend::store::{Checked, Defect};
use cleat_backend::uri::VolumeUri;
use cleat_core::error::{ErrorKind, Result};

const EXAMPLES: &str = "\
Examples:
  Look for objects of a volume that are missing or too short, without reading all data:
    $ cleat volume fsck dir:/var/lib/volumes/data

  Read all data, and compare it with its checksums:
    $ cleat volume scrub dir:/var/lib/volumes/data

  Only a snapshot, as JSON:
    $ cleat volume scrub dir:/var/lib/volumes/data@monday -o json
";

/// Check that the objects of a volume and of its snapshots are complete
///
/// Reads the map of the volume, and of each object with data the header and the last byte that is needed. Compares the
/// accounting of the space with the map. Changes nothing, and the volume may be in use. Prints each range that cannot
/// be read, with the object that is lost or damaged; the exit code is 1 then. Supports volumes of objects (dir:, s3:,
/// gs:, az:).
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Fsck {
    #[command(flatten)]
    of: Of,
}

/// Read all data of a volume and of its snapshots, and compare it with its checksums
///
/// Otherwise like fsck. Takes as long as reading the volume; snapshots that share data with it read that again.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Scrub {
    #[command(flatten)]
    of: Of,
}

#[derive(Debug, clap::Args)]
struct Of {
    /// The volume with its snapshots, or one snapshot
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

pub(super) fn fsck(globals: &Globals, args: &Fsck) -> Result<u8> {
    check(globals, "fsck", &args.of.uri)
}

pub(super) fn scrub(globals: &Globals, args: &Scrub) -> Result<u8> {
    check(globals, "scrub", &args.of.uri)
}

/// Checks the volume and prints what was found. Returns the exit code.
fn check(globals: &Globals, operation: &'static str, uri: &VolumeUri) -> Result<u8> {
    let (place, name, snapshot) = uri.store_location()?;
    let tracker = Tracker::begin(globals, operation, uri)?;
    let store = place.connect()?;
    let checks = capability(store.checks(), &place, "check of their content")?;
    let found = tracker
        .run(|progress| checks.check(&name, snapshot.as_deref(), operation == "scrub", progress))?;
    let is_intact = found.defects.is_empty();
    if globals.output == Some(Format::Json) {
        output::json(&found)?;
    } else {
        output::text(&described(uri, &found))?;
    }
    Ok(if is_intact { exit::OK } else { exit::code(ErrorKind::Internal) })
}

fn described(uri: &VolumeUri, found: &Checked) -> String {
    let lines = found.defects.iter().map(line).collect::<String>();
    let count = match found.defects.len() {
        0 => "no defect".to_owned(),
        1 => "1 defect".to_owned(),
        Checked::MAX_DEFECTS => format!("the first {} defects", Checked::MAX_DEFECTS),
        count => format!("{count} defects"),
    };
    let (uri, snapshots, objects) = (uri.to_string(), found.snapshots, found.objects);
    format!("{lines}{}: {count}; {objects} objects, {snapshots} snapshots\n", short(&uri))
}

fn line(defect: &Defect) -> String {
    let snapshot = defect.snapshot.as_ref();
    let of = snapshot.map(|name| format!("snapshot {}, ", output::printable(name)));
    let range = defect
        .range
        .as_ref()
        .map(|range| format!("{} bytes at {} cannot be read: ", range.length, range.offset));
    let (of, range) = (of.unwrap_or_default(), range.unwrap_or_default());
    format!("{of}{range}{}\n", output::printable(&defect.problem))
}
