//! Directories for temporary files.
//!
//! `tests/kit/runner`, through which cargo starts each test, names them and removes them at the end of
//! the test, also of one that was killed. `tempfile::tempdir()` is below such a directory, too: the
//! runner sets `TMPDIR`. A test that was started without the runner uses the same places directly.

use std::path::PathBuf;

/// Returns a directory on the disk that cargo builds on. Its file system supports direct access.
pub fn on_disk() -> PathBuf {
    named("CLEAT_TEST_DISK").unwrap_or_else(|| {
        let test = std::env::current_exe().unwrap();
        test.parent().unwrap().to_owned()
    })
}

/// Returns a directory on a tmpfs, which has neither a disk's latency nor `FALLOC_FL_ZERO_RANGE`.
pub fn in_memory() -> PathBuf {
    named("CLEAT_TEST_SHM").unwrap_or_else(|| PathBuf::from("/dev/shm"))
}

fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from)
}
