//! `cleat fence`: who may write to a volume, as its storage has it, and who may not any more.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::Globals;
use super::output::{self, Format, Table};
use super::volume::time;
use cleat_backend::claimant::Claimant;
use cleat_backend::fence::{Client, Standing};
use cleat_backend::uri::VolumeUri;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::config::Config;

/// How long one call to the storage may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) const EXAMPLES: &str = "\
Examples:
  Who writes to it, who did, and who is cut off?
    $ cleat fence ls rbd:volumes/db

  A node hangs, and nobody can say what it still writes. What would be done, then do it:
    $ cleat fence add rbd:volumes/db
    $ cleat fence add rbd:volumes/db --yes
    $ cleat map rbd:volumes/db

  The node is back, restarted; take its old client off the blocklist, on that node:
    $ cleat fence clear 'rbd:volumes/db?id=admin' 10.0.0.7:0/3519840207
";

const LS_EXAMPLES: &str = "\
Examples:
    $ cleat fence ls rbd:volumes/db

  The address of whoever holds the claim:
    $ cleat fence ls rbd:volumes/db -o json | jq -r '.clients[] | select(.claim == \"held\").address'
";

const ADD_EXAMPLES: &str = "\
Examples:
  What would be done:
    $ cleat fence add rbd:volumes/db

  Cut off whoever may write to it now:
    $ cleat fence add rbd:volumes/db --yes

  One client, as cleat fence ls shows it:
    $ cleat fence add rbd:volumes/db --address 10.0.0.7:0/3519840207 --yes
";

const CLEAR_EXAMPLES: &str = "\
Examples:
    $ cleat fence clear 'rbd:volumes/db?id=admin' 10.0.0.7:0/3519840207
";

/// Show who may write to a volume, cut clients off, let them in again
///
/// Works on the storage itself (rbd: volumes), with the rights of whoever runs it; the daemon is not
/// needed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Fence {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Ls(Ls),
    Add(Add),
    Clear(Clear),
}

/// Show the clients of a volume: claims, lock, who has it open, who is cut off
#[derive(Debug, clap::Args)]
#[command(visible_alias = "list", after_long_help = LS_EXAMPLES)]
struct Ls {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

/// Cut off whoever may write to a volume, for five years
///
/// The client's mapping never writes to the volume again, and everybody else may map it. What the
/// client has not written yet is lost, and what is mounted on it fails. Without --yes this only says
/// what would be done.
#[derive(Debug, clap::Args)]
#[command(after_long_help = ADD_EXAMPLES)]
struct Add {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Only this client, IP:PORT/NONCE as shown by `cleat fence ls`
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Do it
    #[arg(long)]
    yes: bool,
}

/// Let a client in again that is proved gone
///
/// Proved gone is a client that has let go of the volume in order, or whose claim was taken over and
/// whose node was restarted since, or whose process has ended on this node. All others are refused:
/// an entry that stays does no harm, since a new client has a new address.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CLEAR_EXAMPLES)]
struct Clear {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The client, IP:PORT/NONCE as shown by `cleat fence ls`
    address: String,
}

#[derive(Debug, Serialize)]
struct Listing {
    volume: String,
    clients: Vec<Client>,
}

#[derive(Debug, Serialize)]
struct Cut {
    volume: String,
    cut_off: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Cleared {
    volume: String,
    address: String,
    changed: bool,
}

/// Runs the command.
///
/// # Errors
/// What the storage gives.
pub(super) fn run(globals: &Globals, args: Fence) -> Result<()> {
    match args.command {
        Command::Ls(args) => ls(globals, &args),
        Command::Add(args) => add(globals, &args),
        Command::Clear(args) => clear(globals, args),
    }
}

fn ls(globals: &Globals, args: &Ls) -> Result<()> {
    let clients = args.uri.fence()?.clients(deadline())?;
    if globals.output == Some(Format::Json) {
        return output::json(&Listing { volume: args.uri.to_string(), clients });
    }
    let mut table = Table::new(&[
        "ADDRESS",
        "NODE",
        "MAPPING",
        "CLAIM",
        "SINCE",
        "LOCK",
        "OPEN",
        "CUT OFF UNTIL",
    ]);
    for client in clients {
        let claim = match (client.claim, client.generation) {
            (Some(standing), Some(generation)) => format!("{} ({generation})", word(standing)),
            _ => String::new(),
        };
        let yes = |is: bool| if is { "yes".to_owned() } else { String::new() };
        table.row(vec![
            client.address,
            client.node.unwrap_or_default(),
            client.mapping_id.unwrap_or_default(),
            claim,
            since(client.since_s),
            yes(client.holds_lock),
            yes(client.watches),
            client.cut_off_until.unwrap_or_default(),
        ]);
    }
    output::text(&table.render())
}

fn since(seconds: Option<u64>) -> String {
    seconds.and_then(|seconds| i64::try_from(seconds).ok()).map(time).unwrap_or_default()
}

fn word(standing: Standing) -> &'static str {
    match standing {
        Standing::Held => "held",
        Standing::Released => "released",
        Standing::Taken => "taken over",
    }
}

fn add(globals: &Globals, args: &Add) -> Result<()> {
    let fence = args.uri.fence()?;
    let targets = fence.targets(args.address.as_deref(), deadline())?;
    if !args.yes {
        let consequences: Vec<&str> = targets.iter().map(|target| &*target.consequence).collect();
        let message = format!("nothing was done; with --yes, {}", consequences.join("; "));
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("repeat it with --yes if that is what you want"));
    }
    // Told, since that is what the command is for; and it has a mapping id of its own.
    let claimant = Claimant { take_over: true, ..here()? };
    fence.fence(&targets, &claimant, deadline())?;
    let cut_off: Vec<String> = targets.into_iter().map(|target| target.client.address).collect();
    if globals.output == Some(Format::Json) {
        return output::json(&Cut { volume: args.uri.to_string(), cut_off });
    }
    output::text(&cut_off.iter().map(|address| format!("{address}\n")).collect::<String>())
}

fn clear(globals: &Globals, args: Clear) -> Result<()> {
    let changed = args.uri.fence()?.unfence(&args.address, &here()?, deadline())?;
    if globals.output == Some(Format::Json) {
        let volume = args.uri.to_string();
        return output::json(&Cleared { volume, address: args.address, changed });
    }
    if !changed {
        output::note(&format!("{} is not cut off", args.address));
    }
    Ok(())
}

/// The deadline of a call to the storage that begins now.
fn deadline() -> Instant {
    SystemClock.now() + CALL_TIMEOUT
}

fn here() -> Result<Claimant> {
    Claimant::alone(&Config::load(None)?.node_name, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_every_field() {
        let client = serde_json::to_value(Client::default()).expect("it is JSON");
        for field in client.as_object().expect("an object").keys() {
            assert!(super::super::man::JSON.contains(field), "{field}");
        }
    }
}
