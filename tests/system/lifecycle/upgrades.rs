//! Planned handovers from the serving worker to a new one, and failures at every step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{MapOptions, MapRequest, Mapping, MappingState, UpgradeRequest};
use nix::sys::signal::Signal;
use tokio_stream::StreamExt as _;

use test_kit::node::{
    Machine, Supervisor, assert_code, index_of, is_alive, kill, request, wait_halted, wait_until,
};

/// Threads that write numbered blocks and check that they read the same data, until `finish`.
struct Load {
    end: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<Duration>>,
}

impl Load {
    fn on(machine: &Machine, mapping: &Mapping) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let index = index_of(mapping);
        let threads = (0..3_u64).map(|client| {
            let (kernel, end, done) = (machine.kernel.clone(), Arc::clone(&end), Arc::clone(&done));
            std::thread::spawn(move || {
                let mut longest = Duration::ZERO;
                let mut round = 0_u64;
                while !end.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    // Small requests, and requests larger than the receive buffer.
                    let length = if round.is_multiple_of(3) { 160 << 10 } else { 4096 };
                    let at = client * (300 << 10) + (round % 8) * 4096;
                    let data = vec![u8::try_from(round % 251).unwrap(); length];
                    kernel.write(index, at, &data).unwrap();
                    let length = u32::try_from(length).unwrap();
                    assert_eq!(kernel.read(index, at, length).unwrap(), data);
                    longest = longest.max(began.elapsed());
                    done.fetch_add(1, Ordering::Relaxed);
                    round += 1;
                }
                longest
            })
        });
        Self { threads: threads.collect(), end, done }
    }

    /// Waits until more rounds are done.
    fn wait_for_progress(&self) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until("I/O continues", || self.done.load(Ordering::Relaxed) > before + 3);
    }

    /// Stops the threads and returns the duration of the longest round.
    fn finish(mut self) -> Duration {
        self.end.store(true, Ordering::Relaxed);
        self.threads.drain(..).map(|thread| thread.join().unwrap()).max().unwrap()
    }
}

/// Asserts that the longest round stays below `limit` in one of three runs. On a busy machine any
/// process may be delayed for seconds, but a slow handover would be slow in each run.
fn some_run_within(limit: Duration, run: impl Fn() -> Duration) {
    let mut runs = std::iter::repeat_with(run).take(3);
    assert!(runs.any(|longest| longest < limit), "no run stays below {limit:?}");
}

/// Waits until `pid` is the only worker. On a busy machine a killed worker may exit after the call.
fn wait_until_only_worker(machine: &Machine, pid: u32) {
    wait_until("the other worker has exited", || machine.workers() == [pid]);
}

fn wait_gone(pid: u32) {
    wait_until("the old worker has exited", || !is_alive(pid));
}

#[test]
fn workers_are_handed_over_under_load() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let options = MapOptions { connections: 3, ..MapOptions::default() };
    let volume = MapRequest { options: Some(options), ..request("a", &machine.volume("a")) };
    let mut mapping = supervisor.map_with(volume).unwrap();
    let first = mapping.clone();
    assert!(!first.worker_version.is_empty());
    let load = Load::on(&machine, &mapping);
    for _ in 0..10 {
        load.wait_for_progress();
        let event = supervisor.hand_over();
        assert_eq!((event.name.as_str(), &event.to_version), ("a", &first.worker_version));
        let now = supervisor.get("a").unwrap();
        assert_ne!(now.worker_pid, mapping.worker_pid);
        assert!(now.generation > mapping.generation);
        assert_eq!(now.device, first.device);
        wait_gone(mapping.worker_pid);
        assert_eq!(machine.workers(), [now.worker_pid]);
        println!("paused {} us", event.paused_us);
        mapping = now;
    }
    load.wait_for_progress();
    println!("longest round: {:?}", load.finish());
    // The kernel still uses the same sockets.
    assert_eq!(machine.kernel.live_connections(index_of(&mapping)), 3);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn workers_of_the_current_build_are_upgraded_only_with_force() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.map("b", "mem:1M").unwrap();
    let events = supervisor.upgrade(false);
    assert!(events.iter().all(|event| event.outcome() == Outcome::Current), "{events:?}");
    // The daemon is current, too, because its executable is unchanged on disk.
    let all = supervisor.upgrade_with(UpgradeRequest::default()).unwrap();
    assert_eq!(all.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), ["", "a", "b"]);
    assert!(all.iter().all(|event| event.outcome() == Outcome::Current), "{all:?}");
    let one = UpgradeRequest { targets: vec!["b".into()], force: true, workers_only: true };
    let events = supervisor.upgrade_with(one).unwrap();
    assert_eq!((events.len(), events[0].outcome()), (1, Outcome::HandedOver));
    let none = UpgradeRequest { targets: vec!["c".into()], ..UpgradeRequest::default() };
    let unknown = "no mapping has the name, URI or device c";
    assert_code(supervisor.upgrade_with(none), tonic::Code::NotFound, unknown);
}

#[test]
fn memory_volumes_survive_a_handover() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("m", "mem:1M").unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 4096, &[7; 8192]).unwrap();
    for round in 1..4 {
        supervisor.hand_over();
        assert_eq!(machine.kernel.read(index, 4096, 8192).unwrap(), [7; 8192], "round {round}");
    }
    supervisor.unmap("m").unwrap();
    machine.assert_clean();
}

#[test]
fn counters_continue_after_a_handover_and_a_later_crash_is_recovered() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    let writes = |supervisor: &Supervisor| {
        let stats = supervisor.stats();
        assert_eq!(stats.connections, 1);
        stats.ops.iter().find(|op| op.op == "write").unwrap().count
    };
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    supervisor.hand_over();
    machine.kernel.write(index, 0, &[2; 512]).unwrap();
    wait_until("both writes are counted", || writes(&supervisor) == 2);
    let worker = supervisor.get("a").unwrap().worker_pid;
    kill(worker, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != worker
    });
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [2; 512]);
    supervisor.hand_over();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_crash_of_the_supervisor_at_any_point_of_a_handover_leaves_one_serving_worker() {
    let mut points = 0;
    loop {
        let machine = Machine::new();
        let supervisor = machine.start();
        let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
        supervisor.crash();
        let load = Load::on(&machine, &mapping);
        let (supervisor, halted) = machine.start_halting(points);
        let mut client = supervisor.client();
        let asked = UpgradeRequest { force: true, workers_only: true, targets: Vec::new() };
        let call = supervisor.spawn(async move {
            let mut stream = client.upgrade(asked).await.unwrap().into_inner();
            while stream.next().await.is_some() {}
        });
        let point = wait_halted(&halted, &call);
        println!("crash at point {points}: {point:?}");
        supervisor.crash();
        // I/O continues without a supervisor.
        load.wait_for_progress();
        // The next supervisor keeps one of the two workers and stops the other.
        let supervisor = machine.start();
        let now = supervisor.wait_for("a", MappingState::Mapped);
        load.wait_for_progress();
        wait_until("one worker remains", || machine.workers() == [now.worker_pid]);
        assert_eq!(machine.kernel.live_connections(index_of(&mapping)), 1);
        let longest = load.finish();
        // The mapping was not recovered: that would delay I/O until a new connection. A slow disk is no recovery.
        assert!(now.message.is_empty() || now.message.contains("state directory"), "{now:?}");
        println!("longest round: {longest:?}");
        let event = supervisor.hand_over();
        assert_eq!(event.name, "a");
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 9, "only {points} points were passed");
}

/// Replaces the executable of the machine's future workers by `program`.
fn replace_executable(machine: &Machine, program: &str) {
    let name = machine.path("cleat");
    std::fs::remove_file(&name).unwrap();
    std::os::unix::fs::symlink(program, &name).unwrap();
}

#[test]
fn the_old_worker_serves_on_when_the_new_one_does_not_start() {
    some_run_within(Duration::from_secs(1), longest_round_with_failed_start);
}

fn longest_round_with_failed_start() -> Duration {
    let mut machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let load = Load::on(&machine, &mapping);
    supervisor.crash();
    let timeout = std::mem::replace(&mut machine.config.map.timeout, Duration::from_secs(3));
    let supervisor = machine.start();
    // A program that exits at once, one that runs and sends no message, and a missing one.
    for (program, reason) in
        [("/bin/false", "worker"), ("/usr/bin/yes", "in time"), ("/nowhere", "cannot start")]
    {
        replace_executable(&machine, program);
        let event = supervisor.fail_to_hand_over();
        assert!(event.message.contains(reason), "{program}: {event:?}");
        let now = supervisor.wait_for("a", MappingState::Mapped);
        assert_eq!(now.worker_pid, mapping.worker_pid);
        load.wait_for_progress();
    }
    replace_executable(&machine, env!("CARGO_BIN_EXE_cleat"));
    supervisor.crash();
    machine.config.map.timeout = timeout;
    let supervisor = machine.start();
    // Failed handovers do not count as failures of the mapping, so there is no backoff.
    supervisor.hand_over();
    let longest = load.finish();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
    longest
}

#[test]
fn the_old_worker_serves_on_when_the_new_one_cannot_open_the_volume() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let shrunk = std::fs::File::options().write(true).open(machine.path("a")).unwrap();
    shrunk.set_len(4096).unwrap();
    let event = supervisor.fail_to_hand_over();
    assert!(event.message.contains("smaller"), "{event:?}");
    supervisor.wait_for_worker(mapping.worker_pid);
    shrunk.set_len(test_kit::node::SIZE).unwrap();
    // A renamed file is still the same open file.
    std::fs::rename(machine.path("a"), machine.path("b")).unwrap();
    supervisor.hand_over();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// Maps a volume with a supervisor that calls `act` once, at `point`, with the machine and the pid of the
/// serving worker.
fn start_acting(
    point: &'static str,
    act: impl Fn(&Machine, u32) + Send + Sync + 'static,
) -> (Arc<Machine>, Supervisor, Mapping) {
    let machine = Arc::new(Machine::new());
    let serving = Arc::new(AtomicU32::new(0));
    let (seen, known) = (Arc::clone(&machine), Arc::clone(&serving));
    let done = AtomicBool::new(false);
    let supervisor = machine.start_with(Some(Arc::new(move |here: &str| {
        if here == point && !done.swap(true, Ordering::SeqCst) {
            act(&seen, known.load(Ordering::SeqCst));
        }
        false
    })));
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    serving.store(mapping.worker_pid, Ordering::SeqCst);
    (machine, supervisor, mapping)
}

/// Returns the pids of all workers except `serving`.
fn others(machine: &Machine, serving: u32) -> Vec<u32> {
    machine.workers().into_iter().filter(|pid| *pid != serving).collect()
}

#[test]
fn a_handover_fails_when_the_new_worker_hangs() {
    for (point, limit) in [("successor ready", 700), ("before the pause", 3000)] {
        some_run_within(Duration::from_millis(limit), || longest_round_with_hung_successor(point));
    }
}

fn longest_round_with_hung_successor(point: &'static str) -> Duration {
    let (machine, supervisor, mapping) = start_acting(point, |machine, serving| {
        for pid in others(machine, serving) {
            kill(pid, Signal::SIGSTOP);
        }
    });
    let load = Load::on(&machine, &mapping);
    load.wait_for_progress();
    let event = supervisor.fail_to_hand_over();
    println!("{point}: {}", event.message);
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(now.worker_pid, mapping.worker_pid);
    wait_until_only_worker(&machine, mapping.worker_pid);
    load.wait_for_progress();
    let longest = load.finish();
    supervisor.hand_over();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
    longest
}

#[test]
fn a_handover_fails_when_the_new_worker_dies() {
    for point in ["successor ready", "before the pause", "handover offered"] {
        some_run_within(Duration::from_secs(1), || longest_round_with_dead_successor(point));
    }
}

fn longest_round_with_dead_successor(point: &'static str) -> Duration {
    let (machine, supervisor, mapping) = start_acting(point, |machine, serving| {
        for pid in others(machine, serving) {
            kill(pid, Signal::SIGKILL);
            wait_gone(pid);
        }
    });
    let load = Load::on(&machine, &mapping);
    supervisor.fail_to_hand_over();
    supervisor.wait_for_worker(mapping.worker_pid);
    load.wait_for_progress();
    let longest = load.finish();
    supervisor.hand_over();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
    longest
}

#[test]
fn an_old_worker_that_dies_during_a_handover_is_replaced() {
    for point in ["successor recorded", "successor ready", "handover offered", "taken over"] {
        let (machine, supervisor, mapping) =
            start_acting(point, |_, serving| kill(serving, Signal::SIGKILL));
        let load = Load::on(&machine, &mapping);
        load.wait_for_progress();
        // On a busy machine the handover may fail before it reaches the point; retry it.
        wait_until("the handover reaches the point", || {
            let event = supervisor.upgrade(true).pop().unwrap();
            println!("{point}: {:?} {}", event.outcome(), event.message);
            !is_alive(mapping.worker_pid)
        });
        load.wait_for_progress();
        let now = supervisor.wait_for("a", MappingState::Mapped);
        assert_eq!(machine.workers(), [now.worker_pid]);
        assert_ne!(now.worker_pid, mapping.worker_pid);
        load.finish();
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
    }
}

#[test]
fn a_handover_fails_when_the_old_worker_hangs() {
    let (machine, supervisor, mapping) =
        start_acting("before the pause", |_, serving| kill(serving, Signal::SIGSTOP));
    let load = Load::on(&machine, &mapping);
    load.wait_for_progress();
    let event = supervisor.fail_to_hand_over();
    assert!(event.message.contains("in time"), "{event:?}");
    println!("{}", event.message);
    wait_until_only_worker(&machine, mapping.worker_pid);
    kill(mapping.worker_pid, Signal::SIGCONT);
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(now.worker_pid, mapping.worker_pid);
    load.wait_for_progress();
    load.finish();
    assert_eq!(machine.kernel.live_connections(index_of(&mapping)), 1);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_handover_fails_while_the_backend_hangs() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}?fault.hang=true&fault.ops=write", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    let kernel = machine.kernel.clone();
    let write = std::thread::spawn(move || kernel.write(index, 0, &[3; 512]).unwrap());
    wait_until("the write hangs", || supervisor.stats().in_flight == 1);
    let event = supervisor.fail_to_hand_over();
    assert!(event.message.contains("its requests did not end in time"), "{event:?}");
    supervisor.wait_for_worker(mapping.worker_pid);
    wait_until_only_worker(&machine, mapping.worker_pid);
    supervisor.set_fault("");
    write.join().unwrap();
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [3; 512]);
    // A fault plan that was set at runtime is handed over.
    supervisor.set_fault("error=broken&ops=write");
    supervisor.hand_over();
    machine.kernel.write(index, 0, &[4; 512]).unwrap_err();
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [3; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn builds_with_a_common_protocol_version_hand_over_in_both_directions() {
    let mut machine = Machine::new();
    machine.variable = Some(("CLEAT_TEST_PROTOCOL", "1-3"));
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let load = Load::on(&machine, &mapping);
    supervisor.crash();
    for (variable, name) in
        [(None, "down"), (Some(("CLEAT_TEST_PROTOCOL", "1-9")), "up"), (None, "down again")]
    {
        machine.variable = variable;
        let supervisor = machine.start();
        println!("{name}: {:?}", supervisor.hand_over());
        load.wait_for_progress();
        supervisor.crash();
    }
    load.finish();
    let supervisor = machine.start();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_handover_between_builds_without_a_common_protocol_version_is_refused() {
    let mut machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    machine.variable = Some(("CLEAT_TEST_PROTOCOL", "7-9"));
    let supervisor = machine.start();
    let event = supervisor.fail_to_hand_over();
    for part in ["supports 7 to 9", "supports 1", env!("CARGO_PKG_VERSION")] {
        assert!(event.message.contains(part), "{event:?} does not contain {part}");
    }
    assert!(!event.repair.is_empty());
    let now = supervisor.get("a").unwrap();
    assert_eq!((now.worker_pid, now.state()), (mapping.worker_pid, MappingState::Mapped));
    assert!(now.message.contains("stays until it is unmapped"), "{now:?}");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_worker_without_a_handover_command_stays_and_is_reported() {
    for (unknown, generation) in [("prepare_handover", 1), ("offer_handover", 2)] {
        some_run_within(Duration::from_secs(1), || {
            longest_round_with_unknown_command(unknown, generation)
        });
    }
}

/// Tries a handover to or from a worker that does not support the command `unknown`.
fn longest_round_with_unknown_command(unknown: &'static str, generation: u64) -> Duration {
    let mut machine = Machine::new();
    machine.variable = Some(("CLEAT_TEST_UNKNOWN", unknown));
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let load = Load::on(&machine, &mapping);
    let event = supervisor.fail_to_hand_over();
    assert!(event.message.contains(&format!("{unknown:?}")), "{event:?}");
    load.wait_for_progress();
    let now = supervisor.get("a").unwrap();
    assert_eq!((now.worker_pid, now.generation), (mapping.worker_pid, generation));
    assert!(now.message.contains("stays until it is unmapped"), "{now:?}");
    let longest = load.finish();
    supervisor.unmap("a").unwrap();
    supervisor.crash();
    machine.assert_clean();
    longest
}
