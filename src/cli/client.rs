//! The connection to the daemon: gRPC over its unix socket, every call bounded in time, every
//! failure turned into an error that names cause and repair.

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

/// Bound on the connection being made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Bound on calls that only ask.
pub(super) const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// What the daemon gets on top of a bound that it was told, to answer that the bound has ended.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// The daemon's bound on `map` and `unmap` where none is given.
pub(super) const OPERATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The metadata key of an error's repair, see `node.proto`.
const REPAIR_KEY: &str = "cleat-repair";

/// A connection to the daemon.
#[derive(Debug, Clone)]
pub(super) struct Client {
    node: NodeClient<Channel>,
    #[cfg(feature = "fault")]
    channel: Channel,
    socket: PathBuf,
}

/// Connects to the daemon and runs `command` with the connection, on this thread.
///
/// # Errors
/// When there is no daemon, or what `command` gives.
pub(super) fn run<T, F>(globals: &Globals, command: impl FnOnce(Client) -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("the client cannot start", error))?;
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
        // The stream is made here, for errors that name their cause, and used once: the channel
        // outlives no call of this process, so it never needs another.
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
        Ok(Self {
            node: NodeClient::new(channel.clone()),
            #[cfg(feature = "fault")]
            channel,
            socket: socket.to_owned(),
        })
    }

    /// The connection, for services beside the control API.
    #[cfg(feature = "fault")]
    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Makes one call, for at most `timeout`.
    ///
    /// # Errors
    /// What the daemon answers; `TimedOut` when it does not.
    pub(super) async fn call<T, F>(
        &self,
        timeout: Duration,
        call: impl FnOnce(NodeClient<Channel>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match tokio::time::timeout(timeout, call(self.node.clone())).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(&status)),
            Err(_) => Err(no_answer(&self.socket, timeout)),
        }
    }

    /// The error that `status` stands for.
    pub(super) fn error(&self, status: &Status) -> Error {
        if is_transport(status) {
            let message =
                format!("the daemon at {} broke the connection off", self.socket.display());
            return Error::new(ErrorKind::Unavailable, message)
                .with_repair("look into its log: journalctl -u cleat, then try again");
        }
        let error = Error::new(kind_of(status.code()), status.message());
        match repair_of(status) {
            Some(repair) => error.with_repair(repair),
            None => error,
        }
    }
}

/// `duration` as the API counts it.
pub(super) fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A status that this side made, because the connection failed: it has a source.
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
    let value = status.metadata().get(REPAIR_KEY)?;
    String::from_utf8(value.as_bytes().to_vec()).ok().filter(|text| !text.is_empty())
}

fn cannot_connect(socket: &Path, source: io::Error) -> Error {
    let path = socket.display();
    let error = match source.kind() {
        io::ErrorKind::NotFound => {
            Error::new(ErrorKind::Unavailable, format!("no daemon: there is no socket at {path}"))
                .with_repair(START)
        }
        io::ErrorKind::PermissionDenied => {
            let message = format!("no permission to talk to the daemon at {path}");
            Error::new(ErrorKind::PermissionDenied, message)
                .with_repair("run the command as root: sudo cleat …")
        }
        io::ErrorKind::ConnectionRefused if is_socket(socket) => {
            let message = format!("no daemon: nobody listens on the socket {path}");
            Error::new(ErrorKind::Unavailable, message).with_repair(START)
        }
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory => {
            Error::new(ErrorKind::InvalidArgument, format!("{path} is not a unix socket"))
                .with_repair("give the daemon's socket with --socket PATH or CLEAT_SOCKET")
        }
        io::ErrorKind::InvalidInput => {
            let message = format!("{path} cannot be the path of a unix socket");
            Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("a socket's path has at most 107 bytes")
        }
        _ => Error::new(ErrorKind::Unavailable, format!("the daemon at {path} cannot be reached"))
            .with_repair(START),
    };
    error.with_source(source)
}

/// How a daemon is started.
const START: &str = "start it: systemctl start cleat (or, without systemd: cleat node)";

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn no_grpc(socket: &Path) -> Error {
    let message = format!("whoever listens on {} is not a cleat daemon", socket.display());
    Error::new(ErrorKind::Unavailable, message)
        .with_repair("give the daemon's socket with --socket PATH or CLEAT_SOCKET")
}

fn no_answer(socket: &Path, timeout: Duration) -> Error {
    let bound = humantime::format_duration(timeout);
    let message = format!("the daemon at {} did not answer within {bound}", socket.display());
    Error::new(ErrorKind::TimedOut, message)
        .with_repair("look into its log: journalctl -u cleat; ask again with: cleat status")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_keeps_its_kind_and_its_repair() {
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
    fn durations_beyond_the_apis_range_are_its_longest() {
        assert_eq!(milliseconds(Duration::from_secs(5)), 5000);
        assert_eq!(milliseconds(Duration::MAX), u32::MAX);
    }
}
