//! The control API's messages, generated from `proto/cleat/v1/node.proto`.

/// Version 1 of the API.
pub mod v1 {
    #![allow(missing_docs, unreachable_pub, unused_qualifications)]
    #![allow(clippy::pedantic, clippy::all)]
    tonic::include_proto!("cleat.v1");
}
