//! Time, less what the machine itself lost: a bound on how long something took must not fail because
//! the host stood still.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the machine is felt.
const BEAT: Duration = Duration::from_millis(20);

/// What has been lost so far, in milliseconds: by threads that were not run, and on the disk.
static LOST_MS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Runs while the machine does.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    began: Instant,
    lost_ms: [u64; 2],
}

impl Stopwatch {
    /// Starts one.
    pub fn start() -> Self {
        feel();
        Self { began: Instant::now(), lost_ms: lost_ms() }
    }

    /// Since the start, less what was lost since then.
    pub fn elapsed(&self) -> Duration {
        let lost = lost_ms().into_iter().zip(self.lost_ms).map(|(now, then)| now - then).max();
        self.began.elapsed().saturating_sub(Duration::from_millis(lost.unwrap_or(0)))
    }
}

fn lost_ms() -> [u64; 2] {
    [LOST_MS[0].load(Ordering::Relaxed), LOST_MS[1].load(Ordering::Relaxed)]
}

/// Starts the two threads that feel the machine, once a process.
fn feel() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        std::thread::spawn(|| beat(&LOST_MS[0], || {}));
        // Gone from its directory at once.
        let file = tempfile::tempfile_in("/var/tmp").expect("a file on the disk");
        std::thread::spawn(move || beat(&LOST_MS[1], || touch(&file)));
    });
}

/// Counts how much longer than it should `action` and a short sleep take.
fn beat(lost_ms: &AtomicU64, action: impl Fn()) {
    loop {
        let began = Instant::now();
        action();
        std::thread::sleep(BEAT);
        // Some lateness is every machine's.
        let late = began.elapsed().saturating_sub(2 * BEAT);
        lost_ms.fetch_add(u64::try_from(late.as_millis()).unwrap_or(0), Ordering::Relaxed);
    }
}

fn touch(file: &File) {
    file.write_all_at(&[0; 512], 0).and_then(|()| file.sync_data()).expect("the disk is written");
}
