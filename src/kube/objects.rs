//! Objects of Kubernetes with only the fields that the controller reads. The complete types need a tenth of the
//! program. They are for reading and for patches: to replace an object with one of
//! these would delete its other fields.
//!
//! Source: staging/src/k8s.io/api/core/v1/types.go and storage/v1/types.go of Kubernetes.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ObjectReference, Taint, Toleration, VolumeNodeAffinity};
use k8s_openapi::api::storage::v1::VolumeError;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};

macro_rules! objects {
    ($($name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* })*) => {$(
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub(crate) struct $name {
            $(
                $(#[$attribute])*
                pub(crate) $field: $type,
            )*
        }
    )*};
}

macro_rules! resources {
    ($($kind:ident: $group:literal, $plural:literal, $scope:ty;)*) => {$(
        impl kube::Resource for $kind {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    )*};
}

resources! {
    Node: "", "nodes", ClusterResourceScope;
    PersistentVolume: "", "persistentvolumes", ClusterResourceScope;
    PersistentVolumeClaim: "", "persistentvolumeclaims", NamespaceResourceScope;
    Pod: "", "pods", NamespaceResourceScope;
    VolumeAttachment: "storage.k8s.io", "volumeattachments", ClusterResourceScope;
}

objects! {
    Node {
        metadata: ObjectMeta,
        spec: Option<NodeSpec>,
        status: Option<NodeStatus>,
    }
    NodeSpec {
        taints: Option<Vec<Taint>>,
    }
    NodeStatus {
        conditions: Option<Vec<NodeCondition>>,
    }
    NodeCondition {
        #[serde(rename = "type")]
        type_: String,
        status: String,
        last_transition_time: Option<Time>,
    }

    PersistentVolume {
        metadata: ObjectMeta,
        spec: Option<PersistentVolumeSpec>,
        status: Option<Phase>,
    }
    PersistentVolumeSpec {
        access_modes: Option<Vec<String>>,
        claim_ref: Option<ObjectReference>,
        csi: Option<CSIPersistentVolumeSource>,
        node_affinity: Option<VolumeNodeAffinity>,
        volume_mode: Option<String>,
    }
    CSIPersistentVolumeSource {
        driver: String,
        read_only: Option<bool>,
        volume_handle: String,
    }
    Phase {
        phase: Option<String>,
    }

    PersistentVolumeClaim {
        metadata: ObjectMeta,
        spec: Option<PersistentVolumeClaimSpec>,
        status: Option<Phase>,
    }
    PersistentVolumeClaimSpec {
        storage_class_name: Option<String>,
        volume_name: Option<String>,
    }

    Pod {
        metadata: ObjectMeta,
        spec: Option<PodSpec>,
        status: Option<PodStatus>,
    }
    PodSpec {
        node_name: Option<String>,
        tolerations: Option<Vec<Toleration>>,
        volumes: Option<Vec<Volume>>,
    }
    Volume {
        csi: Option<CSIVolumeSource>,
        ephemeral: Option<EphemeralVolumeSource>,
        name: String,
        persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
    }
    CSIVolumeSource {
        driver: String,
    }
    EphemeralVolumeSource {}
    PersistentVolumeClaimVolumeSource {
        claim_name: String,
    }
    PodStatus {
        conditions: Option<Vec<PodCondition>>,
        container_statuses: Option<Vec<ContainerStatus>>,
        ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
        init_container_statuses: Option<Vec<ContainerStatus>>,
        phase: Option<String>,
    }
    PodCondition {
        #[serde(rename = "type")]
        type_: String,
        message: Option<String>,
    }
    ContainerStatus {
        state: Option<ContainerState>,
    }
    ContainerState {
        running: Option<ContainerStateRunning>,
        terminated: Option<ContainerStateTerminated>,
        waiting: Option<ContainerStateWaiting>,
    }
    ContainerStateRunning {}
    ContainerStateTerminated {}
    ContainerStateWaiting {}

    VolumeAttachment {
        metadata: ObjectMeta,
        spec: VolumeAttachmentSpec,
        status: Option<VolumeAttachmentStatus>,
    }
    VolumeAttachmentSpec {
        attacher: String,
        node_name: String,
        source: VolumeAttachmentSource,
    }
    VolumeAttachmentSource {
        inline_volume_spec: Option<PersistentVolumeSpec>,
        persistent_volume_name: Option<String>,
    }
    VolumeAttachmentStatus {
        attach_error: Option<VolumeError>,
        attached: bool,
        attachment_metadata: Option<BTreeMap<String, String>>,
        detach_error: Option<VolumeError>,
    }
}
