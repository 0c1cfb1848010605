//! The controller against a real control plane: etcd and kube-apiserver, built from their Go modules and shared by
//! all tests of this target. Each test has a CSI driver of its own, so that tests run in parallel.
//!
//! A test `row_NN_…` is about that row of the behaviours of Kubernetes' attach/detach controller and
//! external-attacher: docs/controller.md lists them. In most tests the storage keeps the records in memory, and the
//! tests play the agents of nodes; `agent` has real agents, and images of a real Ceph cluster.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, prints figures, and waits in real time"
)]

mod agent;
mod attach;
mod attach_detach;
mod calls;
mod chart;
mod cluster;
mod control_plane;
mod controller_rights;
mod definition;
mod deploy;
mod detach;
mod fights;
mod fixture;
mod kubectl;
mod leader;
mod lease_timeout;
mod monitoring;
mod node;
mod provisioner_rights;
mod proxy;
mod rbd;
mod remediation;
mod rights;
mod scale;
mod security;
mod storage;
mod sweep;
mod taken_over;
mod unreadable;
