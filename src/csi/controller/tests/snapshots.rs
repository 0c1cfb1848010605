//! Tests of the calls for snapshots, and of volumes that are made from snapshots and from volumes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;
use crate::controller::places::Place;
use crate::controller::volumes::content_source;
use crate::secrets::Secrets;

fn write(path: &Path, text: &[u8]) {
    fs::File::options().write(true).open(path).unwrap().write_all_at(text, 8192).unwrap();
}

fn content(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()[8192..8197].to_vec()
}

fn from(name: &str, source: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        volume_content_source: Some(content_source(source)),
        ..new_volume(name)
    }
}

#[tokio::test]
async fn a_repeated_creation_finds_the_snapshot() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.volume("one").await, fixture.volume("two").await);
    let snapshot = fixture.snapshot(&one, "snapshot-1").await.unwrap();
    assert_eq!(snapshot.snapshot_id, "file/n1/default/one@csi-snapshot-1");
    assert_eq!((&snapshot.source_volume_id, snapshot.size_bytes), (&one, SIZE));
    assert!(
        snapshot.ready_to_use
            && snapshot.creation_time.as_ref().is_some_and(|time| time.seconds > 0)
    );
    write(&fixture.file("one"), b"later");
    assert_eq!(fixture.snapshot(&one, "snapshot-1").await.unwrap(), snapshot);
    // The same name for another volume.
    let message = refused(fixture.snapshot(&two, "snapshot-1").await, Code::AlreadyExists);
    assert!(message.contains("default/one"), "{message}");
    refused(fixture.snapshot(&one, "").await, Code::InvalidArgument);
    refused(fixture.snapshot("", "snapshot-2").await, Code::InvalidArgument);
    refused(fixture.snapshot("fake", "snapshot-2").await, Code::NotFound);
    refused(fixture.snapshot("file/n1/default/none", "snapshot-2").await, Code::NotFound);
    let unknown = csi::CreateSnapshotRequest {
        source_volume_id: one,
        name: "snapshot-2".to_owned(),
        parameters: map(&[("size", "1")]),
        ..Default::default()
    };
    let answer = fixture.service.create_snapshot(Request::new(unknown)).await;
    refused(answer, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_with_snapshots_stays_until_they_are_deleted() {
    let fixture = Fixture::new();
    let volume = fixture.volume("one").await;
    // Names that cannot be used as they are.
    let mut ids = Vec::new();
    for name in ["snapshot-1", "a/b", "ü"] {
        let snapshot = fixture.snapshot(&volume, name).await.unwrap();
        assert_eq!(fixture.snapshot(&volume, name).await.unwrap(), snapshot);
        ids.push(snapshot.snapshot_id);
    }
    let message = refused(fixture.delete(&volume).await, Code::FailedPrecondition);
    assert!(message.contains("csi-snapshot-1"), "{message}");
    for id in ids.iter().chain(&ids) {
        fixture.delete_snapshot(id).await.unwrap();
    }
    fixture.delete_snapshot("fake").await.unwrap();
    fixture.delete_snapshot("file/n1/default/none@csi-s").await.unwrap();
    refused(fixture.delete_snapshot("").await, Code::InvalidArgument);
    fixture.delete(&volume).await.unwrap();
}

#[tokio::test]
async fn snapshots_are_listed_and_described() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.volume("one").await, fixture.volume("two").await);
    let mut ids = Vec::new();
    for (volume, name) in [(&one, "a"), (&one, "b"), (&one, "c"), (&two, "d"), (&two, "e")] {
        ids.push(fixture.snapshot(volume, name).await.unwrap().snapshot_id);
    }
    let request = csi::ListSnapshotsRequest::default;
    let all = fixture.list_snapshots(request()).await.unwrap();
    assert_eq!(all, (ids.clone(), String::new()));
    let mut token = String::new();
    let mut paged = Vec::new();
    loop {
        let page = csi::ListSnapshotsRequest { max_entries: 2, starting_token: token, ..request() };
        let (entries, next) = fixture.list_snapshots(page).await.unwrap();
        assert!(entries.len() <= 2);
        paged.extend(entries);
        token = next;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(paged, ids);
    let of = |source: &str, id: &str| csi::ListSnapshotsRequest {
        source_volume_id: source.to_owned(),
        snapshot_id: id.to_owned(),
        ..request()
    };
    for (request, found) in [
        (of(&two, ""), &ids[3..]),
        (of("", &ids[1]), &ids[1..2]),
        (of(&one, &ids[1]), &ids[1..2]),
        (of(&two, &ids[1]), &[]),
        (of("fake", ""), &[]),
        (of("", "fake"), &[]),
        (of("", "file/n1/default/one@none"), &[]),
        (of("file/n1/default/none", ""), &[]),
    ] {
        assert_eq!(fixture.list_snapshots(request).await.unwrap().0, *found);
    }
    let wrong = csi::ListSnapshotsRequest { starting_token: "invalid-token".into(), ..request() };
    refused(fixture.list_snapshots(wrong).await, Code::Aborted);
    let negative = csi::ListSnapshotsRequest { max_entries: -1, ..request() };
    refused(fixture.list_snapshots(negative).await, Code::InvalidArgument);

    let get = |id: &str| {
        let request = csi::GetSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        let service = fixture.service.clone();
        async move { service.get_snapshot(Request::new(request)).await }
    };
    let found = get(&ids[0]).await.unwrap().into_inner().snapshot.unwrap();
    assert_eq!((found.snapshot_id, found.size_bytes), (ids[0].clone(), SIZE));
    refused(get("file/n1/default/one@none").await, Code::NotFound);
    refused(get("fake").await, Code::NotFound);
    refused(get("").await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_is_made_from_a_snapshot() {
    let fixture = Fixture::new();
    let source = fixture.volume("one").await;
    write(&fixture.file("one"), b"first");
    let snapshot = fixture.snapshot(&source, "s").await.unwrap().snapshot_id;
    write(&fixture.file("one"), b"later");
    let volume = fixture.create(from("copy", &snapshot)).await.unwrap();
    assert_eq!(volume.content_source, Some(content_source(&snapshot)));
    assert_eq!(content(&fixture.file("copy")), b"first");
    assert_eq!(fixture.create(from("copy", &snapshot)).await.unwrap(), volume);
    // The same name without a source is another volume.
    refused(fixture.create(new_volume("copy")).await, Code::AlreadyExists);

    let larger = csi::CreateVolumeRequest {
        capacity_range: range(2 * SIZE, 0),
        ..from("larger", &snapshot)
    };
    let larger = fixture.create(larger).await.unwrap();
    assert_eq!(larger.capacity_bytes, 2 * SIZE);
    assert_eq!(content(&fixture.file("larger")), b"first");
    let smaller =
        csi::CreateVolumeRequest { capacity_range: range(1, SIZE / 2), ..from("x", &snapshot) };
    refused(fixture.create(smaller).await, Code::OutOfRange);
    refused(fixture.create(from("x", "file/n1/default/one@none")).await, Code::NotFound);
    let fake = csi::VolumeContentSource {
        r#type: Some(csi::volume_content_source::Type::Snapshot(
            csi::volume_content_source::SnapshotSource { snapshot_id: "fake".to_owned() },
        )),
    };
    let fake = csi::CreateVolumeRequest { volume_content_source: Some(fake), ..new_volume("x") };
    refused(fixture.create(fake).await, Code::NotFound);
    // A clone does not need its source.
    fixture.delete_snapshot(&snapshot).await.unwrap();
    fixture.delete(&source).await.unwrap();
    assert_eq!(content(&fixture.file("copy")), b"first");
}

#[tokio::test]
async fn a_clone_that_was_interrupted_before_its_growth_is_completed() {
    let fixture = Fixture::new();
    let source = fixture.volume("one").await;
    let request =
        csi::CreateVolumeRequest { capacity_range: range(2 * SIZE, 0), ..from("copy", &source) };
    fixture.create(request.clone()).await.unwrap();
    // As the call leaves it after the clone was made.
    let file = fs::File::options().write(true).open(fixture.file("copy")).unwrap();
    file.set_len(SIZE.cast_unsigned()).unwrap();
    assert_eq!(fixture.create(request).await.unwrap().capacity_bytes, 2 * SIZE);
}

/// The other steps of a creation: the copy is incomplete, and the mutable parameters are not stored yet.
#[tokio::test]
async fn a_clone_that_was_interrupted_at_another_step_is_completed() {
    let fixture = Fixture::new();
    let source = fixture.volume("one").await;
    write(&fixture.file("one"), b"first");
    let incomplete = fixture.file(".cleat/new/copy");
    fs::create_dir_all(incomplete.parent().unwrap()).unwrap();
    fs::write(&incomplete, "a part").unwrap();
    let request =
        csi::CreateVolumeRequest { parameters: map(&[("iops", "5")]), ..from("copy", &source) };
    let volume = fixture.create(request.clone()).await.unwrap();
    assert_eq!(content(&fixture.file("copy")), b"first");
    assert!(!incomplete.exists());

    let place = Place::File { directory: "default".to_owned() };
    let open = fixture.service.0.open(&place, &Secrets::default()).unwrap();
    let removed = map(&[("csi.mutable.iops", "")]);
    assert!(open.labels().unwrap().set("copy", &removed).unwrap());
    assert_eq!(fixture.create(request).await.unwrap(), volume);
}

#[tokio::test]
async fn a_volume_is_made_from_a_volume() {
    let fixture = Fixture::new();
    let source = fixture.volume("one").await;
    write(&fixture.file("one"), b"first");
    let volume = fixture.create(from("copy", &source)).await.unwrap();
    assert_eq!(volume.content_source, Some(content_source(&source)));
    assert_eq!(content(&fixture.file("copy")), b"first");
    assert_eq!(fixture.create(from("copy", &source)).await.unwrap(), volume);
    let other = fixture.volume("two").await;
    refused(fixture.create(from("copy", &other)).await, Code::AlreadyExists);
    refused(fixture.create(from("x", "file/n1/default/none")).await, Code::NotFound);
    // Also to another directory, and to no other kind of storage.
    let parameters = map(&[("directory", "fast")]);
    let fast = csi::CreateVolumeRequest { parameters, ..from("copy", &source) };
    fixture.create(fast).await.unwrap();
    assert_eq!(content(&fixture.directory.path().join("fast/copy")), b"first");
    let parameters = map(&[("clusterID", "c1"), ("pool", "p")]);
    let rbd = csi::CreateVolumeRequest { parameters, ..from("copy", &source) };
    refused(fixture.create(rbd).await, Code::InvalidArgument);
    fixture.delete(&source).await.unwrap();
}

#[tokio::test]
async fn a_volume_is_encrypted_if_its_source_is() {
    let fixture = Fixture::new();
    let encrypted = || map(&[("encrypted", "true")]);
    let request = csi::CreateVolumeRequest {
        parameters: encrypted(),
        capacity_range: range(1, 0),
        ..new_volume("safe")
    };
    let safe = fixture.create(request.clone()).await.unwrap();
    assert_eq!(safe.capacity_bytes, 32 << 20, "the header has to fit");
    assert_eq!(safe.volume_context, encrypted());
    assert_eq!(fixture.create(request).await.unwrap(), safe);
    let small = csi::CreateVolumeRequest {
        parameters: encrypted(),
        capacity_range: range(1, 16 << 20),
        ..new_volume("small")
    };
    refused(fixture.create(small).await, Code::OutOfRange);

    let open = fixture.volume("open").await;
    let snapshot = fixture.snapshot(&safe.volume_id, "s").await.unwrap().snapshot_id;
    for (source, parameters) in [
        (&safe.volume_id, BTreeMap::new()),
        (&snapshot, map(&[("encrypted", "false")])),
        (&open, encrypted()),
    ] {
        let range = range(0, 0);
        let request =
            csi::CreateVolumeRequest { parameters, capacity_range: range, ..from("c", source) };
        let message = refused(fixture.create(request).await, Code::InvalidArgument);
        assert!(message.contains("encrypted"), "{message}");
    }
    let request = csi::CreateVolumeRequest {
        parameters: encrypted(),
        capacity_range: range(0, 0),
        ..from("c", &snapshot)
    };
    fixture.create(request).await.unwrap();
}
