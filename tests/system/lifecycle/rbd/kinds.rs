//! Images of every kind, also those that krbd does not support: each under load, while its worker dies.

use nix::sys::signal::Signal;
use test_kit::ceph::{Cluster, POOL};

use super::load::{SIZE, held};
use super::{Scene, spec};
use test_kit::node::{kill, wait_until};

/// The name of an image, and the options of `rbd create` besides the size.
const KINDS: [(&str, &[&str]); 6] = [
    ("tenant/namespaced", &[]),
    ("split", &["--data-pool", "elsewhere"]),
    ("striped", &["--stripe-unit", "64K", "--stripe-count", "4"]),
    ("journaled", &["--image-feature", "exclusive-lock,journaling"]),
    ("mirrored-by-journal", &["--image-feature", "exclusive-lock,journaling"]),
    ("mirrored-by-snapshots", &[]),
];

#[test]
fn images_of_every_kind_are_mapped_and_survive_their_worker() {
    let cluster = Cluster::start();
    cluster.make_pool("elsewhere");
    let caps =
        ["mon", "profile rbd", "osd", "profile rbd pool=volumes, profile rbd pool=elsewhere"];
    cluster.ceph(&[&["auth", "caps", "client.volumes"][..], &caps].concat());
    let rbd = |arguments: &[&str]| {
        cluster.rbd(arguments).unwrap();
    };
    rbd(&["namespace", "create", &format!("{POOL}/tenant")]);
    rbd(&["mirror", "pool", "enable", POOL, "image"]);
    // The peer cluster does not have to exist.
    rbd(&["mirror", "pool", "peer", "add", POOL, "client.remote@elsewhere"]);
    let scene = Scene::on(&cluster);
    for (image, how) in KINDS {
        let (spec, size) = (spec(image), format!("{SIZE}B"));
        rbd(&[&["create", &spec, "--size", &size][..], how].concat());
        if let Some(mode) = image.strip_prefix("mirrored-by-") {
            rbd(&["mirror", "image", "enable", &spec, mode.trim_end_matches('s')]);
        }
        let name = image.replace('/', "-");
        let mapping = scene.supervisor.map_with(scene.named(&name, image)).unwrap();
        let load = scene.load(&mapping);
        load.wait_for_more();
        if image == "mirrored-by-snapshots" {
            rbd(&["mirror", "image", "snapshot", &spec]);
            load.wait_for_more();
        }
        kill(mapping.worker_pid, Signal::SIGKILL);
        wait_until("another worker serves", || {
            scene.supervisor.get(&name).unwrap().generation > mapping.generation
        });
        load.wait_for_more();
        let written = load.finish();
        scene.supervisor.unmap(&name).unwrap();
        assert_eq!(held(&scene.content(image)), written, "{image}");
    }
    scene.machine.assert_clean();
}
