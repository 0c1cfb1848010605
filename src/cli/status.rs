//! `cleat status`: shows the daemon's state, or one mapping with all its properties.

use std::fmt::Write as _;

use serde::Serialize;

use super::client::{self, Client, QUERY_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::{GetRequest, HealthRequest, ListRequest};
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  The daemon and its checks:
    $ cleat status

  One mapping, with the holders of its device:
    $ cleat status data
    $ cleat status /dev/nbd1 -o json | jq .holders
";

/// Show the daemon's health, or one mapping in full
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Status {
    /// The mapping's name, device or URI [default: show the daemon]
    target: Option<String>,
}

/// The daemon's state in JSON.
#[derive(Debug, Serialize)]
struct Daemon {
    version: String,
    pid: u32,
    started_at_s: u64,
    checks: Vec<view::Check>,
    mappings: Vec<view::Mapping>,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, args: Status) -> Result<()> {
    match args.target {
        Some(target) => mapping(globals, target),
        None => daemon(globals),
    }
}

fn mapping(globals: &Globals, target: String) -> Result<()> {
    let request = GetRequest { target, with_holders: true };
    let mapping: view::Mapping = client::run(globals, async |client| {
        client.call(QUERY_TIMEOUT, async |mut node| node.get(request).await).await
    })?
    .into();
    match globals.output {
        Some(Format::Json) => output::json(&mapping),
        Some(Format::Wide) => output::text(&view::mappings(&[mapping], true)),
        Some(Format::Table) | None => output::text(&view::details(&mapping)),
    }
}

fn daemon(globals: &Globals) -> Result<()> {
    let daemon = client::run(globals, query_daemon)?;
    if globals.output == Some(Format::Json) {
        return output::json(&daemon);
    }
    let mut text = format!("cleat {}, process {}\n", daemon.version, daemon.pid);
    text.push_str(&view::checks(&daemon.checks));
    // Writing to a String cannot fail.
    let _ = match daemon.mappings.len() {
        0 => writeln!(text, "no mappings"),
        1 => writeln!(text, "1 mapping"),
        several => writeln!(text, "{several} mappings"),
    };
    let needs_attention =
        |mapping: &&view::Mapping| mapping.state != "mapped" || mapping.sync_failed;
    for mapping in daemon.mappings.iter().filter(needs_attention) {
        let message = mapping.message.as_deref().unwrap_or("no reason given");
        let _ = writeln!(
            text,
            "  {} is {}: {}",
            output::printable(&mapping.name),
            mapping.state,
            output::printable(message)
        );
    }
    output::text(&text)
}

async fn query_daemon(client: Client) -> Result<Daemon> {
    let health =
        client.call(QUERY_TIMEOUT, async |mut node| node.health(HealthRequest {}).await).await?;
    let list = client.call(QUERY_TIMEOUT, async |mut node| node.list(ListRequest {}).await).await?;
    Ok(Daemon {
        version: health.version,
        pid: health.pid,
        started_at_s: health.started_at_s,
        checks: health.checks.into_iter().map(Into::into).collect(),
        mappings: list.mappings.into_iter().map(Into::into).collect(),
    })
}
