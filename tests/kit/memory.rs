//! The memory that a process uses for itself.

/// Disables transparent huge pages for this process and its children, as `cleat node` does for itself.
/// Without this, memory that a child touches before it disables them is rounded up to huge pages.
pub fn without_huge_pages() {
    nix::sys::prctl::set_thp_disable(true).unwrap();
}

/// Returns the process's own memory in KiB: the pages that it has written to, without file pages. The
/// page cache decides how many file pages of the program are resident and dirty, and after a build
/// most of them are.
pub fn own_kib(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let kib = |key| -> u64 {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    kib("Pss_Anon:") + kib("Pss_Shmem:")
}
