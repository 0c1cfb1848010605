//! The root directory of a worker: a file system in memory that contains only what the volume's backend reads,
//! in a mount namespace of its own.
//!
//! Without a path there is nothing to connect to, to open or to change, whatever system call or io_uring
//! operation is used. Old mounts leave the namespace, so the worker keeps no file system of the host busy
//! except those of its open files.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, chroot, pivot_root};

use super::Needs;

/// The maximum length of a copied file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The maximum number of files that are copied from one directory.
const MAX_FILES: usize = 256;

/// The options of the file system. It is read-only once it is complete.
const OPTIONS: &str = "size=32m,nr_inodes=4k,mode=0755";

/// Directories of which one exists everywhere. The new root is mounted on it for a moment, in the new
/// namespace.
const PLACES: [&str; 5] = ["/etc", "/usr", "/var", "/bin", "/tmp"];

/// The flags of every mount in the new root.
fn harmless() -> MsFlags {
    MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC
}

/// A file in the new root.
enum Entry {
    /// A copy with this content.
    Copy(PathBuf, Vec<u8>),
    /// A symbolic link to a path that the new root contains.
    Link(PathBuf, PathBuf),
}

/// Moves this process into a new root directory, with the files that `needs` names.
pub(super) fn enter(needs: &Needs) -> Result<(), String> {
    let entries = entries(needs);
    let shown = needs.paths.iter().chain(&needs.writable);
    let shown: Vec<_> = shown.filter_map(|path| fs::canonicalize(path).ok()).collect();
    unshare(CloneFlags::CLONE_NEWNS).map_err(|e| format!("no mount namespace: {e}"))?;
    make_private().map_err(|error| format!("cannot make mounts private: {error}"))?;
    let before = umask(Mode::empty());
    let built = build(needs, entries, &shown);
    umask(before);
    built.map_err(|error| format!("no new root: {error}"))?;
    leave_the_old_root().map_err(|error| format!("the old root stays: {error}"))
}

const NONE: Option<&str> = None;

/// Separates the mounts of the new namespace: no mount of one namespace appears in the other one, nor does an
/// unmount.
fn make_private() -> io::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    match mount(NONE, "/", NONE, private, NONE) {
        // The root is a directory inside of a mount, as after chroot(2). Entering the own namespace makes its
        // root the root of this process (setns(2)).
        Err(Errno::EINVAL) => {
            setns(File::open("/proc/self/ns/mnt")?, CloneFlags::CLONE_NEWNS)?;
            Ok(mount(NONE, "/", NONE, private, NONE)?)
        }
        other => Ok(other?),
    }
}

/// Makes the new root, which becomes the current directory. `shown` are the directories and devices that
/// appear in it as they are.
fn build(needs: &Needs, entries: Vec<Entry>, shown: &[PathBuf]) -> io::Result<()> {
    let free =
        |place: &&&str| Path::new(place).is_dir() && !shown.iter().any(|p| p.starts_with(place));
    let place = PLACES.iter().find(free).ok_or(io::ErrorKind::NotFound)?;
    mount(Some("none"), *place, Some("tmpfs"), harmless(), Some(OPTIONS))?;
    chdir(*place)?;
    for entry in entries {
        match entry {
            Entry::Copy(path, content) => create(&path)?.write_all(&content)?,
            Entry::Link(path, target) => {
                let path = below(&path);
                make_parents(path)?;
                symlink(target, path)?;
            }
        }
    }
    for path in &needs.paths {
        show(path, MsFlags::MS_RDONLY)?;
    }
    for path in &needs.writable {
        show(path, MsFlags::empty())?;
    }
    Ok(())
}

/// Lets `path` appear in the new root, with `access` as a flag of the mount. A symbolic link appears with what it leads
/// to: libcryptsetup opens its files by the number of the process, which /proc/self leads to.
fn show(path: &Path, access: MsFlags) -> io::Result<()> {
    let real = match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if real != path {
        make_parents(below(path))?;
        symlink(&real, below(path))?;
    }
    let (path, metadata) = (real.as_path(), fs::metadata(&real)?);
    let target = below(path);
    if metadata.is_dir() {
        DirBuilder::new().recursive(true).mode(0o755).create(target)?;
    } else {
        drop(create(path)?);
    }
    mount(Some(path), target, NONE, MsFlags::MS_BIND, NONE)?;
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | access | harmless();
    if metadata.file_type().is_char_device() {
        flags -= MsFlags::MS_NODEV;
    }
    Ok(mount(NONE, target, NONE, flags, NONE)?)
}

/// Replaces the root directory by the current directory, and detaches every other mount.
fn leave_the_old_root() -> nix::Result<()> {
    match pivot_root(".", ".") {
        // Both roots are now mounted at the same place, the old one on top (pivot_root(2)).
        Ok(()) => umount2(".", MntFlags::MNT_DETACH)?,
        // The machine runs from its initramfs, whose root cannot be detached (pivot_root(2)). It is covered,
        // and everything else is detached.
        Err(Errno::EINVAL) => {
            let new = std::env::current_dir().unwrap_or_default();
            for point in mount_points().iter().rev().filter(|point| !point.starts_with(&new)) {
                let _ = umount2(point, MntFlags::MNT_DETACH);
            }
            mount(Some("."), "/", NONE, MsFlags::MS_MOVE, NONE)?;
            chroot(".")?;
        }
        Err(error) => return Err(error),
    }
    chdir("/")?;
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | harmless();
    mount(NONE, "/", NONE, flags, NONE)
}

/// Returns the mount points of this namespace except the root, parents before children.
fn mount_points() -> Vec<PathBuf> {
    let list = fs::read("/proc/self/mountinfo").unwrap_or_default();
    // The fifth field is the mount point (proc_pid_mountinfo(5)).
    let points = list.split(|byte| *byte == b'\n').filter_map(|line| {
        let point = line.split(|byte| *byte == b' ').nth(4)?;
        Some(PathBuf::from(std::ffi::OsString::from_vec(unescaped(point))))
    });
    points.filter(|point| point != Path::new("/")).collect()
}

/// Decodes the octal escapes of mountinfo: blank, tab, newline and backslash.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) => {
                decoded.push(byte);
                rest = &after[3..];
            }
            None => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    decoded
}

/// Reads the files that are copied. A file that does not exist, cannot be read or is too long is left out, as
/// if it did not exist.
fn entries(needs: &Needs) -> Vec<Entry> {
    let mut entries = Vec::new();
    for path in &needs.copies {
        if path.is_dir() {
            let files = fs::read_dir(path).into_iter().flatten().flatten().take(MAX_FILES);
            let files = files.map(|file| file.path()).filter(|file| file.is_file());
            entries.extend(files.filter_map(|file| entry(&file, needs)));
        } else {
            entries.extend(entry(path, needs));
        }
    }
    entries
}

fn entry(path: &Path, needs: &Needs) -> Option<Entry> {
    let real = fs::canonicalize(path).ok()?;
    // A link into a directory that changes while the worker runs stays a link: /etc/resolv.conf.
    if real != path && needs.paths.iter().any(|shown| real.starts_with(shown)) {
        return Some(Entry::Link(path.to_owned(), real));
    }
    let mut content = Vec::new();
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(real).ok()?;
    let regular = file.metadata().is_ok_and(|found| found.is_file() && found.len() <= MAX_FILE);
    (regular && file.take(MAX_FILE).read_to_end(&mut content).is_ok())
        .then(|| Entry::Copy(path.to_owned(), content))
}

/// Creates the file of `path` in the new root. The worker reads it as another user.
fn create(path: &Path) -> io::Result<File> {
    let path = below(path);
    make_parents(path)?;
    File::options().write(true).create(true).truncate(true).mode(0o444).open(path)
}

fn make_parents(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new(""));
    if parent == Path::new("") {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(parent)
}

/// Returns an absolute path relative to the new root, which is the current directory.
fn below(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_mountinfo_are_decoded() {
        for (text, decoded) in [("/a", "/a"), ("/a\\040b\\134", "/a b\\"), ("/x\\9", "/x\\9")] {
            assert_eq!(unescaped(text.as_bytes()), decoded.as_bytes());
        }
    }
}
