//! End-to-end tests of the supervisor: control API, journal, planner and executor, with the simulated
//! kernel and real worker processes. A crash of the supervisor drops its runtime at any point; a new
//! supervisor starts with the state of the kernel, the workers and the journal.

mod basic;
mod crashes;
mod failures;
mod forced;
mod full;
mod idle;
mod metrics;
mod names;
mod objects;
mod openmetrics;
mod orphans;
mod outages;
mod rbd;
mod replaced;
mod resize;
mod state_directory;
mod syncs;
mod upgrades;
