//! The load on a device while processes are killed: fio, which verifies its writes, and a prober, which
//! writes and reads one block at a time and measures each request.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fixture::{Block, TIMEOUT};

/// fio on a file or device: random direct reads and writes, with checksums.
pub(crate) struct Fio {
    child: Child,
    report: PathBuf,
    /// Whether the test has asked fio to end.
    stopped: bool,
}

/// The results of fio.
#[derive(Debug)]
pub(crate) struct Report {
    /// The longest time from the submission of a read or write to its completion.
    pub(crate) longest: Duration,
    pub(crate) read_mib: u64,
    pub(crate) written_mib: u64,
}

impl Fio {
    /// Starts fio on the first `size` bytes of `target` (in fio's notation), for `runtime` or until
    /// [`Fio::finish`].
    pub(crate) fn start(target: &str, size: &str, runtime: Duration) -> Self {
        let report = PathBuf::from("/out/campaign-fio.json");
        // The report of an earlier run must not be read as that of this one.
        let _ = std::fs::remove_file(&report);
        let child = Command::new("fio")
            .args(["--name=campaign", "--direct=1", "--ioengine=libaio", "--iodepth=8"])
            .args(["--rw=randrw", "--bsrange=4k-32k", "--verify=crc32c", "--verify_backlog=128"])
            .args(["--verify_fatal=1", "--fsync=64", "--randseed=11", "--time_based"])
            .arg(format!("--filename={target}"))
            .arg(format!("--size={size}"))
            .arg(format!("--runtime={}", runtime.as_secs()))
            .args(["--output-format=json", &format!("--output={}", report.display())])
            .stdin(Stdio::null())
            .spawn()
            .expect("fio starts");
        Self { child, report, stopped: false }
    }

    /// Whether fio is still running.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().expect("waiting for fio").is_none()
    }

    /// Ends fio as the end of its run time does. Panics when fio reports an error.
    pub(crate) fn finish(mut self, limit: Duration) -> Report {
        self.stopped = true;
        crate::fixture::signal("INT", self.child.id());
        self.outcome(limit).expect("fio succeeds")
    }

    /// Waits until fio ends. Returns its results, or why it failed.
    pub(crate) fn outcome(mut self, limit: Duration) -> Result<Report, String> {
        let deadline = Instant::now() + limit;
        while self.runs() {
            if Instant::now() >= deadline {
                return Err("its requests hang".to_owned());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let status = self.child.wait().expect("waiting for fio");
        let text = std::fs::read_to_string(&self.report).expect("fio's report");
        let start = text.find('{').ok_or_else(|| format!("it failed: {status}"))?;
        let json: serde_json::Value = serde_json::from_str(&text[start..]).expect("fio's JSON");
        let job = &json["jobs"][0];
        let number = |value: &serde_json::Value| value.as_u64().expect("a number of fio's");
        match number(&job["error"]) {
            // fio exits with 128 after a signal.
            0 if status.success() || self.stopped && status.code() == Some(128) => {}
            errno => {
                let errno = i32::try_from(errno).expect("an error number");
                return Err(std::io::Error::from_raw_os_error(errno).to_string());
            }
        }
        let longest = ["read", "write"].map(|way| number(&job[way]["clat_ns"]["max"]));
        Ok(Report {
            longest: Duration::from_nanos(longest.into_iter().max().unwrap_or(0)),
            read_mib: number(&job["read"]["io_bytes"]) >> 20,
            written_mib: number(&job["write"]["io_bytes"]) >> 20,
        })
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        // It has ended already, unless the test failed.
        let _ = self.child.kill();
    }
}

/// The write or read of one block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) at: Instant,
    pub(crate) took: Duration,
}

/// Writes a block, reads it and compares it, every millisecond or as soon as possible, in turn over all
/// blocks of its region. At the end each block must contain its last write.
pub(crate) struct Prober {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Vec<Probe>, Option<String>)>,
}

/// The number of blocks in a prober's region.
const BLOCKS: usize = 256;
/// The size of a prober's region, in bytes.
pub(crate) const REGION: usize = BLOCKS * 4096;
const PAUSE: Duration = Duration::from_millis(1);

impl Prober {
    /// Probes the region of `target` that begins at `offset`.
    pub(crate) fn start(target: &str, offset: u64) -> Self {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(target).expect("the prober's target opens");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || run(&file, offset, &stopped));
        Self { stop, thread }
    }

    /// Ends the prober and returns all probes. Panics when a probe failed or read other data.
    pub(crate) fn finish(self) -> Vec<Probe> {
        let (probes, failure) = self.outcome();
        assert_eq!(failure, None, "a probe failed");
        probes
    }

    /// Ends the prober and returns all probes, and the error of the last one if it failed.
    pub(crate) fn outcome(self) -> (Vec<Probe>, Option<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + TIMEOUT;
        while !self.thread.is_finished() {
            if Instant::now() >= deadline {
                return (Vec::new(), Some("it hangs".to_owned()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.thread.join().expect("the prober does not panic")
    }
}

fn run(file: &File, offset: u64, stopped: &AtomicBool) -> (Vec<Probe>, Option<String>) {
    let mut probes = Vec::new();
    let failure = probe(file, offset, stopped, &mut probes).err().map(|error| error.to_string());
    (probes, failure)
}

fn probe(
    file: &File,
    offset: u64,
    stopped: &AtomicBool,
    probes: &mut Vec<Probe>,
) -> std::io::Result<()> {
    let mut block = Block::new();
    let mut written = vec![0; BLOCKS];
    for (number, slot) in (1_u64..).zip((0..BLOCKS).cycle()) {
        if stopped.load(Ordering::Relaxed) {
            break;
        }
        let place = offset + slot as u64 * 4096;
        block.0[..8].copy_from_slice(&number.to_le_bytes());
        timed(probes, || file.write_all_at(&block.0, place))?;
        written[slot] = number;
        block.0[..8].fill(0);
        timed(probes, || file.read_exact_at(&mut block.0, place))?;
        compare(&block, number)?;
    }
    for (slot, number) in written.into_iter().enumerate().filter(|(_, number)| *number > 0) {
        file.read_exact_at(&mut block.0, offset + slot as u64 * 4096)?;
        compare(&block, number)?;
    }
    Ok(())
}

fn compare(block: &Block, number: u64) -> std::io::Result<()> {
    if block.0[..8] == number.to_le_bytes() {
        return Ok(());
    }
    Err(std::io::Error::other(format!("write {number} is lost: {:?}", &block.0[..8])))
}

fn timed(
    probes: &mut Vec<Probe>,
    call: impl FnOnce() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let at = Instant::now();
    let result = call();
    let took = at.elapsed();
    probes.push(Probe { at, took });
    std::thread::sleep(PAUSE.saturating_sub(took));
    result
}

/// The longest duration of the probes that were in flight between two instants.
pub(crate) fn longest(probes: &[Probe], from: Instant, until: Instant) -> Duration {
    let within = |probe: &&Probe| probe.at < until && probe.at + probe.took > from;
    probes.iter().filter(within).map(|probe| probe.took).max().unwrap_or_default()
}

/// Percentiles, maximum and number of the probes that began within those spans of time.
pub(crate) fn distribution(probes: &[Probe], spans: &[(Instant, Instant)]) -> String {
    let mut times: Vec<Duration> = probes
        .iter()
        .filter(|probe| spans.iter().any(|(from, until)| (from..until).contains(&&probe.at)))
        .map(|probe| probe.took)
        .collect();
    times.sort_unstable();
    let Some(most) = times.last() else { return "no probe".to_owned() };
    let at = |part: usize| times[(times.len() - 1) * part / 1000];
    format!(
        "p50 {:.2?} p99 {:.1?} p99.9 {:.1?} max {most:.1?} ({} probes)",
        at(500),
        at(990),
        at(999),
        times.len()
    )
}
