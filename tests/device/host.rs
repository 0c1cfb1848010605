//! The host's half of the device tests: chooses the tests, boots virtual machines, and runs the tests
//! in them.
//!
//! A machine boots once and runs many tests. The tests of RBD share one machine and its cluster, the others that
//! need no systemd are divided among [`FAST_MACHINES`] machines with a small init, and those that test the
//! systemd unit get one with systemd. A test of the shutdown gets a machine of its own, which it powers off, and
//! which boots again for the checks. [`SLOTS`] machines run at a time.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use libtest_mimic::{Arguments, Trial};
use test_kit::csi_sanity;

/// Set in the guest: the file with the names of the tests to run, one per line.
pub(crate) const TRIALS: &str = "CLEAT_TEST_TRIALS";

/// Divides the tests for `make`: `short` selects those of [`SHORT`], `long` the others. Without it, all run.
const PART: &str = "CLEAT_TEST_PART";

/// The tests of `make test`, which run on one machine: one or two of each kind.
const SHORT: [&str; 17] = [
    "kernel_trait_suite_on_the_real_kernel",
    "row_40_map_prints_the_device_and_unmap_frees_it",
    "mapping_is_idempotent_and_conflicts_are_refused",
    "map_returns_with_the_links_of_existing_partitions",
    "unmap_is_refused_while_held_naming_the_holder",
    "a_restarted_supervisor_still_has_its_mappings",
    "resize_grows_the_device_online",
    "ext4_on_file_with_1_connections",
    "fio_verify_on_file_with_4_connections",
    "zeroes_and_discards_read_as_zero",
    "crash_of_a_worker_is_repaired_under_a_filesystem",
    "force_aborts_an_unmap_that_hangs",
    "outage_under_a_filesystem_delays_io_without_errors",
    "upgrade_of_workers_under_fio_on_ext4",
    "objects_survive_kills_under_a_filesystem",
    "csi_filesystem_from_stage_to_unstage",
    "csi_never_formats_content",
];

/// Set in the guest of a test of the shutdown: which of [`BOOTS`] it is.
pub(crate) const BOOT: &str = "CLEAT_TEST_BOOT";

/// The boots of a machine that a test powers off: it prepares the disks and powers off; then it checks them.
pub(crate) const BOOTS: [&str; 2] = ["prepare", "check"];

/// The number and the size of the disks that keep their content until the second boot.
const KEPT_DISKS: usize = 4;
const KEPT_DISK_BYTES: u64 = 512 << 20;

/// The number of machines for the tests that need neither systemd nor a cluster. The slot that is free first
/// takes the next machine. With more machines they end at nearly the same time, but each takes time to boot.
const FAST_MACHINES: usize = 4;

/// The number of machines that run at the same time. On two processors, three leave them idle for less time than two.
const SLOTS: usize = 3;

/// Exit status of this program when a virtual machine could not be run.
const EXIT_HARNESS: i32 = 123;

/// Exit status of `tests/vm/run` when a machine did not boot.
const EXIT_BOOT: i32 = 122;

/// One virtual machine and the tests that it runs.
struct Machine {
    name: String,
    /// The number of processors. Emulated ones that share a real one slow each other down by a fifth, since a
    /// processor may wait for a spinlock whose holder does not run; but some tests need to see races.
    processors: u32,
    init: &'static str,
    trials: Vec<String>,
    /// Its test powers it off.
    powers_off: bool,
}

/// Boots the machines that the chosen tests need, and runs the tests there. Returns the exit status of
/// the first machine that failed, or 0.
pub(crate) fn run(
    arguments: &Arguments,
    fast: &[Trial],
    systemd: &[Trial],
    shutdown: &[Trial],
) -> i32 {
    let all: Vec<&str> = [fast, systemd, shutdown].into_iter().flatten().map(Trial::name).collect();
    for name in SHORT {
        assert!(all.contains(&name), "there is no test {name} for `make test`");
    }
    let machines = machines(arguments, fast, systemd, shutdown);
    if machines.is_empty() {
        println!("no test is chosen");
        // A name that no test has must not pass. Without --exact, other test programs may have such a test.
        return if arguments.exact { EXIT_HARNESS } else { 0 };
    }
    let payload = tempfile::tempdir().expect("a temporary directory for the payload");
    fill(payload.path(), machines.iter().flat_map(|machine| &machine.trials));
    for machine in &machines {
        let list = payload.path().join(&machine.name);
        std::fs::write(list, machine.trials.join("\n")).expect("writing the list of tests");
    }
    let count = machines.len();
    let waiting = Mutex::new(VecDeque::from(machines));
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..SLOTS.min(count) {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().expect("no panic").pop_front();
                    let Some(machine) = next else { return };
                    let (code, results) = run_machine(payload.path(), &machine);
                    ended.lock().expect("no panic").push((machine.name, (code, results)));
                }
            });
        }
    });
    let mut ended = ended.into_inner().expect("no panic");
    ended.sort();
    println!();
    for (name, (_, results)) in &ended {
        let counts = results.trim_start_matches("test result: ");
        println!("{name}: {}", if counts.is_empty() { "no results" } else { counts });
    }
    ended.into_iter().map(|(_, (code, _))| code).find(|code| *code != 0).unwrap_or(0)
}

/// Boots a machine and runs its tests. A machine that does not boot, so that no test has begun, boots once more;
/// `scripts/run-suites` lists it as unstable if its tests pass then. A machine that fails later is not repeated: a panic of the
/// kernel may be what cleat has caused. Returns the exit status, and the line with the results.
fn run_machine(payload: &Path, machine: &Machine) -> (i32, String) {
    let (mut code, mut results) = boot(payload, machine);
    if code == EXIT_BOOT {
        println!("{}: has not booted, and boots again", machine.name);
        (code, results) = boot(payload, machine);
    }
    if code == 0 && reported(&results) != machine.trials.len() {
        println!("{}: not all of its tests have run", machine.name);
        code = EXIT_HARNESS;
    }
    (code, results)
}

/// Returns how many tests libtest's summary line counts as passed, failed or ignored.
fn reported(results: &str) -> usize {
    let words: Vec<&str> = results.split_whitespace().collect();
    let counts = words.windows(2).filter_map(|pair| {
        let kind = pair[1].trim_end_matches(';');
        ["passed", "failed", "ignored"].contains(&kind).then(|| pair[0].parse::<usize>().ok())?
    });
    counts.sum()
}

/// Divides the tests that `arguments` choose among machines.
fn machines(
    arguments: &Arguments,
    fast: &[Trial],
    systemd: &[Trial],
    shutdown: &[Trial],
) -> Vec<Machine> {
    let names = |trials: &[Trial]| -> Vec<String> {
        let chosen = trials.iter().filter(|trial| is_chosen(arguments, trial));
        chosen.map(|trial| trial.name().to_owned()).collect()
    };
    let (fast, systemd, shutdown) = (names(fast), names(systemd), names(shutdown));
    let (with_cluster, fast): (Vec<String>, Vec<String>) =
        fast.into_iter().partition(|name| name.contains("rbd"));
    // The tests of `make test` end before a second machine would be worth its start.
    let shards = if fast.len() <= SHORT.len() { fast.len().min(1) } else { FAST_MACHINES };
    let machine = |name: &str, processors, init, trials| Machine {
        name: name.to_owned(),
        processors,
        init,
        trials,
        powers_off: false,
    };
    let divided = (0..shards).map(|shard| {
        // Adjacent tests in the list are similar, also in length, so they go to different machines.
        let trials = fast.iter().skip(shard).step_by(shards).cloned().collect();
        machine(&format!("vm{}", shard + 1), if shard == 0 { 2 } else { 1 }, "fast", trials)
    });
    let powered_off = shutdown.into_iter().enumerate().map(|(number, name)| Machine {
        powers_off: true,
        ..machine(&format!("shutdown{}", number + 1), 2, "systemd", vec![name])
    });
    // The longest first.
    [machine("rbd", 1, "fast", with_cluster)]
        .into_iter()
        .chain(divided)
        .chain([machine("systemd", 2, "systemd", systemd)])
        .chain(powered_off)
        .filter(|machine| !machine.trials.is_empty())
        .collect()
}

/// Returns whether libtest would run `trial`, or report it as ignored, under `arguments`.
fn is_chosen(arguments: &Arguments, trial: &Trial) -> bool {
    let matches = |pattern: &String| {
        if arguments.exact { trial.name() == pattern } else { trial.name().contains(pattern) }
    };
    let is_of_part = match std::env::var(PART).as_deref() {
        Ok("short") => SHORT.contains(&trial.name()),
        Ok("long") => !SHORT.contains(&trial.name()),
        Ok(other) => panic!("{PART}={other}: choose short or long"),
        Err(_) => true,
    };
    is_of_part
        && arguments.filter.as_ref().is_none_or(matches)
        && !arguments.skip.iter().any(matches)
        && (!arguments.ignored || trial.has_ignored_flag())
}

/// Fills the payload of the machines with what `trials` need.
fn fill<'a>(payload: &Path, mut trials: impl Iterator<Item = &'a String>) {
    if trials.any(|name| name.contains("csi_sanity")) {
        install(&csi_sanity::program(), &payload.join(csi_sanity::PROGRAM));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    install(Path::new(env!("CARGO_BIN_EXE_cleat")), &payload.join("cleat"));
    install(&std::env::current_exe().expect("the path of this program"), &payload.join("device"));
    std::fs::copy(root.join("tests/kit/ceph/cluster"), payload.join(crate::rbd::CLUSTER))
        .expect("copying the script of the test cluster");
    for directory in ["systemd", "systemd/optional"] {
        let files = std::fs::read_dir(root.join(directory)).expect("the systemd directory");
        for file in files {
            let file = file.expect("an entry of the systemd directory").path();
            if file.is_file() {
                std::fs::copy(&file, payload.join(file.file_name().expect("a file has a name")))
                    .expect("copying a file of the systemd directory");
            }
        }
    }
}

/// Copies a program without its debug information, which would only make the payload large.
fn install(program: &Path, target: &Path) {
    let status =
        Command::new("strip").arg("--strip-debug").arg("-o").arg(target).arg(program).status();
    assert!(status.expect("strip, of binutils").success(), "strip {}", program.display());
}

/// Boots a machine, as often as its tests need. Returns the exit status, and the line with the results.
fn boot(payload: &Path, machine: &Machine) -> (i32, String) {
    if !machine.powers_off {
        return boot_once(payload, machine, &["--disk".into(), "1G".into()], None);
    }
    let disks = tempfile::tempdir().expect("a temporary directory for the disks");
    let mut arguments: Vec<OsString> = Vec::new();
    for number in 0..KEPT_DISKS {
        let disk = disks.path().join(format!("disk{number}"));
        let created = std::fs::File::create(&disk).and_then(|file| file.set_len(KEPT_DISK_BYTES));
        created.expect("creating a disk");
        arguments.extend(["--disk".into(), disk.into()]);
    }
    let mut powered_off = arguments.clone();
    powered_off.push("--power-off".into());
    match boot_once(payload, machine, &powered_off, Some(BOOTS[0])) {
        (0, _) => boot_once(payload, machine, &arguments, Some(BOOTS[1])),
        failed => failed,
    }
}

/// Boots a machine once, runs its tests and prints their output as it arrives, each line after the machine's
/// name. Returns the exit status, and the line with the results.
fn boot_once(
    payload: &Path,
    machine: &Machine,
    options: &[OsString],
    boot: Option<&str>,
) -> (i32, String) {
    let mut child = match command(payload, machine, options, boot).spawn() {
        Ok(child) => child,
        Err(error) => {
            println!(
                "tests/vm/run: {error}; run scripts/install-deps.sh vm to install its dependencies"
            );
            return (EXIT_HARNESS, String::new());
        }
    };
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let results = std::thread::scope(|scope| {
        scope.spawn(|| show(&machine.name, stderr.expect("it is a pipe")));
        show(&machine.name, stdout.expect("it is a pipe"))
    });
    let status = child.wait().expect("waiting for the machine");
    (status.code().unwrap_or(EXIT_HARNESS), results)
}

fn command(payload: &Path, machine: &Machine, options: &[OsString], boot: Option<&str>) -> Command {
    let mut vm = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/run"));
    vm.args(["--init", machine.init, "--memory", "3G"]).args(options);
    vm.args(["--timeout", &timeout_s(), "--cpus", &machine.processors.to_string()]);
    if let Some(out) = std::env::var_os("CLEAT_VM_OUT") {
        let name = [Some(machine.name.as_str()), boot].into_iter().flatten().collect::<Vec<_>>();
        vm.arg("--out").arg(Path::new(&out).join(name.join("-")));
    }
    if let Some(kernel) = std::env::var_os("CLEAT_VM_KERNEL") {
        vm.arg("--kernel").arg(kernel);
    }
    vm.arg("--payload").arg(payload).args(["--", "env", "CLEAT_TEST_REAL_KERNEL=1"]);
    vm.arg(format!("{TRIALS}={}", machine.name));
    for name in ["CLEAT_VERIFY_SECONDS", "CLEAT_REPEAT"] {
        if let Ok(value) = std::env::var(name) {
            vm.arg(format!("{name}={value}"));
        }
    }
    if let Some(boot) = boot {
        vm.arg(format!("{BOOT}={boot}"));
    }
    vm.arg("./device").args(std::env::args().skip(1));
    vm.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    vm
}

/// Prints each line of `output` after `name`. Returns libtest's summary line.
fn show(name: &str, output: impl Read) -> String {
    let mut results = String::new();
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        println!("{name}: {line}");
        if line.starts_with("test result:") {
            results = line.into_owned();
        }
    }
    results
}

/// The time limit of a machine in seconds. It is generous because the speed of an emulated processor
/// varies, and longer for requested extra work.
fn timeout_s() -> String {
    let number = |name| -> u64 {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or_default()
    };
    let comparison = std::env::args().any(|argument| argument.ends_with("ignored"));
    let comparison_s = if comparison { 1800 } else { 0 };
    (3600 + comparison_s + 4 * number("CLEAT_VERIFY_SECONDS") + 60 * number("CLEAT_REPEAT"))
        .to_string()
}
