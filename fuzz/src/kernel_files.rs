//! Text that the kernel shows in /proc and sysfs, part of which other processes choose: mount points,
//! file system sources, backend identifiers.

use std::os::unix::ffi::OsStrExt;

use cleat_kernel::{Identity, Mount, parse_mountinfo};

/// Checks that there are no more mounts than lines, that a mount is read back from its own
/// line, and that an identity is accepted only if it is safe as a file name.
pub(crate) fn check(data: &[u8]) {
    let mounts: Vec<Mount> = parse_mountinfo(data).collect();
    let lines = data.split(|byte| *byte == b'\n').count();
    assert!(mounts.len() <= lines, "{} mounts in {lines} lines", mounts.len());
    for mount in mounts {
        let again: Vec<Mount> = parse_mountinfo(&line(&mount)).collect();
        assert_eq!(again, [mount]);
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Some(identity) = Identity::parse(text)
    {
        assert_eq!(identity.as_str(), text);
        assert_eq!(Identity::new(identity.mapping_id(), identity.name()), identity);
        let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        assert!(text.bytes().all(safe) && !identity.name().starts_with('.'), "{text:?}");
    }
}

/// Returns the line of mountinfo that the kernel would show for `mount`.
fn line(mount: &Mount) -> Vec<u8> {
    [
        format!("1 2 {}:{} / ", mount.number.major, mount.number.minor).as_bytes(),
        &escape(mount.path.as_os_str().as_bytes()),
        b" rw - ",
        mount.filesystem.as_bytes(),
        b" ",
        &escape(mount.source.as_bytes()),
        b" rw\n",
    ]
    .concat()
}

/// Escapes white space and backslashes as the kernel does (fs/seq_file.c, `mangle_path`).
fn escape(name: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::new();
    for &byte in name {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => escaped.extend(format!("\\{byte:03o}").bytes()),
            _ => escaped.push(byte),
        }
    }
    escaped
}
