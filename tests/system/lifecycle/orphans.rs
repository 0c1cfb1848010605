//! Devices whose records are lost while their workers serve: a map of the volume under the device's name adopts
//! them.

use cleat_api::v1::{MapOptions, MapRequest, MappingState};
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{
    Machine, Supervisor, assert_code, index_of, is_alive, kill, repair, request, wait_until,
};

/// Crashes the supervisor, removes all records, and starts another supervisor.
fn lose_records(machine: &Machine, supervisor: Supervisor) -> Supervisor {
    supervisor.crash();
    for directory in
        [machine.config.state_dir.join("mappings"), machine.config.runtime_dir.join("records")]
    {
        for entry in std::fs::read_dir(&directory).into_iter().flatten() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
    let supervisor = machine.start();
    assert_orphan(&supervisor);
    supervisor
}

/// Checks that `a`, the only device, has no record and that the way to adopt it is shown.
fn assert_orphan(supervisor: &Supervisor) {
    let listed = supervisor.list();
    let [orphan] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!((orphan.name.as_str(), orphan.state()), ("a", MappingState::Orphan));
    let hint = "cleat map URI --name a adopts it";
    assert!(orphan.message.contains(hint), "{}", orphan.message);
    let unknown = supervisor.get("a").unwrap_err();
    assert!(repair(&unknown).contains(hint), "{unknown:?}");
}

#[test]
fn a_device_whose_record_is_lost_is_adopted_by_a_map_of_its_volume() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let options = MapOptions { block_size: 4096, ..MapOptions::default() };
    let asked = MapRequest { options: Some(options), ..request("a", &uri) };
    let mapping = supervisor.map_with(asked).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[5; 4096]).unwrap();
    let supervisor = lose_records(&machine, supervisor);

    // Under another name, the device would need a second worker.
    let refused = supervisor.map("b", &uri).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    let hint = format!("cleat map '{uri}' --name a adopts it");
    assert!(repair(&refused).contains(&hint), "{}", repair(&refused));
    assert!(repair(&refused).contains(&mapping.device), "{}", repair(&refused));

    let adopted = supervisor.map("a", &uri).unwrap();
    assert_eq!(adopted.state(), MappingState::Mapped);
    let of = |mapping: &cleat_api::v1::Mapping| {
        let id = mapping.mapping_id.clone();
        (id, mapping.device.clone(), mapping.worker_pid, mapping.generation, mapping.block_size)
    };
    assert_eq!(of(&adopted), of(&mapping));
    assert_eq!((adopted.uri, adopted.size_bytes), (mapping.uri.clone(), mapping.size_bytes));
    assert_eq!(machine.kernel.read(index, 0, 4096).unwrap(), [5; 4096]);

    // The record is durable, and complete enough for the next worker.
    supervisor.crash();
    let supervisor = machine.start();
    assert_eq!(of(&supervisor.wait_for("a", MappingState::Mapped)), of(&mapping));
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("another worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.generation == mapping.generation + 1
    });
    assert_eq!(machine.kernel.read(index, 0, 4096).unwrap(), [5; 4096]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_device_without_a_record_is_adopted_only_with_its_volume_and_its_options() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let (uri, other) = (machine.volume("a"), machine.volume("b"));
    let mapping = supervisor.map("a", &uri).unwrap();
    let supervisor = lose_records(&machine, supervisor);
    let none = MapOptions::default;
    for (uri, options, part) in [
        (other.clone(), none(), "serves another volume"),
        (format!("{uri}?direct=true"), none(), "other options of the volume"),
        (uri.clone(), MapOptions { connections: 4, ..none() }, "connections=1"),
        (uri.clone(), MapOptions { read_only: true, ..none() }, "read_only=false"),
        (uri.clone(), MapOptions { block_size: 4096, ..none() }, "another block size"),
    ] {
        let asked = MapRequest { options: Some(options), ..request("a", &uri) };
        let refused = supervisor.map_with(asked).unwrap_err();
        assert!(repair(&refused).contains(&format!("cleat unmap {}", mapping.device)), "{part}");
        assert_code::<()>(Err(refused), Code::AlreadyExists, part);
        assert_orphan(&supervisor);
        machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    }
    // Another volume under another name is not affected.
    supervisor.map("b", &other).unwrap();
    supervisor.unmap("b").unwrap();
    assert!(supervisor.unmap(&mapping.device).unwrap());
    wait_until("its worker has exited", || !is_alive(mapping.worker_pid));
    machine.assert_clean();
}

/// The worker has the file open. Its successor must not get another file by the same path.
#[test]
fn an_adopted_device_never_gets_another_volume() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[3; 512]).unwrap();
    let supervisor = lose_records(&machine, supervisor);
    std::fs::rename(machine.path("a"), machine.path("away")).unwrap();
    machine.volume("a");
    supervisor.map("a", &uri).unwrap();
    assert_eq!(machine.kernel.read(index_of(&mapping), 0, 512).unwrap(), [3; 512]);
    kill(mapping.worker_pid, Signal::SIGKILL);
    let failed = supervisor.wait_for("a", MappingState::Failed);
    assert!(failed.message.contains("the volume of a was replaced"), "{}", failed.message);
    supervisor.force("a").unwrap();
    machine.assert_clean();
}
