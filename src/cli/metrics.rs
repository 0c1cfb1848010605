//! `cleat metrics`: prints the metrics as Prometheus receives them.

use std::io::{ErrorKind as Io, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{DEFAULT_SOCKET, Globals, output};
use cleat_core::error::{Error, ErrorKind, Result};

pub(super) const EXAMPLES: &str = "\
Examples:
  All metrics of one volume:
    $ cleat metrics | grep 'volume=\"data\"'

  From a daemon that serves metrics over TCP:
    $ cleat metrics 127.0.0.1:9599

  A configuration of Prometheus, with [metrics] listen = \"127.0.0.1:9599\" in cleat.toml:
    scrape_configs:
      - job_name: cleat
        static_configs:
          - targets: ['127.0.0.1:9599']

  The same with curl:
    $ curl --unix-socket /run/cleat/metrics.sock http://cleat/metrics
";

/// The timeout of each step: connecting, one read, one write.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum size of the metrics in bytes, enough for tens of thousands of volumes.
const MAX_TEXT: u64 = 1 << 30;

/// Print the metrics that the daemon serves for Prometheus
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Metrics {
    /// The endpoint: the path of a socket, or an address and a port [default: metrics.sock in the
    /// directory of the daemon's socket]
    endpoint: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// Returns `Unavailable` if no metrics are served at the endpoint.
pub(super) fn run(globals: &Globals, args: Metrics) -> Result<()> {
    let socket = globals.socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET));
    let beside = || socket.with_file_name("metrics.sock").to_string_lossy().into_owned();
    let endpoint = args.endpoint.unwrap_or_else(beside);
    let answer = match endpoint.contains('/') {
        true => over_unix(Path::new(&endpoint)),
        false => over_tcp(&endpoint),
    };
    let answer = answer.map_err(|error| cannot_reach(&endpoint, error))?;
    output::bytes(body(&answer)?)
}

fn cannot_reach(endpoint: &str, error: std::io::Error) -> Error {
    let (kind, repair) = match error.kind() {
        Io::InvalidInput => (
            ErrorKind::InvalidArgument,
            "use the path of a socket with a '/', or an address such as 127.0.0.1:9599",
        ),
        Io::NotFound | Io::ConnectionRefused => (
            ErrorKind::Unavailable,
            "check with `cleat status` that the daemon runs, and use the endpoint of \
             metrics.listen in its configuration",
        ),
        Io::PermissionDenied => (
            ErrorKind::PermissionDenied,
            "run it as root, or change metrics.socket_mode in cleat.toml",
        ),
        Io::TimedOut | Io::WouldBlock => {
            (ErrorKind::TimedOut, "check the daemon's log with `journalctl -u cleat`")
        }
        _ => (
            ErrorKind::Unavailable,
            "use the endpoint of metrics.listen in the daemon's configuration",
        ),
    };
    let message = format!("cannot read metrics from {endpoint}");
    Error::new(kind, message).with_source(error).with_repair(repair)
}

fn over_unix(path: &Path) -> std::io::Result<Vec<u8>> {
    let stream = UnixStream::connect(PathBuf::from(path))?;
    stream.set_read_timeout(Some(STEP_TIMEOUT))?;
    stream.set_write_timeout(Some(STEP_TIMEOUT))?;
    exchange(stream)
}

fn over_tcp(address: &str) -> std::io::Result<Vec<u8>> {
    let addresses = address.to_socket_addrs()?;
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    for address in addresses {
        match TcpStream::connect_timeout(&address, STEP_TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(STEP_TIMEOUT))?;
                stream.set_write_timeout(Some(STEP_TIMEOUT))?;
                return exchange(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Makes a request with HTTP/1.0: the response is not chunked and ends with the connection.
fn exchange(mut stream: impl Read + Write) -> std::io::Result<Vec<u8>> {
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(MAX_TEXT).read_to_end(&mut answer)?;
    Ok(answer)
}

fn body(answer: &[u8]) -> Result<&[u8]> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let (head, body) = match end {
        Some(end) => (&answer[..end], &answer[end + 4..]),
        None => (answer, &[][..]),
    };
    let status = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    if status.starts_with(b"HTTP/1.") && status.get(8..12) == Some(b" 200") {
        return Ok(body);
    }
    let status: String = String::from_utf8_lossy(status).chars().take(80).collect();
    let message = format!("the endpoint does not serve metrics: it answered {status:?}");
    Err(Error::new(ErrorKind::Unavailable, message)
        .with_repair("use the endpoint of metrics.listen, not the daemon's control socket"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_to_connect_has_its_own_repair() {
        let error = |source| cannot_reach("host:1", source);
        let unknown = error(std::io::Error::other("failed to lookup address information"));
        assert_eq!(unknown.kind(), ErrorKind::Unavailable);
        assert!(!unknown.repair().expect("there is one").contains("root"), "{unknown:?}");
        let refused = error(Io::PermissionDenied.into());
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(refused.repair().expect("there is one").contains("root"), "{refused:?}");
    }

    #[test]
    fn only_metrics_are_printed() {
        assert_eq!(
            body(b"HTTP/1.0 200 OK\r\nA: b\r\n\r\nx 1\r\n\r\n").expect("200"),
            b"x 1\r\n\r\n"
        );
        for other in [&b"HTTP/1.1 404 Not Found\r\n\r\nx"[..], b"", b"\0\0\x06\x04", b"HTTP/1.1 2"]
        {
            assert_eq!(body(other).expect_err("no metrics").kind(), ErrorKind::Unavailable);
        }
    }
}
