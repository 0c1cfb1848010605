//! A mapping of a volume of objects, while its worker and its supervisor die.

use cleat::backends::REGISTRY;
use cleat_api::v1::MappingState;
use cleat_backend::store::Layout;
use nix::sys::signal::Signal;

use test_kit::node::{Machine, SIZE, index_of, is_alive, kill, wait_until};

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
