//! The supervisor from end to end: control API, journal, planner, executor, on the simulated kernel
//! and real worker processes. Crashes of the supervisor are real, too: its runtime is dropped where
//! it stands, and a new one begins with what kernel, workers and journal have kept.

mod basic;
mod crashes;
mod failures;
mod forced;
mod metrics;
mod names;
mod openmetrics;
mod outages;
mod rbd;
mod resize;
mod upgrades;
