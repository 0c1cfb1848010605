//! `cleat upgrade`: replaces the daemon and its workers by the installed build while devices are in use.

use std::time::Duration;

use serde::Serialize;
use tokio_stream::StreamExt as _;

use super::client::{self, Client, OPERATION_TIMEOUT, QUERY_TIMEOUT, REPLY_MARGIN};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{HealthRequest, UpgradeEvent, UpgradeRequest};
use cleat_core::clock::{Clock as _, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

pub(super) const EXAMPLES: &str = "\
Examples:
  After the installation of a new build (systemctl reload cleat does the same):
    $ cleat upgrade
    daemon: restarted, 0.1.0 (5c1dcf6) -> 0.2.0 (8ac53d1)
    data: handed over, paused 12.3 ms, 0.1.0 (5c1dcf6) -> 0.2.0 (8ac53d1)

  One volume first:
    $ cleat upgrade data

  Back to the old build, after its installation:
    $ cleat upgrade
";

/// Upgrade the daemon and its workers to the installed build, while devices are in use
///
/// The daemon executes the installed build in place of itself. Then each volume is handed over, one after
/// the other: a new worker opens the volume, the old worker finishes the requests in flight, and the new
/// worker takes over the device's connection. The device stays connected. If a handover fails, the old
/// worker continues to serve. A downgrade works the same way.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Upgrade {
    /// Names, devices or URIs of mappings [default: all mappings]
    targets: Vec<String>,
    /// Do not restart the daemon
    #[arg(long)]
    workers_only: bool,
    /// Also replace workers that already have the daemon's build
    #[arg(long)]
    force: bool,
}

/// The result in JSON.
#[derive(Debug, Default, Serialize)]
struct Upgraded {
    /// The daemon's result; null with `--workers-only`.
    daemon: Option<Part>,
    volumes: Vec<Part>,
}

/// The result for the daemon or one volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Part {
    /// Null for the daemon.
    name: Option<String>,
    /// restarted, handed_over, current, failed
    outcome: &'static str,
    from_version: String,
    /// The same as `from_version` if nothing has changed.
    to_version: String,
    /// The time in which no worker served the device; null if there was no handover.
    paused_us: Option<u32>,
    message: Option<String>,
    repair: Option<String>,
}

/// The timeout for the restart of the daemon, which observes every device before it answers.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);

/// The interval between two attempts to connect to the restarted daemon.
const RESTART_POLL: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error, or `Unavailable` if the daemon or a worker was not replaced.
pub(super) fn run(globals: &Globals, args: Upgrade) -> Result<()> {
    let mut done = Upgraded::default();
    let mut request = UpgradeRequest {
        targets: args.targets,
        workers_only: args.workers_only,
        force: args.force,
    };
    let first = request.clone();
    let restarting =
        client::run(globals, async |client| follow(globals, &client, first, &mut done).await)?;
    if let Some(binary) = restarting {
        wait_for_daemon(globals, &binary)?;
        request.workers_only = true;
        client::run(globals, async |client| follow(globals, &client, request, &mut done).await)?;
    }
    finish(globals, &done)
}

/// Waits until the daemon that runs the executable `binary` answers.
fn wait_for_daemon(globals: &Globals, binary: &str) -> Result<()> {
    let deadline = SystemClock.now() + RESTART_TIMEOUT;
    loop {
        let health = client::run(globals, async |client| {
            client.call(QUERY_TIMEOUT, async |mut node| node.health(HealthRequest {}).await).await
        });
        if health.as_ref().is_ok_and(|health| health.binary == binary) {
            return Ok(());
        }
        if SystemClock.now() >= deadline {
            let message = "the daemon has not restarted as the new build";
            let error = Error::new(ErrorKind::TimedOut, message).with_repair(
                "check its log with `journalctl -u cleat`; devices are still being served",
            );
            return Err(match health {
                Err(source) => error.with_source(source),
                Ok(_) => error,
            });
        }
        pause(RESTART_POLL);
    }
}

#[allow(clippy::disallowed_methods, reason = "the command has nothing else to do meanwhile")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Prints the events of an upgrade. Returns the executable as which the daemon restarts, if it restarts.
async fn follow(
    globals: &Globals,
    client: &Client,
    request: UpgradeRequest,
    done: &mut Upgraded,
) -> Result<Option<String>> {
    // The daemon enforces its own timeout for each volume.
    let limit =
        OPERATION_TIMEOUT * 2 + crate::backends::REGISTRY.max_extra_open_time() + REPLY_MARGIN;
    let mut stream = client.call(limit, async |mut node| node.upgrade(request).await).await?;
    loop {
        let event = match tokio::time::timeout(limit, stream.next()).await {
            Ok(Some(Ok(event))) => event,
            Ok(Some(Err(status))) => return Err(client.error(&status)),
            Ok(None) => return Ok(None),
            Err(_) => {
                let message = "the daemon has stopped reporting the progress of the upgrade";
                return Err(Error::new(ErrorKind::TimedOut, message)
                    .with_repair("check its log with `journalctl -u cleat`"));
            }
        };
        let binary = event.binary.clone();
        let part = Part::from(event);
        if globals.output != Some(Format::Json) {
            output::text(&line(&part))?;
        }
        let restarts = part.outcome == "restarted";
        match part.name {
            None => done.daemon = Some(part),
            Some(_) => done.volumes.push(part),
        }
        if restarts {
            return Ok(Some(binary));
        }
    }
}

fn finish(globals: &Globals, done: &Upgraded) -> Result<()> {
    if globals.output == Some(Format::Json) {
        output::json(done)?;
    }
    let parts = || done.daemon.iter().chain(&done.volumes);
    let failed = parts().filter(|part| part.outcome == "failed").count();
    if failed == 0 {
        return Ok(());
    }
    let message = format!("{failed} of {} parts were not upgraded", parts().count());
    Err(Error::new(ErrorKind::Unavailable, message).with_repair(
        "the reasons are printed above; the old workers continue to serve; retry with `cleat upgrade`",
    ))
}

fn line(part: &Part) -> String {
    let name = part.name.as_deref().unwrap_or("daemon");
    let change = if part.from_version == part.to_version {
        String::new()
    } else {
        format!(", {} -> {}", part.from_version, part.to_version)
    };
    let what = match (part.outcome, part.paused_us) {
        ("restarted", _) => format!("restarted{change}"),
        ("handed_over", Some(paused_us)) => {
            let paused_ms = f64::from(paused_us) / 1000.0;
            format!("handed over, paused {paused_ms:.1} ms{change}")
        }
        ("failed", _) => {
            let repair = part.repair.iter().map(|repair| format!("; {repair}")).collect::<String>();
            format!("not upgraded: {}{repair}", part.message.as_deref().unwrap_or_default())
        }
        _ => format!("already has this build, {}", part.from_version),
    };
    format!("{}\n", output::printable(&format!("{name}: {what}")))
}

impl From<UpgradeEvent> for Part {
    fn from(event: UpgradeEvent) -> Self {
        let outcome = match event.outcome() {
            Outcome::HandedOver => "handed_over",
            Outcome::Current => "current",
            Outcome::Restarting => "restarted",
            // An outcome that this client does not know counts as a failure.
            Outcome::Failed | Outcome::Unspecified => "failed",
        };
        let to = if event.to_version.is_empty() { &event.from_version } else { &event.to_version };
        Self {
            name: view::text(event.name),
            outcome,
            to_version: to.clone(),
            from_version: event.from_version,
            paused_us: (outcome == "handed_over").then_some(event.paused_us),
            message: view::text(event.message),
            repair: view::text(event.repair),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(outcome: Outcome) -> UpgradeEvent {
        let (name, from_version) = ("data".to_owned(), "1 (a)".to_owned());
        let outcome = outcome.into();
        UpgradeEvent { name, outcome, from_version, ..UpgradeEvent::default() }
    }

    #[test]
    fn each_outcome_has_its_line() {
        let handed = UpgradeEvent {
            to_version: "2 (b)".to_owned(),
            paused_us: 12_340,
            ..event(Outcome::HandedOver)
        };
        assert_eq!(line(&handed.into()), "data: handed over, paused 12.3 ms, 1 (a) -> 2 (b)\n");
        assert_eq!(line(&event(Outcome::Current).into()), "data: already has this build, 1 (a)\n");
        let failed = UpgradeEvent { message: "it hangs".to_owned(), ..event(Outcome::Failed) };
        assert_eq!(line(&failed.into()), "data: not upgraded: it hangs\n");
        let daemon = UpgradeEvent {
            name: String::new(),
            to_version: "2 (b)".to_owned(),
            ..event(Outcome::Restarting)
        };
        assert_eq!(line(&daemon.into()), "daemon: restarted, 1 (a) -> 2 (b)\n");
    }

    #[test]
    fn the_command_fails_if_one_part_fails() {
        let globals = Globals { socket: None, socket_typed: false, output: None, verbose: 0 };
        let mut done = Upgraded::default();
        done.volumes.push(event(Outcome::HandedOver).into());
        finish(&globals, &done).expect("all went well");
        done.volumes.push(event(Outcome::Failed).into());
        let error = finish(&globals, &done).expect_err("one has failed");
        assert!(error.message().starts_with("1 of 2"), "{error}");
    }
}
