//! Other processes: signals, and whether they run.

use std::path::Path;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Sends `signal` to the process `pid`. A process that has ended already is no error.
pub fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Returns how often the threads of the process `pid` have gone to sleep, which is how often they have woken up. Threads
/// that have ended do not count.
pub fn wakeups(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    threads.filter_map(|thread| voluntary_switches(&thread.path())).sum()
}

/// Returns how often the main thread of the process `pid` has gone to sleep.
pub fn wakeups_of_main_thread(pid: u32) -> u64 {
    voluntary_switches(Path::new(&format!("/proc/{pid}/task/{pid}"))).unwrap()
}

/// Reads from `/proc` how often a thread has given up its processor by itself; `None` if it has ended.
fn voluntary_switches(thread: &Path) -> Option<u64> {
    let status = std::fs::read_to_string(thread.join("status")).ok()?;
    let mut lines = status.lines();
    lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
}

/// Returns whether the process `pid` runs. A zombie does not.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
}
