//! `cleat doctor`: what this machine lacks, each finding with its repair. Needs no daemon.

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
  What is missing, and how is it repaired?
    $ cleat doctor

  Only what is wrong, for a script:
    $ cleat doctor -o json | jq '.checks[] | select(.verdict != \"ok\")'
";

/// Check this machine: module, kernel, permissions, udev, limits, libraries
///
/// Changes nothing. The exit code tells the worst finding: 0 all is well, 20 a warning, 21 an error.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Doctor {
    /// The daemon's configuration file [default: /etc/cleat/cleat.toml, which may be absent]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Findings {
    worst: Verdict,
    checks: Vec<view::Check>,
}

/// Runs the command; returns the exit code of the worst finding.
///
/// # Errors
/// When stdout cannot be written.
pub(super) fn run(globals: &Globals, args: &Doctor) -> Result<u8> {
    let (config, configuration) = match Config::load(args.config.as_deref()) {
        Ok(config) => (config, ok("the configuration can be read")),
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
