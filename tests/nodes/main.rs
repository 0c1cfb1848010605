//! cleat on nodes with kubelet and containerd, in virtual machines (`tests/vm`) that join a control plane on the host. What
//! is in `deploy/` is installed with kubectl, with the image that `scripts/build-image` makes. `make nodes` runs these
//! tests, and `make demo-cluster` shows a fail-over.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, prints figures, and waits in real time"
)]

mod claims_of_images;
mod cluster;
mod comparison;
mod controller_killed;
mod demo;
mod fail_over;
mod figures;
mod files;
mod installation;
mod life;
mod machine;
mod network;
mod programs;
mod reboots;
mod restarts;
mod slow;
mod survival;
mod timeline;
mod watch;
mod writer;
