//! `cleat upgrade`: daemon and workers become the build on disk, while everything is in use.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_stream::StreamExt as _;

use super::client::{self, Client, GRACE, OPERATION_TIMEOUT, QUERY_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{HealthRequest, UpgradeEvent, UpgradeRequest};
use cleat_core::error::{Error, ErrorKind, Result};

pub(super) const EXAMPLES: &str = "\
Examples:
  After a new build was put in the old one's place (systemctl reload cleat does the same):
    $ cleat upgrade
    daemon: restarted, 0.1.0 (5c1dcf6) -> 0.2.0 (8ac53d1)
    data: handed over, paused 12.3 ms, 0.1.0 (5c1dcf6) -> 0.2.0 (8ac53d1)

  One volume first:
    $ cleat upgrade data

  Back to the old build: put it in its place, and once more:
    $ cleat upgrade
";

/// Bring the daemon and its workers to the build on disk, while devices are in use
///
/// The daemon goes on as the executable that is now in its place. Then, one volume after the other,
/// a new worker opens the volume, the old one finishes the running requests, and the device's
/// connection changes hands: the kernel notices nothing. What fails leaves the old worker serving.
/// Downgrading works the same.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Upgrade {
    /// Names, devices or URIs of mappings; without any: all of them
    targets: Vec<String>,
    /// Leave the daemon as it is
    #[arg(long)]
    workers_only: bool,
    /// Also workers that are of the daemon's build already
    #[arg(long)]
    force: bool,
}

/// The result in JSON.
#[derive(Debug, Default, Serialize)]
struct Upgraded {
    /// Null with `--workers-only`.
    daemon: Option<Part>,
    volumes: Vec<Part>,
}

/// What became of one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Part {
    /// Null for the daemon.
    name: Option<String>,
    /// restarted, handed_over, current, failed
    outcome: &'static str,
    from_version: String,
    /// As before, where nothing has changed.
    to_version: String,
    /// How long nobody served the device; null where it was not handed over.
    paused_us: Option<u32>,
    message: Option<String>,
    repair: Option<String>,
}

/// For the daemon to be there as the other build: it looks at every device first.
const RESTART_LIMIT: Duration = Duration::from_secs(60);

/// Between two attempts to reach it.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// `Unavailable` when some part stays as it was; what the daemon answers.
pub(super) fn run(globals: &Globals, args: Upgrade) -> Result<()> {
    let mut done = Upgraded::default();
    let mut request = UpgradeRequest {
        targets: args.targets,
        workers_only: args.workers_only,
        force: args.force,
    };
    let asked = request.clone();
    let restarting =
        client::run(globals, async |client| follow(globals, &client, asked, &mut done).await)?;
    if let Some(binary) = restarting {
        wait_for(globals, &binary)?;
        request.workers_only = true;
        client::run(globals, async |client| follow(globals, &client, request, &mut done).await)?;
    }
    finish(globals, &done)
}

/// Waits until the daemon answers as the executable `binary`.
fn wait_for(globals: &Globals, binary: &str) -> Result<()> {
    let until = Instant::now() + RESTART_LIMIT;
    loop {
        let asked = client::run(globals, async |client| {
            client.call(QUERY_TIMEOUT, async |mut node| node.health(HealthRequest {}).await).await
        });
        if asked.as_ref().is_ok_and(|health| health.binary == binary) {
            return Ok(());
        }
        if Instant::now() >= until {
            let message = "the daemon has not come back as the other build";
            let error = Error::new(ErrorKind::TimedOut, message)
                .with_repair("look into its log: journalctl -u cleat; devices are served on");
            return Err(match asked {
                Err(source) => error.with_source(source),
                Ok(_) => error,
            });
        }
        std::thread::sleep(RESTART_PAUSE);
    }
}

/// Shows what the daemon says. Returns what it goes on as, if it does.
async fn follow(
    globals: &Globals,
    client: &Client,
    request: UpgradeRequest,
    done: &mut Upgraded,
) -> Result<Option<String>> {
    // The daemon bounds each volume by itself.
    let limit = OPERATION_TIMEOUT * 2 + crate::backends::REGISTRY.max_extra_open_time() + GRACE;
    let mut stream = client.call(limit, async |mut node| node.upgrade(request).await).await?;
    loop {
        let event = match tokio::time::timeout(limit, stream.next()).await {
            Ok(Some(Ok(event))) => event,
            Ok(Some(Err(status))) => return Err(client.error(&status)),
            Ok(None) => return Ok(None),
            Err(_) => {
                let message = "the daemon does not say any more how far it is";
                return Err(Error::new(ErrorKind::TimedOut, message)
                    .with_repair("look into its log: journalctl -u cleat"));
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
    let message = format!("{failed} of {} parts stay as they were", parts().count());
    Err(Error::new(ErrorKind::Unavailable, message)
        .with_repair("each says why; what stays is served by its old worker: upgrade again"))
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
            format!("stays as it was: {}{repair}", part.message.as_deref().unwrap_or_default())
        }
        _ => format!("of this build already, {}", part.from_version),
    };
    format!("{}\n", output::printable(&format!("{name}: {what}")))
}

impl From<UpgradeEvent> for Part {
    fn from(event: UpgradeEvent) -> Self {
        let outcome = match event.outcome() {
            Outcome::HandedOver => "handed_over",
            Outcome::Current => "current",
            Outcome::Restarting => "restarted",
            // A newer daemon may know more ways to fail.
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
        assert_eq!(line(&event(Outcome::Current).into()), "data: of this build already, 1 (a)\n");
        let failed = UpgradeEvent { message: "it hangs".to_owned(), ..event(Outcome::Failed) };
        assert_eq!(line(&failed.into()), "data: stays as it was: it hangs\n");
        let daemon = UpgradeEvent {
            name: String::new(),
            to_version: "2 (b)".to_owned(),
            ..event(Outcome::Restarting)
        };
        assert_eq!(line(&daemon.into()), "daemon: restarted, 1 (a) -> 2 (b)\n");
    }

    #[test]
    fn a_failure_of_one_part_is_one_of_the_command() {
        let globals = Globals { socket: None, socket_typed: false, output: None, verbose: 0 };
        let mut done = Upgraded::default();
        done.volumes.push(event(Outcome::HandedOver).into());
        finish(&globals, &done).expect("all went well");
        done.volumes.push(event(Outcome::Failed).into());
        let error = finish(&globals, &done).expect_err("one has failed");
        assert!(error.message().starts_with("1 of 2"), "{error}");
    }
}
