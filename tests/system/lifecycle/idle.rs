//! Idle volumes: their workers sleep, and changes are noticed nevertheless.

use nix::sys::signal::Signal;

use cleat_api::v1::MappingState;
use test_kit::node::{Machine, SIZE, Supervisor, index_of, kill, wait_until};
use test_kit::process::{wakeups, wakeups_of_main_thread};

/// Maps a volume, and waits until two pings of its worker, which is kept busy, wake none of the workers `idle`.
fn wait_until_idle(machine: &Machine, supervisor: &Supervisor, idle: &[u32]) {
    let busy = supervisor.map("busy", &machine.volume("busy")).unwrap();
    let count = || idle.iter().map(|pid| wakeups(*pid)).sum::<u64>();
    wait_until("only the busy worker wakes up", || {
        let (before, pings) = (count(), wakeups_of_main_thread(busy.worker_pid));
        wait_until("the busy worker is pinged", || {
            machine.kernel.read(index_of(&busy), 0, 512).unwrap();
            wakeups_of_main_thread(busy.worker_pid) >= pings + 2
        });
        count() == before
    });
    supervisor.unmap("busy").unwrap();
}

#[test]
fn idle_workers_sleep_and_what_happens_to_them_is_noticed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let (grows, stops) = ("a", "m");
    let growing = supervisor.map(grows, &machine.volume(grows)).unwrap();
    let stopping = supervisor.map(stops, "mem:1M").unwrap();
    wait_until_idle(&machine, &supervisor, &[growing.worker_pid, stopping.worker_pid]);

    let pid = stopping.worker_pid;
    kill(pid, Signal::SIGSTOP);
    let (kernel, index) = (machine.kernel.clone(), index_of(&stopping));
    let reading = std::thread::spawn(move || kernel.read(index, 0, 4096).unwrap());
    let failed = supervisor.wait_for(stops, MappingState::Failed);
    assert!(failed.message.contains(&pid.to_string()), "{}", failed.message);
    kill(pid, Signal::SIGCONT);
    assert_eq!(reading.join().unwrap(), [0; 4096]);
    supervisor.wait_for(stops, MappingState::Mapped);

    let file = std::fs::File::options().write(true).open(machine.path(grows)).unwrap();
    file.set_len(2 * SIZE + 100).unwrap();
    wait_until("the mapping has the new size", || {
        supervisor.get(grows).unwrap().size_bytes == 2 * SIZE
    });
    supervisor.unmap(grows).unwrap();
    supervisor.unmap(stops).unwrap();
    machine.assert_clean();
}
