//! cleat on a node with kubelet and containerd, in a virtual machine (`tests/vm`) that joins a control plane on the host.
//! `deploy/base` is installed with kubectl, with the image that `scripts/build-image` makes. `make nodes` runs these
//! tests.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, prints figures, and waits in real time"
)]

mod cluster;
mod files;
mod machine;
mod programs;
mod restarts;
