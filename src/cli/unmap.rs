//! `cleat unmap`: removes the device of a mapping.

use std::time::Duration;

use serde::Serialize;

use super::client::{self, OPERATION_TIMEOUT, REPLY_MARGIN, milliseconds};
use super::output::{self, Format};
use super::{Globals, exit, size, view};
use cleat_api::v1;
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  By name, by device or by URI:
    $ cleat unmap data
    $ cleat unmap /dev/nbd1
    $ cleat unmap file:/var/lib/images/a.img

  A device in use is not unmapped; the error names its holders:
    $ cleat unmap data
    cleat: error: data is in use: mounted on /mnt (ext4)
      repair: umount /mnt; or cleat unmap data --force, which loses data that is not written yet

  The volume does not answer any more, and programs hang:
    $ cleat unmap data --force
    cleat: data: no longer mounted at /mnt (ext4)
    cleat: data: fail I/O: 4 requests hang at the backend

  The same within 3 seconds and without unmounting; a process keeps the device open:
    $ cleat unmap data --force --unmount none --deadline 3s
    cleat: data is unmapped, and its name and volume are free; /dev/nbd1 remains, and all its I/O \
fails, until its holders close it: open in process 4711 (dd)
    $ echo $?
    22
";

/// Unmap a volume: remove its device
///
/// Fails while the device is open or mounted, and names the holders. Otherwise the daemon flushes all data
/// to the volume and disconnects the device; the command returns when the device is gone. It fails if the
/// data cannot be flushed, for example because the volume is missing, and for a device of another program.
/// It also succeeds if the target is not mapped.
///
/// With --force, nothing is refused or waited for: all requests fail immediately, mounts are detached, the
/// device is disconnected and its worker is ended. Data that was not written is lost. When the command
/// succeeds, no request reaches the volume any more, and other calls for the mapping have ended. If the
/// deadline passes (exit status 10), the daemon continues the forced unmap in the background.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Unmap {
    /// The mapping's name, device or URI
    target: String,
    /// Unmap even if the device is in use or the volume does not answer; pending I/O fails
    #[arg(long)]
    force: bool,
    /// Which mounts of the device to detach with --force (lazy unmount) [default: all]
    #[arg(long, value_name = "WHICH", requires = "force")]
    unmount: Option<Unmount>,
    /// Fail after this time [default: 30s; with --force, 5s]
    #[arg(long, visible_alias = "timeout", value_name = "DURATION", value_parser = size::duration)]
    deadline: Option<Duration>,
}

/// The values of `--unmount`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Unmount {
    /// The mounts in every mount namespace, containers included
    All,
    /// The mounts in the daemon's mount namespace
    Own,
    /// No mounts: programs that use them get errors
    None,
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Unmapped {
    target: String,
    /// False if no mapping matched the target.
    was_mapped: bool,
    /// With `--force`: the remaining holders of the device.
    remaining_holders: Vec<view::Holder>,
    /// With `--force`: the steps that were done, in order.
    steps: Vec<Step>,
    /// With `--force`: the mounts that were detached.
    unmounted: Vec<view::Holder>,
    /// With `--force`: the device that remains until its holders close it.
    device_left: Option<String>,
    /// With `--force`: why requests may still reach the volume.
    unproven: Option<String>,
}

#[derive(Debug, Serialize)]
struct Step {
    step: String,
    took_ms: u32,
    note: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, args: Unmap) -> Result<u8> {
    let default = if args.force { Duration::from_secs(5) } else { OPERATION_TIMEOUT };
    let deadline = args.deadline.unwrap_or(default);
    let unmount = match args.unmount {
        None => v1::Unmount::Unspecified,
        Some(Unmount::All) => v1::Unmount::All,
        Some(Unmount::Own) => v1::Unmount::Own,
        Some(Unmount::None) => v1::Unmount::None,
    };
    let request = v1::UnmapRequest {
        target: args.target.clone(),
        force: args.force,
        timeout_ms: milliseconds(deadline),
        unmount: unmount.into(),
    };
    let response = client::run(globals, async |client| {
        client.call(deadline + REPLY_MARGIN, async |mut node| node.unmap(request).await).await
    })?;
    let unmapped = Unmapped::new(args.target, response);
    if globals.output == Some(Format::Json) {
        output::json(&unmapped)?;
    } else {
        unmapped.print(globals.verbose > 0);
    }
    let left = unmapped.device_left.is_some() || unmapped.unproven.is_some();
    Ok(if left { exit::LEFT_BEHIND } else { exit::OK })
}

impl Unmapped {
    fn new(target: String, response: v1::UnmapResponse) -> Self {
        let step = |step: v1::ForcedStep| Step {
            step: step.step,
            took_ms: step.took_ms,
            note: view::text(step.note),
        };
        Self {
            target,
            was_mapped: response.was_mapped,
            remaining_holders: response.remaining_holders.into_iter().map(Into::into).collect(),
            steps: response.steps.into_iter().map(step).collect(),
            unmounted: response.unmounted.into_iter().map(Into::into).collect(),
            device_left: view::text(response.device_left),
            unproven: view::text(response.unproven),
        }
    }

    fn print(&self, verbose: bool) {
        let target = &self.target;
        if !self.was_mapped {
            output::note(&format!("{target} was not mapped"));
        }
        for mount in &self.unmounted {
            output::note(&format!("{target}: no longer {mount}"));
        }
        for Step { step, took_ms, note } in &self.steps {
            match note {
                Some(note) => output::note(&format!("{target}: {step}: {note}")),
                None if verbose => output::note(&format!("{target}: {step}: {took_ms} ms")),
                None => {}
            }
        }
        if let Some(why) = &self.unproven {
            output::note(&format!(
                "cannot prove that no request reaches the volume of {target} any more: {why}"
            ));
        }
        if let Some(device) = &self.device_left {
            let holders: Vec<String> =
                self.remaining_holders.iter().map(ToString::to_string).collect();
            let holders = match holders.is_empty() {
                true => "unknown".to_owned(),
                false => holders.join(", "),
            };
            output::note(&format!(
                "{target} is unmapped, and its name and volume are free; {device} remains, and all \
                 its I/O fails, until its holders close it: {holders}"
            ));
        }
    }
}
