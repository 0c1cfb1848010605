//! `cleat node`: runs the daemon.

use std::path::PathBuf;

use super::Globals;
use crate::features::{EXTENSIONS, KUBERNETES};
use cleat_core::error::Result;
use cleat_node::config::Config;
use cleat_telemetry::Format;

pub(super) const EXAMPLES: &str = "\
Examples:
  As in the systemd unit:
    $ cleat node

  A second daemon, for a test:
    $ cleat node --runtime-dir /tmp/c/run --state-dir /tmp/c/state
    $ cleat --socket /tmp/c/run/cleat.sock ls

  Check the configuration of the daemon before its next start:
    $ cleat node --check-config

  A CSI driver for one machine, with volumes in the directories of [csi.directories]:
    $ cleat node --csi-controller
";

/// Run the daemon; devices stay mapped when it ends
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Node {
    /// The configuration file [default: /etc/cleat/cleat.toml, if it exists]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// The directory of the sockets
    #[arg(long, value_name = "PATH")]
    runtime_dir: Option<PathBuf>,
    /// The directory of the journal of mappings
    #[arg(long, value_name = "PATH")]
    state_dir: Option<PathBuf>,
    /// The name of this node in its claims and in CSI; in a pod, the name of the Node object (node_name)
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// The format of the log: auto, human, json, journald
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<Format>,
    /// The log level: error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Unmap all devices that are not in use when the daemon ends
    #[arg(long)]
    unmap_on_shutdown: bool,
    /// Serve CSI, and also its Controller service on the same socket (csi.enabled and csi.controller)
    #[arg(long, hide = !KUBERNETES.is_present)]
    csi_controller: bool,
    /// Check the configuration file and the other options, and exit; an upgrade lets the new build do this
    #[arg(long)]
    check_config: bool,
}

/// Runs the daemon until a signal ends it.
///
/// # Errors
/// Returns an error if the configuration is invalid or the daemon cannot start.
pub(super) fn run(globals: &Globals, args: Node) -> Result<()> {
    let mut config = Config::load(args.config.as_deref())?;
    if let Some(path) = args.runtime_dir {
        config.runtime_dir = std::path::absolute(path).unwrap_or_default();
    }
    if let Some(path) = args.state_dir {
        config.state_dir = std::path::absolute(path).unwrap_or_default();
    }
    if let Some(socket) = &globals.socket {
        config.socket = Some(std::path::absolute(socket).unwrap_or_default());
    }
    if let Some(name) = args.node_name {
        config.node_name = name;
    }
    if let Some(format) = args.log_format {
        config.log.format = format;
    }
    if let Some(level) = args.log_level {
        config.log.level = level;
    }
    config.log.level = match globals.verbose {
        0 => config.log.level,
        1 => "debug".to_owned(),
        _ => "trace".to_owned(),
    };
    config.unmap_on_shutdown |= args.unmap_on_shutdown;
    config.csi.enabled |= args.csi_controller;
    config.csi.controller |= args.csi_controller;
    config.check(std::path::Path::new("command line"))?;
    if config.csi.enabled {
        KUBERNETES.require("cannot serve CSI (csi.enabled)")?;
    }
    if args.check_config {
        return Ok(());
    }
    config.log().init()?;
    cleat_node::daemon::run(&config, crate::backends::REGISTRY, EXTENSIONS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Command, parse};

    #[test]
    fn a_check_refuses_what_a_start_would_refuse_and_starts_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("cleat.toml");
        let check = |text: &str, more: &[&str]| {
            std::fs::write(&file, text).unwrap();
            let path = file.to_str().unwrap();
            let mut arguments = vec!["cleat", "node", "--check-config", "--config", path];
            arguments.extend(more);
            let arguments: Vec<_> = arguments.into_iter().map(Into::into).collect();
            let cli = parse(&arguments).unwrap();
            let Command::Node(args) = cli.command else { panic!("another command") };
            run(&cli.globals, args)
        };
        check("modprobe = false\n", &[]).unwrap();
        let error = check("modprobe = false\nunknown = 1\n", &[]).expect_err("an unknown key");
        assert!(error.message().contains("cleat.toml, line 2: unknown field"), "{error}");
        assert!(check("", &["--log-level", "loud"]).is_err());
    }
}
