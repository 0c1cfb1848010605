//! Other processes: signals, and whether they run.

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Sends `signal` to the process `pid`. A process that has ended already is no error.
pub fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Returns a file of `/proc` of each thread of the process `pid`. A thread that ends meanwhile is left out; there is at
/// least one.
pub fn threads(pid: u32, file: &str) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let read = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join(file)).ok();
    let files: Vec<String> = threads.filter_map(read).collect();
    assert!(!files.is_empty(), "no thread of the process {pid} has a {file}");
    files
}

/// Returns how often the threads of the process `pid` have gone to sleep, which is how often they have woken up. Threads
/// that have ended do not count.
pub fn wakeups(pid: u32) -> u64 {
    threads(pid, "status").iter().map(|status| voluntary_switches(status)).sum()
}

/// Returns how often the main thread of the process `pid` has gone to sleep.
pub fn wakeups_of_main_thread(pid: u32) -> u64 {
    voluntary_switches(&std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/status")).unwrap())
}

/// Returns how often a thread with this `status` has given up its processor by itself.
pub fn voluntary_switches(status: &str) -> u64 {
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

/// Returns whether the process `pid` runs. A zombie does not.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
}
