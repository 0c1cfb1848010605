//! Other processes: signals, and whether they run.

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Sends `signal` to the process `pid`. A process that has ended already is no error.
pub fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Returns whether the process `pid` runs. A zombie does not.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
}
