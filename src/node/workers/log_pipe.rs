//! A named pipe for the log of workers that outlive the container of the daemon.
//!
//! A container has ended for its runtime when every process has closed the container's stderr, too. Workers that
//! inherited it kept the container of an old daemon from ending, for minutes. The pipe has a path, so that a later
//! daemon reads the log of the workers that it finds.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use cleat_core::error::{Error, Result};
use nix::sys::stat::Mode;

/// The name of the pipe in the runtime directory.
const NAME: &str = "workers.log";

/// The pipe. While no daemon reads it, workers drop their lines.
#[derive(Debug, Clone)]
pub struct LogPipe {
    path: PathBuf,
}

impl LogPipe {
    /// Creates the pipe in `runtime_dir`, and starts a thread that copies what it gets to stderr.
    ///
    /// # Errors
    /// Returns an error if the pipe cannot be created.
    pub fn open(runtime_dir: &Path) -> Result<Self> {
        let path = runtime_dir.join(NAME);
        let failed = |error| Error::from_io(format!("cannot create {}", path.display()), error);
        let mut reader = reader(&path).map_err(failed)?;
        let copy = move || io::copy(&mut reader, &mut io::stderr());
        std::thread::Builder::new().name("worker-log".to_owned()).spawn(copy).map_err(failed)?;
        Ok(Self { path })
    }

    /// Returns a descriptor for the stderr of a worker, which cannot read what others write.
    pub(super) fn writer(&self) -> io::Result<File> {
        File::options().write(true).open(&self.path)
    }
}

/// Returns whether the stderr of this process is a pipe, as in a container.
pub fn stderr_is_pipe() -> bool {
    fs::metadata("/proc/self/fd/2").is_ok_and(|found| found.file_type().is_fifo())
}

/// Opens the pipe, which exists if an earlier daemon has created it.
fn reader(path: &Path) -> io::Result<File> {
    match nix::unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
        Err(error) => return Err(error.into()),
    }
    // With its own writer, a reader neither waits for one nor sees an end (fifo(7)).
    let file = File::options().read(true).write(true).open(path)?;
    if !file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("it exists and is no named pipe: remove it"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_later_daemon_reads_the_log_of_earlier_workers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        let first = reader(&path).unwrap();
        let mut worker = LogPipe { path: path.clone() }.writer().unwrap();
        drop(first);
        let lost = worker.write(b"lost\n").unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::BrokenPipe);
        let mut second = reader(&path).unwrap();
        worker.write_all(b"line\n").unwrap();
        let mut line = [0; 5];
        second.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"line\n");
    }

    #[test]
    fn a_file_in_the_place_of_the_pipe_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        fs::write(&path, "").unwrap();
        assert!(reader(&path).unwrap_err().to_string().contains("no named pipe"));
    }
}
