//! A file volume on a full file system: requests that need space wait or fail, depending on the policy, as those
//! of an image in a full pool do (see `rbd::full`); all others succeed.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use cleat_api::v1::{MappingState, Outage, SetOptionsRequest};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;

use super::metrics::scrape;
use test_kit::node::{Machine, SIZE, Supervisor, index_of, kill, wait_until};

/// A mounted file system of 512 KiB, which is half the size of a volume.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    fn on(machine: &Machine) -> Self {
        let is_root = nix::unistd::geteuid().is_root();
        assert!(is_root, "this test needs root: run it with sudo, or exclude it with --skip NAME");
        let path = machine.path("small");
        std::fs::create_dir(&path).unwrap();
        let options = Some("size=512k");
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), options).unwrap();
        Self(path)
    }

    /// Creates a file of [`SIZE`] bytes without data, and returns its URI.
    fn volume(&self) -> String {
        let path = self.0.join("a");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        format!("file:{}", path.display())
    }

    /// Uses all space that is left.
    fn fill(&self) {
        let mut filler = File::create(self.0.join("filler")).unwrap();
        let full = std::iter::repeat_with(|| filler.write_all(&[1; 4096])).find_map(Result::err);
        assert_eq!(full.unwrap().raw_os_error(), Some(libc::ENOSPC));
    }

    fn free(&self) {
        std::fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

fn outage(supervisor: &Supervisor) -> Option<Outage> {
    let mapping = supervisor.get("a").unwrap();
    assert_eq!(mapping.state(), MappingState::Mapped, "{mapping:?}");
    mapping.outage
}

fn on_outage(supervisor: &Supervisor, policy: &str) {
    let (target, on_outage) = ("a".into(), policy.into());
    let request = SetOptionsRequest { target, on_outage, ..Default::default() };
    supervisor.block_on(supervisor.client().set_options(request)).unwrap();
}

#[test]
fn writes_to_a_full_file_system_wait_or_fail_depending_on_the_policy() {
    let machine = Machine::new();
    let small = SmallFileSystem::on(&machine);
    let supervisor = machine.start();
    let index = index_of(&supervisor.map("a", &small.volume()).unwrap());
    let kernel = &machine.kernel;
    // Starts a write of a range without data on a thread, because it may block.
    let begin = |place: u64| {
        let kernel = kernel.clone();
        std::thread::spawn(move || kernel.write(index, place, &[5; 4096]))
    };
    let waits = || outage(&supervisor).is_some_and(|outage| outage.queued == 1);
    kernel.write(index, 0, &[1; 4096]).unwrap();
    small.fill();
    // Writes of a range with data succeed.
    kernel.write(index, 0, &[2; 4096]).unwrap();
    assert_eq!(outage(&supervisor), None);

    let writer = begin(64 << 10);
    wait_until("the write waits, and the outage is reported", waits);
    let now = outage(&supervisor).unwrap();
    assert_eq!(now.policy, "queue");
    for part in ["no space is left for", "small/a", "its file system is full", "remove data"] {
        assert!(now.reason.contains(part), "{part}: {}", now.reason);
    }
    let metrics = scrape(&machine);
    let of = |name: &str| metrics.value(name, &[("volume", "a")]);
    assert_eq!(of("cleat_volume_queued_requests"), Some(1.0));
    assert!(of("cleat_volume_outage_seconds").unwrap() > 0.0);
    assert_eq!(kernel.read(index, 64 << 10, 4096).unwrap(), [0; 4096]);
    kernel.write(index, 0, &[3; 4096]).unwrap();
    assert!(!writer.is_finished());
    small.free();
    writer.join().unwrap().unwrap();
    wait_until("the end of the outage is reported", || outage(&supervisor).is_none());
    assert_eq!(kernel.read(index, 64 << 10, 4096).unwrap(), [5; 4096]);

    small.fill();
    let writer = begin(128 << 10);
    wait_until("the write waits", waits);
    on_outage(&supervisor, "fail");
    // NBD_ENOSPC.
    for failed in [writer, begin(192 << 10)] {
        let error = failed.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("NBD error 28"), "{error}");
    }
    small.free();
    kernel.write(index, 192 << 10, &[6; 4096]).unwrap();
    wait_until("the end of the outage is reported", || outage(&supervisor).is_none());
    // No acknowledged write was lost, so no sync has failed.
    assert!(!supervisor.get("a").unwrap().sync_failed);
    supervisor.unmap("a").unwrap();
    let content = std::fs::read(small.0.join("a")).unwrap();
    for (place, byte) in [(0, 3), (64 << 10, 5), (128 << 10, 0), (192 << 10, 6)] {
        assert_eq!(content[place..][..4096], [byte; 4096], "at {place}");
    }
    machine.assert_clean();
}

/// The kernel sends the waiting request of a dead worker to the next one, which waits again.
#[test]
fn a_write_that_waits_for_space_survives_its_worker() {
    let machine = Machine::new();
    let small = SmallFileSystem::on(&machine);
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &small.volume()).unwrap();
    small.fill();
    let (kernel, index) = (machine.kernel.clone(), index_of(&mapping));
    let writer = std::thread::spawn(move || kernel.write(index, 0, &[7; 4096]));
    wait_until("the write waits", || outage(&supervisor).is_some_and(|o| o.queued == 1));
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the write waits in another worker", || {
        let now = supervisor.get("a").unwrap();
        let waits = now.outage.is_some_and(|o| o.queued == 1 && o.reason.contains("no space"));
        waits && ![0, mapping.worker_pid].contains(&now.worker_pid)
    });
    assert!(!writer.is_finished());
    small.free();
    writer.join().unwrap().unwrap();
    wait_until("the end of the outage is reported", || {
        supervisor.get("a").unwrap().outage.is_none()
    });
    supervisor.unmap("a").unwrap();
    assert_eq!(std::fs::read(small.0.join("a")).unwrap()[..4096], [7; 4096]);
    machine.assert_clean();
}
