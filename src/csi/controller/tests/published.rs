//! Which volumes are published to a node, in which mode, and how many.

use super::*;
use crate::attributes::Attributes;

impl Fixture {
    async fn publish(&self, id: &str, readonly: bool) -> Result<BTreeMap<String, String>, Status> {
        let request = csi::ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: "n1".to_owned(),
            volume_capability: Some(capability(Mode::SingleNodeWriter)),
            readonly,
            ..Default::default()
        };
        let answer = self.service.controller_publish_volume(Request::new(request)).await?;
        Ok(answer.into_inner().publish_context)
    }

    async fn unpublish(&self, id: &str, node: &str) {
        let request = csi::ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        self.service.controller_unpublish_volume(Request::new(request)).await.unwrap();
    }

    /// Returns the nodes of each volume, as the list has them.
    async fn published(&self) -> Vec<Vec<String>> {
        let request = Request::new(csi::ListVolumesRequest::default());
        let entries = self.service.list_volumes(request).await.unwrap().into_inner().entries;
        entries.into_iter().map(|entry| entry.status.unwrap().published_node_ids).collect()
    }

    /// Starts another process with the same directories.
    fn restarted(self) -> Self {
        let service = ControllerService(controller_of(&self.directory, Arc::clone(&self.node)));
        Self { service, ..self }
    }
}

#[tokio::test]
async fn a_volume_is_published_in_one_mode_until_it_is_unpublished() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    assert_eq!(fixture.published().await, [[""; 0]]);
    assert_eq!(fixture.publish(&id, false).await.unwrap(), map(&[]));
    let fixture = fixture.restarted();
    fixture.publish(&id, false).await.unwrap();
    assert_eq!(fixture.published().await, [["n1"]]);
    let message = refused(fixture.publish(&id, true).await, Code::AlreadyExists);
    assert!(message.contains("read-write, not read-only"), "{message}");
    // A stale call for another node takes nothing from this one.
    fixture.unpublish(&id, "n2").await;
    assert_eq!(fixture.published().await, [["n1"]]);
    fixture.unpublish(&id, "n1").await;
    let context = fixture.publish(&id, true).await.unwrap();
    assert!(Attributes::parse_published(&map(&[]), &context).unwrap().read_only);
    refused(fixture.publish(&id, false).await, Code::AlreadyExists);
    fixture.unpublish(&id, "").await;
    assert_eq!(fixture.published().await, [[""; 0]]);
}

#[tokio::test]
async fn a_node_gets_as_many_volumes_as_it_can_have() {
    let fixture = Fixture::new();
    let mut ids = Vec::new();
    for number in 0..=LIMIT {
        ids.push(fixture.volume(&format!("pvc-{number}")).await);
    }
    for id in &ids[..LIMIT - 1] {
        fixture.publish(id, false).await.unwrap();
    }
    let fixture = fixture.restarted();
    let (last, extra) = (&ids[LIMIT - 1], &ids[LIMIT]);
    fixture.publish(last, false).await.unwrap();
    let message = refused(fixture.publish(extra, false).await, Code::ResourceExhausted);
    assert!(message.contains("can have 4 volumes"), "{message}");
    fixture.publish(last, false).await.unwrap();
    fixture.unpublish(last, "n1").await;
    fixture.publish(extra, false).await.unwrap();
    // A volume that is gone takes no place, whoever has removed it.
    refused(fixture.publish(last, false).await, Code::ResourceExhausted);
    std::fs::remove_file(fixture.file("pvc-0")).unwrap();
    fixture.publish(last, false).await.unwrap();
    fixture.delete(&ids[1]).await.unwrap();
    fixture.publish(&fixture.volume("pvc-0").await, false).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_of_a_file_can_be_used_where_the_file_is() {
    let fixture = Fixture::new();
    let id = fixture.volume("pvc-1").await;
    let topology =
        |node: &str| csi::Topology { segments: map(&[("topology.cleat.csi.storage/node", node)]) };
    let snapshot = |name: &str, nodes: &[&str]| {
        let requisite = nodes.iter().map(|node| topology(node)).collect();
        let required = csi::TopologyRequirement { requisite, preferred: Vec::new() };
        let request = csi::CreateSnapshotRequest {
            source_volume_id: id.clone(),
            name: name.to_owned(),
            accessibility_requirements: Some(required),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.create_snapshot(Request::new(request)).await }
    };
    for nodes in [&["n1"][..], &["n2", "n1"], &[]] {
        let made = snapshot("s1", nodes).await.unwrap().into_inner().snapshot.unwrap();
        let known = if nodes.is_empty() { vec![topology("n1")] } else { Vec::new() };
        assert_eq!(made.accessible_topology, known);
    }
    refused(snapshot("s2", &["n2"]).await, Code::ResourceExhausted);
}

#[tokio::test]
async fn files_have_no_group_snapshots() {
    use csi::group_controller_server::GroupController;
    let fixture = Fixture::new();
    assert!(!fixture.service.0.has_group_snapshots().await);
    let id = fixture.volume("pvc-1").await;
    let create = |name: &str, ids: &[&str]| {
        let request = csi::CreateVolumeGroupSnapshotRequest {
            name: name.to_owned(),
            source_volume_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        };
        let service = fixture.service.clone();
        async move { service.create_volume_group_snapshot(Request::new(request)).await }
    };
    let message = refused(create("g", &[&id]).await, Code::FailedPrecondition);
    assert!(message.contains("have no group snapshots"), "{message}");
    refused(create("", &[&id]).await, Code::InvalidArgument);
    refused(create("g", &[]).await, Code::InvalidArgument);
    refused(create("g", &[&id, &id]).await, Code::InvalidArgument);
    refused(create("g", &["fake"]).await, Code::NotFound);
}
