//! `cleat csi`: makes a call of CSI or of CSI-Addons to a driver, with the request and the answer in JSON.

mod calls;
mod codec;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prost_reflect::{DynamicMessage, MessageDescriptor, SerializeOptions};
use serde::de::DeserializeSeed;
use serde_json::value::Serializer;
use tonic::Request;

use crate::cli::client::{self, REPLY_MARGIN};
use crate::cli::{Globals, output, size};
use cleat_core::error::{Error, ErrorKind, Result};
use codec::Dynamic;

pub(super) const EXAMPLES: &str = "\
Examples:
  The calls, and an example of a request:
    $ cleat csi
    $ cleat csi CreateVolume --template

  Make a volume, and learn its id (a driver with the Controller service: cleat node --csi-controller):
    $ cleat csi CreateVolume '{\"name\": \"v1\", \"capacityRange\": {\"requiredBytes\": \"1073741824\"},
        \"volumeCapabilities\": [{\"mount\": {}, \"accessMode\": {\"mode\": \"SINGLE_NODE_WRITER\"}}]}'

  Mount it and unmount it, as kubelet does:
    $ cleat csi NodeStageVolume '{\"volumeId\": \"ID\", \"stagingTargetPath\": \"/mnt/staging\",
        \"volumeCapability\": {\"mount\": {}, \"accessMode\": {\"mode\": \"SINGLE_NODE_WRITER\"}}}'
    $ cleat csi NodeUnstageVolume '{\"volumeId\": \"ID\", \"stagingTargetPath\": \"/mnt/staging\"}'

  A request with secrets, from a file:
    $ cleat csi NodeStageVolume @stage.json
";

/// The socket of a driver with the default name, for kubelet with the default directory.
const DEFAULT_ENDPOINT: &str = "/var/lib/kubelet/plugins/cleat.csi.storage/csi.sock";

/// The maximum length of a request in bytes, as that of a gRPC message.
const MAX_REQUEST: u64 = 4 << 20;

/// Make a CSI call to a driver
///
/// Without CALL, the calls are listed. The request and the answer are JSON (the JSON form of Protocol Buffers:
/// names in lowerCamelCase, 64-bit numbers as strings). It works with the driver of this daemon, when its section
/// [csi] is enabled, and with others.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(in crate::cli) struct Csi {
    /// The name of the call, such as NodeStageVolume; SERVICE/CALL if several services have it
    call: Option<String>,
    /// The request as JSON, @FILE for the content of a file, or - for stdin; absent: an empty request
    ///
    /// Other users of this machine see the arguments of commands, so a request with secrets must come from a
    /// file or from stdin.
    request: Option<String>,
    /// The driver's socket
    #[arg(long, env = "CSI_ENDPOINT", default_value = DEFAULT_ENDPOINT, value_name = "PATH")]
    endpoint: String,
    /// The time that the call may take
    #[arg(long, default_value = "2m", value_parser = size::duration, value_name = "DURATION")]
    timeout: Duration,
    /// Print an example of the request, with all fields, instead of making the call
    #[arg(long, requires = "call", conflicts_with = "request")]
    template: bool,
}

/// Runs the command.
///
/// # Errors
/// Returns `InvalidArgument` for an unknown call or a malformed request, and otherwise the driver's error.
pub(super) fn run(globals: &Globals, args: &Csi) -> Result<()> {
    let Some(name) = &args.call else { return calls::list(globals.output) };
    let call = calls::find(name)?;
    if args.template {
        return output::json(&json(&calls::template(call.input()))?);
    }
    let request = request(call.input(), args.request.as_deref())?;
    let globals = Globals { socket: Some(socket(&args.endpoint)?), ..globals.clone() };
    let answer = client::run(&globals, async |client| {
        let mut grpc = tonic::client::Grpc::new(client.channel());
        let path = calls::path(&call);
        let mut request = Request::new(request);
        request.set_timeout(args.timeout);
        let answer = client.call(args.timeout + REPLY_MARGIN, async |_| {
            grpc.ready().await.map_err(|error| tonic::Status::from_error(error.into()))?;
            grpc.unary(request, path, Dynamic::new(call.output())).await
        });
        // An error of the driver has its own repair.
        Ok(answer.await)
    });
    let answer = answer.map_err(|error| match error.kind() {
        ErrorKind::Unavailable => error.with_repair(
            "set enabled = true in the section [csi] of the daemon's configuration, or name the driver's socket \
             with --endpoint PATH",
        ),
        _ => error,
    })??;
    output::json(&json(&answer)?)
}

/// Returns the path of the socket, which CSI's callers also write as a URI.
fn socket(endpoint: &str) -> Result<PathBuf> {
    let path = endpoint.strip_prefix("unix:").unwrap_or(endpoint);
    let path = path.strip_prefix("//").unwrap_or(path);
    if !path.starts_with('/') {
        let message = format!("the endpoint {endpoint:?} is not the path of a unix socket");
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair(format!("use an absolute path, as in {DEFAULT_ENDPOINT}")));
    }
    Ok(path.into())
}

/// Returns the request that the argument contains or names.
fn request(input: MessageDescriptor, argument: Option<&str>) -> Result<DynamicMessage> {
    let (text, typed) = match argument {
        None => return Ok(DynamicMessage::new(input)),
        Some("-") => (read(std::io::stdin(), "stdin")?, false),
        Some(argument) => match argument.strip_prefix('@') {
            Some(path) => (read_file(Path::new(path))?, false),
            None => (argument.to_owned(), true),
        },
    };
    let mut deserializer = serde_json::Deserializer::from_str(&text);
    let name = input.name().to_owned();
    let parsed = input.deserialize(&mut deserializer);
    let request =
        parsed.and_then(|parsed| deserializer.end().map(|()| parsed)).map_err(|error| {
            let call = name.trim_end_matches("Request");
            Error::new(ErrorKind::InvalidArgument, format!("the request is not a {name}: {error}"))
                .with_repair(format!("cleat csi {call} --template prints an example"))
        })?;
    if typed && request.has_field_by_name("secrets") {
        let message =
            "the request has secrets, which other users of this machine see in the arguments";
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("write the request to a file of mode 600 and name it: @FILE"));
    }
    Ok(request)
}

fn read_file(path: &Path) -> Result<String> {
    let shown = path.display().to_string();
    let file = std::fs::File::open(path)
        .map_err(|error| Error::from_io(format!("cannot open the request {shown}"), error))?;
    read(file, &shown)
}

fn read(source: impl Read, shown: &str) -> Result<String> {
    let mut text = String::new();
    source
        .take(MAX_REQUEST + 1)
        .read_to_string(&mut text)
        .map_err(|error| Error::from_io(format!("cannot read the request from {shown}"), error))?;
    if text.len() as u64 > MAX_REQUEST {
        let message = format!("the request in {shown} is longer than {MAX_REQUEST} bytes");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok(text)
}

/// Returns the message as JSON, with the fields that have their default value.
fn json(message: &DynamicMessage) -> Result<serde_json::Value> {
    let options = SerializeOptions::new().skip_default_fields(false);
    message.serialize_with_options(Serializer, &options).map_err(|error| {
        Error::new(ErrorKind::Internal, "internal: the answer is not JSON").with_source(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(call: &str, json: &str) -> Result<DynamicMessage> {
        request(calls::find(call).unwrap().input(), Some(json))
    }

    #[test]
    fn requests_are_checked_against_their_type() {
        let stage = parsed("NodeStageVolume", r#"{"volumeId": "v", "volumeContext": {"a": "b"}}"#);
        assert_eq!(json(&stage.unwrap()).unwrap()["volumeContext"]["a"], "b");
        for (text, part) in [
            ("{", "EOF"),
            ("{} {}", "trailing"),
            (r#"{"volume": "v"}"#, "unrecognized field"),
            (r#"{"volumeId": 7}"#, "NodeStageVolumeRequest"),
        ] {
            let error = parsed("NodeStageVolume", text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(part), "{error}");
            assert!(error.repair().unwrap().starts_with("cleat csi NodeStageVolume "), "{error}");
        }
    }

    #[test]
    fn secrets_come_from_a_file() {
        let text = r#"{"volumeId": "v", "secrets": {"userKey": "sesame"}}"#;
        let error = parsed("NodeStageVolume", text).unwrap_err();
        assert!(error.message().contains("secrets") && !error.message().contains("sesame"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("request");
        std::fs::write(&path, text).unwrap();
        parsed("NodeStageVolume", &format!("@{}", path.display())).unwrap();
        assert_eq!(parsed("NodeStageVolume", "@/none").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn endpoints_are_paths_or_uris() {
        for endpoint in ["/a/csi.sock", "unix:/a/csi.sock", "unix:///a/csi.sock"] {
            assert_eq!(socket(endpoint).unwrap(), Path::new("/a/csi.sock"));
        }
        for endpoint in ["", "csi.sock", "tcp://localhost:1", "unix:csi.sock"] {
            assert_eq!(socket(endpoint).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
}
