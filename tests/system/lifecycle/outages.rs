//! Backend outages, which the supervisor waits for, and workers that keep crashing, which it gives up.
//! Both are reported.

use std::fs::File;
use std::time::{Duration, Instant};

use cleat_api::v1::{HealthRequest, MapOptions, Mapping, MappingState, SetOptionsRequest};
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{
    Machine, Supervisor, assert_code, claim, index_of, kill, request, wait_until,
};
use test_kit::stopwatch::Stopwatch;

fn set(supervisor: &Supervisor, on_outage: &str, iops: Option<u64>) -> Mapping {
    let (target, on_outage) = ("a".into(), on_outage.into());
    let request =
        SetOptionsRequest { target, on_outage, iops, bytes_per_s: None, ..Default::default() };
    supervisor.block_on(supervisor.client().set_options(request)).unwrap().into_inner()
}

fn faulty(machine: &Machine) -> String {
    format!("fault:{}", machine.volume("a"))
}

#[test]
fn requests_survive_an_outage_and_a_new_supervisor_reports_it() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &faulty(&machine)).unwrap();
    assert_eq!(mapping.options.as_ref().unwrap().on_outage, "queue");
    let index = index_of(&mapping);
    supervisor.set_fault("error=retry");
    let kernel = machine.kernel.clone();
    let writer = std::thread::spawn(move || kernel.write(index, 0, &[7; 512]));
    let reported_outage = |supervisor: &Supervisor| {
        let mut outage = None;
        wait_until("the outage is reported", || {
            outage = supervisor.get("a").unwrap().outage;
            outage.as_ref().is_some_and(|outage| outage.queued == 1)
        });
        outage.unwrap()
    };
    let first = reported_outage(&supervisor);
    assert_eq!((first.reason.as_str(), first.policy.as_str()), ("injected: error=retry", "queue"));
    // The device and the mapping remain.
    assert_eq!(supervisor.get("a").unwrap().state(), MappingState::Mapped);
    assert_eq!(supervisor.map("a", &mapping.uri).unwrap().device, mapping.device);
    supervisor.crash();
    let supervisor = machine.start();
    assert_eq!(reported_outage(&supervisor).since_unix_ms, first.since_unix_ms);
    assert!(!writer.is_finished());
    supervisor.set_fault("");
    writer.join().unwrap().unwrap();
    wait_until("the end of the outage is reported", || {
        supervisor.get("a").unwrap().outage.is_none()
    });
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [7; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_policy_change_applies_at_once_and_survives_worker_and_supervisor() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mut asked = request("a", &faulty(&machine));
    asked.options =
        Some(MapOptions { on_outage: "queue:1h".into(), iops: Some(5000), ..Default::default() });
    let mapping = supervisor.map_with(asked.clone()).unwrap();
    let options = mapping.options.clone().unwrap();
    assert_eq!((options.on_outage.as_str(), options.iops), ("queue:1h", Some(5000)));
    let index = index_of(&mapping);
    supervisor.set_fault("error=retry");
    let kernel = machine.kernel.clone();
    let writer = std::thread::spawn(move || kernel.write(index, 0, &[7; 512]));
    wait_until("the write waits", || {
        supervisor.get("a").unwrap().outage.is_some_and(|o| o.queued == 1)
    });
    let changed = set(&supervisor, "fail", None).options.unwrap();
    assert_eq!((changed.on_outage.as_str(), changed.iops), ("fail", Some(5000)));
    assert!(writer.join().unwrap().is_err(), "the waiting write fails with the new policy");
    assert_code(supervisor.map_with(asked), Code::AlreadyExists, "policy");

    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    supervisor.crash();
    let supervisor = machine.start();
    supervisor.set_fault("error=retry");
    let begun = Stopwatch::start();
    assert!(machine.kernel.write(index, 0, &[8; 512]).is_err());
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "the new supervisor does not apply the policy"
    );
    supervisor.set_fault("");
    let nothing = SetOptionsRequest { target: "a".into(), ..Default::default() };
    let refused = supervisor.block_on(supervisor.client().set_options(nothing));
    assert_code(refused, Code::InvalidArgument, "no option");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_backend_that_refuses_a_new_worker_is_retried() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[5; 512]).unwrap();
    // Another process claims the file while no worker finds it.
    let (here, away) = (machine.path("a"), machine.path("away"));
    std::fs::rename(&here, &away).unwrap();
    kill(mapping.worker_pid, Signal::SIGKILL);
    let claimed = File::options().write(true).open(&away).unwrap();
    wait_until("the worker has released the file", || claim(&claimed).is_ok());
    std::fs::rename(&away, &here).unwrap();
    let mut waiting = Mapping::default();
    wait_until("the refusal is reported", || {
        waiting = supervisor.get("a").unwrap();
        waiting.outage.as_ref().is_some_and(|outage| outage.reason.contains("is being written by"))
    });
    wait_until("the message says that the mapping waits", || {
        supervisor.get("a").unwrap().message.contains("waiting for the backend")
    });
    assert!(waiting.last_worker_end.contains("was killed by SIGKILL"), "{waiting:?}");
    drop(claimed);
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!((now.outage, now.message.as_str()), (None, ""));
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [5; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_worker_that_keeps_crashing_fails_the_mapping_and_map_retries_it() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[5; 512]).unwrap();
    // Use each signal in turn. SIGKILL is also the signal of the out-of-memory killer.
    let ways = [Signal::SIGKILL, Signal::SIGABRT, Signal::SIGILL];
    let mut killed = Vec::new();
    let until = Instant::now() + Duration::from_secs(90);
    let failed = loop {
        let now = supervisor.get("a").unwrap();
        if now.state() == MappingState::Failed {
            break now;
        }
        if now.worker_pid != 0 && !killed.contains(&now.worker_pid) {
            kill(now.worker_pid, ways[killed.len() % ways.len()]);
            killed.push(now.worker_pid);
        }
        assert!(Instant::now() < until, "not given up after {} workers", killed.len());
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!((9..=12).contains(&killed.len()), "{killed:?}");
    for part in ["10 attempts", "SIGABRT", "SIGILL", "SIGKILL", "waited for 300 s", "cleat map"] {
        assert!(failed.message.contains(part), "{part}: {}", failed.message);
    }
    let last = killed.last().unwrap().to_string();
    assert!(failed.last_worker_end.contains(&last), "{last}: {}", failed.last_worker_end);
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    assert!(format!("{health:?}").contains("failed: a"), "{health:?}");
    // No more workers are started.
    std::thread::sleep(Duration::from_millis(300));
    assert!(machine.workers().is_empty());

    let again = supervisor.map("a", &mapping.uri).unwrap();
    assert_eq!((again.state(), &again.device), (MappingState::Mapped, &mapping.device));
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [5; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}
