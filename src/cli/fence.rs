//! `cleat fence`: lists the clients of a volume in its storage, fences them and removes the fence.

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

/// The timeout of one call to the storage.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) const EXAMPLES: &str = "\
Examples:
  List the present and former writers, and the fenced clients:
    $ cleat fence ls rbd:volumes/db

  A node hangs and may still write. Show the consequences, then fence its client:
    $ cleat fence add rbd:volumes/db
    $ cleat fence add rbd:volumes/db --yes
    $ cleat map rbd:volumes/db

  The node was restarted; on that node, remove its old client from the blocklist:
    $ cleat fence clear 'rbd:volumes/db?id=admin' 10.0.0.7:0/3519840207
";

const LS_EXAMPLES: &str = "\
Examples:
    $ cleat fence ls rbd:volumes/db

  Print the address of the client with the claim:
    $ cleat fence ls rbd:volumes/db -o json | jq -r '.clients[] | select(.claim == \"held\").address'
";

const ADD_EXAMPLES: &str = "\
Examples:
  Show the consequences:
    $ cleat fence add rbd:volumes/db

  Fence the clients that may write to it now:
    $ cleat fence add rbd:volumes/db --yes

  Fence one client, by its address in cleat fence ls:
    $ cleat fence add rbd:volumes/db --address 10.0.0.7:0/3519840207 --yes
";

const CLEAR_EXAMPLES: &str = "\
Examples:
    $ cleat fence clear 'rbd:volumes/db?id=admin' 10.0.0.7:0/3519840207
";

/// List the clients of a volume, fence them, and remove the fence
///
/// Works directly on the storage (rbd: volumes) with the rights of the calling user; the daemon is not
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

/// List the clients of a volume with their claims, locks, watches and blocklist entries
#[derive(Debug, clap::Args)]
#[command(visible_alias = "list", after_long_help = LS_EXAMPLES)]
struct Ls {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

/// Fence the clients that may write to a volume, for five years
///
/// The client's mapping never writes to the volume again, and any other client may map it. Data that the
/// client has not yet written is lost, and file systems on its device fail. Without --yes the command only
/// shows the consequences.
#[derive(Debug, clap::Args)]
#[command(after_long_help = ADD_EXAMPLES)]
struct Add {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Fence only this client: IP:PORT/NONCE as shown by `cleat fence ls`
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Fence the clients
    #[arg(long)]
    yes: bool,
}

/// Remove a client from the blocklist if it is proved to have ended
///
/// A client is proved to have ended if it has released the volume; or if its claim was taken over, and
/// since then its node was restarted or its process on this node has ended. Any other client is refused: an
/// entry that stays does no harm, because a new client has a new address.
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
struct Fenced {
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
/// Returns the storage's error.
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
            (Some(standing), Some(generation)) => {
                format!("{} ({generation})", claim_label(standing))
            }
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

fn claim_label(standing: Standing) -> &'static str {
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
        let message = format!("nothing was changed; with --yes, {}", consequences.join("; "));
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("repeat the command with --yes to do this"));
    }
    // The command is the explicit request for a takeover. The claimant has its own mapping id.
    let claimant = Claimant { take_over: true, ..here()? };
    fence.fence(&targets, &claimant, deadline())?;
    let cut_off: Vec<String> = targets.into_iter().map(|target| target.client.address).collect();
    if globals.output == Some(Format::Json) {
        return output::json(&Fenced { volume: args.uri.to_string(), cut_off });
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
        output::note(&format!("{} is not on the blocklist", args.address));
    }
    Ok(())
}

/// Returns the deadline of a call to the storage that starts now.
fn deadline() -> Instant {
    SystemClock.now() + CALL_TIMEOUT
}

/// Returns the identity of this process on this node.
fn here() -> Result<Claimant> {
    Claimant::alone(&Config::load(None)?.node_name, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_lists_every_field() {
        let client = serde_json::to_value(Client::default()).expect("it is JSON");
        for field in client.as_object().expect("an object").keys() {
            assert!(super::super::man::JSON.contains(field), "{field}");
        }
    }
}
