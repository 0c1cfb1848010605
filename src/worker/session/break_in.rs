//! Tries from inside a worker to reach something else, for tests with real kernels.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::escape_attempts::roads::{Targets, try_all};

/// Tries every road to `targets`, which are a file, a unix socket, a process, a TCP port, and the name of an
/// abstract socket, separated by blanks.
///
/// # Errors
/// Returns `PermissionDenied` with the names of the roads that are open, and `InvalidArgument` for other text.
pub(super) fn try_roads(targets: &str) -> Result<()> {
    let parsed = parse(targets).ok_or_else(|| {
        let message = "break-in needs a file, a socket, a process, a port and an abstract name";
        Error::new(ErrorKind::InvalidArgument, message)
    })?;
    let tried = try_all(&parsed, true);
    let open: Vec<_> = tried.iter().filter(|(_, result)| *result >= 0).collect();
    if open.is_empty() {
        tracing::info!(roads = tried.len(), "every road out of this worker is closed");
        return Ok(());
    }
    let message = format!("roads out of this worker are open: {open:?}");
    Err(Error::new(ErrorKind::PermissionDenied, message))
}

fn parse(targets: &str) -> Option<Targets> {
    let mut words = targets.split(' ');
    let targets = Targets {
        file: words.next()?.into(),
        socket: words.next()?.into(),
        pid: words.next()?.parse().ok()?,
        port: words.next()?.parse().ok()?,
        abstract_name: words.next()?.as_bytes().to_vec(),
    };
    words.next().is_none().then_some(targets)
}
