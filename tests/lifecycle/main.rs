//! The supervisor from end to end: control API, journal, planner, executor, on the simulated kernel
//! and real worker processes. Crashes of the supervisor are real, too: its runtime is dropped where
//! it stands, and a new one begins with what kernel, workers and journal have kept.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod bench;
mod crashes;
mod everyday;
mod forced;
mod metrics;
mod names;
mod openmetrics;
mod outages;
mod rbd;
mod sizes;
#[path = "../common/stopwatch.rs"]
mod stopwatch;
mod trouble;
mod upgrades;
