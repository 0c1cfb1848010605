//! cleat makes volumes fast to a Linux node as block devices. `ARCHITECTURE.md`, beside this file,
//! tells how the parts work together and in which order to read them.

pub mod backend;
pub mod cli;
pub mod config;
pub mod control;
pub mod data;
pub mod doctor;
pub mod error;
pub mod kernel;
pub mod policy;
pub mod proto;
pub mod request;
pub mod statistics;
pub mod sys;
pub mod telemetry;
pub mod worker;
