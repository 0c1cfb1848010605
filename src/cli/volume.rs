//! `cleat volume`: manages volumes in their storage, without the daemon and without a device.

mod change;
mod check;
mod copy;
mod diff;
mod show;
mod snapshot;
mod trash;

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::Globals;
use super::output::{self, Format, short};
use super::progress::Tracker;
use cleat_backend::claimant::Claimant;
use cleat_backend::store::Store;
use cleat_backend::uri::StoreUri;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::config::Config;

pub(super) const EXAMPLES: &str = "\
Examples:
  Create an RBD image, and map it to a device:
    $ cleat volume create rbd:volumes/data 10G
    $ cleat map rbd:volumes/data

  Take a snapshot while it is mapped, and create a writable clone of it:
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy

  List volumes, and show one of them:
    $ cleat volume list rbd:volumes --long
    $ cleat volume info rbd:volumes/data

  Remove a volume, and restore it:
    $ cleat volume remove rbd:volumes/data
    $ cleat volume trash restore rbd:volumes/data

  Copy a snapshot to a file, and make a volume of it elsewhere:
    $ cleat volume export rbd:volumes/data@monday data.qcow2
    $ cleat volume import data.qcow2 dir:/var/lib/volumes/data

  Use another cluster and another user (the volume's options are those of map):
    $ cleat volume list 'rbd:volumes?conf=/etc/ceph/b.conf&id=backup'
";

/// Create, list, resize, clone, copy, compare and remove volumes and their snapshots
///
/// Works directly on the storage with the rights of the calling user, like `rbd`; the daemon is not
/// needed. Supports RBD images and, with fewer operations, volumes of objects and files. Repeating a command is safe: if nothing
/// has to be changed, the command succeeds and reports it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct VolumeCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(change::Create),
    Remove(change::Remove),
    Resize(change::Resize),
    List(show::List),
    Info(show::Info),
    Clone(Box<change::Clone>),
    Flatten(change::Flatten),
    Snapshot(snapshot::Snapshot),
    Trash(trash::Trash),
    Export(copy::Export),
    Import(copy::Import),
    Fsck(check::Fsck),
    Scrub(check::Scrub),
    Diff(diff::Diff),
}

/// The result of a change in JSON.
#[derive(Debug, Serialize)]
struct Changed<'a> {
    volume: &'a str,
    changed: bool,
}

/// Runs the command and returns the exit code.
///
/// # Errors
/// Returns the storage's error.
pub(super) fn run(globals: &Globals, args: VolumeCommand) -> Result<u8> {
    match args.command {
        Command::Create(args) => change::create(globals, args),
        Command::Remove(args) => change::remove(globals, &args),
        Command::Resize(args) => change::resize(globals, &args),
        Command::List(args) => return show::list(globals, args),
        Command::Info(args) => show::info(globals, &args),
        Command::Clone(args) => change::clone(globals, *args),
        Command::Flatten(args) => change::flatten(globals, &args),
        Command::Snapshot(args) => snapshot::run(globals, args),
        Command::Trash(args) => return trash::run(globals, args),
        Command::Export(args) => copy::export(globals, &args),
        Command::Import(args) => copy::import(globals, &args),
        Command::Fsck(args) => return check::fsck(globals, &args),
        Command::Scrub(args) => return check::scrub(globals, &args),
        Command::Diff(args) => diff::diff(globals, &args),
    }
    .map(|()| super::exit::OK)
}

/// The option of commands that remove data which other clients may use.
#[derive(Debug, clap::Args)]
struct TakeOverArgs {
    /// Fence the client that has claimed the volume (rbd:, dir:, s3:), permanently, instead of refusing
    ///
    /// Data that this client has not yet written is lost, and file systems on its device fail. Needed only
    /// if the volume cannot be unmapped there and the client is not known to have ended.
    #[arg(long)]
    take_over: bool,
}

impl TakeOverArgs {
    /// Connects to the store as [`connect`] does.
    fn store(&self, place: &StoreUri) -> Result<Box<dyn Store>> {
        connect_as(place, self.take_over)
    }
}

/// Connects to the store with the identity of this process on this node, for commands that change a volume. So the claim
/// that a command has left which was killed does not keep the next one from the volume.
fn connect(place: &StoreUri) -> Result<Box<dyn Store>> {
    connect_as(place, false)
}

fn connect_as(place: &StoreUri, take_over: bool) -> Result<Box<dyn Store>> {
    place.connect_as(&Claimant::alone(&Config::load(None)?.node_name, take_over)?)
}

/// Returns a capability that only some stores have.
///
/// # Errors
/// Returns `Unsupported` if this store does not have it.
fn capability<T>(found: Option<T>, place: &StoreUri, what: &str) -> Result<T> {
    found.ok_or_else(|| {
        let message = format!("{} volumes have no {what}", place.spec().scheme());
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// Prints the result of a change. `unchanged` is the text if nothing had to be changed.
fn print_change(
    globals: &Globals,
    volume: &impl ToString,
    changed: bool,
    unchanged: &str,
) -> Result<()> {
    let volume = &*volume.to_string();
    if globals.output == Some(Format::Json) {
        return output::json(&Changed { volume, changed });
    }
    if !changed {
        output::note(&format!("{} {unchanged}", short(volume)));
    }
    Ok(())
}

/// The last second of the year 9999, the latest time that `humantime` can format.
const LAST_SECOND: u64 = 253_402_300_799;

/// Formats a time in seconds since the Unix epoch.
pub(super) fn time(seconds: i64) -> String {
    let since = u64::try_from(seconds).unwrap_or(0);
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(since));
    match time.filter(|_| since <= LAST_SECOND) {
        Some(time) => humantime::format_rfc3339_seconds(time).to_string(),
        None => seconds.to_string(),
    }
}
