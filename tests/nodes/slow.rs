//! A Ceph cluster that answers late.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use test_kit::ceph;

/// For how long the OSD stops, and for how long it works then, again and again. Requests wait for up to four seconds.
const STOPPED: Duration = Duration::from_secs(4);
const WORKS: Duration = Duration::from_secs(1);

/// Runs an action while the OSD stops again and again.
pub(crate) fn while_slow<T>(ceph: &ceph::Cluster, action: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                ceph.tell("pause osd");
                std::thread::sleep(STOPPED);
                ceph.tell("resume osd");
                std::thread::sleep(WORKS);
            }
        });
        // Also if the action panics.
        let _end = End(&is_over);
        action()
    })
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
