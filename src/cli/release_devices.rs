//! `cleat release-devices`: the last step of a shutdown, which the unit cleat-shutdown.service runs.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::{DEFAULT_SOCKET, Globals, output};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::shutdown::{State, release_devices};

pub(super) const EXAMPLES: &str = "\
Examples:
  As in cleat-shutdown.service, at the end of a shutdown:
    $ cleat release-devices
";

/// How long all devices together may take.
const TIMEOUT: Duration = Duration::from_secs(45);

/// End the users of mounted devices, then unmount or freeze their filesystems; for the end of a shutdown
///
/// Kills every process that uses a filesystem on a device of cleat. Does nothing if no such filesystem is mounted,
/// and refuses while the daemon runs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES, hide = true)]
pub(super) struct ReleaseDevices {}

/// Runs the command.
///
/// # Errors
/// Returns `InUse` while the daemon runs, and an error if a filesystem is neither unmounted nor frozen.
pub(super) fn run(globals: &Globals) -> Result<()> {
    let socket = globals.socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET));
    if UnixStream::connect(socket).is_ok() {
        let message =
            "the daemon runs: this command is for the end of a shutdown, and kills processes";
        return Err(Error::new(ErrorKind::InUse, message)
            .with_repair("unmap devices with `cleat unmap`, or with `cleat unmap --force`"));
    }
    let mut failed = None;
    for released in release_devices(SystemClock.now() + TIMEOUT)? {
        let device = released.device;
        if !released.ended.is_empty() {
            output::note(&format!("{device}: ended its users: {}", released.ended.join(", ")));
        }
        match released.state {
            State::Unmounted => output::note(&format!("{device}: unmounted")),
            State::Frozen => output::note(&format!("{device}: frozen, because it is still in use")),
            State::Dirty(error) => {
                output::note(&format!("{device}: not clean: {}", error.report()));
                failed = Some(error);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}
