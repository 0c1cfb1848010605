//! Parses /proc/PID/mountinfo and /proc/swaps (proc_pid_mountinfo(5), proc_swaps(5)).
//!
//! The crate `procfs` does not fit here. It fails as a whole on a line that it does not understand and on
//! names that are not UTF-8, both of which any user with a mount namespace can produce, and it does not undo
//! the kernel's escapes in mount points.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use cleat_sys::descriptor::{DeviceNumber, mount_id};

use super::sysfs::parse_number;

/// A mount: the fields of a line of mountinfo that cleat uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mount {
    /// The device number of the file system.
    pub number: DeviceNumber,
    /// The mount point.
    pub path: PathBuf,
    /// The type of the file system.
    pub filesystem: String,
    /// The source of the mount: a device or a name.
    pub source: OsString,
}

/// Parses mountinfo. Lines that cannot be parsed are skipped.
pub fn parse_mountinfo(text: &[u8]) -> impl Iterator<Item = Mount> {
    text.split(|byte| *byte == b'\n').filter_map(parse_mount)
}

/// Parses a line such as `36 35 98:0 /root /mount/point options [optional]... - type source super-options`.
pub(super) fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let number = parse_number(std::str::from_utf8(fields.nth(2)?).ok()?)?;
    let path = PathBuf::from(unescape(fields.nth(1)?));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let filesystem = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    Some(Mount { number, path, filesystem, source })
}

/// Parses /proc/swaps and returns the paths in it.
pub(super) fn parse_swaps(text: &[u8]) -> impl Iterator<Item = OsString> {
    let lines = text.split(|byte| *byte == b'\n').skip(1);
    lines.filter_map(|line| {
        let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t'))?;
        (end > 0).then(|| unescape(&line[..end]))
    })
}

/// Undoes the kernel's escapes `\ooo` (fs/seq_file.c, `mangle_path`).
pub(super) fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        plain.push(octal.unwrap_or(byte));
        rest = if octal.is_some() { &rest[4..] } else { after };
    }
    OsString::from_vec(plain)
}

/// Parses mountinfo and returns the mounts that no other mount covers at the same path, with their ids. An unmount by
/// path removes the topmost mount, which must not belong to another device. A mount at a directory above can hide one of
/// these; see [`is_at_its_path`].
pub(super) fn uncovered(text: &[u8]) -> impl Iterator<Item = (u32, Mount)> {
    let lines = text.split(|byte| *byte == b'\n');
    let parsed: Vec<(u32, u32, Mount)> = lines
        .filter_map(|line| {
            let mut words = line.split(|byte| *byte == b' ').map(std::str::from_utf8);
            let mut number = || words.next()?.ok()?.parse().ok();
            Some((number()?, number()?, parse_mount(line)?))
        })
        .collect();
    let paths: HashMap<u32, _> =
        parsed.iter().map(|(id, _, mount)| (*id, mount.path.clone())).collect();
    let covered: HashSet<u32> = parsed
        .iter()
        .filter(|(id, parent, mount)| id != parent && paths.get(parent) == Some(&mount.path))
        .map(|(_, parent, _)| *parent)
        .collect();
    let visible = parsed.into_iter().filter(move |(id, ..)| !covered.contains(id));
    visible.map(|(id, _, mount)| (id, mount))
}

/// Returns whether the path of a mount leads to this mount in the namespace of the calling thread, and not to another one
/// that hides it. Linux before 5.8 does not tell; then it counts as visible.
pub(super) fn is_at_its_path((id, mount): &(u32, Mount)) -> bool {
    !mount_id(&mount.path).is_ok_and(|found| found.is_some_and(|found| found != u64::from(*id)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use proptest::prelude::*;

    use super::*;
    use crate::sysfs::Disk;

    fn disk(minor: u32) -> Disk {
        Disk { names: vec!["nbd1".into()], numbers: vec![DeviceNumber { major: 43, minor }] }
    }

    #[test]
    fn covered_mounts_are_left_out() {
        let text = b"\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
36 22 43:32 / /mnt/a rw - ext4 /dev/nbd1 rw
37 22 43:32 / /mnt/b rw - ext4 /dev/nbd1 rw
38 37 0:40 / /mnt/b rw - tmpfs none rw
39 36 43:32 / /mnt/a rw - ext4 /dev/nbd1 rw
40 36 0:41 / /mnt/a/sub rw - tmpfs none rw
";
        let found: Vec<_> = uncovered(text).filter(|(_, mount)| mount.is_on(&disk(32))).collect();
        let paths: Vec<_> = found.iter().map(|(_, mount)| mount.path.to_str().unwrap()).collect();
        // /mnt/a once: the upper mount has the same path as the lower one.
        assert_eq!(paths, ["/mnt/a"]);
    }

    proptest! {
        #[test]
        fn escaped_names_are_restored(name in proptest::collection::vec(1u8.., 0..40)) {
            let mut escaped = Vec::new();
            for &byte in &name {
                match byte {
                    b' ' | b'\t' | b'\n' | b'\\' | b'#' => {
                        escaped.extend(format!("\\{byte:03o}").bytes());
                    }
                    _ => escaped.push(byte),
                }
            }
            let plain = unescape(&escaped);
            prop_assert_eq!(plain.as_bytes(), &name[..]);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse_mountinfo(&text).for_each(drop);
            parse_swaps(&text).for_each(drop);
        }
    }
}
