//! librbd's caches: a write may complete before the OSDs have it; a FUA write and a flush must not.

use std::time::Duration;

use cleat_core::request::{Flags, Op};
use test_kit::ceph::Cluster as TestCluster;

use crate::checks::pattern;
use crate::client::{Job, Volume, job, write};
use crate::rbd::{MIB, fresh, local};

/// How long the test watches that a request does not complete.
const WATCHED: Duration = Duration::from_millis(500);

/// While the OSD is paused, only a cache can complete a request.
#[test]
fn flush_and_fua_do_not_complete_before_cached_writes_are_on_the_osds() {
    let cluster = TestCluster::start();
    for (name, options, holds_back) in [
        ("plain", "", false),
        ("writeback", "&config.rbd_cache=true&config.rbd_cache_policy=writeback", true),
        ("writearound", "&config.rbd_cache=true&config.rbd_cache_policy=writearound", true),
        ("writethrough", "&config.rbd_cache=true&config.rbd_cache_policy=writethrough", false),
        ("clean", "&config.rbd_cache=true&config.rbd_cache_max_dirty=0", false),
    ] {
        let volume = local(&format!("{}{options}", fresh(&cluster, name, 16 * MIB)));
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
        if holds_back {
            volume.client().one(write(0, &pattern(1, 4096)));
            must_wait(job(Op::Flush, 0, 0));
        } else {
            must_wait(write(0, &pattern(1, 4096)));
        }
        for durable in [write(4 * MIB, &pattern(2, 4096)), job(Op::WriteZeroes, 8 * MIB, 4096)] {
            cluster.tell("pause osd");
            must_wait(durable.with(fua));
        }
        assert!(volume.client().read(0, 4096) == pattern(1, 4096), "{name}");
        assert!(volume.client().read(4 * MIB, 4096) == pattern(2, 4096), "{name}");
        assert!(volume.client().read(8 * MIB, 4096).iter().all(|byte| *byte == 0), "{name}");
    }
}
