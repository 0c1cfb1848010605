//! The identity of this machine: its host name, a hash of its machine id, and the id of the current
//! boot.

use std::fs::File;
use std::io::{self, Read};

use hmac_sha256::HMAC;
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};

/// The application id for the hash of the machine id: hashes for other applications differ, as
/// machine-id(5) requires.
const APPLICATION: u128 = 0x6b1f_0d3a_9a5e_4c0f_8c1d_2e7b_54a9_60c3;

/// `RAMFS_MAGIC` of linux/magic.h.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// Returns the host name of the kernel.
///
/// # Errors
/// Returns an error if /proc is not mounted.
pub fn host_name() -> io::Result<String> {
    line("/proc/sys/kernel/hostname")
}

/// Returns the id of the current boot. It changes with each boot.
///
/// # Errors
/// Returns the errors of [`host_name`].
pub fn boot_id() -> io::Result<String> {
    line("/proc/sys/kernel/random/boot_id")
}

/// Returns a hash of the machine id, which is the same after each boot; empty when no such id is known. In a
/// container, the host's id is used if it is visible, because the container's own id may be temporary.
pub fn machine_id_hash() -> String {
    let opened = match File::open("/proc/1/root/etc/machine-id") {
        // The root directory of the host is not accessible from here.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            File::open("/etc/machine-id")
        }
        opened => opened,
    };
    opened.ok().and_then(|file| lasting_id(file).map(hashed)).unwrap_or_default()
}

/// Returns the machine id in `file`. `None` for a file in memory: such an id is generated at each boot.
fn lasting_id(file: File) -> Option<u128> {
    let kind = fstatfs(&file).ok()?.filesystem_type();
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind) {
        return None;
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    id(&text)
}

/// Parses a machine id. `None` for an empty file and for `uninitialized`, which images for many machines
/// contain.
fn id(text: &str) -> Option<u128> {
    let text = text.trim_end();
    let plain = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u128::from_str_radix(text, 16).ok()).flatten().filter(|id| *id != 0)
}

/// Hashes the machine id as `systemd-id128 machine-id --app-specific=…` does.
fn hashed(id: u128) -> String {
    let hash = HMAC::mac(APPLICATION.to_be_bytes(), id.to_be_bytes());
    let half = hash.iter().take(16).fold(0_u128, |all, byte| all << 8 | u128::from(*byte));
    // Set the version and the variant of a random UUID.
    let uuid = half & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    format!("{uuid:032x}")
}

fn line(path: &str) -> io::Result<String> {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_hash_equals_that_of_systemd_id128() {
        let id = id("0123456789abcdef0123456789abcdef\n").unwrap();
        assert_eq!(hashed(id), "4004f1f0408c431cafe9c0d3018cffdd");
        let own = machine_id_hash();
        if !own.is_empty() {
            let application = format!("--app-specific={APPLICATION:032x}");
            let asked = Command::new("systemd-id128").args(["machine-id", &application]).output();
            assert_eq!(own, String::from_utf8(asked.unwrap().stdout).unwrap().trim());
        }
    }

    #[test]
    fn invalid_and_temporary_machine_ids_are_ignored() {
        let texts = ["", "uninitialized\n", "0123", &"0".repeat(32), &"x".repeat(32)];
        assert!(texts.iter().all(|text| id(text).is_none()), "{texts:?}");
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        io::Write::write_all(&mut file, "1".repeat(32).as_bytes()).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!(lasting_id(file), None, "an id in memory changes with the next boot");
    }
}
