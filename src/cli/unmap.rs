//! `cleat unmap`: the device goes away.

use std::time::Duration;

use serde::Serialize;

use super::client::{self, GRACE, OPERATION_TIMEOUT, milliseconds};
use super::output::{self, Format};
use super::{Globals, size, view};
use crate::error::Result;
use crate::proto::v1::UnmapRequest;

pub(super) const EXAMPLES: &str = "\
Examples:
  By name, by device or by URI:
    $ cleat unmap data
    $ cleat unmap /dev/nbd1
    $ cleat unmap file:/var/lib/images/a.img

  While it is in use it stays, and whoever holds it is named:
    $ cleat unmap data
    cleat: error: data is in use: mounted on /mnt (ext4)
      repair: umount /mnt
";

/// Take a mapping's device away
///
/// Refuses while the device is open or mounted, naming who holds it. Else everything is flushed to
/// the volume, the device is disconnected, and the command returns when it is gone. Unmapping what
/// is not mapped succeeds.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Unmap {
    /// The mapping's name, its device or its URI
    target: String,
    /// Do it although the device is in use or the volume does not answer; pending I/O fails
    // Part of the API; shown once a daemon does it.
    #[arg(long, hide = true)]
    force: bool,
    /// Give up after this long [default: 30s]
    #[arg(long, visible_alias = "timeout", value_name = "DURATION", value_parser = size::duration)]
    deadline: Option<Duration>,
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Unmapped {
    target: String,
    /// False when nothing was mapped under that target.
    was_mapped: bool,
    /// With `--force`: who still holds the device.
    remaining_holders: Vec<view::Holder>,
}

/// Runs the command.
///
/// # Errors
/// What the daemon answers.
pub(super) fn run(globals: &Globals, args: Unmap) -> Result<()> {
    let default = if args.force { Duration::from_secs(5) } else { OPERATION_TIMEOUT };
    let deadline = args.deadline.unwrap_or(default);
    let request = UnmapRequest {
        target: args.target.clone(),
        force: args.force,
        timeout_ms: milliseconds(deadline),
    };
    let response = client::run(globals, async |client| {
        client.call(deadline + GRACE, async |mut node| node.unmap(request).await).await
    })?;
    let remaining_holders: Vec<view::Holder> =
        response.remaining_holders.into_iter().map(Into::into).collect();
    if globals.output == Some(Format::Json) {
        return output::json(&Unmapped {
            target: args.target,
            was_mapped: response.was_mapped,
            remaining_holders,
        });
    }
    if !response.was_mapped {
        output::note(&format!("{} was not mapped", args.target));
    }
    for holder in &remaining_holders {
        output::note(&format!("{} is still {holder}", args.target));
    }
    Ok(())
}
