//! `cleat volume snapshot`.

use std::ops::ControlFlow;

use serde::Serialize;

use super::change::volume_location;
use super::{TakeOverArgs, Tracker, capability, connect, print_change, time};
use crate::cli::output::{self, Format, Table};
use crate::cli::{Globals, size};
use cleat_backend::store::{self, SnapshotStore, Store};
use cleat_backend::uri::{StoreUri, VolumeUri};
use cleat_core::error::Result;

const EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ cleat volume snapshot list rbd:volumes/data
    $ cleat volume snapshot remove rbd:volumes/data@monday
";

/// Create, list, protect and remove snapshots, and roll back to one
#[derive(Debug, clap::Args)]
#[command(visible_alias = "snap", after_long_help = EXAMPLES)]
pub(super) struct Snapshot {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(Create),
    List(List),
    Remove(Remove),
    Protect(Protect),
    Unprotect(Unprotect),
    Rollback(Rollback),
}

const CREATE_EXAMPLES: &str = "\
Examples:
  While it is mapped, with a frozen file system:
    $ fsfreeze --freeze /mnt
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ fsfreeze --unfreeze /mnt
";

/// Take a snapshot, also while the volume is in use
///
/// The snapshot contains all flushed data. A file system on it is in the state as after a crash, unless it
/// was frozen.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CREATE_EXAMPLES)]
struct Create {
    /// The snapshot: VOLUME@SNAPSHOT, for example rbd:POOL/IMAGE@SNAPSHOT or s3://BUCKET/NAME@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const LIST_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot list rbd:volumes/data
    $ cleat volume snapshot list rbd:volumes/data -o json | jq -r '.snapshots[].name'
";

/// List the snapshots of a volume, oldest first
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_long_help = LIST_EXAMPLES)]
struct List {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const REMOVE_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot remove rbd:volumes/data@monday
";

/// Remove a snapshot; succeeds if it does not exist
///
/// The cluster keeps a removed snapshot with clones until they are removed or flattened. A protected
/// snapshot cannot be removed.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "rm", after_long_help = REMOVE_EXAMPLES)]
struct Remove {
    /// The snapshot: VOLUME@SNAPSHOT, for example rbd:POOL/IMAGE@SNAPSHOT or s3://BUCKET/NAME@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const PROTECT_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot protect rbd:volumes/data@monday
";

/// Protect a snapshot from removal
///
/// Clones of format 1 need a protected snapshot.
#[derive(Debug, clap::Args)]
#[command(after_long_help = PROTECT_EXAMPLES)]
struct Protect {
    /// The snapshot: VOLUME@SNAPSHOT, for example rbd:POOL/IMAGE@SNAPSHOT or s3://BUCKET/NAME@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const UNPROTECT_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot unprotect rbd:volumes/data@monday
";

/// Remove the protection of a snapshot; refused while it has clones that need the protection
#[derive(Debug, clap::Args)]
#[command(after_long_help = UNPROTECT_EXAMPLES)]
struct Unprotect {
    /// The snapshot: VOLUME@SNAPSHOT, for example rbd:POOL/IMAGE@SNAPSHOT or s3://BUCKET/NAME@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const ROLLBACK_EXAMPLES: &str = "\
Examples:
    $ cleat unmap rbd:volumes/data
    $ cleat volume snapshot rollback rbd:volumes/data@monday
";

/// Set the volume back to the content of a snapshot: data written since then is lost
///
/// Refused while a client has the volume open, or has claimed it and may write again. If a signal
/// interrupts the command, a part of the volume has the content of the snapshot; repeat the command to
/// complete it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = ROLLBACK_EXAMPLES)]
struct Rollback {
    /// The snapshot: VOLUME@SNAPSHOT, for example rbd:POOL/IMAGE@SNAPSHOT or s3://BUCKET/NAME@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    #[command(flatten)]
    take_over: TakeOverArgs,
}

/// The result of `list` in JSON.
#[derive(Debug, Serialize)]
struct Listing {
    snapshots: Vec<store::Snapshot>,
}

pub(super) fn run(globals: &Globals, args: Snapshot) -> Result<()> {
    match args.command {
        Command::Create(Create { uri }) => {
            let (store, name, snapshot) = uri.snapshot_location()?;
            let connected = connect(&store)?;
            // A URI can only name snapshots of backends that copy nothing, so there is no progress to show.
            let mut progress = |_, _| ControlFlow::Continue(());
            let snapshots = snapshots(&*connected, &store)?;
            let changed = snapshots.create(&name, &snapshot, &mut progress)?;
            print_change(globals, &uri, changed, "already exists")
        }
        Command::List(List { uri }) => list(globals, &uri),
        Command::Remove(Remove { uri }) => {
            let (store, name, snapshot) = uri.snapshot_location()?;
            let connected = connect(&store)?;
            let changed = snapshots(&*connected, &store)?.remove(&name, &snapshot)?;
            print_change(globals, &uri, changed, "does not exist")
        }
        Command::Protect(Protect { uri }) => protect(globals, &uri, true),
        Command::Unprotect(Unprotect { uri }) => protect(globals, &uri, false),
        Command::Rollback(Rollback { uri, take_over }) => {
            let (store, name, snapshot) = uri.snapshot_location()?;
            let tracker = Tracker::begin(globals, "rollback", &uri)?;
            let connected = take_over.store(&store)?;
            let snapshots = snapshots(&*connected, &store)?;
            tracker.run(|progress| snapshots.rollback(&name, &snapshot, progress))?;
            print_change(globals, &uri, true, "")
        }
    }
}

fn snapshots<'a>(store: &'a dyn Store, place: &StoreUri) -> Result<&'a dyn SnapshotStore> {
    capability(store.snapshots(), place, "snapshots")
}

fn list(globals: &Globals, uri: &VolumeUri) -> Result<()> {
    let (store, name) = volume_location(uri)?;
    let connected = store.connect()?;
    let snapshots = snapshots(&*connected, &store)?.list(&name)?;
    if globals.output == Some(Format::Json) {
        return output::json(&Listing { snapshots });
    }
    let mut table = Table::new(&["ID", "NAME", "SIZE", "CREATED", "PROTECTED", "KIND"]);
    table = table.align_right([0, 2]);
    for snapshot in snapshots {
        table.row(vec![
            snapshot.id.to_string(),
            snapshot.name,
            size::human(snapshot.size_bytes),
            time(snapshot.created_at_s),
            if snapshot.protected { "yes".to_owned() } else { String::new() },
            snapshot.kind.to_owned(),
        ]);
    }
    output::text(&table.render())
}

fn protect(globals: &Globals, uri: &VolumeUri, protect: bool) -> Result<()> {
    let (store, name, snapshot) = uri.snapshot_location()?;
    let connected = store.connect()?;
    let changed = snapshots(&*connected, &store)?.protect(&name, &snapshot, protect)?;
    print_change(
        globals,
        uri,
        changed,
        if protect { "is already protected" } else { "is not protected" },
    )
}
