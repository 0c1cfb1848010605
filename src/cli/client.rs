//! The connection to the daemon: gRPC over its unix socket. Every call has a timeout, and every failure
//! becomes an error with a cause and a hint.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::{DEFAULT_SOCKET, Globals, output};
use cleat_api::v1::node_client::NodeClient;
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout for connecting to the socket.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The timeout for calls that change nothing on a device.
pub(super) const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that the client waits beyond a timeout that the daemon enforces, so that the daemon's own error
/// arrives.
pub(super) const REPLY_MARGIN: Duration = Duration::from_secs(2);

/// The default timeout of `map`, `unmap` and similar operations.
pub(super) const OPERATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The metadata key of an error's hint in ASCII, see `node.proto`.
const REPAIR_KEY: &str = "cleat-repair";

/// The metadata key of an error's hint in UTF-8, see `node.proto`.
const REPAIR_UTF8_KEY: &str = "cleat-repair-bin";

/// A connection to the daemon.
#[derive(Debug, Clone)]
pub(super) struct Client {
    channel: Channel,
    socket: PathBuf,
}

/// Connects to the daemon and runs `command` with the connection, on this thread.
///
/// # Errors
/// Returns an error if the daemon cannot be reached, and the errors of `command`.
pub(super) fn run<T, F>(globals: &Globals, command: impl FnOnce(Client) -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("cannot start the client's runtime", error))?;
    runtime.block_on(async {
        let socket = globals.socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET));
        let client = Client::connect(socket).await?;
        if globals.verbose > 0 {
            output::note(&format!("connected to {}", socket.display()));
        }
        command(client).await
    })
}

impl Client {
    async fn connect(socket: &Path) -> Result<Self> {
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(socket))
            .await
            .map_err(|_| no_answer(socket, CONNECT_TIMEOUT))?
            .map_err(|error| cannot_connect(socket, error))?;
        // The stream is connected here, because tonic's own error would not name the cause. One stream is
        // enough: the process ends before a reconnect could be useful.
        let mut stream = Some(stream);
        let connector = tower::service_fn(move |_| {
            let stream = stream.take().map(TokioIo::new);
            async { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
        });
        let channel = Endpoint::from_static("http://cleat.invalid")
            .connect_timeout(CONNECT_TIMEOUT)
            .connect_with_connector(connector)
            .await
            .map_err(|error| no_grpc(socket).with_source(error))?;
        Ok(Self { channel, socket: socket.to_owned() })
    }

    /// Returns the connection, for the client of a service.
    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Makes one call and waits for its reply for at most `timeout`.
    ///
    /// # Errors
    /// Returns the daemon's error, or `TimedOut` if there is no reply in time.
    pub(super) async fn call<T, F>(
        &self,
        timeout: Duration,
        call: impl FnOnce(NodeClient<Channel>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match tokio::time::timeout(timeout, call(NodeClient::new(self.channel()))).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(&status)),
            Err(_) => Err(no_answer(&self.socket, timeout)),
        }
    }

    /// Converts `status` into an error.
    pub(super) fn error(&self, status: &Status) -> Error {
        if is_transport(status) {
            let message = format!("the daemon at {} closed the connection", self.socket.display());
            return Error::new(ErrorKind::Unavailable, message)
                .with_repair("check its log with `journalctl -u cleat`, then try again");
        }
        let error = Error::new(kind_of(status.code()), status.message());
        match repair_of(status) {
            Some(repair) => error.with_repair(repair),
            None => error,
        }
    }
}

/// Returns `duration` in milliseconds, as in the API; `u32::MAX` if it is longer.
pub(super) fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Returns whether the client created the status because the connection failed. Only such a status has a
/// source.
fn is_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

fn kind_of(code: Code) -> ErrorKind {
    match code {
        Code::InvalidArgument | Code::OutOfRange => ErrorKind::InvalidArgument,
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::AlreadyExists,
        Code::FailedPrecondition => ErrorKind::InUse,
        Code::Aborted => ErrorKind::Aborted,
        Code::PermissionDenied | Code::Unauthenticated => ErrorKind::PermissionDenied,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unavailable => ErrorKind::Unavailable,
        Code::DeadlineExceeded | Code::Cancelled => ErrorKind::TimedOut,
        Code::ResourceExhausted => ErrorKind::NoSpace,
        Code::DataLoss => ErrorKind::Fenced,
        Code::Ok | Code::Unknown | Code::Internal => ErrorKind::Internal,
    }
}

fn repair_of(status: &Status) -> Option<String> {
    let metadata = status.metadata();
    let exact = metadata.get_bin(REPAIR_UTF8_KEY).and_then(|value| value.to_bytes().ok());
    // Older daemons, and hints of one line of ASCII, have only the other key.
    let bytes = exact
        .map(|bytes| bytes.to_vec())
        .or_else(|| metadata.get(REPAIR_KEY).map(|value| value.as_bytes().to_vec()))?;
    String::from_utf8(bytes).ok().filter(|text| !text.is_empty())
}

fn cannot_connect(socket: &Path, source: io::Error) -> Error {
    let path = socket.display();
    let error = match source.kind() {
        io::ErrorKind::NotFound => Error::new(
            ErrorKind::Unavailable,
            format!("cannot connect to the daemon: there is no socket at {path}"),
        )
        .with_repair(START),
        io::ErrorKind::PermissionDenied => {
            let message = format!("no permission to connect to the daemon at {path}");
            Error::new(ErrorKind::PermissionDenied, message)
                .with_repair("run the command as root: sudo cleat …")
        }
        io::ErrorKind::ConnectionRefused if is_socket(socket) => {
            let message = format!("cannot connect to the daemon: no process listens on {path}");
            Error::new(ErrorKind::Unavailable, message).with_repair(START)
        }
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory => {
            Error::new(ErrorKind::InvalidArgument, format!("{path} is not a unix socket"))
                .with_repair("set the daemon's socket with --socket PATH or CLEAT_SOCKET")
        }
        io::ErrorKind::InvalidInput => {
            let message = format!("{path} is not a valid path for a unix socket");
            Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("use a path of at most 107 bytes")
        }
        _ => Error::new(ErrorKind::Unavailable, format!("cannot connect to the daemon at {path}"))
            .with_repair(START),
    };
    error.with_source(source)
}

/// The hint to start the daemon.
const START: &str = "start it with `systemctl start cleat` or, without systemd, `cleat node`";

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn no_grpc(socket: &Path) -> Error {
    let message = format!("the process that listens on {} is not a cleat daemon", socket.display());
    Error::new(ErrorKind::Unavailable, message)
        .with_repair("set the daemon's socket with --socket PATH or CLEAT_SOCKET")
}

fn no_answer(socket: &Path, timeout: Duration) -> Error {
    let bound = humantime::format_duration(timeout);
    let message = format!("the daemon at {} did not answer within {bound}", socket.display());
    Error::new(ErrorKind::TimedOut, message)
        .with_repair("check its log with `journalctl -u cleat` and its state with `cleat status`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_daemon_keeps_its_kind_and_its_repair() {
        let client_error = |code| {
            let mut status = Status::new(code, "cause");
            let repair = "modprobe nbd".parse().expect("plain ASCII");
            status.metadata_mut().insert(REPAIR_KEY, repair);
            (kind_of(status.code()), repair_of(&status))
        };
        assert_eq!(
            client_error(Code::Unimplemented),
            (ErrorKind::Unsupported, Some("modprobe nbd".to_owned()))
        );
        assert_eq!(client_error(Code::FailedPrecondition).0, ErrorKind::InUse);
    }

    #[test]
    fn the_hint_in_utf8_is_preferred() {
        let mut status = Status::new(Code::FailedPrecondition, "cause");
        let plain = "umount /mnt/?".parse().expect("plain ASCII");
        status.metadata_mut().insert(REPAIR_KEY, plain);
        assert_eq!(repair_of(&status).as_deref(), Some("umount /mnt/?"));
        let exact = tonic::metadata::MetadataValue::from_bytes("umount /mnt/ü".as_bytes());
        status.metadata_mut().insert_bin(REPAIR_UTF8_KEY, exact);
        assert_eq!(repair_of(&status).as_deref(), Some("umount /mnt/ü"));
    }

    #[test]
    fn durations_are_clamped_to_the_range_of_the_api() {
        assert_eq!(milliseconds(Duration::from_secs(5)), 5000);
        assert_eq!(milliseconds(Duration::MAX), u32::MAX);
    }
}
