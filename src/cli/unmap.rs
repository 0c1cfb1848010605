//! `cleat unmap`: the device goes away.

use std::time::Duration;

use serde::Serialize;

use super::client::{self, GRACE, OPERATION_TIMEOUT, milliseconds};
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

  While it is in use it stays, and whoever holds it is named:
    $ cleat unmap data
    cleat: error: data is in use: mounted on /mnt (ext4)
      repair: umount /mnt; or cleat unmap data --force, which gives up what is not written yet

  Its volume does not answer any more, and programs hang on it:
    $ cleat unmap data --force
    cleat: data: no longer mounted at /mnt (ext4)
    cleat: data: fail I/O: 4 requests hang at the backend

  The same within 3 seconds, leaving mounts alone; somebody keeps the device open:
    $ cleat unmap data --force --unmount none --deadline 3s
    cleat: data is gone, and its name and volume are free; /dev/nbd1, on which everything fails, \
stays as long as it is open in process 4711 (dd)
    $ echo $?
    22
";

/// Take a mapping's device away
///
/// Refuses while the device is open or mounted, naming who holds it. Else everything is flushed to
/// the volume, the device is disconnected, and the command returns when it is gone. Unmapping what
/// is not mapped succeeds.
///
/// By force, nothing is refused or waited for: every request fails from the first moment on, mounts
/// are taken away, the device is disconnected and its worker ended. What was not written is lost.
/// When the command succeeds, nothing reaches the volume any more; another call for the mapping that
/// was under way has ended. When its deadline ends it (exit status 10), the daemon goes on by itself.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Unmap {
    /// The mapping's name, its device or its URI
    target: String,
    /// Do it although the device is in use or the volume does not answer; pending I/O fails
    #[arg(long)]
    force: bool,
    /// Which mounts of the device to take away by force; they are unmounted lazily [default: all]
    #[arg(long, value_name = "WHICH", requires = "force")]
    unmount: Option<Unmount>,
    /// Give up after this long [default: 30s; by force, 5s]
    #[arg(long, visible_alias = "timeout", value_name = "DURATION", value_parser = size::duration)]
    deadline: Option<Duration>,
}

/// The values of `--unmount`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Unmount {
    /// Those in every mount namespace, containers included
    All,
    /// Those in the daemon's own mount namespace
    Own,
    /// None: whoever uses them gets errors
    None,
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Unmapped {
    target: String,
    /// False when nothing was mapped under that target.
    was_mapped: bool,
    /// With `--force`: who still holds the device.
    remaining_holders: Vec<view::Holder>,
    /// With `--force`: what was done, in order.
    steps: Vec<Step>,
    /// With `--force`: mounts that were taken away.
    unmounted: Vec<view::Holder>,
    /// With `--force`: the device that stays until its holders let go.
    device_left: Option<String>,
    /// With `--force`: why it is not known whether the volume has got its last request.
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
/// What the daemon answers.
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
        client.call(deadline + GRACE, async |mut node| node.unmap(request).await).await
    })?;
    let unmapped = Unmapped::new(args.target, response);
    if globals.output == Some(Format::Json) {
        output::json(&unmapped)?;
    } else {
        unmapped.tell(globals.verbose > 0);
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

    fn tell(&self, verbose: bool) {
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
                "it is not known whether the volume of {target} has got its last request: {why}"
            ));
        }
        if let Some(device) = &self.device_left {
            let holders: Vec<String> =
                self.remaining_holders.iter().map(ToString::to_string).collect();
            let holders = match holders.is_empty() {
                true => "somebody keeps it".to_owned(),
                false => format!("it is {}", holders.join(", ")),
            };
            output::note(&format!(
                "{target} is gone, and its name and volume are free; {device}, on which everything \
                 fails, stays as long as {holders}"
            ));
        }
    }
}
