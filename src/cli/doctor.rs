//! `cleat doctor`: checks this machine and prints each finding with its repair. It needs no daemon.

use std::path::PathBuf;

use serde::Serialize;

use super::output::{self, Format};
use super::view;
use super::{Globals, exit};
use crate::doctor::{self, Verdict};
use cleat_core::error::Result;
use cleat_node::config::Config;

pub(super) const EXAMPLES: &str = "\
Examples:
  All findings, with their repairs:
    $ cleat doctor

  Only warnings and errors, for a script:
    $ cleat doctor -o json | jq '.checks[] | select(.verdict != \"ok\")'
";

/// Check this machine: module, kernel, permissions, udev, limits, libraries
///
/// Changes nothing. The exit code is that of the worst finding: 0 ok, 20 a warning, 21 an error.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Doctor {
    /// The daemon's configuration file [default: /etc/cleat/cleat.toml, if it exists]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Findings {
    worst: Verdict,
    checks: Vec<view::Check>,
}

/// Runs the command. Returns the exit code of the worst finding.
///
/// # Errors
/// Returns an error if stdout cannot be written.
pub(super) fn run(globals: &Globals, args: &Doctor) -> Result<u8> {
    let (config, configuration) = match Config::load(args.config.as_deref()) {
        Ok(config) => (config, ok("the configuration is valid")),
        Err(error) => {
            let finding = view::Check {
                verdict: Verdict::Error,
                repair: error.repair().map(str::to_owned),
                ..ok(&error.report())
            };
            (Config::default(), finding)
        }
    };
    let mut checks = vec![configuration];
    checks.extend(doctor::examine(&config).into_iter().map(view::Check::from));
    let worst = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Ok);
    if globals.output == Some(Format::Json) {
        output::json(&Findings { worst, checks })?;
    } else {
        output::text(&view::checks(&checks))?;
    }
    Ok(match worst {
        Verdict::Ok => exit::OK,
        Verdict::Warning => exit::DOCTOR_WARNING,
        Verdict::Error => exit::DOCTOR_ERROR,
    })
}

fn ok(finding: &str) -> view::Check {
    view::Check {
        name: "configuration".to_owned(),
        verdict: Verdict::Ok,
        finding: finding.to_owned(),
        repair: None,
    }
}
