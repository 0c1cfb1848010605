//! `cleat serve`: serves a volume to NBD clients, without a daemon and a device.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::PossibleValuesParser;

use super::set::PolicyArgs;
use super::{Globals, output};
use cleat_backend::claimant::Claimant;
use cleat_backend::uri::VolumeUri;
use cleat_backend::{Confinement, OpenOptions};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{self, Policy};
use cleat_export::serve::{self, Address, ServeOptions};
use cleat_node::config::Config;
use cleat_statistics::SLOTS;
use cleat_telemetry::{Format, Log};
use cleat_worker::isolation::{Isolation, layer};
use cleat_worker::sandbox::{self, Needs};

pub(super) const EXAMPLES: &str = "\
Examples:
  Serve an image on a unix socket, and inspect it:
    $ cleat serve file:/var/lib/images/a.img --socket /run/a.sock &
    $ nbdinfo 'nbd+unix:///?socket=/run/a.sock'

  One gibibyte of memory on TCP, for this machine only:
    $ cleat serve mem:1G --listen 127.0.0.1:10809

The server confines itself like a worker of the daemon: it keeps its volume and its clients, and gives up files,
network, capabilities and, if root starts it, root. A layer that the machine lacks is an error, unless
workers.allow_missing in /etc/cleat/cleat.toml or --allow-missing names it.

The NBD URI is printed on stdout as soon as clients can connect. SIGTERM and SIGINT end the server after
the requests in flight, or at once (exit code 6) if the volume is not open yet.
";

/// Serve a volume to NBD clients (qemu, libnbd, nbd-client)
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("address").required(true).args(["socket", "listen"]))]
pub(super) struct Serve {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Serve on a unix socket at this path, which only the current user can open
    // Has the id of the global option and hides it.
    #[arg(id = "socket", long = "socket", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve on this TCP address, to every client that can reach it
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Open the volume read-only
    #[arg(long)]
    read_only: bool,
    /// Take the volume from the client that has claimed it (rbd:), which is fenced first
    #[arg(long)]
    take_over: bool,
    /// The maximum number of clients at the same time
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=SLOTS as i64))]
    connections: u16,
    /// The export's name; clients may also use the empty name
    #[arg(long, value_name = "NAME", default_value = "")]
    export_name: String,
    /// Serve without these layers of the confinement, if the machine lacks them
    // The variable is for test harnesses, which start many servers.
    #[arg(long, value_name = "LAYER", env = "CLEAT_ALLOW_MISSING", value_delimiter = ',',
          value_parser = PossibleValuesParser::new(layer::ALL))]
    allow_missing: Vec<String>,
    /// End also when the other end of the standard input is closed, for example with the process that has started the
    /// server and holds a pipe to it
    #[arg(long)]
    end_with_stdin: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Runs the command: serves until a signal ends it.
///
/// # Errors
/// Returns an error if the volume cannot be opened or the address cannot be used.
pub(super) fn run(globals: &Globals, args: Serve) -> Result<()> {
    let level = ["warn", "info", "debug"].get(usize::from(globals.verbose)).unwrap_or(&"trace");
    Log { format: Format::Auto, filter: (*level).to_owned() }.init()?;
    // CLEAT_SOCKET is the daemon's socket, which this server must not replace.
    let typed = args.socket.filter(|_| globals.socket_typed);
    let address = match (args.listen, typed) {
        (Some(address), _) => Address::Tcp(address),
        (None, Some(path)) => Address::Unix(path),
        (None, None) => {
            let message = "no address to serve the volume on";
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("add --socket PATH or --listen IP:PORT"));
        }
    };
    if let Some(warning) = args.uri.spec().warning() {
        output::note(&format!("warning: {warning}"));
    }
    let PolicyArgs { on_outage: outage, iops, bps: bytes_per_s, busy_poll } = args.policy;
    let policy = policy::Change { outage, iops, bytes_per_s, busy_poll }.apply(Policy::default());
    let config = Config::load(None)?;
    let (isolation, _user_lock) = isolation(&config, args.allow_missing)?;
    let options = ServeOptions {
        uri: args.uri,
        address,
        open: OpenOptions {
            read_only: args.read_only,
            claimant: Claimant {
                grant: Some(0),
                ..Claimant::alone(&config.node_name, args.take_over)?
            },
            ..OpenOptions::default()
        },
        connections: usize::from(args.connections),
        export_name: args.export_name,
        policy,
        ends_with: args.end_with_stdin.then(stdin).transpose()?,
    };
    let confine = |confinement: &Confinement| {
        let report = sandbox::confine(&Needs::from(confinement), &isolation)?;
        for (layer, reason) in &report.missing {
            tracing::warn!(layer, %reason, "a layer of the server's confinement is missing");
        }
        Ok(())
    };
    serve::run(&options, confine, |address| {
        // The server also runs if the reader of its output has gone.
        let _ = output::text(&format!("{}\n", uri(address, &options.export_name)));
    })
}

fn stdin() -> Result<Arc<OwnedFd>> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    stdin.map(Arc::new).map_err(|error| Error::from_io("cannot use the standard input", error))
}

/// Returns how the server is confined. A server of root becomes a user of its own, whose number is taken until the
/// returned descriptor is closed. Another user's server does without the layers for which the kernel may require
/// root.
fn isolation(config: &Config, allow: Vec<String>) -> Result<(Isolation, Option<OwnedFd>)> {
    let mut allow_missing = [config.workers.allow_missing.clone(), allow].concat();
    if nix::unistd::geteuid().is_root() {
        let (user, lock) = config.workers.users.take(&config.runtime_dir)?;
        return Ok((Isolation { user: Some(user), allow_missing }, Some(lock)));
    }
    let of_root = [layer::EMPTY_NETWORK, layer::OWN_IPC, layer::EMPTY_ROOT, layer::OWN_USER];
    allow_missing.extend(of_root.map(str::to_owned));
    Ok((Isolation { user: None, allow_missing }, None))
}

/// Returns the NBD URI of the export, as specified in `doc/uri.md` of the NBD project.
fn uri(address: &Address, export: &str) -> String {
    match address {
        Address::Unix(path) => {
            format!("nbd+unix:///{}?socket={}", escape(export), escape(&path.to_string_lossy()))
        }
        Address::Tcp(address) => format!("nbd://{address}/{}", escape(export)),
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_escaped() {
        let unix = Address::Unix("/run/a b.sock".into());
        assert_eq!(uri(&unix, "x?y"), "nbd+unix:///x%3Fy?socket=/run/a%20b.sock");
        let tcp = Address::Tcp(([127, 0, 0, 1], 10809).into());
        assert_eq!(uri(&tcp, ""), "nbd://127.0.0.1:10809/");
    }
}
