//! The messages, clients and servers of the Container Storage Interface (CSI 1.13), of kubelet's plugin
//! registration and of CSI-Addons, generated from `proto/csi`, `proto/pluginregistration` and
//! `proto/csiaddons` when the crate is built.
//!
//! kubelet, the sidecars of Kubernetes and operators call the servers; tests and the command line use the
//! clients. Names and numbers are those of the published interfaces, which the test `csi-wire` compares.
//! Maps are ordered, so that equal messages have equal bytes.
//!
//! No message may show a secret: `Debug` of a message with a field `secrets` prints only the keys.

/// Messages of `google.protobuf` that CSI uses. Its wrappers become options, such as `Option<bool>`.
pub use prost_types::Timestamp;

mod secrets;

/// The descriptors of all messages and services, as a `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The Container Storage Interface.
pub mod csi {
    /// Version 1.
    pub mod v1 {
        #![allow(missing_docs, unreachable_pub, unused_qualifications)]
        #![allow(clippy::pedantic, clippy::all)]
        tonic::include_proto!("csi.v1");
    }
}

/// The service through which a driver registers with kubelet.
pub mod pluginregistration {
    #![allow(missing_docs, unreachable_pub, unused_qualifications)]
    #![allow(clippy::pedantic, clippy::all)]
    tonic::include_proto!("pluginregistration");
}

/// CSI-Addons: what operators request besides CSI.
pub mod addons {
    // The generated code of `reclaimspace` finds the module of CSI here.
    use super::csi;

    /// What a driver supports.
    pub mod identity {
        #![allow(missing_docs, unreachable_pub, unused_qualifications)]
        #![allow(clippy::pedantic, clippy::all)]
        tonic::include_proto!("identity");
    }

    /// Fencing of address ranges.
    pub mod fence {
        #![allow(missing_docs, unreachable_pub, unused_qualifications)]
        #![allow(clippy::pedantic, clippy::all)]
        tonic::include_proto!("fence");
    }

    /// Giving unused space back to the storage.
    pub mod reclaimspace {
        #![allow(missing_docs, unreachable_pub, unused_qualifications)]
        #![allow(clippy::pedantic, clippy::all)]
        tonic::include_proto!("reclaimspace");
    }
}
