//! `cleat completions`: prints completion scripts for shells.

use clap::CommandFactory;

use super::{Cli, output};
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  For this shell only:
    $ source <(cleat completions bash)

  For all users:
    $ cleat completions bash > /usr/share/bash-completion/completions/cleat
    $ cleat completions zsh > /usr/share/zsh/vendor-completions/_cleat
    $ cleat completions fish > /usr/share/fish/vendor_completions.d/cleat.fish
";

/// Print the completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Completions {
    /// The shell
    shell: clap_complete::Shell,
}

/// Runs the command.
///
/// # Errors
/// Returns an error if stdout cannot be written.
pub(super) fn run(args: &Completions) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "cleat", &mut script);
    output::bytes(&script)
}
