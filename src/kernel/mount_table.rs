//! The mounts of a mount namespace with all their properties, in the order of /proc/PID/mountinfo
//! (proc_pid_mountinfo(5)).
//!
//! [`Mount`] has the fields that the search for the users of a device needs; it is parsed for every mount of
//! every namespace. A [`MountEntry`] has the others too, for callers that examine single mounts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::mountinfo::{Mount, parse_mount, unescape};

/// A mount with all its properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The kernel's number of the mount. The kernel gives the number of a removed mount to a later one.
    pub id: u32,
    /// The number of the mount in which the mount point lies. The root of the namespace may have itself as
    /// parent, or a mount that is not listed.
    pub parent: u32,
    /// The device, the mount point, the type and the source.
    pub mount: Mount,
    /// The directory or file of the file system that is visible at the mount point. It is `/` except for bind
    /// mounts and btrfs subvolumes.
    pub root: PathBuf,
    /// The options of the mount point, such as `ro` and `noexec`.
    pub options: Vec<OsString>,
    /// The options of the file system, which all its mounts share.
    pub super_options: Vec<OsString>,
    /// How mounts below this one spread to other mounts.
    pub propagation: Propagation,
}

/// The propagation of a mount (mount_namespaces(7)). A mount with none of these properties is private.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Propagation {
    /// The peer group that the mount shares its mounts with.
    pub shared: Option<u32>,
    /// The peer group that the mount receives mounts from.
    pub master: Option<u32>,
    /// Whether a bind mount of the mount is refused.
    pub unbindable: bool,
}

impl MountEntry {
    /// Returns whether writes through this mount fail: the mount point or the file system is read-only.
    pub fn is_read_only(&self) -> bool {
        let has_ro = |options: &[OsString]| options.iter().any(|option| option == "ro");
        has_ro(&self.options) || has_ro(&self.super_options)
    }
}

/// Parses mountinfo. Lines that cannot be parsed are skipped.
pub fn parse_mount_table(text: &[u8]) -> impl Iterator<Item = MountEntry> {
    text.split(|byte| *byte == b'\n').filter_map(parse_entry)
}

/// Returns the mount that is visible at `path`, which must have no symlinks: the one that no other mount at
/// the same path covers. If the table has several, because a mount at a directory above hides some of them,
/// this is the latest.
pub fn topmost<'a>(table: &'a [MountEntry], path: &Path) -> Option<&'a MountEntry> {
    let here = || table.iter().filter(|entry| entry.mount.path == path);
    let is_covered = |id| here().any(|other| other.parent == id && other.id != id);
    here().rfind(|entry| !is_covered(entry.id))
}

/// Parses a line such as
/// `36 35 98:0 /root /mount/point rw,noatime shared:1 master:2 - ext3 /dev/root rw,errors=continue`.
fn parse_entry(line: &[u8]) -> Option<MountEntry> {
    let mount = parse_mount(line)?;
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let root = PathBuf::from(unescape(fields.nth(1)?));
    let options = split_options(fields.nth(1)?);
    let mut propagation = Propagation::default();
    for field in fields.by_ref().take_while(|field| *field != b"-") {
        if let Some(group) = field.strip_prefix(b"shared:") {
            propagation.shared = number(group);
        } else if let Some(group) = field.strip_prefix(b"master:") {
            propagation.master = number(group);
        } else if field == b"unbindable" {
            propagation.unbindable = true;
        }
    }
    // The fields after the separator are the type, the source and the options of the file system.
    let super_options = fields.nth(2).map(split_options).unwrap_or_default();
    Some(MountEntry { id, parent, mount, root, options, super_options, propagation })
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Splits options at commas. The kernel quotes SELinux contexts, which may contain commas.
fn split_options(field: &[u8]) -> Vec<OsString> {
    let mut is_quoted = false;
    let options = field.split(|byte| {
        is_quoted ^= *byte == b'"';
        *byte == b',' && !is_quoted
    });
    options.filter(|option| !option.is_empty()).map(unescape).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &[u8] = b"\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
36 22 43:32 / /mnt/my\\040data rw,noatime - ext4 /dev/nbd1 ro,seclabel
37 22 43:33 /sub\\011dir /mnt/part ro,noexec shared:2 master:1 propagate_from:4 - xfs /dev/nbd1p1 rw
38 22 0:45 / /mnt/c rw unbindable - btrfs /dev/nbd1 rw,context=\"a:b:c1,c2\",subvol=/
broken line
39 22 0:46 / /proc rw - proc proc
";

    #[test]
    fn all_properties_are_parsed() {
        let table: Vec<_> = parse_mount_table(TABLE).collect();
        assert_eq!(table.iter().map(|entry| entry.id).collect::<Vec<_>>(), [22, 36, 37, 38, 39]);
        let [root, data, part, quoted, proc] = &table[..] else { panic!("{table:?}") };
        assert_eq!(root.propagation.shared, Some(1));
        assert_eq!(data.mount.path.to_str(), Some("/mnt/my data"));
        // The mount point is writable, the file system is not.
        assert!(data.is_read_only() && part.is_read_only() && !root.is_read_only());
        assert_eq!((part.parent, part.root.to_str()), (22, Some("/sub\tdir")));
        assert_eq!(part.options, ["ro", "noexec"]);
        let expected = Propagation { shared: Some(2), master: Some(1), unbindable: false };
        assert_eq!(part.propagation, expected);
        assert!(quoted.propagation.unbindable);
        assert_eq!(quoted.super_options, ["rw", "context=\"a:b:c1,c2\"", "subvol=/"]);
        assert!(proc.super_options.is_empty());
    }

    #[test]
    fn the_topmost_mount_is_found() {
        let text = b"\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
36 22 43:32 / /mnt rw - ext4 /dev/nbd1 rw
37 36 43:64 / /mnt rw - ext4 /dev/nbd2 rw
38 22 43:96 / /mnt rw - ext4 /dev/nbd3 rw
39 38 0:41 / /mnt/sub rw - tmpfs none rw
";
        let table: Vec<_> = parse_mount_table(text).collect();
        let id = |path: &str| topmost(&table, Path::new(path)).map(|entry| entry.id);
        assert_eq!(id("/mnt"), Some(38));
        assert_eq!(id("/mnt/sub"), Some(39));
        assert_eq!(id("/"), Some(22));
        assert_eq!(id("/mnt/other"), None);
        assert_eq!(topmost(&table[..3], Path::new("/mnt")).map(|entry| entry.id), Some(37));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse_mount_table(&text).for_each(drop);
        }

        #[test]
        fn every_line_with_the_known_fields_is_parsed(
            id: u32, parent: u32, shared: Option<u32>, name in "[a-z/]{1,20}",
        ) {
            let shared_field = shared.map(|group| format!("shared:{group} ")).unwrap_or_default();
            let line = format!("{id} {parent} 8:1 /r {name} rw {shared_field}- ext4 /dev/sda rw");
            let found: Vec<_> = parse_mount_table(line.as_bytes()).collect();
            prop_assert_eq!(found.len(), 1);
            prop_assert_eq!((found[0].id, found[0].parent), (id, parent));
            prop_assert_eq!(found[0].propagation.shared, shared);
            prop_assert_eq!(found[0].mount.path.to_str(), Some(&name[..]));
        }
    }
}
