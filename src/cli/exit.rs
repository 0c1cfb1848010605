//! Exit codes: one for each reaction to an error, so that a script can react without parsing messages.

use cleat_core::error::ErrorKind;

/// The command succeeded.
pub const OK: u8 = 0;
/// `doctor`: the worst finding is a warning.
pub const DOCTOR_WARNING: u8 = 20;
/// `doctor`: at least one finding is an error.
pub const DOCTOR_ERROR: u8 = 21;
/// `unmap --force`: done, but the device or pending requests may remain. The output names them.
pub const LEFT_BEHIND: u8 = 22;
/// `kubectl drain-check`: something is in the way.
pub const NOT_DRAINABLE: u8 = 23;

/// Returns the exit code for an error of this kind. The codes are part of the interface: a code never changes
/// its meaning.
pub fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Internal => 1,
        ErrorKind::InvalidArgument => 2,
        ErrorKind::NotFound => 3,
        ErrorKind::AlreadyExists => 4,
        ErrorKind::InUse => 5,
        ErrorKind::Aborted => 6,
        ErrorKind::PermissionDenied => 7,
        ErrorKind::Unsupported => 8,
        ErrorKind::Unavailable => 9,
        ErrorKind::TimedOut => 10,
        ErrorKind::NoSpace => 11,
        // For scripts, both mean that this node must not use the volume under its mapping any more.
        ErrorKind::Fenced | ErrorKind::Replaced => 12,
    }
}

/// All exit codes with their meanings, for the manual.
pub const TABLE: [(u8, &str); 17] = [
    (OK, "done"),
    (1, "an unexpected failure: I/O, a reply of the kernel, a defect in cleat"),
    (2, "wrong usage or an invalid argument: option, URI, option key, size"),
    (3, "no such mapping, volume, device or file"),
    (4, "a mapping or a volume with that name exists with other properties"),
    (5, "the device or the volume is in use; the message names the holders"),
    (
        6,
        "another operation on the same volume is in progress, or a signal ended this one; try again",
    ),
    (7, "a permission or a capability is missing"),
    (8, "a part of the system is missing: kernel module, library, feature"),
    (9, "the daemon or the backend cannot be reached"),
    (10, "the deadline of the call has passed"),
    (11, "no space left, no memory left, or no free device"),
    (12, "fenced: another client owns the volume now, or another volume has taken its place"),
    (DOCTOR_WARNING, "doctor: the worst finding is a warning"),
    (DOCTOR_ERROR, "doctor: at least one finding is an error"),
    (
        LEFT_BEHIND,
        "unmap --force: done, but a process still holds the device, or requests may still \
         reach the volume",
    ),
    (NOT_DRAINABLE, "kubectl drain-check: something is in the way"),
];

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [ErrorKind; 12] = [
        ErrorKind::Internal,
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::AlreadyExists,
        ErrorKind::InUse,
        ErrorKind::Aborted,
        ErrorKind::PermissionDenied,
        ErrorKind::Unsupported,
        ErrorKind::Unavailable,
        ErrorKind::TimedOut,
        ErrorKind::NoSpace,
        ErrorKind::Fenced,
    ];

    #[test]
    fn every_kind_has_its_own_code_and_an_entry_in_the_table() {
        assert_eq!(code(ErrorKind::Replaced), code(ErrorKind::Fenced));
        let mut codes: Vec<u8> = KINDS.map(code).to_vec();
        assert!(codes.iter().all(|code| TABLE.iter().any(|(entry, _)| entry == code)));
        codes.extend([OK, DOCTOR_WARNING, DOCTOR_ERROR, LEFT_BEHIND, NOT_DRAINABLE]);
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), TABLE.len());
    }

    #[test]
    fn the_readme_has_every_code() {
        let readme = include_str!("../../README.md");
        for (code, meaning) in TABLE {
            assert!(readme.contains(&format!("| {code} | {meaning} |")), "{code}");
        }
    }
}
