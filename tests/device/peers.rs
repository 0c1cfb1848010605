//! The same failures with cleat and with nbd-client and nbdkit, in the same virtual machine: the tests kill
//! the servers under load, and detach hung devices by force. Cleat's behaviour is asserted; that of the
//! other products is only printed. rbd-nbd needs a Ceph cluster and is not measured.

mod peer;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::campaign::load::{Fio, Prober, REGION, longest};
use crate::fixture::{shell, signal};
use crate::trial;
use peer::{Peer, Setup, Up};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for setup in Setup::ALL {
        let mut case = |what: &str, run: Case| {
            let words = format!("peers {} {what}", setup.title());
            let name = words.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            // Each takes minutes, mostly with the other products: `make comparison` runs them.
            let trial = trial(name, move || judge(setup, &run(setup)));
            trials.push(trial.with_ignored_flag(true));
        };
        case("server killed under load", Box::new(crash));
        for situation in Situation::ALL.into_iter().filter(|_| setup.detaches()) {
            let run = Box::new(move |setup| detach(setup, situation));
            case(&format!("detached by force {}", situation.title()), run);
        }
    }
    trials
}

const KILLS: u32 = 3;
/// The pause between kills. More frequent crashes of a worker are a crash loop, whose repairs back off.
const PERIOD: Duration = Duration::from_secs(9);
/// The time after which a forced detach counts as hung.
const TIMEOUT: Duration = Duration::from_secs(30);
const MOUNT: &str = "/mnt/peers";

/// Prints the result, and fails when cleat does not meet its documented behaviour.
fn judge(setup: Setup, row: &Row) {
    println!("figures: {}", row.text);
    assert!(row.good || setup != Setup::Cleat, "cleat does not meet its documented behaviour");
}

/// A test of one situation.
type Case = Box<dyn FnOnce(Setup) -> Row + Send>;

/// The result of one product in one situation.
struct Row {
    good: bool,
    text: String,
}

fn crash(setup: Setup) -> Row {
    let peer = Peer::new(setup);
    let up = peer.up();
    let node = &up.device;
    shell("dmesg --clear");
    shell(&format!(
        "mkfs.ext4 -q {node}; mkdir -p {MOUNT}; mount {node} {MOUNT}
         dd if=/dev/zero of={MOUNT}/data bs=1M count=64 conv=fsync status=none
         dd if=/dev/zero of={MOUNT}/probed bs={REGION} count=1 conv=fsync status=none"
    ));
    let fio = Fio::start(&format!("{MOUNT}/data"), "64M", PERIOD * (KILLS + 1));
    let prober = Prober::start(&format!("{MOUNT}/probed"), 0);
    let mut kills = Vec::new();
    for _ in 0..KILLS {
        std::thread::sleep(PERIOD / 2);
        kills.push(Instant::now());
        up.kill_server();
        std::thread::sleep(PERIOD / 2);
    }
    let (probes, probe_failure) = prober.outcome();
    let fio = fio.outcome(PERIOD * 5);
    let errors =
        shell("dmesg | grep -cE 'I/O error|EXT4-fs error|Aborting journal|Remounting' || true");
    let stall = kills.iter().map(|at| longest(&probes, *at, *at + PERIOD)).max();
    let stall = stall.unwrap_or_default();
    let outcome = match (&fio, probe_failure) {
        (Ok(report), None) => {
            format!(
                "works on, {} MiB written verified, longest stall {stall:.1?}",
                report.written_mib
            )
        }
        (Err(why), _) => format!("load fails: {why}"),
        (Ok(_), Some(why)) => format!("load fails: {why}"),
    };
    let good = fio.is_ok() && outcome.starts_with("works") && errors == "0";
    let succeeds = |script: &str| run(script, TIMEOUT) == End::Success;
    let check = succeeds(&format!("umount {MOUNT}")) && succeeds(&format!("e2fsck -fn {node}"));
    drop(up);
    let check = if check { "file system clean" } else { "file system not clean" };
    Row {
        good: good && check == "file system clean",
        text: format!("{outcome}; {errors} error messages of the kernel; {check}"),
    }
}

/// What makes a device hard to detach.
#[derive(Debug, Clone, Copy)]
enum Situation {
    ServerStopped,
    ReadUnderWay,
    DirtyPages,
    BlockedFsync,
    OpenForever,
}

impl Situation {
    const ALL: [Self; 5] = [
        Self::ServerStopped,
        Self::ReadUnderWay,
        Self::DirtyPages,
        Self::BlockedFsync,
        Self::OpenForever,
    ];

    fn title(self) -> &'static str {
        match self {
            Self::ServerStopped => "server stopped, idle",
            Self::ReadUnderWay => "server stopped, a read in flight",
            Self::DirtyPages => "server stopped, dirty pages under ext4",
            Self::BlockedFsync => "server stopped, a process in fsync",
            Self::OpenForever => "server works, an opener never closes",
        }
    }

    fn is_mounted(self) -> bool {
        matches!(self, Self::DirtyPages | Self::BlockedFsync)
    }

    /// Causes the trouble. Returns the process that blocks on the device or holds it.
    fn cause(self, up: &Up) -> Option<Child> {
        let node = &up.device;
        if self.is_mounted() {
            shell(&format!(
                "mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 {node}; mkdir -p {MOUNT}
                 mount {node} {MOUNT}; touch {MOUNT}/dirty; sync -f {MOUNT}"
            ));
        }
        shell("udevadm settle --timeout=30 || true");
        if matches!(self, Self::DirtyPages) {
            // The data is only in the cache; the kernel writes it back seconds later.
            shell(&format!("head -c 24M /dev/zero | tr '\\0' x > {MOUNT}/dirty"));
        }
        if !matches!(self, Self::OpenForever) {
            signal("STOP", up.server());
        }
        let script = match self {
            Self::ServerStopped | Self::DirtyPages => return None,
            Self::ReadUnderWay => {
                format!("exec dd if={node} of=/dev/null bs=64k iflag=direct count=1")
            }
            Self::BlockedFsync => {
                format!("exec dd if=/dev/zero of={MOUNT}/synced bs=1M count=8 conv=fsync")
            }
            Self::OpenForever => format!("exec sleep 600 <{node}"),
        };
        let mut command = Command::new("bash");
        command.args(["-c", &script]).stdin(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("bash starts");
        std::thread::sleep(Duration::from_secs(2));
        Some(child)
    }
}

fn detach(setup: Setup, situation: Situation) -> Row {
    let peer = Peer::new(setup);
    let up = peer.up();
    let stuck = situation.cause(&up);
    let started = Instant::now();
    let end = run(&up.detach_script(situation.is_mounted().then_some(MOUNT)), TIMEOUT);
    let returned = end != End::Never;
    let took = started.elapsed();
    std::thread::sleep(Duration::from_secs(2));
    let blocked = blocked_tasks();
    let configured = up.is_configured();
    let works = peer.another_works();
    let before = up.checksum();
    up.wake_server();
    std::thread::sleep(Duration::from_secs(2));
    let late = returned && before != up.checksum();
    if let Some(mut stuck) = stuck {
        // A process in D state ends only when its requests do.
        let _ = stuck.kill();
        if !matches!(situation, Situation::OpenForever) || returned {
            let _ = stuck.try_wait();
        }
    }
    drop(up);
    let good =
        end == End::Success && took < Duration::from_secs(6) && blocked == 0 && works && !late;
    let text = format!(
        "{}, {blocked} tasks in D state, device {}, a new one {}{}",
        match end {
            End::Success => format!("returns after {took:.1?}"),
            End::Failure => format!("FAILS after {took:.1?}"),
            End::Never => format!("HANGS for {TIMEOUT:?}"),
        },
        if configured { "still configured" } else { "free" },
        if works { "works" } else { "DOES NOT WORK" },
        if late { ", WRITES REACHED THE SERVER AFTER IT" } else { "" },
    );
    Row { good, text }
}

/// How a script ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Success,
    Failure,
    /// The script did not end in time.
    Never,
}

/// Runs a script that may hang for ever.
fn run(script: &str, limit: Duration) -> End {
    let mut command = Command::new("bash");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is gone if the script ended too late.
        let _ = sender.send(command.status().is_ok_and(|status| status.success()));
    });
    match ended.recv_timeout(limit) {
        Ok(true) => End::Success,
        Ok(false) => End::Failure,
        Err(_) => End::Never,
    }
}

/// Tasks in uninterruptible sleep, threads of the kernel included.
fn blocked_tasks() -> u32 {
    let list = || shell("ps -eLo state,comm | grep -c '^D' || true").parse().expect("a number");
    // A blocked task appears in both lists.
    let (first, second): (u32, u32) = (list(), {
        std::thread::sleep(Duration::from_millis(300));
        list()
    });
    first.min(second)
}
