//! Progress of long operations, and the signals that end them.
//!
//! Progress goes to stderr: a bar on a terminal, otherwise one line for every 10 %, and with `-o json` one
//! line with a JSON document for every 1 %. After the first SIGINT or SIGTERM the operation ends at the next
//! safe point; the second ends the process.

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

/// The width of the bar in columns.
const WIDTH: u64 = 30;

/// Reports the progress of one operation.
pub(super) struct Tracker {
    operation: &'static str,
    volume: String,
    style: Style,
    stop: Arc<AtomicBool>,
    /// The last percentage that was printed.
    printed: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
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
    /// Creates a tracker and starts to catch signals. Must be called before other threads are started, so that
    /// they inherit the signal mask.
    ///
    /// # Errors
    /// Returns an error if the thread for signals cannot be started.
    pub(super) fn begin(
        globals: &Globals,
        operation: &'static str,
        volume: impl ToString,
    ) -> Result<Self> {
        let style = match globals.output {
            Some(Format::Json) => Style::Json,
            _ if output::is_stderr_terminal() => Style::Bar,
            _ => Style::Lines,
        };
        let (stop, volume) = (catch_signals(style)?, volume.to_string());
        Ok(Self { operation, volume, style, stop, printed: None })
    }

    /// Runs `work` and prints its progress.
    ///
    /// # Errors
    /// Returns the errors of `work`.
    pub(super) fn run<T>(mut self, work: impl FnOnce(Progress<'_>) -> Result<T>) -> Result<T> {
        let result = work(&mut |done, total| self.report(done, total));
        if self.style == Style::Bar && self.printed.is_some() {
            output::progress(CLEAR);
        }
        result
    }

    fn report(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.stop.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        let Some(percent) = percent(done, total) else { return ControlFlow::Continue(()) };
        let step = if self.style == Style::Lines { 10 } else { 1 };
        if self.printed.is_none_or(|printed| percent / step != printed / step) {
            self.printed = Some(percent);
            output::progress(&self.format(percent, done, total));
        }
        ControlFlow::Continue(())
    }

    fn format(&self, percent: u64, done: u64, total: u64) -> String {
        let Self { operation, volume, .. } = self;
        let name = output::printable(output::short(volume));
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = match self.style {
            Style::Bar => {
                let bar: String =
                    (0..WIDTH).map(|n| if n * 100 < percent * WIDTH { '#' } else { ' ' }).collect();
                write!(text, "{CLEAR}{operation} {name}  [{bar}] {percent:>3}%")
            }
            Style::Lines => writeln!(text, "cleat: {operation} {name}: {percent}%"),
            Style::Json => {
                let progress = Inner { operation, volume, done, total };
                let line = output::line(&Step { progress }).unwrap_or_default();
                writeln!(text, "{line}")
            }
        };
        text
    }
}

/// Returns `done` in percent of `total`, or `None` if `total` is 0.
fn percent(done: u64, total: u64) -> Option<u64> {
    let percent = (u128::from(done) * 100).checked_div(total.into())?;
    u64::try_from(percent.min(100)).ok()
}

/// Starts a thread that waits for signals. The first signal sets the returned flag; the second ends the
/// process.
fn catch_signals(style: Style) -> Result<Arc<AtomicBool>> {
    let failed = |error: nix::Error| Error::from_io("cannot catch signals", error.into());
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().map_err(failed)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let wait = move || {
        // sigwait fails only for an invalid set of signals.
        let Ok(first) = signals.wait() else { return };
        flag.store(true, Ordering::Relaxed);
        if style == Style::Bar {
            output::progress(CLEAR);
        }
        // With JSON, the error that follows reports the signal.
        if style != Style::Json {
            let how = "stopping at the next safe point; send it again to stop at once";
            output::note(&format!("{first}: {how}"));
        }
        if let Ok(second) = signals.wait() {
            // The parent process must see that the signal has ended this process.
            let _ = signals.thread_unblock().and_then(|()| raise(second));
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .map_err(|error| Error::from_io("cannot start the thread that waits for signals", error))?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(style: Style) -> Tracker {
        let stop = Arc::new(AtomicBool::new(false));
        Tracker {
            operation: "flatten",
            volume: "rbd:p/\x1bi".to_owned(),
            style,
            stop,
            printed: None,
        }
    }

    #[test]
    fn progress_is_shown_in_the_style_of_the_output() {
        let bar = tracker(Style::Bar).format(50, 1, 2);
        assert!(bar.contains(&format!("[{}{}]  50%", "#".repeat(15), " ".repeat(15))), "{bar}");
        let line = tracker(Style::Lines).format(50, 1, 2);
        assert_eq!(line, "cleat: flatten rbd:p/\\u{1b}i: 50%\n");
        let json: serde_json::Value =
            serde_json::from_str(&tracker(Style::Json).format(50, 1, 2)).expect("it is JSON");
        assert_eq!(json["progress"]["total"], 2);
    }

    #[test]
    fn percentages_are_bounded_and_need_a_total() {
        assert_eq!(percent(0, 0), None);
        assert_eq!(percent(u64::MAX, u64::MAX), Some(100));
        assert_eq!(percent(3, 2), Some(100));
    }

    #[test]
    fn a_signal_stops_the_operation() {
        let mut tracker = tracker(Style::Lines);
        assert!(tracker.report(0, 0).is_continue());
        tracker.stop.store(true, Ordering::Relaxed);
        assert!(tracker.report(0, 0).is_break());
    }
}
