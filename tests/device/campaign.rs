//! Crash campaigns: the tests kill processes repeatedly under load, on the raw device and under ext4. No
//! request may fail and no write may be lost; each stall is measured. `CLEAT_REPEAT` is the number of
//! kills (default 2). Without it, the device itself is left out: what fails there fails under ext4, too.

pub(crate) mod load;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::fixture::{
    Image, Node, cleat_ok, promised, repeat, shell, signal, status, wait_for_state,
};
use crate::trial;
use load::{Fio, Prober, REGION, Report, distribution, longest};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for ground in [Ground::Raw, Ground::Ext4] {
        let on = ground.name();
        let of_workers = trial(format!("campaign_killed_workers_on_{on}"), move || {
            workers(ground, kills(), |pid, _| signal("KILL", pid));
        });
        let of_supervisors = trial(format!("campaign_killed_supervisors_on_{on}"), move || {
            supervisors(ground);
        });
        let is_soak = ground == Ground::Raw && repeat().is_none();
        trials.extend([of_workers, of_supervisors].map(|trial| trial.with_ignored_flag(is_soak)));
    }
    trials.push(trial("campaign_aborted_and_oom_killed_workers", || {
        workers(Ground::Ext4, 2, |pid, round| match round {
            0 => signal("ABRT", pid),
            _ => oom_kill(pid),
        });
    }));
    trials
}

/// The target of the load: the device itself or a file system on it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ground {
    Raw,
    Ext4,
}

impl Ground {
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "the_raw_device",
            Self::Ext4 => "ext4",
        }
    }
}

/// The documented limit for a stall after a crash of a worker.
const STALL_LIMIT: Duration = Duration::from_secs(3);
/// The pause between a repair and the next kill. It is longer than a worker must serve for the daemon to
/// reset its failure count: more frequent crashes are a crash loop, whose repairs back off.
const SOUND: Duration = Duration::from_secs(6);
/// The run time of the load; the campaign stops it earlier.
pub(crate) const WHOLE: Duration = Duration::from_secs(3600);
/// The time in which the load has to finish its last requests, on a busy machine.
const LAST_REQUESTS: Duration = Duration::from_secs(120);
/// The period of the kills of supervisors.
const PERIOD: Duration = Duration::from_secs(4);
/// How long the supervisor is absent. A request that needed it would wait for at least this time.
const SUPERVISOR_AWAY: Duration = Duration::from_secs(1);

fn kills() -> u32 {
    repeat().unwrap_or(2)
}

/// A mapping under load.
struct Scene {
    node: Node,
    image: Image,
    ground: Ground,
    device: String,
    fio: Fio,
    prober: Prober,
}

impl Scene {
    fn set(ground: Ground) -> Self {
        let node = Node::start();
        let image = Image::new("campaign", "192M");
        let device = cleat_ok(&["map", &image.uri(), "--name", "campaign"]);
        shell("dmesg --clear");
        let (target, probed, offset) = match ground {
            Ground::Raw => (device.clone(), device.clone(), 160 << 20),
            Ground::Ext4 => {
                // The files are allocated and written beforehand, so that only the device is measured.
                shell(&format!(
                    "mkfs.ext4 -q {device}; mkdir -p /mnt/campaign; mount {device} /mnt/campaign
                     dd if=/dev/zero of=/mnt/campaign/data bs=1M count=96 conv=fsync status=none
                     dd if=/dev/zero of=/mnt/campaign/probed bs={REGION} count=1 conv=fsync status=none"
                ));
                ("/mnt/campaign/data".to_owned(), "/mnt/campaign/probed".to_owned(), 0)
            }
        };
        let fio = Fio::start(&target, "96M", WHOLE);
        let prober = Prober::start(&probed, offset);
        Self { node, image, ground, device, fio, prober }
    }

    /// Ends the load, checks that there was no error, and unmaps the device.
    fn finish(self) -> (Report, Vec<load::Probe>) {
        let probes = self.prober.finish();
        let report = self.fio.finish(LAST_REQUESTS);
        if self.ground == Ground::Ext4 {
            shell("umount /mnt/campaign");
            shell(&format!("e2fsck -fn {}", self.device));
        }
        let name = self.device.trim_start_matches("/dev/");
        let complaints = shell(&format!(
            "dmesg | grep -E 'I/O error|EXT4-fs (error|warning)|Remounting|Aborting' | grep {name} || true"
        ));
        assert_eq!(complaints, "", "the kernel logged errors");
        cleat_ok(&["unmap", "campaign"]);
        drop((self.node, self.image));
        (report, probes)
    }
}

fn workers(ground: Ground, rounds: u32, kill: impl Fn(u32, u32)) {
    let mut scene = Scene::set(ground);
    let began = Instant::now();
    let mut kills = Vec::new();
    for round in 0..rounds {
        std::thread::sleep(SOUND);
        let before = status("campaign")["worker_pid"].clone();
        assert!(scene.fio.runs(), "the load ended before the campaign did");
        let killed = Instant::now();
        kill(u32::try_from(before.as_u64().expect("a worker")).expect("a pid"), round);
        kills.push(killed);
        wait_for_another_worker(&before);
    }
    std::thread::sleep(SOUND);
    let (report, probes) = scene.finish();
    let stalls: Vec<Duration> =
        kills.iter().map(|killed| longest(&probes, *killed, *killed + SOUND)).collect();
    let until = kills.first().copied().unwrap_or(began);
    println!(
        "figures: {rounds} workers killed on {}: 0 errors, {} MiB read and {} MiB written verified; \
         stalls {stalls:.2?}; fio's longest {:.2?}; before the first kill: {}",
        ground.name(),
        report.read_mib,
        report.written_mib,
        report.longest,
        distribution(&probes, &[(began, until)]),
    );
    let worst = stalls.into_iter().max().unwrap_or_default();
    promised(worst, STALL_LIMIT, "a request stalled by a crash");
}

fn wait_for_another_worker(before: &serde_json::Value) {
    let deadline = Instant::now() + crate::fixture::TIMEOUT;
    loop {
        let now = status("campaign");
        if now["state"] == "mapped" && now["worker_pid"] != *before && now["worker_pid"] != 0 {
            return;
        }
        assert!(Instant::now() < deadline, "the worker is not replaced: {now}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Makes the kernel's OOM killer kill the process.
fn oom_kill(pid: u32) {
    shell(&format!("echo 1000 > /proc/{pid}/oom_score_adj; echo f > /proc/sysrq-trigger"));
    let died = shell("sleep 1; dmesg | grep -c 'Out of memory: Killed process' || true");
    assert_ne!(died, "0", "the OOM killer killed no process");
}

/// Repeats three periods: an undisturbed one, one in which an unrelated process of the same size (the
/// stranger) is killed and restarted, and one in which the supervisor is. The first two measure the noise
/// of the machine.
fn supervisors(ground: Ground) {
    let rounds = kills();
    let mut scene = Scene::set(ground);
    let worker = status("campaign")["worker_pid"].clone();
    let (mut undisturbed, mut strange, mut ours, mut away) = (vec![], vec![], vec![], vec![]);
    let mut stranger = start_stranger();
    for _ in 0..rounds {
        undisturbed.push(period(|| ()));
        strange.push(period(|| {
            stranger.kill().expect("killing the stranger");
            stranger.wait().expect("waiting for the stranger");
            std::thread::sleep(SUPERVISOR_AWAY);
            stranger = start_stranger();
        }));
        ours.push(period(|| {
            let from = Instant::now();
            scene.node.kill();
            std::thread::sleep(SUPERVISOR_AWAY);
            scene.node.restart();
            away.push((from, Instant::now()));
        }));
        assert!(scene.fio.runs(), "the load ended before the campaign did");
    }
    stranger.kill().expect("killing the stranger");
    stranger.wait().expect("waiting for the stranger");
    wait_for_state("campaign", "mapped");
    assert_eq!(status("campaign")["worker_pid"], worker, "the worker was replaced");
    let (report, probes) = scene.finish();
    println!(
        "figures: {rounds} supervisors killed on {}: 0 errors, {} MiB read and {} MiB written verified;\n  \
         undisturbed:       {}\n  a stranger killed: {}\n  supervisor killed: {}",
        ground.name(),
        report.read_mib,
        report.written_mib,
        distribution(&probes, &undisturbed),
        distribution(&probes, &strange),
        distribution(&probes, &ours),
    );
    let worst = |spans: &[(Instant, Instant)]| {
        let longest = spans.iter().map(|(from, until)| longest(&probes, *from, *until)).max();
        longest.unwrap_or_default()
    };
    let (theirs, ours) = (worst(&strange), worst(&away));
    assert!(ours < theirs + SUPERVISOR_AWAY, "a request waited for the supervisor: {ours:?}");
}

/// Runs one period that begins with `event`. Returns its start and end.
fn period(event: impl FnOnce()) -> (Instant, Instant) {
    let from = Instant::now();
    event();
    std::thread::sleep(PERIOD.saturating_sub(from.elapsed()));
    (from, Instant::now())
}

/// Starts a process of the same program that has nothing to do with the mapping.
fn start_stranger() -> std::process::Child {
    Command::new("./cleat")
        .args(["serve", "mem:16M", "--socket", "/tmp/stranger.sock"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("cleat serve starts")
}
