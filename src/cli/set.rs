//! `cleat set`: another policy for a mapping that exists.

use super::client::{self, QUERY_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::SetOptionsRequest;
use cleat_backend::uri::parse_size_or_zero;
use cleat_core::error::Result;
use cleat_core::policy::{MAX_IOPS, OnOutage, RateLimits};

pub(super) const EXAMPLES: &str = "\
Examples:
  Let I/O wait two minutes for a backend that cannot be reached, then fail:
    $ cleat set data --on-outage queue:2m

  A backend that will not come back: fail what waits, now:
    $ cleat set data --on-outage fail

  At most 500 requests and 50 MiB per second; then no limit again:
    $ cleat set data --iops 500 --bps 50M
    $ cleat set data --iops 0 --bps 0
";

/// Change what a mapping does in an outage, and how fast it may go
///
/// Live: what waits already follows the new policy. Kept for as long as the mapping lives, whatever
/// becomes of its worker or the daemon.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true)
          .args(["on_outage", "iops", "bps"]))]
pub(super) struct Set {
    /// The mapping's name, its device or its URI
    target: String,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Options of whatever serves a volume.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub(super) struct PolicyArgs {
    /// What becomes of I/O while the backend cannot be reached: queue, queue:DURATION or fail
    ///
    /// `queue`: it waits and is repeated, however long that takes. `queue:30s`: so until the outage
    /// has lasted so long; then it fails. `fail`: it fails at once. A full pool of RBD counts, too, for
    /// what needs more room.
    #[arg(long, value_name = "POLICY")]
    pub(super) on_outage: Option<OnOutage>,
    /// The most requests per second, flushes not counted; 0: no limit
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(..=MAX_IOPS))]
    pub(super) iops: Option<u64>,
    /// The most bytes read and written per second, such as 100M; 0: no limit
    ///
    /// A tenth of a second's worth may come at once; in the long run the rate is kept exactly.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = bytes_per_s)]
    pub(super) bps: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// What the daemon answers.
pub(super) fn run(globals: &Globals, args: Set) -> Result<()> {
    let PolicyArgs { on_outage, iops, bps } = args.policy;
    let request = SetOptionsRequest {
        target: args.target,
        on_outage: on_outage.map(|policy| policy.to_string()).unwrap_or_default(),
        iops,
        bytes_per_s: bps,
    };
    let mapping: view::Mapping = client::run(globals, async |client| {
        client.call(QUERY_TIMEOUT, async |mut node| node.set_options(request).await).await
    })?
    .into();
    match globals.output {
        None => Ok(()),
        Some(Format::Json) => output::json(&mapping),
        Some(format) => output::text(&view::mappings(&[mapping], format == Format::Wide)),
    }
}

fn bytes_per_s(text: &str) -> Result<u64> {
    let bytes_per_s = parse_size_or_zero(text)?;
    RateLimits { iops: 0, bytes_per_s }.check().map(|limits| limits.bytes_per_s)
}
