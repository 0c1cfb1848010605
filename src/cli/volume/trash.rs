//! `cleat volume trash`.

use serde::Serialize;

use super::change::volume_location;
use super::{TakeOverArgs, Tracker, capability, print_change, short, time};
use crate::cli::output::{self, Format, Table};
use crate::cli::{Globals, exit};
use cleat_backend::store::{Failure, Purged, Trashed};
use cleat_backend::uri::{StoreUri, VolumeUri};
use cleat_core::error::Result;

const EXAMPLES: &str = "\
Examples:
    $ cleat volume trash list rbd:volumes
    $ cleat volume trash restore rbd:volumes/data
    $ cleat volume trash purge rbd:volumes
";

/// List, restore and delete removed volumes that the trash keeps
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Trash {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(List),
    Restore(Box<Restore>),
    Purge(Purge),
}

const LIST_EXAMPLES: &str = "\
Examples:
    $ cleat volume trash list rbd:volumes
    $ cleat volume trash list rbd:volumes/tenant -o json | jq -r '.trash[].id'
";

/// List the trash of a pool or a namespace, oldest entry first
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_long_help = LIST_EXAMPLES)]
struct List {
    /// The store: rbd:POOL or rbd:POOL/NAMESPACE
    #[arg(value_parser = crate::backends::store)]
    place: StoreUri,
}

const RESTORE_EXAMPLES: &str = "\
Examples:
    $ cleat volume trash restore rbd:volumes/data

  Restore one of several volumes of this name, under another name:
    $ cleat volume trash restore rbd:volumes/data --id 10a7b2f3c1 --name data-before
";

/// Restore a volume from the trash
#[derive(Debug, clap::Args)]
#[command(after_long_help = RESTORE_EXAMPLES)]
struct Restore {
    /// The volume, by its former name
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The id, if several volumes had this name (see `list`)
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// A new name for it
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

const PURGE_EXAMPLES: &str = "\
Examples:
  Delete the volumes whose time in the trash has passed:
    $ cleat volume trash purge rbd:volumes

  Delete these two now, also before their time has passed:
    $ cleat volume trash purge rbd:volumes 10a7b2f3c1 10a7d00e44 --force
";

/// Permanently delete the volumes in the trash
///
/// A volume whose time in the trash has not passed is kept, unless --force is given; a volume with
/// watchers or a claim is also kept. A volume that cannot be deleted is reported and does not prevent the
/// deletion of the others; the exit code is then that of the first error.
#[derive(Debug, clap::Args)]
#[command(after_long_help = PURGE_EXAMPLES)]
struct Purge {
    /// The store: rbd:POOL or rbd:POOL/NAMESPACE
    #[arg(value_parser = crate::backends::store)]
    place: StoreUri,
    /// Only the volumes with these ids [default: all]
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// Also delete volumes before their time has passed
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    take_over: TakeOverArgs,
}

/// The result of `list` in JSON.
#[derive(Debug, Serialize)]
struct Listing {
    trash: Vec<Trashed>,
}

/// The result of `purge` in JSON.
#[derive(Debug, Serialize)]
struct Outcome {
    removed: Vec<Trashed>,
    failed: Vec<Kept>,
    waiting: Vec<Trashed>,
}

#[derive(Debug, Serialize)]
struct Kept {
    #[serde(flatten)]
    trashed: Trashed,
    #[serde(flatten)]
    why: Failure,
}

pub(super) fn run(globals: &Globals, args: Trash) -> Result<u8> {
    match args.command {
        Command::List(List { place }) => list(globals, &place).map(|()| exit::OK),
        Command::Restore(restore) => {
            let Restore { uri, id, name: new_name } = *restore;
            let (store, name) = volume_location(&uri)?;
            let connected = store.connect()?;
            let trash = capability(connected.trash(), &store, "trash")?;
            let changed = trash.restore(&name, id.as_deref(), new_name.as_deref())?;
            print_change(globals, &uri, changed, "is already restored").map(|()| exit::OK)
        }
        Command::Purge(args) => purge(globals, &args),
    }
}

fn list(globals: &Globals, place: &StoreUri) -> Result<()> {
    let store = place.connect()?;
    let trash = capability(store.trash(), place, "trash")?.entries()?;
    if globals.output == Some(Format::Json) {
        return output::json(&Listing { trash });
    }
    let mut table = Table::new(&["ID", "NAME", "REMOVED", "KEPT UNTIL"]);
    for entry in trash {
        let (removed, kept) = (time(entry.removed_at_s), time(entry.kept_until_s));
        table.row(vec![entry.id, entry.name, removed, kept]);
    }
    output::text(&table.render())
}

fn purge(globals: &Globals, args: &Purge) -> Result<u8> {
    let tracker = Tracker::begin(globals, "purge", &args.place)?;
    let store = args.take_over.store(&args.place)?;
    let trash = capability(store.trash(), &args.place, "trash")?;
    let purged = tracker.run(|progress| trash.purge(&args.ids, args.force, progress))?;
    let code = purged.failed.first().map_or(exit::OK, |(_, error)| exit::code(error.kind()));
    if globals.output == Some(Format::Json) {
        output::json(&Outcome::from(purged))?;
        return Ok(code);
    }
    for entry in &purged.removed {
        output::note(&format!("deleted {} ({})", entry.id, entry.name));
    }
    for entry in &purged.waiting {
        let until = time(entry.kept_until_s);
        output::note(&format!("{} ({}) is kept until {until}", entry.id, entry.name));
    }
    for (entry, error) in &purged.failed {
        let why = Failure::from(error);
        output::note(&format!("cannot delete {} ({}): {why}", entry.id, entry.name));
    }
    if purged.removed.is_empty() && purged.waiting.is_empty() && purged.failed.is_empty() {
        output::note(&format!("the trash of {} is empty", short(&args.place.to_string())));
    }
    Ok(code)
}

impl From<Purged> for Outcome {
    fn from(purged: Purged) -> Self {
        let failed = purged.failed.into_iter();
        let failed = failed.map(|(trashed, error)| Kept { trashed, why: Failure::from(&error) });
        Self { removed: purged.removed, failed: failed.collect(), waiting: purged.waiting }
    }
}
