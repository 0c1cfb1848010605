//! `cleat set`: changes the policy of a mapping, and renews its credentials.

use super::client::{self, QUERY_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::SetOptionsRequest;
use cleat_backend::uri::parse_size_or_zero;
use cleat_core::error::Result;
use cleat_core::policy::{BusyPoll, MAX_IOPS, OnOutage, RateLimits};

pub(super) const EXAMPLES: &str = "\
Examples:
  In an outage of the backend, let I/O wait for two minutes and then fail:
    $ cleat set data --on-outage queue:2m

  Fail all waiting I/O now, because the backend will not come back:
    $ cleat set data --on-outage fail

  Limit a mapping to 500 requests and 50 MiB per second; remove the limits:
    $ cleat set data --iops 500 --bps 50M
    $ cleat set data --iops 0 --bps 0

  After a change of the file that keyring=PATH names:
    $ cleat set data --renew-credentials
";

/// Change a mapping's behaviour in an outage, its limits and its credentials
///
/// The change takes effect immediately, also for requests that already wait. It lasts until the volume is
/// unmapped, across restarts of the worker and the daemon.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true)
          .args(["on_outage", "iops", "bps", "busy_poll", "renew_credentials"]))]
pub(super) struct Set {
    /// The mapping's name, device or URI
    target: String,
    #[command(flatten)]
    policy: PolicyArgs,
    /// Pass the present content of the volume's credential files (keyring=PATH) to its worker
    ///
    /// Later requests use the new credentials. If only a new worker can use them, as for a changed key of an
    /// RBD image, the command fails and prints the command to run instead. Each new worker reads the files when
    /// it starts, without this command.
    #[arg(long)]
    renew_credentials: bool,
}

/// The policy options of `map`, `set` and `serve`.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub(super) struct PolicyArgs {
    /// What happens to I/O while the backend cannot be reached: queue, queue:DURATION or fail
    ///
    /// `queue`: requests wait and are retried without a time limit. `queue:30s`: requests fail when the
    /// outage has lasted 30 seconds. `fail`: requests fail at once. A full RBD pool counts as an outage for
    /// requests that need more space.
    #[arg(long, value_name = "POLICY")]
    pub(super) on_outage: Option<OnOutage>,
    /// The maximum number of requests per second, without flushes; 0: no limit
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(..=MAX_IOPS))]
    pub(super) iops: Option<u64>,
    /// The maximum number of bytes read and written per second, such as 100M; 0: no limit
    ///
    /// Bursts may have the size of a tenth of a second; the average rate is exact.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = bytes_per_s)]
    pub(super) bps: Option<u64>,
    /// Whether to look for new requests for up to 50 us before sleeping: auto or off
    ///
    /// `auto`: while requests follow each other closely and no other thread wants the processor. It makes one
    /// request at a time faster and costs CPU time.
    #[arg(long, value_name = "SETTING")]
    pub(super) busy_poll: Option<BusyPoll>,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, args: Set) -> Result<()> {
    let PolicyArgs { on_outage, iops, bps, busy_poll } = args.policy;
    let request = SetOptionsRequest {
        target: args.target,
        on_outage: on_outage.map(|policy| policy.to_string()).unwrap_or_default(),
        iops,
        bytes_per_s: bps,
        busy_poll: busy_poll.map(|setting| setting.to_string()).unwrap_or_default(),
        renew_credentials: args.renew_credentials,
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
