//! A loop device on a sparse file.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::geteuid;
use tempfile::TempDir;
use test_kit::temp::in_memory;
use tokio::time::Instant;

/// One MiB.
pub(super) const MIB: u64 = 1 << 20;

/// A deadline that no test reaches.
pub(super) fn later() -> Instant {
    Instant::now() + test_kit::wait::LIMIT
}

/// A loop device.
pub(super) struct Disk {
    pub(super) device: PathBuf,
    file: PathBuf,
    /// Contains the file, unless the caller has given another place.
    _directory: Option<TempDir>,
}

impl Disk {
    /// Attaches a file of `size` zero bytes.
    pub(super) fn new(size: u64) -> Self {
        let directory = tempfile::tempdir_in(in_memory()).unwrap();
        let mut disk = Self::at(&directory.path().join("file"), size);
        disk._directory = Some(directory);
        disk
    }

    /// Attaches a new file of `size` zero bytes with this path.
    pub(super) fn at(file: &Path, size: u64) -> Self {
        assert!(
            geteuid().is_root(),
            "this test needs root: run it with sudo, or exclude it with --skip NAME"
        );
        File::create(file).unwrap().set_len(size).unwrap();
        let device = run("losetup", &["--find", "--show", text(file)]).into();
        Self { device, file: file.to_owned(), _directory: None }
    }

    pub(super) fn name(&self) -> &str {
        text(&self.device)
    }

    pub(super) fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.device).unwrap()
    }

    /// Writes to the device.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        let device = self.open();
        device.write_all_at(bytes, at).unwrap();
        device.sync_all().unwrap();
    }

    /// Returns all bytes of the device.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut device = self.open();
        let size = cleat_sys::block::device_size(&device).unwrap();
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap());
        device.read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// Changes the size of the device.
    pub(super) fn resize(&self, size: u64) {
        self.set_file_size(size);
        run("losetup", &["--set-capacity", self.name()]);
    }

    /// Changes the size of the file, but not that of the device.
    pub(super) fn set_file_size(&self, size: u64) {
        OpenOptions::new().write(true).open(&self.file).unwrap().set_len(size).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["--detach", self.name()]).status();
        assert!(detached.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

/// A directory in which the test mounts. At the end, everything in it is unmounted.
pub(super) struct Place(TempDir);

impl Place {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Makes a directory to mount at.
    pub(super) fn directory(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    }

    /// Makes a file to bind a device to.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        File::create(&path).unwrap();
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for entry in std::fs::read_dir(self.0.path()).unwrap() {
            let path = entry.unwrap().path();
            while Command::new("mountpoint").arg("--quiet").arg(&path).status().unwrap().success() {
                run("umount", &["--lazy", text(&path)]);
            }
        }
    }
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a program that must succeed, and returns its output.
#[track_caller]
pub(super) fn run(command: &str, arguments: &[&str]) -> String {
    let output = Command::new(command).args(arguments).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
