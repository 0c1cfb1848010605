//! Tests of the calls for volumes.

use std::fs;

use csi::VolumeHealthErrorType as Kind;

use super::*;

#[tokio::test]
async fn a_repeated_creation_finds_the_volume() {
    let fixture = Fixture::new();
    let request = csi::CreateVolumeRequest {
        parameters: map(&[("fsck", "full"), ("iops", "100"), ("csi.storage.k8s.io/pv/name", "x")]),
        mutable_parameters: map(&[("iops", "200")]),
        ..new_volume("pvc-1")
    };
    let volume = fixture.create(request.clone()).await.unwrap();
    assert_eq!(volume.volume_id, "file/n1/default/pvc-1");
    assert_eq!(volume.capacity_bytes, SIZE);
    assert_eq!(volume.volume_context, map(&[("fsck", "full"), ("iops", "200")]));
    let key = "topology.cleat.csi.storage/node";
    assert_eq!(volume.accessible_topology, [csi::Topology { segments: map(&[(key, "n1")]) }]);
    assert_eq!(fs::metadata(fixture.file("pvc-1")).unwrap().len(), 4 << 20);
    assert_eq!(fixture.create(request.clone()).await.unwrap(), volume);

    let larger = csi::CreateVolumeRequest { capacity_range: range(2 * SIZE, 0), ..request.clone() };
    let message = refused(fixture.create(larger).await, Code::AlreadyExists);
    assert!(message.contains("its size is 4M, not at least 8M"), "{message}");
    let parameters = map(&[("fsck", "never")]);
    let other = csi::CreateVolumeRequest { parameters, ..request.clone() };
    refused(fixture.create(other).await, Code::AlreadyExists);
    // Parameters that can be changed do not make another volume, and their values stay.
    let faster = csi::CreateVolumeRequest { mutable_parameters: map(&[("iops", "9")]), ..request };
    assert_eq!(fixture.create(faster).await.unwrap(), volume);
}

#[tokio::test]
async fn wrong_requests_for_a_volume_are_refused() {
    let fixture = Fixture::new();
    let request = || new_volume("pvc-1");
    let of_mode = |mode| vec![capability(mode)];
    let elsewhere = csi::TopologyRequirement {
        requisite: vec![csi::Topology {
            segments: map(&[("topology.cleat.csi.storage/node", "n2")]),
        }],
        preferred: Vec::new(),
    };
    for (request, code) in [
        (csi::CreateVolumeRequest { name: String::new(), ..request() }, Code::InvalidArgument),
        (
            csi::CreateVolumeRequest { volume_capabilities: Vec::new(), ..request() },
            Code::InvalidArgument,
        ),
        (
            csi::CreateVolumeRequest {
                volume_capabilities: of_mode(Mode::MultiNodeMultiWriter),
                ..request()
            },
            Code::InvalidArgument,
        ),
        (
            csi::CreateVolumeRequest { parameters: map(&[("size", "1")]), ..request() },
            Code::InvalidArgument,
        ),
        (
            csi::CreateVolumeRequest { mutable_parameters: map(&[("fsck", "full")]), ..request() },
            Code::InvalidArgument,
        ),
        (
            csi::CreateVolumeRequest { capacity_range: range(-1, 0), ..request() },
            Code::InvalidArgument,
        ),
        (csi::CreateVolumeRequest { capacity_range: range(0, 100), ..request() }, Code::OutOfRange),
        (
            csi::CreateVolumeRequest { accessibility_requirements: Some(elsewhere), ..request() },
            Code::ResourceExhausted,
        ),
        (
            csi::CreateVolumeRequest { secrets: map(&[("userID", "csi")]), ..request() },
            Code::InvalidArgument,
        ),
    ] {
        refused(fixture.create(request).await, code);
    }
    assert_eq!(fixture.list(0, "").await.unwrap().0, Vec::<String>::new());
}

#[tokio::test]
async fn an_interrupted_creation_is_completed_and_a_foreign_file_is_not_touched() {
    let fixture = Fixture::new();
    // The call was killed before and after it had set the size.
    fs::write(fixture.file("empty"), "").unwrap();
    fs::File::create(fixture.file("sized")).unwrap().set_len(4 << 20).unwrap();
    for name in ["empty", "sized"] {
        let volume = fixture.create(new_volume(name)).await.unwrap();
        assert_eq!(volume.capacity_bytes, SIZE, "{name}");
    }
    fs::write(fixture.file("foreign"), vec![1_u8; 4 << 20]).unwrap();
    let message = refused(fixture.create(new_volume("foreign")).await, Code::AlreadyExists);
    assert!(message.contains("another program made it"), "{message}");
    refused(fixture.delete("file/n1/default/foreign").await, Code::FailedPrecondition);
    assert!(fixture.file("foreign").exists());
    assert_eq!(fixture.list(0, "").await.unwrap().0.len(), 2);
}

#[tokio::test]
async fn names_of_any_kind_are_volumes_of_their_own() {
    let fixture = Fixture::new();
    let long = "n".repeat(128);
    let mut ids = Vec::new();
    for name in ["a/b", "a b", "..", "ü", ".cleat", &long] {
        let id = fixture.volume(name).await;
        assert_eq!(fixture.volume(name).await, id);
        ids.push(id);
    }
    ids.sort();
    assert_eq!(fixture.list(0, "").await.unwrap().0, ids);
    // A plain name that is the stored name of another one.
    let stored = ids.iter().find(|id| id.contains("a-b-")).unwrap().rsplit('/').next().unwrap();
    let message = refused(fixture.create(new_volume(stored)).await, Code::AlreadyExists);
    assert!(message.contains("it was made for the name"), "{message}");
}

#[tokio::test]
async fn a_volume_is_deleted_once_it_is_not_used() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    fixture.set_mapped(&id, Vec::new());
    let message = refused(fixture.delete(&id).await, Code::FailedPrecondition);
    assert!(message.contains("staged on the node n1"), "{message}");
    fixture.node.mapped.lock().unwrap().clear();
    fixture.delete(&id).await.unwrap();
    assert!(!fixture.file("pvc-1").exists());
    fixture.delete(&id).await.unwrap();
    fixture.delete("fake-vol-id-1").await.unwrap();
    refused(fixture.delete("").await, Code::InvalidArgument);
    refused(fixture.delete("file/n2/default/pvc-1").await, Code::FailedPrecondition);
    // Nothing is known about a directory that is not configured.
    refused(fixture.delete("file/n1/none/pvc-1").await, Code::FailedPrecondition);
}

#[tokio::test]
async fn a_second_call_for_a_busy_volume_is_aborted() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let claimed = fixture.service.0.busy.claim(&id, "DeleteVolume").unwrap();
    let message = refused(fixture.create(new_volume("pvc-1")).await, Code::Aborted);
    assert!(message.contains("DeleteVolume for volume file/n1"), "{message}");
    fixture.volume("pvc-2").await;
    drop(claimed);
    fixture.volume("pvc-1").await;
}

#[tokio::test]
async fn a_volume_is_published_on_its_node_only() {
    let fixture = Fixture::new();
    let id = fixture
        .create(csi::CreateVolumeRequest {
            mutable_parameters: map(&[("iops", "5")]),
            ..new_volume("pvc-1")
        })
        .await
        .unwrap()
        .volume_id;
    let publish = |id: &str, node: &str, mode: Option<Mode>| {
        let request = csi::ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            volume_capability: mode.map(capability),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.controller_publish_volume(Request::new(request)).await }
    };
    let single = Some(Mode::SingleNodeWriter);
    for _ in 0..2 {
        let answer = publish(&id, "n1", single).await.unwrap().into_inner();
        assert_eq!(answer.publish_context, map(&[("iops", "5")]));
    }
    let several = Some(Mode::MultiNodeReaderOnly);
    refused(publish(&id, "n1", several).await, Code::InvalidArgument);
    refused(publish(&id, "n1", None).await, Code::InvalidArgument);
    refused(publish(&id, "", single).await, Code::InvalidArgument);
    refused(publish("", "n1", single).await, Code::InvalidArgument);
    refused(publish(&id, "n2", single).await, Code::NotFound);
    refused(publish("fake", "n1", single).await, Code::NotFound);
    refused(publish("file/n1/default/none", "n1", single).await, Code::NotFound);

    let unpublish = |id: &str, node: &str| {
        let request = csi::ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.controller_unpublish_volume(Request::new(request)).await }
    };
    fixture.set_mapped(&id, Vec::new());
    for node in ["n1", ""] {
        let message = refused(unpublish(&id, node).await, Code::FailedPrecondition);
        assert!(message.contains("still staged"), "{message}");
    }
    unpublish(&id, "n2").await.unwrap();
    fixture.node.mapped.lock().unwrap().clear();
    for node in ["n1", "n1", "n2", ""] {
        unpublish(&id, node).await.unwrap();
    }
    unpublish("fake", "n1").await.unwrap();
    unpublish("file/n1/default/none", "n1").await.unwrap();
    refused(unpublish("", "n1").await, Code::InvalidArgument);
}

#[tokio::test]
async fn capabilities_are_validated() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let validate = |id: &str, modes: &[Mode], parameters: &[(&str, &str)]| {
        let request = csi::ValidateVolumeCapabilitiesRequest {
            volume_id: id.to_owned(),
            volume_capabilities: modes.iter().map(|mode| capability(*mode)).collect(),
            parameters: map(parameters),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.validate_volume_capabilities(Request::new(request)).await }
    };
    let modes = [Mode::SingleNodeWriter, Mode::SingleNodeMultiWriter];
    let answer = validate(&id, &modes, &[("fsck", "full")]).await.unwrap().into_inner();
    let confirmed = answer.confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities.len(), 2);
    assert_eq!(confirmed.parameters, map(&[("fsck", "full")]));
    for (modes, parameters) in
        [(&[Mode::MultiNodeMultiWriter][..], &[][..]), (&modes, &[("size", "1")])]
    {
        let answer = validate(&id, modes, parameters).await.unwrap().into_inner();
        assert_eq!(answer.confirmed, None);
        assert!(!answer.message.is_empty());
    }
    refused(validate(&id, &[], &[]).await, Code::InvalidArgument);
    refused(validate("", &modes, &[]).await, Code::InvalidArgument);
    refused(validate("fake", &modes, &[]).await, Code::NotFound);
    refused(validate("file/n1/default/none", &modes, &[]).await, Code::NotFound);
}

#[tokio::test]
async fn lists_have_pages_that_survive_changes() {
    let fixture = Fixture::new();
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d"] {
        ids.push(fixture.volume(name).await);
    }
    let fast =
        csi::CreateVolumeRequest { parameters: map(&[("directory", "fast")]), ..new_volume("a") };
    ids.push(fixture.create(fast).await.unwrap().volume_id);
    fs::write(fixture.file("foreign"), "x").unwrap();
    assert_eq!(fixture.list(0, "").await.unwrap(), (ids.clone(), String::new()));
    let (page, token) = fixture.list(2, "").await.unwrap();
    assert_eq!(page, ids[..2]);
    // The token stays valid if its volume is deleted.
    fixture.delete(&ids[1]).await.unwrap();
    let (page, token) = fixture.list(2, &token).await.unwrap();
    assert_eq!(page, ids[2..4]);
    assert_eq!(fixture.list(2, &token).await.unwrap(), (ids[4..].to_vec(), String::new()));
    refused(fixture.list(0, "invalid-token").await, Code::Aborted);
    refused(fixture.list(-1, "").await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_is_described() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let get = |id: &str| {
        let request = csi::ControllerGetVolumeRequest { volume_id: id.to_owned() };
        let service = fixture.service.clone();
        async move { service.controller_get_volume(Request::new(request)).await }
    };
    let answer = get(&id).await.unwrap().into_inner();
    assert_eq!(answer.volume.unwrap().capacity_bytes, SIZE);
    assert_eq!(answer.status.unwrap().published_node_ids, Vec::<String>::new());
    fixture.set_mapped(&id, Vec::new());
    let answer = get(&id).await.unwrap().into_inner();
    assert_eq!(answer.status.unwrap().published_node_ids, ["n1"]);
    refused(get("").await, Code::InvalidArgument);
    refused(get("fake").await, Code::NotFound);
    refused(get("file/n1/default/none").await, Code::NotFound);
}

#[tokio::test]
async fn the_health_of_volumes_is_that_of_this_node() {
    let fixture = Fixture::new();
    let (good, bad) = (fixture.volume("good").await, fixture.volume("bad").await);
    let outage = VolumeHealthEntry {
        status: Kind::Degraded.into(),
        reason: "BackendOutage".to_owned(),
        message: "its backend does not answer".to_owned(),
    };
    fixture.set_mapped(&good, Vec::new());
    fixture.set_mapped(&bad, vec![outage.clone()]);
    let get = |id: &str| {
        let volume_id = id.to_owned();
        let request = csi::ControllerGetVolumeHealthRequest { volume_id, ..Default::default() };
        let service = fixture.service.clone();
        async move { service.controller_get_volume_health(Request::new(request)).await }
    };
    let health = |answer: csi::ControllerGetVolumeHealthResponse| answer.volume_health.unwrap();
    let of_good = health(get(&good).await.unwrap().into_inner());
    assert_eq!((&of_good.volume_id, of_good.health_statuses.len()), (&good, 0));
    assert_eq!(health(get(&bad).await.unwrap().into_inner()).health_statuses, [outage]);
    refused(get("file/n1/default/none").await, Code::NotFound);
    refused(get("").await, Code::InvalidArgument);

    let list = |max_entries, token: &str| {
        let starting_token = token.to_owned();
        let request = csi::ControllerListVolumeHealthRequest {
            max_entries,
            starting_token,
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.controller_list_volume_health(Request::new(request)).await }
    };
    let answer = list(0, "").await.unwrap().into_inner();
    assert_eq!(answer.entries.iter().map(|entry| &entry.volume_id).collect::<Vec<_>>(), [&bad]);
    refused(list(0, "invalid-token").await, Code::Aborted);
    refused(list(-1, "").await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_grows_and_never_shrinks() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let expand = |id: &str, capacity_range| {
        let request = csi::ControllerExpandVolumeRequest {
            volume_id: id.to_owned(),
            capacity_range,
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.controller_expand_volume(Request::new(request)).await }
    };
    for (range, size) in
        [(range(2 * SIZE, 0), 2 * SIZE), (range(2 * SIZE, 0), 2 * SIZE), (range(1, 0), 2 * SIZE)]
    {
        let answer = expand(&id, range).await.unwrap().into_inner();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (size, true));
        assert_eq!(fs::metadata(fixture.file("pvc-1")).unwrap().len().cast_signed(), size);
    }
    refused(expand(&id, range(1, SIZE)).await, Code::OutOfRange);
    refused(expand(&id, range(i64::MAX, 0)).await, Code::OutOfRange);
    refused(expand(&id, None).await, Code::InvalidArgument);
    refused(expand("", range(SIZE, 0)).await, Code::InvalidArgument);
    refused(expand("fake", range(SIZE, 0)).await, Code::NotFound);
    refused(expand("file/n1/default/none", range(SIZE, 0)).await, Code::NotFound);
    // A repeated CreateVolume still finds the volume that it made.
    let volume = fixture.create(new_volume("pvc-1")).await.unwrap();
    assert_eq!(volume.capacity_bytes, 2 * SIZE);
}

#[tokio::test]
async fn mutable_parameters_change_in_the_volume_and_on_this_node() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let modify = |id: &str, parameters: &[(&str, &str)]| {
        let request = csi::ControllerModifyVolumeRequest {
            volume_id: id.to_owned(),
            mutable_parameters: map(parameters),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.controller_modify_volume(Request::new(request)).await }
    };
    modify(&id, &[("iops", "7"), ("bps", "1M")]).await.unwrap();
    modify(&id, &[("onOutage", "fail")]).await.unwrap();
    modify(&id, &[]).await.unwrap();
    let volume = fixture.create(new_volume("pvc-1")).await.unwrap();
    let present = map(&[("iops", "7"), ("bps", "1M"), ("onOutage", "fail")]);
    assert_eq!(volume.volume_context, present);
    let changes = fixture.node.changes.lock().unwrap().clone();
    assert_eq!(changes.len(), 2);
    assert_eq!(
        changes[0],
        (
            id.clone(),
            policy::Change { iops: Some(7), bytes_per_s: Some(1 << 20), ..Default::default() }
        )
    );
    for wrong in [[("fsck", "full")], [("iops", "many")], [("bps", "1")]] {
        let message = refused(modify(&id, &wrong).await, Code::InvalidArgument);
        assert!(message.contains(wrong[0].0) || message.contains("bytes per second"), "{message}");
    }
    refused(modify("", &[]).await, Code::InvalidArgument);
    refused(modify("fake", &[]).await, Code::NotFound);
    refused(modify("file/n1/default/none", &[("iops", "1")]).await, Code::NotFound);
}

#[tokio::test]
async fn the_capacity_is_that_of_the_directory() {
    let fixture = Fixture::new();
    let capacity = |request: csi::GetCapacityRequest| {
        let service = fixture.service.clone();
        async move {
            let answer = service.get_capacity(Request::new(request)).await?;
            Ok::<i64, Status>(answer.into_inner().available_capacity)
        }
    };
    let topology = |node| {
        let segments = map(&[("topology.cleat.csi.storage/node", node)]);
        Some(csi::Topology { segments })
    };
    assert!(capacity(csi::GetCapacityRequest::default()).await.unwrap() > 0);
    let here =
        csi::GetCapacityRequest { accessible_topology: topology("n1"), ..Default::default() };
    assert!(capacity(here).await.unwrap() > 0);
    let other =
        csi::GetCapacityRequest { accessible_topology: topology("n2"), ..Default::default() };
    assert_eq!(capacity(other).await.unwrap(), 0);
    let shared = csi::GetCapacityRequest {
        volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter)],
        ..Default::default()
    };
    assert_eq!(capacity(shared).await.unwrap(), 0);
    let unknown =
        csi::GetCapacityRequest { parameters: map(&[("size", "1")]), ..Default::default() };
    refused(capacity(unknown).await, Code::InvalidArgument);
}
