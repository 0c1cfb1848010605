//! What this machine is called, what tells it from others of that name, and which boot of its kernel
//! this is.

use std::fs::File;
use std::io::{self, Read};

use hmac_sha256::HMAC;
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};

/// What the machine's id is hashed for: nobody else's hashes of it are comparable, as machine-id(5)
/// asks for.
const APPLICATION: u128 = 0x6b1f_0d3a_9a5e_4c0f_8c1d_2e7b_54a9_60c3;

/// `RAMFS_MAGIC` of linux/magic.h.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// The host's name, as the kernel has it.
///
/// # Errors
/// When /proc is not there.
pub fn host_name() -> io::Result<String> {
    line("/proc/sys/kernel/hostname")
}

/// Of the kernel now running: another one after each boot.
///
/// # Errors
/// As [`host_name`].
pub fn boot_id() -> io::Result<String> {
    line("/proc/sys/kernel/random/boot_id")
}

/// A hash of the machine's id, the same after each boot; empty where that is not known. Of the host's
/// id where that can be seen: a container may have one of its own, for as long as it lives.
pub fn machine_id_hash() -> String {
    let opened = match File::open("/proc/1/root/etc/machine-id") {
        // Not seen from here.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            File::open("/etc/machine-id")
        }
        opened => opened,
    };
    opened.ok().and_then(|file| lasting_id(file).map(hashed)).unwrap_or_default()
}

/// The id in `file`, unless it is made anew at each boot: then it lies in memory.
fn lasting_id(file: File) -> Option<u128> {
    let kind = fstatfs(&file).ok()?.filesystem_type();
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind) {
        return None;
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    id(&text)
}

/// Images for many machines have none in it, or `uninitialized`.
fn id(text: &str) -> Option<u128> {
    let text = text.trim_end();
    let plain = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u128::from_str_radix(text, 16).ok()).flatten().filter(|id| *id != 0)
}

/// As `systemd-id128 machine-id --app-specific=…` has it.
fn hashed(id: u128) -> String {
    let hash = HMAC::mac(APPLICATION.to_be_bytes(), id.to_be_bytes());
    let half = hash.iter().take(16).fold(0_u128, |all, byte| all << 8 | u128::from(*byte));
    // The version and the variant of a random UUID.
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
    fn an_id_is_hashed_as_systemd_does() {
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
    fn what_is_no_lasting_id_tells_nothing() {
        let texts = ["", "uninitialized\n", "0123", &"0".repeat(32), &"x".repeat(32)];
        assert!(texts.iter().all(|text| id(text).is_none()), "{texts:?}");
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        io::Write::write_all(&mut file, "1".repeat(32).as_bytes()).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!(lasting_id(file), None, "another boot has another one");
    }
}
