//! Credentials that change while a process serves a volume without a supervisor (`cleat serve`).
//!
//! The process is confined, so it cannot read files, and reaches no service that gives keys. A second process, which
//! starts before the confinement, looks for changes as the supervisor does for its workers, and passes what has changed.
//! It takes nothing from the first one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use crate::Image;
use crate::credentials::{CredentialFile, CredentialSet, CredentialVersion};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::process::beside_this_process;
use cleat_sys::seqpacket;

/// The time between two looks, in milliseconds.
const INTERVAL_MS: u16 = 5000;

/// The maximum length of a message: why the files could not be read. A message with descriptors has one byte.
const MAX_MESSAGE: usize = 4096;

/// The first byte of a message: with the descriptors of all files, or with a text.
const FILES: u8 = 0;
const PROBLEM: u8 = 1;

/// A second process that looks for changed credentials. It ends when this process has ended.
#[derive(Debug)]
pub struct CredentialWatch {
    channel: OwnedFd,
    files: Vec<CredentialFile>,
}

impl CredentialWatch {
    /// Starts the second process; none if none of `files` is followed. Must be called while this process has one thread,
    /// and before it has secrets or rings: the second process gets a copy of the memory.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started.
    pub fn start(files: Vec<CredentialFile>) -> Result<Option<Self>> {
        if !files.iter().any(|file| file.is_followed) {
            return Ok(None);
        }
        let failed = |error| Error::from_io("cannot start the process that reads keys", error);
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|error| failed(error.into()))?;
        let work = |channel: OwnedFd| look(channel.as_fd(), &files);
        let channel = beside_this_process(ours, theirs, work).map_err(failed)?;
        Ok(Some(Self { channel, files }))
    }

    /// Passes what changes to `image`, on a thread of its own.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn pass_to(self, image: Arc<dyn Image>) -> Result<()> {
        let thread = std::thread::Builder::new().name("credentials".into());
        let started = thread.spawn(move || {
            while let Some(received) = self.receive() {
                let renewed = received.and_then(|credentials| match image.renew_credentials() {
                    Some(renewal) => renewal.renew(&credentials),
                    None => Ok(()),
                });
                if let Err(error) = renewed {
                    tracing::warn!("the present credentials stay in use: {}", error.report());
                }
            }
            tracing::warn!("changes of the credentials are not noticed any more");
        });
        started.map(drop).map_err(|error| Error::from_io("cannot start a thread", error))
    }

    /// Waits for the next message; `None` if the second process has ended.
    fn receive(&self) -> Option<Result<CredentialSet>> {
        let mut buffer = [0; MAX_MESSAGE];
        loop {
            return match seqpacket::receive(self.channel.as_fd(), &mut buffer) {
                Ok((0, _)) => None,
                Ok((length, _)) if buffer[0] == PROBLEM => {
                    let text = String::from_utf8_lossy(&buffer[1..length]).into_owned();
                    Some(Err(Error::new(ErrorKind::Unavailable, text)))
                }
                Ok((_, descriptors)) => {
                    let paths = self.files.iter().map(|file| file.path.to_string_lossy().into());
                    let paths: Vec<String> = paths.collect();
                    Some(CredentialSet::receive(&self.files, &paths, descriptors))
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => None,
            };
        }
    }
}

/// Passes the files if they differ from those that were passed last, until the other end of the channel is closed. The
/// first look passes them in any case: they may have changed since the first process has read them. Runs in the second
/// process.
fn look(channel: BorrowedFd<'_>, files: &[CredentialFile]) {
    let _ = nix::sys::prctl::set_name(c"cleat:keys");
    let (mut passed, mut problem) = (None, None);
    loop {
        let mut set = [PollFd::new(channel, PollFlags::POLLIN)];
        match poll(&mut set, PollTimeout::from(INTERVAL_MS)) {
            Ok(0) | Err(nix::Error::EINTR) => {}
            _ => return,
        }
        let opened: Result<(Vec<File>, Vec<CredentialVersion>)> =
            files.iter().map(CredentialFile::open_with_version).collect();
        let sent = match opened {
            Ok((_, versions)) if passed.as_ref() == Some(&versions) => {
                problem = None;
                Ok(())
            }
            Ok((opened, versions)) => {
                (passed, problem) = (Some(versions), None);
                let descriptors: Vec<_> = opened.iter().map(File::as_fd).collect();
                seqpacket::send(channel, &[FILES], &descriptors)
            }
            Err(error) => {
                let text = error.report();
                let is_new = problem.replace(text.clone()) != Some(text.clone());
                let message: Vec<u8> =
                    [PROBLEM].into_iter().chain(text.bytes()).take(MAX_MESSAGE).collect();
                if is_new { seqpacket::send(channel, &message, &[]) } else { Ok(()) }
            }
        };
        if sent.is_err() {
            return;
        }
    }
}
