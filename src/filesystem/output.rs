//! The output of a program, in a memory file.
//!
//! A pipe would end the program by SIGPIPE if this process ended or executed a new build before it, in the
//! middle of a repair for example. A memory file remains writable, and its size is the bound of the output.

use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::FileExt;
use std::process::Stdio;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

/// The maximum number of bytes that a program can write. A later write fails in the program.
const FILE_MAX: usize = 1 << 20;

/// The maximum number of bytes that are kept of an output.
const KEPT_MAX: usize = 64 << 10;

/// A memory file that a program writes to.
#[derive(Debug)]
pub(crate) struct Output(File);

impl Output {
    /// Makes an empty file. It takes memory only for what is written.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("cleat-output", flags)?);
        ftruncate(&file, FILE_MAX.try_into().map_err(io::Error::other)?)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self(file))
    }

    /// Returns the descriptor for the program. Its position is that of this file.
    pub(crate) fn stdio(&self) -> io::Result<Stdio> {
        Ok(Stdio::from(self.0.try_clone()?))
    }

    /// Returns the first [`KEPT_MAX`] bytes that were written.
    pub(crate) fn text(&mut self) -> io::Result<String> {
        let written = usize::try_from(self.0.stream_position()?).unwrap_or(KEPT_MAX);
        let mut text = vec![0; written.min(KEPT_MAX)];
        self.0.read_exact_at(&mut text, 0)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_output_of_a_program_is_bounded() {
        let mut output = Output::new().unwrap();
        let mut echo = Command::new("/bin/echo");
        echo.arg("a line").stdout(output.stdio().unwrap()).status().unwrap();
        echo.stdout(output.stdio().unwrap()).status().unwrap();
        assert_eq!(output.text().unwrap(), "a line\na line\n");
        let mut endless = Command::new("/usr/bin/yes");
        endless.stdout(output.stdio().unwrap()).stderr(Stdio::null());
        assert!(!endless.status().unwrap().success());
        assert_eq!(output.text().unwrap().len(), KEPT_MAX);
    }
}
