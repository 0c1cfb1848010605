//! `cleat volume`: volumes where they are kept, without daemon and device.

mod change;
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
  Make an RBD image, and a device of it:
    $ cleat volume create rbd:volumes/data 10G
    $ cleat map rbd:volumes/data

  A snapshot while it is mapped, and a writable clone of that:
    $ cleat volume snapshot create rbd:volumes/data@monday
    $ cleat volume clone rbd:volumes/data@monday rbd:volumes/copy

  What is there, and what is known of one:
    $ cleat volume list rbd:volumes --long
    $ cleat volume info rbd:volumes/data

  Away with it, and back:
    $ cleat volume remove rbd:volumes/data
    $ cleat volume trash restore rbd:volumes/data

  Another cluster or another user stand in the volume's options, as for map:
    $ cleat volume list 'rbd:volumes?conf=/etc/ceph/b.conf&id=backup'
";

/// Make, list, resize, clone and remove volumes and their snapshots
///
/// Works on the storage itself, with the rights of whoever runs it, as `rbd` does; the daemon is not
/// needed. For RBD images and, as far as they can, for files. Repeating a command is safe: what is
/// already as it was wanted succeeds, and says so.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Volume {
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
}

/// The result of a change in JSON.
#[derive(Debug, Serialize)]
struct Changed<'a> {
    volume: &'a str,
    changed: bool,
}

/// Runs the command; returns the exit code.
///
/// # Errors
/// What the storage gives.
pub(super) fn run(globals: &Globals, args: Volume) -> Result<u8> {
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
    }
    .map(|()| super::exit::OK)
}

/// What takes data from under those who may write: as this process, on this node.
#[derive(Debug, clap::Args)]
struct Rivals {
    /// Cut off whoever has claimed the volume (rbd:), for good, instead of refusing
    ///
    /// What that client has not written yet is lost, and what is mounted there fails. Needed only when
    /// it cannot be asked to unmap, and is not known to have ended.
    #[arg(long)]
    take_over: bool,
}

impl Rivals {
    fn store(&self, place: &StoreUri) -> Result<Box<dyn Store>> {
        place.connect_as(&Claimant::alone(&Config::load(None)?.node_name, self.take_over)?)
    }
}

/// Returns what only some stores can do.
///
/// # Errors
/// `Unsupported` where this one cannot.
fn capability<T>(found: Option<T>, place: &StoreUri, what: &str) -> Result<T> {
    found.ok_or_else(|| {
        let message = format!("{} volumes have no {what}", place.spec().scheme());
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// Tells of a change; `unchanged` is what there is to say when nothing had to be done.
fn tell(globals: &Globals, volume: &impl ToString, changed: bool, unchanged: &str) -> Result<()> {
    let volume = &*volume.to_string();
    if globals.output == Some(Format::Json) {
        return output::json(&Changed { volume, changed });
    }
    if !changed {
        output::note(&format!("{} {unchanged}", short(volume)));
    }
    Ok(())
}

/// The end of the year 9999: later times cannot be written.
const LAST_SECOND: u64 = 253_402_300_799;

/// Seconds since 1970 for the eye.
pub(super) fn time(seconds: i64) -> String {
    let since = u64::try_from(seconds).unwrap_or(0);
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(since));
    match time.filter(|_| since <= LAST_SECOND) {
        Some(time) => humantime::format_rfc3339_seconds(time).to_string(),
        None => seconds.to_string(),
    }
}
