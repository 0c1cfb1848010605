//! `cargo bench --bench peer`: measures `cleat serve` beside other NBD servers and beside the limit of a bare
//! server in C, on this machine, in one run. The report (Markdown, JSON, and a plot as SVG) is below
//! `target/bench/`.
//!
//! All contestants of a row have the same data, are started anew for each round, and are measured in turns. Ratios are
//! medians of the ratios within one round, because other load on the machine changes between rounds. The client checks
//! every reply, see `common::client`.
//!
//! | variable | meaning |
//! |---|---|
//! | `ROUNDS`, `SECONDS` | the number of rounds (5), and the length of a measurement (0.7) |
//! | `ONLY` | parts of names of rows, separated by semicolons: only these rows |
//! | `CLEAT_BENCH_BINARY` | the cleat that is measured, instead of the one that cargo has built |
//! | `CLEAT_BENCH_OTHER` | adds another build of cleat to the rows of one volume |

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

#[path = "../common/mod.rs"]
mod common;
mod contestants;
mod rows;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::report::Report;
use common::{in_rounds, number};
use contestants::{Contestant, Setup};
use rows::{ROWS, Row};

/// How the figures are measured, for the report.
const CONDITIONS: &str = "Unix sockets. CPU is that of the server.";

fn main() {
    let (rounds, time) = (number("ROUNDS", 5.0) as usize, number("SECONDS", 0.7));
    let time = Duration::from_secs_f64(time);
    let only = std::env::var("ONLY").unwrap_or_default();
    let is_wanted = |row: &&Row| only.split(';').any(|part| row.name.contains(part));
    let wanted: Vec<&Row> = ROWS.iter().filter(is_wanted).collect();
    assert!(!wanted.is_empty(), "ONLY={only}: no row has this in its name");
    let setup = Setup::new();
    let mut report = Report::new(CONDITIONS, rounds, time);
    for rows in wanted.chunk_by(|one, next| one.group == next.group) {
        let start = || setup.contestants(rows[0].group);
        let measure = |row: &&Row, contestant: &mut Contestant| contestant.measure(row, time);
        let measured = in_rounds(rounds, rows, start, measure);
        for (row, measured) in rows.iter().zip(measured) {
            report.add(row.name, row.must, measured);
        }
    }
    report.skipped = setup.skipped();
    let directory = directory();
    report.write(&directory);
    println!("the report: {}", directory.join("report.md").display());
}

/// The directory for the report.
fn directory() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("bench");
    std::fs::create_dir_all(&directory).unwrap();
    directory
}
