//! `cleat fault`: injects faults into a `fault:` volume. For tests; release packages do not have it.

use super::Globals;
use super::client::{self, QUERY_TIMEOUT};
use cleat_api::v1::SetFaultRequest;
use cleat_api::v1::faults_client::FaultsClient;
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  Make every tenth read or write fail, after 10 ms:
    $ cleat map 'fault:mem:1G' --name bad
    $ cleat fault bad 'latency=10ms&error=broken&rate=0.1&ops=read,write'

  Remove the faults:
    $ cleat fault bad ''
";

/// Replace the faults that a `fault:` volume injects (for tests)
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Fault {
    /// The mapping's name, device or URI
    target: String,
    /// The faults, as key=value&key=value; empty: no faults
    ///
    /// latency=10ms, jitter=5ms, hang=true; error=KIND (retry, fenced, nospace, invalid, readonly,
    /// unsupported, nomemory, shutdown, broken); rate=0.1; ops=read,write; from=1G, to=2G; seed=42
    plan: String,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, args: Fault) -> Result<()> {
    let request = SetFaultRequest { target: args.target, plan: args.plan };
    client::run(globals, async |client| {
        let mut faults = FaultsClient::new(client.channel());
        client.call(QUERY_TIMEOUT, async |_| faults.set_fault(request).await).await
    })?;
    Ok(())
}
