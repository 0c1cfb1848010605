//! The messages of the control API and its gRPC client and server, generated from
//! `proto/cleat/v1/node.proto` when the crate is built.
//!
//! The command line and other callers on the node use the client; the supervisor implements the
//! server on a unix socket of mode 0600. Fields and codes are only added, so that a client and a
//! server of different builds understand each other.

/// Version 1 of the API.
pub mod v1 {
    #![allow(missing_docs, unreachable_pub, unused_qualifications)]
    #![allow(clippy::pedantic, clippy::all)]
    tonic::include_proto!("cleat.v1");
}
