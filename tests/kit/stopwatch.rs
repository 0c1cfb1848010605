//! A clock that does not count the time in which the host stalled, so that a test's bound on a duration
//! does not fail because the host did not run the test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The interval at which the sampling threads measure stalls.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// The stalled time so far, in milliseconds: of threads that were not scheduled, and of the disk.
static LOST_MS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// A running stopwatch.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    began: Instant,
    lost_ms: [u64; 2],
}

impl Stopwatch {
    /// Starts a stopwatch.
    pub fn start() -> Self {
        start_sampling();
        Self { began: Instant::now(), lost_ms: lost_ms() }
    }

    /// Returns the time since the start, less the time in which the host stalled since then.
    pub fn elapsed(&self) -> Duration {
        let lost = lost_ms().into_iter().zip(self.lost_ms).map(|(now, then)| now - then).max();
        self.began.elapsed().saturating_sub(Duration::from_millis(lost.unwrap_or(0)))
    }
}

fn lost_ms() -> [u64; 2] {
    [LOST_MS[0].load(Ordering::Relaxed), LOST_MS[1].load(Ordering::Relaxed)]
}

/// Starts the two sampling threads, once per process.
fn start_sampling() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        std::thread::spawn(|| sample(&LOST_MS[0], || {}));
        // The file has no name in the directory, so it is gone when the process exits.
        let file = tempfile::tempfile_in("/var/tmp").expect("a temporary file in /var/tmp");
        std::thread::spawn(move || sample(&LOST_MS[1], || touch(&file)));
    });
}

/// Adds to `lost_ms` how much longer `action` and a short sleep take than expected.
fn sample(lost_ms: &AtomicU64, action: impl Fn()) {
    loop {
        let began = Instant::now();
        action();
        std::thread::sleep(SAMPLE_INTERVAL);
        // One interval of delay is normal scheduling.
        let late = began.elapsed().saturating_sub(2 * SAMPLE_INTERVAL);
        lost_ms.fetch_add(u64::try_from(late.as_millis()).unwrap_or(0), Ordering::Relaxed);
    }
}

fn touch(file: &File) {
    file.write_all_at(&[0; 512], 0).and_then(|()| file.sync_data()).expect("writing to /var/tmp");
}
