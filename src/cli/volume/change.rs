//! `cleat volume create`, `remove`, `resize`, `clone` and `flatten`.

use std::ops::ControlFlow;
use std::time::Duration;

use serde::Serialize;

use super::{TakeOverArgs, Tracker, capability, connect, print_change, short, time};
use crate::cli::Globals;
use crate::cli::output::{self, Format};
use cleat_backend::store::{Layout, Removal, Removed, Source};
use cleat_backend::uri::{Size, VolumeUri, parse_size};
use cleat_core::error::{Error, ErrorKind, Result};

const CREATE_EXAMPLES: &str = "\
Examples:
    $ cleat volume create rbd:volumes/data 10G

  Without an object map, with objects of 8 MiB, and with the data in an erasure-coded pool:
    $ cleat volume create rbd:volumes/data 10G --features layering,exclusive-lock \\
        --object-size 8M --data-pool volumes-ec

  Encrypted, with 10G of plain text; `cleat map` takes the same URI:
    $ cleat volume create \\
        'rbd:volumes/secret?encryption=luks2&passphrase_file=/etc/ceph/secret.key' 10G

  A volume of objects, whose data is compressed:
    $ cleat volume create dir:/var/lib/volumes/data 10G --compression lz4

  A sparse file:
    $ cleat volume create file:/var/lib/images/a.img 10G
";

/// Create a volume
///
/// Succeeds if the volume already exists with this size and the given properties. If the URI has an
/// encryption, the image is formatted with it; an existing image is formatted only if it has no data.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CREATE_EXAMPLES)]
pub(super) struct Create {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: u64,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// The layout of a new volume in its storage.
#[derive(Debug, clap::Args)]
struct LayoutArgs {
    /// The features, by `rbd`'s names; required features are added [default: the cluster's]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// The size of the objects, a power of two from 4K to 32M [default: the cluster's, 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    object_size: Option<u64>,
    /// The number of bytes in an object before the next object of the stripe follows
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "stripe_count")]
    stripe_unit: Option<u64>,
    /// The number of objects of a stripe
    #[arg(long, value_name = "N", requires = "stripe_unit")]
    stripe_count: Option<u64>,
    /// A separate pool for the data [default: the image's pool]
    #[arg(long, value_name = "POOL")]
    data_pool: Option<String>,
    /// The compression of a volume of objects: lz4 or none [default: none; for a clone that of its parent]
    #[arg(long, value_name = "NAME")]
    compression: Option<String>,
}

const REMOVE_EXAMPLES: &str = "\
Examples:
  Move it to the trash, which keeps it for at least a week:
    $ cleat volume remove rbd:volumes/data
    $ cleat volume trash restore rbd:volumes/data

  Delete it at once, with all its data:
    $ cleat volume remove rbd:volumes/data --now

  Remove it although a lost node has claimed it; the client of that node is fenced:
    $ cleat volume remove rbd:volumes/data --take-over
";

/// Remove a volume: to the trash, or permanently with --now
///
/// Refused while the volume has watchers, a claim, snapshots or clones; the error names them. Succeeds if
/// the volume does not exist. A volume in the trash uses space until the trash is purged. If a signal
/// interrupts a deletion, the image is still listed, with a part of its data removed; repeat the command to
/// continue.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "rm", after_long_help = REMOVE_EXAMPLES)]
pub(super) struct Remove {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Delete it permanently instead of moving it to the trash
    #[arg(long)]
    now: bool,
    /// Keep it in the trash for at least this long
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = keep,
          conflicts_with = "now")]
    keep: Duration,
    #[command(flatten)]
    take_over: TakeOverArgs,
}

const RESIZE_EXAMPLES: &str = "\
Examples:
  Grow it; a device that it is mapped to follows:
    $ cleat volume resize rbd:volumes/data 20G

  Shrink it, after its file system was shrunk and the volume was unmapped:
    $ cleat volume resize rbd:volumes/data 5G --shrink
";

/// Resize a volume in its storage
///
/// For a mapping of this node, `cleat resize` resizes the volume and its device. For a volume with an
/// encryption in its URI, the size is that of the plain text.
#[derive(Debug, clap::Args)]
#[command(after_long_help = RESIZE_EXAMPLES)]
pub(super) struct Resize {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The new size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: u64,
    /// Allow a smaller size: data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    take_over: TakeOverArgs,
}

const CLONE_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy

  In a directory, where clone and parent stay together:
    $ cleat volume clone dir:/var/lib/volumes/data@monday dir:/var/lib/volumes/copy

  For clients older than Ceph 13, which need a protected snapshot:
    $ cleat volume snapshot protect rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy --clone-format 1
";

/// Create a writable clone of a snapshot, without copying: unwritten data is read from the snapshot
///
/// A clone of an RBD image has format 2 by default and needs no protected snapshot. If the snapshot is removed before
/// its clone, the cluster keeps it until the clone is removed or flattened. On an object store, a clone is in the
/// same directory or bucket as its parent, and a snapshot with clones cannot be removed until they are flattened. URI options for the access to the
/// cluster are needed for only one of the two.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CLONE_EXAMPLES)]
pub(super) struct Clone {
    /// The snapshot: the URI of a volume with @SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    source: VolumeUri,
    /// The new volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Of an RBD image: 1 needs a protected snapshot, 2 takes any snapshot [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=2))]
    clone_format: Option<u8>,
}

const FLATTEN_EXAMPLES: &str = "\
Examples:
    $ cleat volume flatten rbd:volumes/copy
    $ cleat volume flatten dir:/var/lib/volumes/copy

  Print the progress as JSON on stderr, one document per line:
    $ cleat volume flatten rbd:volumes/copy -o json
";

/// Copy the parent's data into a clone, which is then independent
///
/// The clone can be in use meanwhile: on an object store, the worker that serves it copies then, and a clone that is not
/// in use cannot be mapped until the command ends. If a signal interrupts the command, the volume is still a clone;
/// repeat the command to continue.
#[derive(Debug, clap::Args)]
#[command(after_long_help = FLATTEN_EXAMPLES)]
pub(super) struct Flatten {
    /// The clone
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

/// The result of `remove` in JSON.
#[derive(Debug, Serialize)]
struct Outcome {
    volume: String,
    #[serde(flatten)]
    removed: Removed,
}

pub(super) fn create(globals: &Globals, args: Create) -> Result<()> {
    let (store, name) = volume_location(&args.uri)?;
    check_size(&args.uri, args.size)?;
    let changed = store.connect()?.create(&name, args.size, &args.layout.into())?;
    print_change(globals, &args.uri, changed, "already exists with these properties")
}

pub(super) fn remove(globals: &Globals, args: &Remove) -> Result<()> {
    let (store, name) = volume_location(&args.uri)?;
    let how = if args.now { Removal::Now } else { Removal::Trash { keep: args.keep } };
    let tracker = Tracker::begin(globals, "remove", &args.uri)?;
    let store = args.take_over.store(&store)?;
    let removed = tracker.run(|progress| store.remove(&name, how, progress))?;
    if globals.output == Some(Format::Json) {
        return output::json(&Outcome { volume: args.uri.to_string(), removed });
    }
    match removed.trash {
        Some(trash) => {
            let until = time(trash.kept_until_s);
            output::note(&format!(
                "{} is in the trash, at least until {until}; to restore it: cleat volume trash restore \
                 '{}' --id {}",
                short(&args.uri.to_string()),
                args.uri,
                trash.id
            ));
            Ok(())
        }
        None => print_change(globals, &args.uri, removed.changed, "does not exist"),
    }
}

pub(super) fn resize(globals: &Globals, args: &Resize) -> Result<()> {
    let (store, name) = volume_location(&args.uri)?;
    let tracker = Tracker::begin(globals, "resize", &args.uri)?;
    let store = args.take_over.store(&store)?;
    let changed = tracker.run(|progress| store.resize(&name, args.size, args.shrink, progress))?;
    print_change(globals, &args.uri, changed, "already has this size")
}

pub(super) fn clone(globals: &Globals, args: Clone) -> Result<()> {
    let (from, source, snapshot) = args.source.snapshot_location()?;
    let (to, name) = volume_location(&args.uri)?;
    let store = to.with_access_of(&from)?.connect()?;
    let layout = Layout { clone_format: args.clone_format, ..args.layout.into() };
    let source = Source { store: from.spec(), name: &source, snapshot: Some(&snapshot) };
    let clones = capability(store.clones(), &to, "clones")?;
    // A URI can only name snapshots of backends whose clones copy nothing, so there is no progress to show.
    let mut progress = |_, _| ControlFlow::Continue(());
    let changed = clones.create_clone(&source, &name, &layout, &mut progress)?;
    print_change(globals, &args.uri, changed, "already is this clone")
}

pub(super) fn flatten(globals: &Globals, args: &Flatten) -> Result<()> {
    let (store, name) = volume_location(&args.uri)?;
    let tracker = Tracker::begin(globals, "flatten", &args.uri)?;
    let connected = connect(&store)?;
    let clones = capability(connected.clones(), &store, "clones")?;
    let changed = tracker.run(|progress| clones.flatten(&name, progress))?;
    print_change(globals, &args.uri, changed, "has no parent")
}

/// Rejects a size that differs from the option `create=` of the URI.
fn check_size(uri: &VolumeUri, size: u64) -> Result<()> {
    let in_uri = uri.spec().creation_size().filter(|in_uri| *in_uri != size);
    let Some(in_uri) = in_uri else { return Ok(()) };
    let (in_uri, size) = (Size(in_uri), Size(size));
    let message = format!("the size is {size}, but the URI has create={in_uri}");
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .with_repair("remove create= from the URI: it is for commands that open a missing file"))
}

/// Returns the store of a volume and its name there.
///
/// # Errors
/// Returns `InvalidArgument` for the URI of a snapshot.
pub(super) fn volume_location(uri: &VolumeUri) -> Result<(cleat_backend::uri::StoreUri, String)> {
    match uri.store_location()? {
        (store, name, None) => Ok((store, name)),
        (_, name, Some(snapshot)) => {
            let message = format!("{uri} is a snapshot; this command needs a volume");
            Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(format!(
                "name the volume {name}, or use a command for the snapshot {snapshot}: cleat volume \
                 snapshot --help"
            )))
        }
    }
}

impl From<LayoutArgs> for Layout {
    fn from(args: LayoutArgs) -> Self {
        Self {
            features: args.features,
            object_size: args.object_size,
            stripes: args.stripe_unit.zip(args.stripe_count),
            data_pool: args.data_pool,
            compression: args.compression,
            ..Self::default()
        }
    }
}

fn keep(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
    let keep = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number with its unit, such as 12h or 7d"))?;
    if keep > LONGEST {
        return Err("the trash keeps a volume for at most 10 years".to_owned());
    }
    Ok(keep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_the_trash_needs_a_unit_and_has_a_limit() {
        assert_eq!(keep("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        assert_eq!(keep("0s"), Ok(Duration::ZERO));
        for wrong in ["7", "11y", "soon"] {
            assert!(keep(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_snapshot_is_not_accepted_as_a_volume() {
        let uri = crate::backends::volume("rbd:p/i@s").expect("the URI is valid");
        assert_eq!(
            volume_location(&uri).expect_err("a snapshot").kind(),
            ErrorKind::InvalidArgument
        );
    }
}
