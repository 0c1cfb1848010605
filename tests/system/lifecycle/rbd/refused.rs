//! Images that cannot be mapped: the call fails in time with its cause and a repair, and leaves no state.

use std::time::Instant;

use test_kit::ceph::{Cluster, ID, POOL};
use tonic::{Code, Status};

use super::Scene;
use test_kit::node::repair;

impl Scene<'_> {
    fn refused(&self, uri: &str) -> Status {
        let begun = Instant::now();
        let status = self.supervisor.map("x", uri).unwrap_err();
        println!("figures: after {:?}: {status}", begun.elapsed());
        self.machine.assert_clean();
        status
    }
}

#[test]
fn a_failed_map_reports_its_cause_and_leaves_no_state() {
    let cluster = Cluster::start();
    let scene = Scene::on(&cluster);
    scene.image("a");
    let good = scene.uri("a");
    let forged = scene.machine.path("forged.keyring");
    let key = "AQBbCH1lAAAAABAAZ5F5Yr0zQAg9tGv0n8bRJQ==";
    std::fs::write(&forged, format!("[client.{ID}]\nkey = {key}\n")).unwrap();
    let own = cluster.keyring(ID).display().to_string();
    let pooled = format!("{POOL}/a");
    for (uri, code, part, way) in [
        (
            scene.uri("missing"),
            Code::NotFound,
            "cannot open the RBD image volumes/missing",
            "rbd info volumes/missing",
        ),
        (
            scene.uri("a@never"),
            Code::NotFound,
            "cannot open the RBD image volumes/a@never",
            "rbd info volumes/a@never",
        ),
        (good.replace(&pooled, "nowhere/a"), Code::NotFound, "nowhere/a", "ceph osd pool ls"),
        (
            good.replace(&pooled, &format!("{POOL}/none/a")),
            Code::NotFound,
            "no namespace none",
            "rbd namespace create volumes/none",
        ),
        (
            format!("{good}&config.no_such_option=1"),
            Code::InvalidArgument,
            "no_such_option",
            "ceph config ls",
        ),
        (
            good.replace(&own, &forged.display().to_string()),
            Code::PermissionDenied,
            "volumes/a",
            "keyring=PATH",
        ),
        (
            good.replace(&own, "/nowhere/keyring"),
            Code::NotFound,
            "the keyring /nowhere/keyring",
            "keyring=PATH",
        ),
        (good.replace("ceph.conf", "none.conf"), Code::NotFound, "none.conf", "conf=PATH"),
        (format!("rbd:{POOL}/a"), Code::NotFound, "volumes/a", "conf=PATH"),
    ] {
        let status = scene.refused(&uri);
        assert_eq!(status.code(), code, "{uri}: {status}");
        assert!(status.message().contains(part), "{uri}: {status}");
        assert!(repair(&status).contains(way), "{uri}: {:?}", repair(&status));
        // Only where the image is the cause.
        let names_image = repair(&status).contains("rbd info");
        assert_eq!(names_image, way.contains("rbd info"), "{uri}: {:?}", repair(&status));
    }
    for (gone, back) in
        [("kill mon", "start mon"), ("pause mon", "resume mon"), ("pause osd", "resume osd")]
    {
        cluster.tell(gone);
        let status = scene.refused(&good);
        assert_eq!(status.code(), Code::DeadlineExceeded, "{gone}: {status}");
        assert!(repair(&status).contains("ceph status"), "{gone}: {:?}", repair(&status));
        cluster.tell(back);
    }
    scene.map("a");
    scene.supervisor.unmap("a").unwrap();
    scene.machine.assert_clean();
}
