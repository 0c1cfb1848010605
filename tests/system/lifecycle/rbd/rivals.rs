//! Two machines that map the same image.

use std::time::Instant;

use cleat_api::v1::{MapRequest, MappingState};
use nix::sys::signal::Signal;
use test_kit::ceph::shared;
use tonic::Code;

use super::Scene;
use super::load::{Load, held};
use test_kit::node::{Machine, index_of, kill, repair, wait_until};

/// Starts a machine with its own node name and boot id.
fn node(name: &str) -> Scene<'static> {
    let mut machine = Machine::new();
    machine.config.node_name = name.to_owned();
    machine.boot_id = format!("boot of {name}");
    Scene { supervisor: machine.start(), machine, cluster: shared() }
}

#[test]
fn a_machine_takes_over_an_image_only_with_take_over() {
    let (first, second) = (node("web1"), node("web2"));
    first.image("wanted");
    let lost = first.map("wanted");
    let load = first.load(&lost);
    load.wait_for_more();
    let refused = second.supervisor.map_with(second.request("wanted")).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for part in ["node web1", &lost.mapping_id, &first.owner("wanted")] {
        assert!(refused.message().contains(part), "{part}: {refused}");
    }
    assert!(repair(&refused).contains("--take-over"), "{refused:?}");
    second.machine.assert_clean();
    load.wait_for_more();

    let request = MapRequest { take_over: true, ..second.request("wanted") };
    let mapping = second.supervisor.map_with(request).unwrap();
    let fenced = first.supervisor.wait_for("wanted", MappingState::Failed);
    assert!(fenced.message.contains("another client owns the volume"), "{fenced:?}");
    assert!(load.stop().iter().all(Result::is_err), "a write succeeded");
    let content = held(&first.content("wanted"));
    let load = Load::after(&second.machine.kernel, index_of(&mapping), content);
    load.wait_for_more();

    // The claim passes to successors of the worker, and the unmap of the fenced mapping does not
    // change it.
    kill(mapping.worker_pid, Signal::SIGKILL);
    let begun = Instant::now();
    wait_until("another worker serves", || {
        let now = second.supervisor.get("wanted").unwrap();
        now.generation > mapping.generation && now.state() == MappingState::Mapped
    });
    println!("figures: mapped {:?} after kill -9 of the worker", begun.elapsed());
    load.wait_for_more();
    first.supervisor.force("wanted").unwrap();
    first.machine.assert_clean();
    load.wait_for_more();
    let written = load.finish();
    second.supervisor.unmap("wanted").unwrap();
    second.machine.assert_clean();
    assert_eq!(held(&second.content("wanted")), written);
    // The image is free now, and the first machine maps it without a take-over.
    first.map("wanted");
    first.supervisor.unmap("wanted").unwrap();
}
