//! `cleat ls`: lists all mappings.

use serde::Serialize;

use super::client::{self, QUERY_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::ListRequest;
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
    $ cleat ls
    $ cleat ls -o wide
    $ cleat ls -o json | jq -r '.mappings[] | select(.state != \"mapped\") | .name'
";

/// List the mappings of this node
///
/// The state `orphan` marks devices of cleat that the daemon has no record of, and devices that remain after
/// a forced unmap because they are held. `-o json` shows the holders. `cleat map`, with the volume and the name
/// of a device without a record, adopts the device if its worker still serves.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "list", after_long_help = EXAMPLES)]
pub(super) struct Ls {}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Listing<'a> {
    mappings: &'a [view::Mapping],
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, _args: &Ls) -> Result<()> {
    let response = client::run(globals, async |client| {
        client.call(QUERY_TIMEOUT, async |mut node| node.list(ListRequest {}).await).await
    })?;
    let mut mappings: Vec<view::Mapping> = response.mappings.into_iter().map(Into::into).collect();
    mappings.sort_by(|a, b| a.name.cmp(&b.name));
    match globals.output.unwrap_or(Format::Table) {
        Format::Json => output::json(&Listing { mappings: &mappings }),
        format => output::text(&view::mappings(&mappings, format == Format::Wide)),
    }
}
