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

/// Returns the memory of a process that the dynamic linker has written to in the read-only parts of the executable, in
/// KiB: the addresses that it has relocated. It is a part of [`own_kib`]. Its size depends on the build: one without
/// optimization has several times as many addresses.
///
/// # Panics
///
/// Panics if the process does not exist.
pub fn relocated_kib(pid: u32) -> u64 {
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_counted, mut sum) = (false, 0);
    for line in maps.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            ["Anonymous:", kib, "kB"] if is_counted => sum += kib.parse::<u64>().unwrap(),
            [_, "r--p", _, _, _, ..] => is_counted = fields.last() == program.to_str().as_ref(),
            [_, rights, _, _, _, ..] if rights.len() == 4 => is_counted = false,
            _ => {}
        }
    }
    sum
}
