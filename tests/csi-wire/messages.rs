//! The messages that the test exchanges, by their names on the wire.

use cleat_csi_api::addons::{fence, identity, reclaimspace};
use cleat_csi_api::csi::v1;
use cleat_csi_api::pluginregistration;

use crate::{Exchange, exchange};

/// Lists messages: those whose type has the name of the message, by package, and the others.
macro_rules! messages {
    (
        $($package:literal in $module:ident: $($message:ident)*;)*
        others: $($name:literal = $path:ty;)*
    ) => {
        /// Every message of the protocol files with the function that decodes and encodes it.
        pub(crate) const MESSAGES: &[(&str, Exchange)] = &[
            $($((concat!($package, ".", stringify!($message)), exchange::<$module::$message>),)*)*
            $(($name, exchange::<$path>),)*
        ];
    };
}

messages! {
    "csi.v1" in v1:
        BlockMetadata
        CapacityRange
        ControllerExpandVolumeRequest
        ControllerExpandVolumeResponse
        ControllerGetCapabilitiesRequest
        ControllerGetCapabilitiesResponse
        ControllerGetVolumeHealthRequest
        ControllerGetVolumeHealthResponse
        ControllerGetVolumeRequest
        ControllerGetVolumeResponse
        ControllerListVolumeHealthRequest
        ControllerListVolumeHealthResponse
        ControllerModifyVolumeRequest
        ControllerModifyVolumeResponse
        ControllerPublishVolumeRequest
        ControllerPublishVolumeResponse
        ControllerServiceCapability
        ControllerUnpublishVolumeRequest
        ControllerUnpublishVolumeResponse
        CreateSnapshotRequest
        CreateSnapshotResponse
        CreateVolumeGroupSnapshotRequest
        CreateVolumeGroupSnapshotResponse
        CreateVolumeRequest
        CreateVolumeResponse
        DeleteSnapshotRequest
        DeleteSnapshotResponse
        DeleteVolumeGroupSnapshotRequest
        DeleteVolumeGroupSnapshotResponse
        DeleteVolumeRequest
        DeleteVolumeResponse
        GetCapacityRequest
        GetCapacityResponse
        GetMetadataAllocatedRequest
        GetMetadataAllocatedResponse
        GetMetadataDeltaRequest
        GetMetadataDeltaResponse
        GetPluginCapabilitiesRequest
        GetPluginCapabilitiesResponse
        GetPluginInfoRequest
        GetPluginInfoResponse
        GetSnapshotRequest
        GetSnapshotResponse
        GetVolumeGroupSnapshotRequest
        GetVolumeGroupSnapshotResponse
        GroupControllerGetCapabilitiesRequest
        GroupControllerGetCapabilitiesResponse
        GroupControllerServiceCapability
        ListSnapshotsRequest
        ListSnapshotsResponse
        ListVolumesRequest
        ListVolumesResponse
        NodeExpandVolumeRequest
        NodeExpandVolumeResponse
        NodeGetCapabilitiesRequest
        NodeGetCapabilitiesResponse
        NodeGetInfoRequest
        NodeGetInfoResponse
        NodeGetStorageHealthRequest
        NodeGetStorageHealthResponse
        NodeGetVolumeHealthRequest
        NodeGetVolumeHealthResponse
        NodeGetVolumeStatsRequest
        NodeGetVolumeStatsResponse
        NodePublishVolumeRequest
        NodePublishVolumeResponse
        NodeServiceCapability
        NodeStageVolumeRequest
        NodeStageVolumeResponse
        NodeUnpublishVolumeRequest
        NodeUnpublishVolumeResponse
        NodeUnstageVolumeRequest
        NodeUnstageVolumeResponse
        PluginCapability
        ProbeRequest
        ProbeResponse
        Snapshot
        Topology
        TopologyRequirement
        ValidateVolumeCapabilitiesRequest
        ValidateVolumeCapabilitiesResponse
        Volume
        VolumeCapability
        VolumeContentSource
        VolumeGroupSnapshot
        VolumeHealth
        VolumeUsage;
    "fence" in fence:
        ClientDetails
        FenceClusterNetworkRequest
        FenceClusterNetworkResponse
        GetFenceClientsRequest
        GetFenceClientsResponse
        ListClusterFenceRequest
        ListClusterFenceResponse
        UnfenceClusterNetworkRequest
        UnfenceClusterNetworkResponse;
    "identity" in identity:
        Capability
        GetCapabilitiesRequest
        GetCapabilitiesResponse
        GetIdentityRequest
        GetIdentityResponse
        ProbeRequest
        ProbeResponse;
    "pluginregistration" in pluginregistration:
        InfoRequest
        PluginInfo
        RegistrationStatus
        RegistrationStatusResponse;
    "reclaimspace" in reclaimspace:
        ControllerReclaimSpaceRequest
        ControllerReclaimSpaceResponse
        NodeReclaimSpaceRequest
        NodeReclaimSpaceResponse
        StorageConsumption;
    others:
        "csi.v1.ControllerGetVolumeResponse.VolumeStatus" = v1::controller_get_volume_response::VolumeStatus;
        "csi.v1.ControllerServiceCapability.RPC" = v1::controller_service_capability::Rpc;
        "csi.v1.GroupControllerServiceCapability.RPC" = v1::group_controller_service_capability::Rpc;
        "csi.v1.ListSnapshotsResponse.Entry" = v1::list_snapshots_response::Entry;
        "csi.v1.ListVolumesResponse.Entry" = v1::list_volumes_response::Entry;
        "csi.v1.ListVolumesResponse.VolumeStatus" = v1::list_volumes_response::VolumeStatus;
        "csi.v1.NodeGetStorageHealthResponse.StorageBackendHealth" = v1::node_get_storage_health_response::StorageBackendHealth;
        "csi.v1.NodeServiceCapability.RPC" = v1::node_service_capability::Rpc;
        "csi.v1.PluginCapability.Service" = v1::plugin_capability::Service;
        "csi.v1.PluginCapability.VolumeExpansion" = v1::plugin_capability::VolumeExpansion;
        "csi.v1.ValidateVolumeCapabilitiesResponse.Confirmed" = v1::validate_volume_capabilities_response::Confirmed;
        "csi.v1.VolumeCapability.AccessMode" = v1::volume_capability::AccessMode;
        "csi.v1.VolumeCapability.BlockVolume" = v1::volume_capability::BlockVolume;
        "csi.v1.VolumeCapability.MountVolume" = v1::volume_capability::MountVolume;
        "csi.v1.VolumeContentSource.SnapshotSource" = v1::volume_content_source::SnapshotSource;
        "csi.v1.VolumeContentSource.VolumeSource" = v1::volume_content_source::VolumeSource;
        "csi.v1.VolumeHealth.VolumeHealthEntry" = v1::volume_health::VolumeHealthEntry;
        "fence.CIDR" = fence::Cidr;
        "identity.Capability.EncryptionKeyRotation" = identity::capability::EncryptionKeyRotation;
        "identity.Capability.NetworkFence" = identity::capability::NetworkFence;
        "identity.Capability.ReclaimSpace" = identity::capability::ReclaimSpace;
        "identity.Capability.Service" = identity::capability::Service;
        "identity.Capability.VolumeGroup" = identity::capability::VolumeGroup;
        "identity.Capability.VolumeReplication" = identity::capability::VolumeReplication;
}
