//! `cleat volume snapshot`.

use serde::Serialize;

use super::change::whole;
use super::{Rivals, Tracker, capability, tell, time};
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

/// Take, list, protect, remove snapshots, and go back to one
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
  While it is mapped, with a file system that is written out first:
    $ fsfreeze --freeze /mnt
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ fsfreeze --unfreeze /mnt
";

/// Take a snapshot, while the volume is in use or not
///
/// It has what was flushed before; a file system on it is as after a crash, unless it was frozen.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CREATE_EXAMPLES)]
struct Create {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
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

/// Remove a snapshot; one that is not there is no error
///
/// One that has clones stays in the background until they are gone or flattened. A protected one is
/// refused.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "rm", after_long_help = REMOVE_EXAMPLES)]
struct Remove {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const PROTECT_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot protect rbd:volumes/data@monday
";

/// Protect a snapshot from being removed
///
/// Clones in the format 1 need it protected.
#[derive(Debug, clap::Args)]
#[command(after_long_help = PROTECT_EXAMPLES)]
struct Protect {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const UNPROTECT_EXAMPLES: &str = "\
Examples:
    $ cleat volume snapshot unprotect rbd:volumes/data@monday
";

/// Let a snapshot be removed again; refused while it has clones that need it protected
#[derive(Debug, clap::Args)]
#[command(after_long_help = UNPROTECT_EXAMPLES)]
struct Unprotect {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

const ROLLBACK_EXAMPLES: &str = "\
Examples:
    $ cleat unmap rbd:volumes/data
    $ cleat volume snapshot rollback rbd:volumes/data@monday
";

/// Make the volume what it was when the snapshot was taken: what was written since is lost
///
/// Refused while anybody has the volume open, or has claimed it and may come back. Ended half way by a signal, a part of the volume is as it
/// was then; repeating the command goes on.
#[derive(Debug, clap::Args)]
#[command(after_long_help = ROLLBACK_EXAMPLES)]
struct Rollback {
    /// The snapshot: rbd:POOL/IMAGE@SNAPSHOT
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    #[command(flatten)]
    rivals: Rivals,
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
            let connected = store.connect()?;
            let changed = snapshots(&*connected, &store)?.create(&name, &snapshot)?;
            tell(globals, &uri, changed, "exists already")
        }
        Command::List(List { uri }) => list(globals, &uri),
        Command::Remove(Remove { uri }) => {
            let (store, name, snapshot) = uri.snapshot_location()?;
            let connected = store.connect()?;
            let changed = snapshots(&*connected, &store)?.remove(&name, &snapshot)?;
            tell(globals, &uri, changed, "was not there")
        }
        Command::Protect(Protect { uri }) => protect(globals, &uri, true),
        Command::Unprotect(Unprotect { uri }) => protect(globals, &uri, false),
        Command::Rollback(Rollback { uri, rivals }) => {
            let (store, name, snapshot) = uri.snapshot_location()?;
            let tracker = Tracker::begin(globals, "rollback", &uri)?;
            let connected = rivals.store(&store)?;
            let snapshots = snapshots(&*connected, &store)?;
            tracker.run(|progress| snapshots.rollback(&name, &snapshot, progress))?;
            tell(globals, &uri, true, "")
        }
    }
}

fn snapshots<'a>(store: &'a dyn Store, place: &StoreUri) -> Result<&'a dyn SnapshotStore> {
    capability(store.snapshots(), place, "snapshots")
}

fn list(globals: &Globals, uri: &VolumeUri) -> Result<()> {
    let (store, name) = whole(uri)?;
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
    tell(globals, uri, changed, if protect { "is protected already" } else { "is not protected" })
}
