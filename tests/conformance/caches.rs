//! librbd's caches: a write that has completed is on the OSDs, whatever the pool or the image configures.

use std::time::Duration;

use cleat::backends::REGISTRY;
use cleat_core::error::ErrorKind;
use cleat_core::request::{Flags, Op};
use test_kit::ceph::{Cluster as TestCluster, POOL};

use crate::checks::pattern;
use crate::client::{Job, Volume, job, write};
use crate::rbd::{MIB, fresh, local, refused};

/// How long the test watches that a request does not complete.
const WATCHED: Duration = Duration::from_millis(500);

/// Stores an option of librbd in the image itself.
fn configure(cluster: &TestCluster, image: &str, option: &str, value: &str) {
    let image = format!("{POOL}/{image}");
    cluster.rbd(&["config", "image", "set", &image, option, value]).unwrap();
}

/// While the OSD is paused, only a cache can complete a request. The image of the second case enables
/// librbd's cache by itself, which then writes through.
#[test]
fn writes_do_not_complete_before_they_are_on_the_osds() {
    let cluster = TestCluster::start();
    for (name, options) in [("plain", &[][..]), ("through", &[("rbd_cache", "true")][..])] {
        let uri = fresh(&cluster, name, 16 * MIB);
        for (option, value) in options {
            configure(&cluster, name, option, value);
        }
        let volume = local(&uri);
        let fua = Flags { fua: true, ..Flags::default() };
        // librbd's caches write through before the first flush. The first writes create the objects, so
        // that later writes do not have to update the object map first.
        volume.client().run((0..3).map(|n| write(n * 4 * MIB, &pattern(9, 4096))).collect());
        volume.client().one(job(Op::Flush, 0, 0));
        let must_wait = |job: Job| {
            let what = format!("{name}: {:?}", job.request);
            std::thread::scope(|scope| {
                let request = scope.spawn(|| volume.client().one(job));
                std::thread::sleep(WATCHED);
                let answered = request.is_finished();
                cluster.tell("resume osd");
                assert!(!answered, "{what} completed");
            });
        };
        cluster.tell("pause osd");
        must_wait(write(0, &pattern(1, 4096)));
        for durable in [write(4 * MIB, &pattern(2, 4096)), job(Op::WriteZeroes, 8 * MIB, 4096)] {
            cluster.tell("pause osd");
            must_wait(durable.with(fua));
        }
        assert!(volume.client().read(0, 4096) == pattern(1, 4096), "{name}");
        assert!(volume.client().read(4 * MIB, 4096) == pattern(2, 4096), "{name}");
        assert!(volume.client().read(8 * MIB, 4096).iter().all(|byte| *byte == 0), "{name}");
    }
}

/// Acknowledged writes would be in the worker's memory only, and lost when it is killed.
#[test]
fn a_cache_that_holds_writes_back_is_refused() {
    let cluster = TestCluster::start();
    let uri = fresh(&cluster, "back", 16 * MIB);
    for option in ["rbd_cache=true", "rbd_cache_policy=writeback", "rbd_cache_policy=writearound"] {
        let error = REGISTRY.volume(&format!("{uri}&config.{option}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{option}");
        assert!(error.message().contains(option), "{}", error.message());
    }
    for (option, value) in
        [("rbd_cache", "true"), ("rbd_cache_policy", "writeback"), ("rbd_cache_max_dirty", "1M")]
    {
        configure(&cluster, "back", option, value);
    }
    let error = refused(&uri);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", error.report());
    assert!(error.message().contains("rbd_cache"), "{}", error.message());
    let image = format!("{POOL}/back");
    cluster.rbd(&["config", "image", "rm", &image, "rbd_cache_policy"]).unwrap();
    local(&uri).client().one(write(0, &pattern(1, 4096)));
}
