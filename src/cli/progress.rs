//! Long operations at a terminal: how far they are, and signals that end them.
//!
//! On a terminal a bar on stderr; else a line there for each tenth; with `-o json` a document on one
//! line for each hundredth. The first SIGINT or SIGTERM lets the operation end where it is safe to, the
//! second ends the process.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::signal::{SigSet, Signal, raise};
use serde::Serialize;

use super::Globals;
use super::output::{self, Format};
use cleat_backend::store::Progress;
use cleat_core::error::{Error, Result};

/// Clears the terminal's line.
const CLEAR: &str = "\r\x1b[K";

/// Columns of the bar.
const WIDTH: u64 = 30;

/// What is told of one operation.
pub(super) struct Tracker {
    operation: &'static str,
    volume: String,
    look: Look,
    stop: Arc<AtomicBool>,
    /// In hundredths, as last told.
    told: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Bar,
    Lines,
    Json,
}

#[derive(Serialize)]
struct Step<'a> {
    progress: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    operation: &'a str,
    volume: &'a str,
    done: u64,
    total: u64,
}

impl Tracker {
    /// Begins to catch signals, so it has to come before the first thread that does not want them.
    ///
    /// # Errors
    /// When there is no thread left.
    pub(super) fn begin(
        globals: &Globals,
        operation: &'static str,
        volume: impl ToString,
    ) -> Result<Self> {
        let look = match globals.output {
            Some(Format::Json) => Look::Json,
            _ if output::is_stderr_terminal() => Look::Bar,
            _ => Look::Lines,
        };
        let (stop, volume) = (catch_signals(look)?, volume.to_string());
        Ok(Self { operation, volume, look, stop, told: None })
    }

    /// Runs `work`, telling of its progress.
    ///
    /// # Errors
    /// What `work` gives.
    pub(super) fn run<T>(mut self, work: impl FnOnce(Progress<'_>) -> Result<T>) -> Result<T> {
        let result = work(&mut |done, total| self.tell(done, total));
        if self.look == Look::Bar && self.told.is_some() {
            output::aside(CLEAR);
        }
        result
    }

    fn tell(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.stop.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        let Some(percent) = percent(done, total) else { return ControlFlow::Continue(()) };
        let step = if self.look == Look::Lines { 10 } else { 1 };
        if self.told.is_none_or(|told| percent / step != told / step) {
            self.told = Some(percent);
            output::aside(&self.shown(percent, done, total));
        }
        ControlFlow::Continue(())
    }

    fn shown(&self, percent: u64, done: u64, total: u64) -> String {
        let Self { operation, volume, .. } = self;
        let name = output::printable(output::short(volume));
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = match self.look {
            Look::Bar => {
                let bar: String =
                    (0..WIDTH).map(|n| if n * 100 < percent * WIDTH { '#' } else { ' ' }).collect();
                write!(text, "{CLEAR}{operation} {name}  [{bar}] {percent:>3}%")
            }
            Look::Lines => writeln!(text, "cleat: {operation} {name}: {percent}%"),
            Look::Json => {
                let progress = Inner { operation, volume, done, total };
                let line = serde_json::to_string(&Step { progress }).unwrap_or_default();
                writeln!(text, "{line}")
            }
        };
        text
    }
}

/// `None` until there is something to divide by.
fn percent(done: u64, total: u64) -> Option<u64> {
    let percent = (u128::from(done) * 100).checked_div(total.into())?;
    u64::try_from(percent.min(100)).ok()
}

/// Waits for signals on a thread of its own; the flag is set by the first.
fn catch_signals(look: Look) -> Result<Arc<AtomicBool>> {
    let failed = |error: nix::Error| Error::from_io("cannot catch signals", error.into());
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().map_err(failed)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let wait = move || {
        // It fails for a wrong set of signals only.
        let Ok(first) = signals.wait() else { return };
        flag.store(true, Ordering::Relaxed);
        if look == Look::Bar {
            output::aside(CLEAR);
        }
        // A program that reads JSON is told by the error that follows.
        if look != Look::Json {
            let how = "ending as soon as it is safe to; once more ends it at once";
            output::note(&format!("{first}: {how}"));
        }
        if let Ok(second) = signals.wait() {
            // As it would have been without us: whoever waits for this process sees the signal.
            let _ = signals.thread_unblock().and_then(|()| raise(second));
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .map_err(|error| Error::from_io("cannot start the thread for signals", error))?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(look: Look) -> Tracker {
        let stop = Arc::new(AtomicBool::new(false));
        Tracker { operation: "flatten", volume: "rbd:p/\x1bi".to_owned(), look, stop, told: None }
    }

    #[test]
    fn progress_looks_as_its_reader_needs_it() {
        let bar = tracker(Look::Bar).shown(50, 1, 2);
        assert!(bar.contains(&format!("[{}{}]  50%", "#".repeat(15), " ".repeat(15))), "{bar}");
        let line = tracker(Look::Lines).shown(50, 1, 2);
        assert_eq!(line, "cleat: flatten rbd:p/\\u{1b}i: 50%\n");
        let json: serde_json::Value =
            serde_json::from_str(&tracker(Look::Json).shown(50, 1, 2)).expect("it is JSON");
        assert_eq!(json["progress"]["total"], 2);
    }

    #[test]
    fn percents_are_of_something() {
        assert_eq!(percent(0, 0), None);
        assert_eq!(percent(u64::MAX, u64::MAX), Some(100));
        assert_eq!(percent(3, 2), Some(100));
    }

    #[test]
    fn the_flag_ends_it() {
        let mut tracker = tracker(Look::Lines);
        assert!(tracker.tell(0, 0).is_continue());
        tracker.stop.store(true, Ordering::Relaxed);
        assert!(tracker.tell(0, 0).is_break());
    }
}
