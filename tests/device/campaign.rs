//! Crash campaigns: processes are killed again and again under load, on the raw device and under
//! ext4. No request may fail, no write may be lost, and each stall is measured. `CLEAT_REPEAT` is the
//! number of kills (default 3).

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
        trials.push(trial(format!("campaign_killed_workers_on_{on}"), move || {
            workers(ground, kills(), |pid, _| signal("KILL", pid));
        }));
        trials.push(trial(format!("campaign_killed_supervisors_on_{on}"), move || {
            supervisors(ground);
        }));
    }
    trials.push(trial("campaign_aborted_and_oom_killed_workers", || {
        workers(Ground::Ext4, 2, |pid, round| match round {
            0 => signal("ABRT", pid),
            _ => oom_kill(pid),
        });
    }));
    trials
}

/// What the load runs on.
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

/// The promise for a crashed worker.
const STALL_LIMIT: Duration = Duration::from_secs(3);
/// Between a repair and the next kill: longer than a worker must serve before its death counts as the
/// first one again, since what dies more often is a crash loop, whose repairs wait on purpose.
const SOUND: Duration = Duration::from_secs(6);
/// For the load, which is ended when the campaign is over.
pub(crate) const WHOLE: Duration = Duration::from_secs(3600);
/// For what the load has begun, on a busy machine.
const LAST_REQUESTS: Duration = Duration::from_secs(120);
/// Between kills of supervisors.
const PERIOD: Duration = Duration::from_secs(4);
/// A request that needed the supervisor would wait for at least so long.
const SUPERVISOR_AWAY: Duration = Duration::from_secs(1);

fn kills() -> u32 {
    repeat().unwrap_or(3)
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
                // Allocated and written beforehand, so that the device is measured.
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

    /// Ends the load, checks that nothing went wrong, and takes all down.
    fn strike(self) -> (Report, Vec<load::Probe>) {
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
        assert_eq!(complaints, "", "the kernel complains");
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
    let (report, probes) = scene.strike();
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
    let deadline = Instant::now() + crate::fixture::PATIENCE;
    loop {
        let now = status("campaign");
        if now["state"] == "mapped" && now["worker_pid"] != *before && now["worker_pid"] != 0 {
            return;
        }
        assert!(Instant::now() < deadline, "the worker is not replaced: {now}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Has the kernel's OOM killer choose it.
fn oom_kill(pid: u32) {
    shell(&format!("echo 1000 > /proc/{pid}/oom_score_adj; echo f > /proc/sysrq-trigger"));
    let died = shell("sleep 1; dmesg | grep -c 'Out of memory: Killed process' || true");
    assert_ne!(died, "0", "the OOM killer killed nobody");
}

/// By turns: nothing happens, a stranger of the same weight is killed and started again, and the
/// supervisor is. The first two tell the machine's noise.
fn supervisors(ground: Ground) {
    let rounds = kills();
    let mut scene = Scene::set(ground);
    let worker = status("campaign")["worker_pid"].clone();
    let (mut quiet, mut strange, mut ours, mut away) = (vec![], vec![], vec![], vec![]);
    let mut stranger = start_stranger();
    for _ in 0..rounds {
        quiet.push(period(|| ()));
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
    let (report, probes) = scene.strike();
    println!(
        "figures: {rounds} supervisors killed on {}: 0 errors, {} MiB read and {} MiB written verified;\n  \
         undisturbed:       {}\n  a stranger killed: {}\n  supervisor killed: {}",
        ground.name(),
        report.read_mib,
        report.written_mib,
        distribution(&probes, &quiet),
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

/// One period, in which something happens first.
fn period(event: impl FnOnce()) -> (Instant, Instant) {
    let from = Instant::now();
    event();
    std::thread::sleep(PERIOD.saturating_sub(from.elapsed()));
    (from, Instant::now())
}

/// Our own program in a role that has nothing to do with the mapping.
fn start_stranger() -> std::process::Child {
    Command::new("./cleat")
        .args(["serve", "mem:16M", "--socket", "/tmp/stranger.sock"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("cleat serve starts")
}
