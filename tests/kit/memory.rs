//! How much memory a process has for itself.

/// Keeps huge pages from the children of this process, as `cleat node` keeps them from its own. What a
/// process touches before it can do so itself is rounded up to them, where they are given unasked.
pub fn without_huge_pages() {
    nix::sys::prctl::set_thp_disable(true).unwrap();
}

/// KiB that are a process's own: what it has written to. Pages of files are left out, those of the
/// program above all: how many of them are there, and whether they count as written to, is the page
/// cache's doing, and of a program that was built a moment ago most are.
pub fn own_kib(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let kib = |key| -> u64 {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    kib("Pss_Anon:") + kib("Pss_Shmem:")
}
