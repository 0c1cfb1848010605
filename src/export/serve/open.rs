//! Opens a volume such that a signal interrupts it, because the storage may take long to answer.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::SignalFd;

use cleat_backend::{Image, Waker};
use cleat_core::error::{Error, ErrorKind, Result};

/// How long an interrupted open may take to complete, so that its claim is released. An open that takes
/// longer ends with the process, as in a crash.
const INTERRUPTED_OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the result is checked, in milliseconds: a thread that panics does not wake this one.
const CHECK_INTERVAL_MS: u16 = 1000;

/// Calls `open` on a thread of its own and returns its result.
///
/// # Errors
/// Returns `Aborted` if one of `signals` arrives first, or the error of `open`.
pub(super) fn open_unless_signalled(
    signals: &SignalFd,
    open: impl FnOnce() -> Result<Arc<dyn Image>> + Send + 'static,
) -> Result<Arc<dyn Image>> {
    let waker = Waker::new().map_err(|error| Error::from_io("no descriptor left", error))?;
    let ended = waker.clone();
    let (sender, opened) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("open".into()).spawn(move || {
        // After the timeout, the receiver is gone.
        let _ = sender.send(open());
        ended.wake();
    });
    let thread = thread.map_err(|error| Error::from_io("cannot start a thread", error))?;
    loop {
        match opened.try_recv() {
            Ok(result) => {
                // The caller may confine this process next, which needs a single thread.
                let _ = thread.join();
                return result;
            }
            Err(TryRecvError::Disconnected) => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "the thread that opens the volume panicked",
                ));
            }
            Err(TryRecvError::Empty) => {}
        }
        if let Ok(Some(signal)) = signals.read_signal() {
            tracing::info!(signal = signal.ssi_signo, "stopping before the volume is open");
            if let Ok(Ok(image)) = opened.recv_timeout(INTERRUPTED_OPEN_TIMEOUT) {
                image.close();
            }
            return Err(Error::new(
                ErrorKind::Aborted,
                "a signal arrived before the volume was open",
            ));
        }
        let mut waiting = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(waker.descriptor(), PollFlags::POLLIN),
        ];
        match poll(&mut waiting, PollTimeout::from(CHECK_INTERVAL_MS)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(Error::from_io("cannot wait for the volume", error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, raise};

    use super::*;
    use crate::serve::catch_signals;
    use cleat_backend::{OpenOptions, Registry};

    #[test]
    fn a_signal_ends_what_does_not_answer_and_nothing_else() {
        let signals = catch_signals().unwrap();
        let uri = Registry::new(&[cleat_backend::mem::BACKEND]).volume("mem:1M").unwrap();
        let image = move || uri.open(&OpenOptions::default());
        assert_eq!(open_unless_signalled(&signals, image.clone()).unwrap().size(), 1 << 20);
        let refused = || Err(Error::new(ErrorKind::NotFound, "as expected"));
        assert_eq!(
            open_unless_signalled(&signals, refused).err().unwrap().kind(),
            ErrorKind::NotFound
        );
        let panics = || panic!("as expected");
        assert_eq!(
            open_unless_signalled(&signals, panics).err().unwrap().kind(),
            ErrorKind::Internal
        );

        let (release, released) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = released.recv();
            image()
        };
        raise(Signal::SIGTERM).unwrap();
        let error = open_unless_signalled(&signals, hangs).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Aborted);
        drop(release);
    }
}
