//! `cleat volume fsck` and `scrub`.

use super::{Tracker, capability, connect, short};
use crate::cli::output::{self, Format};
use crate::cli::{Globals, exit};
use cleat_backend::store::{Checked, Defect, Refused, Repair, Repaired};
use cleat_backend::uri::VolumeUri;
use cleat_core::error::{Error, ErrorKind, Result};

const EXAMPLES: &str = "\
Examples:
  Look for objects of a volume that are missing or too short, without reading all data:
    $ cleat volume fsck dir:/var/lib/volumes/data

  Read all data, and compare it with its checksums:
    $ cleat volume scrub dir:/var/lib/volumes/data

  Only a snapshot, as JSON:
    $ cleat volume scrub dir:/var/lib/volumes/data@monday -o json

  Show what a repair would do, and repair what is safe:
    $ cleat volume fsck --repair --dry-run dir:/var/lib/volumes/data
    $ cleat volume fsck --repair dir:/var/lib/volumes/data
";

/// Check that the objects of a volume and of its snapshots are complete
///
/// Reads the map of the volume, and of each object with data the header and the last byte that is needed. Compares the
/// accounting of the space with the map. Prints each range that cannot be read, with the object that is lost or damaged;
/// the exit code is 1 then. If no client has the volume open, it also prints the objects that nothing refers to, which take
/// space and do no other harm. Without --repair it changes nothing, and the volume may be in use. Supports volumes of
/// objects (dir:, s3:, gs:, az:).
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Fsck {
    #[command(flatten)]
    of: Of,

    /// Repair what is proved to be safe, and print what is not touched and why
    ///
    /// Rebuilds the map where a checkpoint or a page of it is lost or damaged, if an older checkpoint and all slots of
    /// the log above it exist; counts a wrong accounting of the space again; deletes objects that nothing refers to.
    /// Never makes up data: ranges whose data is lost or damaged stay unreadable. The volume must not be in use, and an
    /// encrypted one needs its key file. The exit code is 1 if a defect is left. Can be interrupted and repeated.
    #[arg(long)]
    repair: bool,

    /// With --repair: change nothing, and print what would be done
    ///
    /// The exit code is 1 if there is a defect.
    #[arg(long, requires = "repair")]
    dry_run: bool,
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
    match args.repair {
        true => repair(globals, &args.of.uri, args.dry_run),
        false => check(globals, "fsck", &args.of.uri),
    }
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

/// Repairs the volume and prints what was done. Returns the exit code.
fn repair(globals: &Globals, uri: &VolumeUri, dry_run: bool) -> Result<u8> {
    let (place, name, snapshot) = uri.store_location()?;
    if let Some(snapshot) = snapshot {
        let message = format!("a repair is of a volume, not of its snapshot {snapshot}");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("omit the @ and what follows it"));
    }
    let tracker = Tracker::begin(globals, "repair", uri)?;
    let store = connect(&place)?;
    let checks = capability(store.checks(), &place, "check of their content")?;
    let found = tracker.run(|progress| checks.repair(&name, dry_run, progress))?;
    let is_left = !found.checked.defects.is_empty() || !found.refused.is_empty();
    let is_intact = !(is_left || dry_run && !found.repairs.is_empty());
    if globals.output == Some(Format::Json) {
        output::json(&found)?;
    } else {
        output::text(&of_repair(uri, &found))?;
    }
    Ok(if is_intact { exit::OK } else { exit::code(ErrorKind::Internal) })
}

fn described(uri: &VolumeUri, found: &Checked) -> String {
    let mut text = found.defects.iter().map(line).collect::<String>();
    let unreferenced = found.unreferenced.as_ref().filter(|unreferenced| unreferenced.objects > 0);
    for name in unreferenced.iter().flat_map(|unreferenced| &unreferenced.names) {
        text.push_str(&format!("{name}: nothing refers to it\n"));
    }
    text.push_str(&format!("{}: {}", short(&uri.to_string()), counts(found)));
    if let Some(unreferenced) = unreferenced {
        let objects = unreferenced.objects;
        text.push_str(&format!("; nothing refers to {objects} objects (--repair deletes them)"));
    }
    text + "\n"
}

fn counts(found: &Checked) -> String {
    let count = match found.defects.len() {
        0 => "no defect".to_owned(),
        1 => "1 defect".to_owned(),
        Checked::MAX_DEFECTS => format!("the first {} defects", Checked::MAX_DEFECTS),
        count => format!("{count} defects"),
    };
    format!("{count}; {} objects, {} snapshots", found.objects, found.snapshots)
}

fn of_repair(uri: &VolumeUri, found: &Repaired) -> String {
    let (repaired, deleted) = match found.dry_run {
        true => ("would be repaired", "would be deleted"),
        false => ("repaired", "deleted"),
    };
    let mut text = String::new();
    for Repair { range, problem, source } in &found.repairs {
        let range = range
            .as_ref()
            .map(|range| format!("{} bytes at {} could not be read: ", range.length, range.offset));
        let (range, problem) = (range.unwrap_or_default(), output::printable(problem));
        text.push_str(&format!("{repaired} from {source}: {range}{problem}\n"));
    }
    for name in &found.deleted {
        text.push_str(&format!("{deleted}: {name}: nothing refers to it\n"));
    }
    for Refused { problem, reason } in &found.refused {
        let (problem, reason) = (output::printable(problem), output::printable(reason));
        text.push_str(&format!("not repaired: {problem}: {reason}\n"));
    }
    text.extend(found.checked.defects.iter().map(line));
    let (repairs, objects) = (found.repairs.len(), found.deleted_objects);
    let (uri, counts) = (uri.to_string(), counts(&found.checked));
    let done = format!("{repairs} {repaired}, {objects} {deleted}");
    text.push_str(&format!("{}: {done}; {counts}\n", short(&uri)));
    text
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
