//! The events of a run, including the supervisor's log, one per line with the world's time.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::SubscriberExt;

use crate::clock;

/// Runs `run`, and returns its result and the recorded events.
pub(crate) fn record<T>(run: impl FnOnce() -> T) -> (T, String) {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(lines.clone())
        .with_ansi(false)
        .with_timer(WorldTime)
        .finish()
        .with(
            Targets::new()
                .with_targets(["cleat", "simulation"].map(|name| (name, LevelFilter::TRACE))),
        );
    let result = tracing::subscriber::with_default(subscriber, run);
    let bytes = lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (result, neutral(&String::from_utf8_lossy(&bytes)))
}

/// Removes text that differs from run to run: the name of the directory, and real times.
fn neutral(text: &str) -> String {
    let is_moment = |word: &str| word.len() >= 20 && word.starts_with("20") && word.contains('Z');
    let lines = text.lines().map(|line| {
        let words = line.split(' ').map(|word| match word.find("/.tmp") {
            Some(at) => format!("{}{}", &word[..at], word.get(at + 11..).unwrap_or("")),
            None if is_moment(word) => "(a moment)".to_owned(),
            None => word.to_owned(),
        });
        words.collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

struct WorldTime;

impl FormatTime for WorldTime {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        write!(writer, "{:>9.3}", clock::elapsed().as_secs_f64())
    }
}
