//! A mapping of a volume of objects, while its worker and its supervisor die, and while its keys change.

use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cleat::backends::REGISTRY;
use cleat_api::v1::{HealthRequest, MappingState};
use cleat_backend::store::{Layout, Source};
use nix::sys::signal::Signal;

use test_kit::minio;
use test_kit::node::{Machine, SIZE, Supervisor, index_of, is_alive, kill, wait_until};

const SECTOR: u64 = 512;

/// Creates a volume in a directory of the machine.
fn volume(machine: &Machine) -> String {
    let store = REGISTRY.store(&format!("dir:{}", machine.directory.path().display())).unwrap();
    assert!(store.connect().unwrap().create("v", SIZE, &Layout::default()).unwrap());
    store.volume("v", None).unwrap().to_string()
}

/// Counts the tail files of the machine.
fn tails(machine: &Machine) -> usize {
    let files = std::fs::read_dir(machine.config.runtime_dir.join("workers")).unwrap().flatten();
    files.filter(|file| file.path().extension().is_some_and(|suffix| suffix == "tail")).count()
}

/// Both are killed one after the other, in the middle of writes that the kernel then repeats. Each acknowledged write
/// is there afterwards, also in a mapping that is made anew.
#[test]
fn acknowledged_writes_survive_the_death_of_worker_and_supervisor() {
    const WRITES: u64 = 150;
    let machine = Machine::new();
    let uri = volume(&machine);
    let mut supervisor = machine.start();
    let mapping = supervisor.map("v", &uri).unwrap();
    let index = index_of(&mapping);
    let (supervisor, written) = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for number in 0..WRITES {
                let stamp = number.to_le_bytes().repeat(64);
                machine.kernel.write(index, number * SECTOR, &stamp).unwrap();
            }
        });
        let mut worker = mapping.worker_pid;
        for supervisor_first in [true, false, true] {
            if supervisor_first {
                supervisor.crash();
                kill(worker, Signal::SIGKILL);
            } else {
                kill(worker, Signal::SIGKILL);
                supervisor.crash();
            }
            wait_until("the worker has exited", || !is_alive(worker));
            supervisor = machine.start();
            worker = supervisor.wait_for("v", MappingState::Mapped).worker_pid;
        }
        (supervisor, writing.join())
    });
    written.unwrap();
    let check = |index| {
        for number in 0..WRITES {
            let found = machine.kernel.read(index, number * SECTOR, 512).unwrap();
            assert!(found == number.to_le_bytes().repeat(64), "write {number}");
        }
    };
    check(index);
    assert_eq!(tails(&machine), 1, "writes are acknowledged early");
    supervisor.unmap("v").unwrap();
    assert_eq!(tails(&machine), 0);
    let again = supervisor.map("v", &uri).unwrap();
    check(index_of(&again));
    supervisor.unmap("v").unwrap();
    machine.assert_clean();
}

/// Creates the volume `v` in a bucket of MinIO, below a prefix of the machine, and returns its URI.
fn volume_in_bucket(machine: &Machine, options: &str) -> String {
    let prefix = machine.directory.path().file_name().unwrap().to_str().unwrap();
    let prefix = prefix.trim_start_matches('.');
    let endpoint = minio::shared().endpoint();
    let store = format!("s3://{}/{prefix}?endpoint=http://{endpoint}{options}", minio::BUCKET);
    let store = REGISTRY.store(&store).unwrap();
    assert!(store.connect().unwrap().create("v", SIZE, &Layout::default()).unwrap());
    store.volume("v", None).unwrap().to_string()
}

/// Replaces the file as a program does that changes it at once.
fn replace(path: &Path, content: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).unwrap();
    std::fs::set_permissions(&next, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::rename(&next, path).unwrap();
}

/// Returns what the health check says of credentials that cannot be renewed.
fn problem_of_credentials(supervisor: &Supervisor) -> Option<String> {
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    let mut checks = health.into_inner().checks.into_iter();
    checks.find(|check| check.name == "credentials").map(|check| check.finding)
}

/// The worker first gets keys that the store refuses, then a file without keys, then keys that the store accepts. No
/// command is given, no request fails, and the worker stays the same.
#[test]
fn keys_that_are_replaced_in_the_file_are_used_without_a_command() {
    let machine = Machine::new();
    let file = machine.path("keys");
    let keys = std::fs::read_to_string(minio::shared().credentials()).unwrap();
    replace(&file, &keys);
    let uri = volume_in_bucket(&machine, &format!("&credentials_file={}", file.display()));
    let supervisor = machine.start();
    let first = supervisor.map("v", &uri).unwrap();
    machine.kernel.write(index_of(&first), 0, &[1; 512]).unwrap();
    supervisor.unmap("v").unwrap();
    // The new worker has no data in memory, so each read needs the store.
    let mapping = supervisor.map("v", &uri).unwrap();
    let index = index_of(&mapping);
    let (ends, kernel) = (Arc::new(AtomicBool::new(false)), machine.kernel.clone());
    let has_ended = Arc::clone(&ends);
    let reader = std::thread::spawn(move || {
        while !has_ended.load(Ordering::SeqCst) {
            assert_eq!(kernel.read(index, 0, 512).unwrap(), [1_u8; 512]);
        }
    });
    let wrong = keys.replace("secret_access_key = ", "secret_access_key = wrong");
    assert_ne!(wrong, keys);
    replace(&file, &wrong);
    wait_until("the store refuses the worker", || {
        let outage = supervisor.get("v").unwrap().outage;
        outage.is_some_and(|outage| outage.reason.contains("is not that of the access key"))
    });
    machine.kernel.write(index, 4096, &[2; 512]).unwrap();
    replace(&file, "[default]\n");
    wait_until("the daemon reports the file", || {
        let problem = problem_of_credentials(&supervisor);
        problem.is_some_and(|finding| finding.contains("aws_access_key_id is missing"))
    });
    replace(&file, &keys);
    wait_until("the store accepts the worker", || {
        supervisor.get("v").unwrap().outage.is_none()
            && problem_of_credentials(&supervisor).is_none()
    });
    ends.store(true, Ordering::SeqCst);
    reader.join().unwrap();
    assert_eq!(supervisor.get("v").unwrap().worker_pid, mapping.worker_pid);
    supervisor.unmap("v").unwrap();
    let again = supervisor.map("v", &uri).unwrap();
    assert_eq!(machine.kernel.read(index_of(&again), 4096, 512).unwrap(), [2_u8; 512]);
    supervisor.unmap("v").unwrap();
    machine.assert_clean();
}

/// Creates a clone `w` of a volume `v` in its place. Returns its URI.
fn clone_of(uri: &str) -> String {
    let (place, options) = uri.split_once("/v?").unwrap();
    let store = REGISTRY.store(&format!("{place}?{options}")).unwrap();
    let connected = store.connect().unwrap();
    let on = || |_, _| ControlFlow::Continue(());
    connected.snapshots().unwrap().create("v", "s", &mut on()).unwrap();
    let source = Source { store: store.spec(), name: "v", snapshot: Some("s") };
    let clones = connected.clones().unwrap();
    assert!(clones.create_clone(&source, "w", &Layout::default(), &mut on()).unwrap());
    store.volume("w", None).unwrap().to_string()
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_volume_of_a_bucket_and_its_clone_share_a_cache() {
    const BLOCK: u64 = 4096;
    const BLOCKS: u64 = 64;
    let mut machine = Machine::new();
    let caches = machine.path("cache");
    machine.config.cache.directory = Some(caches.clone());
    let keys = minio::shared().credentials();
    let uri = volume_in_bucket(&machine, &format!("&credentials_file={}", keys.display()));
    let supervisor = machine.start();
    let stamp = |number: u64| number.to_le_bytes().repeat(512);
    let index = index_of(&supervisor.map("v", &uri).unwrap());
    for number in 0..BLOCKS {
        machine.kernel.write(index, number * BLOCK, &stamp(number)).unwrap();
    }
    supervisor.unmap("v").unwrap();
    wait_until("the cache is removed with the mapping", || entries(&caches).is_empty());
    let clone = clone_of(&uri);
    let space = || -> u64 {
        let files = entries(&caches).into_iter().flat_map(|cache| entries(&cache));
        files.map(|file| file.metadata().unwrap().blocks() * 512).sum()
    };
    let read = |name: &str, uri: &str| {
        let index = index_of(&supervisor.map(name, uri).unwrap());
        for number in 0..BLOCKS {
            let found = machine.kernel.read(index, number * BLOCK, 4096).unwrap();
            assert!(found == stamp(number), "{name}, block {number}");
        }
    };
    read("v", &uri);
    wait_until("everything is in the cache", || space() > BLOCKS * BLOCK);
    let before = space();
    read("w", &clone);
    // What is offered to the cache is written by another thread.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(space() < before + BLOCKS * BLOCK / 2, "{} bytes after {before}", space());
    let [shared] = &entries(&caches)[..] else { panic!("{:?}", entries(&caches)) };
    assert_eq!(entries(&shared.join("users")).len(), 2);
    supervisor.unmap("v").unwrap();
    assert!(shared.exists());
    supervisor.unmap("w").unwrap();
    wait_until("the cache is removed with its last user", || entries(&caches).is_empty());
    machine.assert_clean();
}
