//! Volumes are made, resized, cloned and removed.

use std::time::Duration;

use serde::Serialize;

use super::{Rivals, Tracker, capability, short, tell, time};
use crate::cli::Globals;
use crate::cli::output::{self, Format};
use cleat_backend::store::{Layout, Removal, Removed, Source};
use cleat_backend::uri::{Size, VolumeUri, parse_size};
use cleat_core::error::{Error, ErrorKind, Result};

const CREATE_EXAMPLES: &str = "\
Examples:
    $ cleat volume create rbd:volumes/data 10G

  Without the object map, in objects of 8 MiB, the data on an erasure-coded pool:
    $ cleat volume create rbd:volumes/data 10G --features layering,exclusive-lock \\
        --object-size 8M --data-pool volumes-ec

  Encrypted, with 10G of plain text; its URI is what `cleat map` takes, too:
    $ cleat volume create \\
        'rbd:volumes/secret?encryption=luks2&passphrase_file=/etc/ceph/secret.key' 10G

  A sparse file:
    $ cleat volume create file:/var/lib/images/a.img 10G
";

/// Make a volume
///
/// One that is there already with the same size, and with what is asked for here, succeeds. Where the
/// URI names an encryption, the image is formatted for it, and one that is there already only if it
/// holds nothing.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CREATE_EXAMPLES)]
pub(super) struct Create {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Its size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: u64,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// How a new image lies in its pool.
#[derive(Debug, clap::Args)]
struct LayoutArgs {
    /// Its features, as `rbd` names them; what they need comes along [default: the cluster's]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// The size of its objects, a power of two from 4K to 32M [default: the cluster's, 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    object_size: Option<u64>,
    /// Lay this much into an object, then go on to the next of the stripe
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "stripe_count")]
    stripe_unit: Option<u64>,
    /// Objects of a stripe
    #[arg(long, value_name = "N", requires = "stripe_unit")]
    stripe_count: Option<u64>,
    /// The pool that its data goes to [default: its own]
    #[arg(long, value_name = "POOL")]
    data_pool: Option<String>,
}

const REMOVE_EXAMPLES: &str = "\
Examples:
  Into the trash, where it stays for a week at least:
    $ cleat volume remove rbd:volumes/data
    $ cleat volume trash restore rbd:volumes/data

  Deleted at once, with all its data:
    $ cleat volume remove rbd:volumes/data --now

  Claimed by a node that is lost, which never writes to it again:
    $ cleat volume remove rbd:volumes/data --take-over
";

/// Take a volume away: into the trash, or with --now for good
///
/// Refuses while it has watchers, a claim, snapshots or clones, and names them. Removing what is not
/// there succeeds. What lies in the trash takes up space until it is purged. Ended half way by a signal, a
/// deletion leaves the image with a part of its data gone, still listed; repeating it goes on.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "rm", after_long_help = REMOVE_EXAMPLES)]
pub(super) struct Remove {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Delete it, and do not put it into the trash
    #[arg(long)]
    now: bool,
    /// Keep it in the trash for at least this long
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = keep,
          conflicts_with = "now")]
    keep: Duration,
    #[command(flatten)]
    rivals: Rivals,
}

const RESIZE_EXAMPLES: &str = "\
Examples:
  Grow it; where it is mapped, its device follows:
    $ cleat volume resize rbd:volumes/data 20G

  Make it smaller, when what is on it is, and nobody has it mapped:
    $ cleat volume resize rbd:volumes/data 5G --shrink
";

/// Change the size of a volume where it is kept
///
/// For a mapping of this node `cleat resize` does both, the volume and its device. Of a volume whose
/// URI says how it is encrypted, the size is that of the plain text.
#[derive(Debug, clap::Args)]
#[command(after_long_help = RESIZE_EXAMPLES)]
pub(super) struct Resize {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The new size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: u64,
    /// Allow a smaller size: what lies behind the new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    rivals: Rivals,
}

const CLONE_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy

  For clients older than Ceph 13, which need the snapshot protected:
    $ cleat volume snapshot protect rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy --clone-format 1
";

/// Make a writable volume of a snapshot, at once: what is not written is read from there
///
/// In the format 2, the default, the snapshot needs no protection; when it is removed before its clone,
/// it stays in the background until that is gone or flattened. Options of the URI that say how the
/// cluster is reached need be given for one of the two only.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CLONE_EXAMPLES)]
pub(super) struct Clone {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    source: VolumeUri,
    /// The new volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    #[command(flatten)]
    layout: LayoutArgs,
    /// 1: only of protected snapshots; 2: of all
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u8).range(1..=2))]
    clone_format: u8,
}

const FLATTEN_EXAMPLES: &str = "\
Examples:
    $ cleat volume flatten rbd:volumes/copy

  Its progress for a program, one JSON document a line on stderr:
    $ cleat volume flatten rbd:volumes/copy -o json
";

/// Copy what a clone has of its parent, so that it needs it no more
///
/// It can be mapped meanwhile. Ended half way by a signal, it is still the clone that it was, and
/// repeating the command goes on.
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
    let (store, name) = whole(&args.uri)?;
    check_size(&args.uri, args.size)?;
    let changed = store.connect()?.create(&name, args.size, &args.layout.into())?;
    tell(globals, &args.uri, changed, "exists already, as it is wanted")
}

pub(super) fn remove(globals: &Globals, args: &Remove) -> Result<()> {
    let (store, name) = whole(&args.uri)?;
    let how = if args.now { Removal::Now } else { Removal::Trash { keep: args.keep } };
    let tracker = Tracker::begin(globals, "remove", &args.uri)?;
    let store = args.rivals.store(&store)?;
    let removed = tracker.run(|progress| store.remove(&name, how, progress))?;
    if globals.output == Some(Format::Json) {
        return output::json(&Outcome { volume: args.uri.to_string(), removed });
    }
    match removed.trash {
        Some(trash) => {
            let until = time(trash.kept_until_s);
            output::note(&format!(
                "{} is in the trash, until {until} at least; back with: cleat volume trash restore \
                 '{}' --id {}",
                short(&args.uri.to_string()),
                args.uri,
                trash.id
            ));
            Ok(())
        }
        None => tell(globals, &args.uri, removed.changed, "was not there"),
    }
}

pub(super) fn resize(globals: &Globals, args: &Resize) -> Result<()> {
    let (store, name) = whole(&args.uri)?;
    let tracker = Tracker::begin(globals, "resize", &args.uri)?;
    let store = args.rivals.store(&store)?;
    let changed = tracker.run(|progress| store.resize(&name, args.size, args.shrink, progress))?;
    tell(globals, &args.uri, changed, "has this size already")
}

pub(super) fn clone(globals: &Globals, args: Clone) -> Result<()> {
    let (from, source, snapshot) = args.source.snapshot_location()?;
    let (to, name) = whole(&args.uri)?;
    let store = to.with_access_of(&from)?.connect()?;
    let layout = Layout { clone_format: Some(args.clone_format), ..args.layout.into() };
    let source = Source { store: from.spec(), name: &source, snapshot: &snapshot };
    let changed =
        capability(store.clones(), &to, "clones")?.create_clone(&source, &name, &layout)?;
    tell(globals, &args.uri, changed, "is that clone already")
}

pub(super) fn flatten(globals: &Globals, args: &Flatten) -> Result<()> {
    let (store, name) = whole(&args.uri)?;
    let tracker = Tracker::begin(globals, "flatten", &args.uri)?;
    let connected = store.connect()?;
    let clones = capability(connected.clones(), &store, "clones")?;
    let changed = tracker.run(|progress| clones.flatten(&name, progress))?;
    tell(globals, &args.uri, changed, "has no parent")
}

/// A URI may say itself how large the file is to be that it makes.
fn check_size(uri: &VolumeUri, size: u64) -> Result<()> {
    let Some(told) = uri.spec().creation_size().filter(|told| *told != size) else {
        return Ok(());
    };
    let (told, size) = (Size(told), Size(size));
    let message = format!("the volume is to have {size}, and by its URI {told} (create={told})");
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .with_repair("leave create= out: it is for those who open the file where it is missing"))
}

/// The place of a volume, and its name there; of all of it, and not of a snapshot.
pub(super) fn whole(uri: &VolumeUri) -> Result<(cleat_backend::uri::StoreUri, String)> {
    match uri.store_location()? {
        (store, name, None) => Ok((store, name)),
        (_, name, Some(snapshot)) => {
            let message = format!("{uri} is a snapshot, and this is for volumes");
            Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(format!(
                "name the volume, {name}, or see what there is for the snapshot, {snapshot}: cleat \
                 volume snapshot --help"
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
            clone_format: None,
        }
    }
}

fn keep(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
    let keep = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a number with its unit, such as 12h or 7d"))?;
    if keep > LONGEST {
        return Err("the trash keeps nothing for more than 10 years".to_owned());
    }
    Ok(keep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trash_keeps_things_for_days() {
        assert_eq!(keep("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        assert_eq!(keep("0s"), Ok(Duration::ZERO));
        for wrong in ["7", "11y", "soon"] {
            assert!(keep(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_snapshot_is_no_volume() {
        let uri = crate::backends::volume("rbd:p/i@s").expect("it is right");
        assert_eq!(whole(&uri).expect_err("a snapshot").kind(), ErrorKind::InvalidArgument);
    }
}
