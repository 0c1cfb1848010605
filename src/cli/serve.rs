//! `cleat serve`: a volume for NBD clients, without daemon and device.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::set::PolicyArgs;
use super::{Globals, output};
use cleat_backend::OpenOptions;
use cleat_backend::claimant::Claimant;
use cleat_backend::uri::VolumeUri;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{self, Policy};
use cleat_export::serve::{self, Address, ServeOptions};
use cleat_node::config::Config;
use cleat_statistics::SLOTS;
use cleat_telemetry::{Format, Log};

pub(super) const EXAMPLES: &str = "\
Examples:
  Serve an image on a unix socket, and look at it:
    $ cleat serve file:/var/lib/images/a.img --socket /run/a.sock &
    $ nbdinfo 'nbd+unix:///?socket=/run/a.sock'

  A gigabyte of memory on TCP, for this machine only:
    $ cleat serve mem:1G --listen 127.0.0.1:10809

The NBD URI to connect to is printed on stdout once clients can connect. SIGTERM and SIGINT end it
after the running requests, or at once (exit code 6) while the volume is not open yet.
";

/// Serve a volume to NBD clients (qemu, libnbd, nbd-client)
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("address").required(true).args(["socket", "listen"]))]
pub(super) struct Serve {
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// Serve on a unix socket at this path, which only this user can use
    // The same id as the global option, which it hides.
    #[arg(id = "socket", long = "socket", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve on this TCP address, to whoever reaches it
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Never write to the volume
    #[arg(long)]
    read_only: bool,
    /// Take the volume from whoever has claimed it (rbd:): that client is cut off first, for good
    #[arg(long)]
    take_over: bool,
    /// Clients at one time
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=SLOTS as i64))]
    connections: u16,
    /// The export's name; clients may also leave it empty
    #[arg(long, value_name = "NAME", default_value = "")]
    export_name: String,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Runs the command: serves until a signal ends it.
///
/// # Errors
/// When the volume cannot be opened, or the address not be used.
pub(super) fn run(globals: &Globals, args: Serve) -> Result<()> {
    let level = ["warn", "info", "debug"].get(usize::from(globals.verbose)).unwrap_or(&"trace");
    Log { format: Format::Auto, filter: (*level).to_owned() }.init()?;
    // CLEAT_SOCKET stands for the daemon's socket, which is not ours to replace.
    let typed = args.socket.filter(|_| globals.socket_typed);
    let address = match (args.listen, typed) {
        (Some(address), _) => Address::Tcp(address),
        (None, Some(path)) => Address::Unix(path),
        (None, None) => {
            let message = "nothing says where to serve the volume";
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("give --socket PATH or --listen IP:PORT"));
        }
    };
    let PolicyArgs { on_outage: outage, iops, bps: bytes_per_s } = args.policy;
    let policy = policy::Change { outage, iops, bytes_per_s }.apply(Policy::default());
    let options = ServeOptions {
        uri: args.uri,
        address,
        open: OpenOptions {
            read_only: args.read_only,
            claimant: Claimant::alone(&Config::load(None)?.node_name, args.take_over)?,
            snapshots: false,
        },
        connections: usize::from(args.connections),
        export_name: args.export_name,
        policy,
    };
    serve::run(&options, |address| {
        // Whoever started the server without reading its output still gets the server.
        let _ = output::text(&format!("{}\n", uri(address, &options.export_name)));
    })
}

/// The NBD URI, as the NBD project's doc/uri.md has it.
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
