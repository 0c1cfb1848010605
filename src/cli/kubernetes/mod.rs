//! The commands for Kubernetes: calls of a CSI driver, the controller of a cluster, and the plugin of kubectl.

mod controller;
mod csi;
mod kubectl;

use super::{Globals, exit};
use cleat_core::error::Result;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Csi(csi::Csi),
    Controller(controller::Controller),
    Kubectl(kubectl::Kubectl),
}

/// Runs the command and returns the exit code.
///
/// # Errors
/// Returns the error of the command.
pub(super) fn run(globals: &Globals, command: Command) -> Result<u8> {
    match command {
        Command::Csi(args) => csi::run(globals, &args),
        Command::Controller(args) => controller::run(globals, args),
        Command::Kubectl(args) => return kubectl::run(globals, args),
    }
    .map(|()| exit::OK)
}
