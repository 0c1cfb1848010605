//! Log output: journald under systemd, plain lines at a terminal, JSON on request.
//!
//! Input: the events of `tracing`. Output: records on stderr or datagrams to journald. The supervisor
//! passes its choice to each worker as text ([`Log`] converts to and from a string).
//!
//! Logging never blocks the caller: a record that the receiver does not take at once is dropped and
//! counted.

mod journal;
mod stderr;

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use cleat_core::error::{Error, ErrorKind, Result};

/// The form of logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `Journald` when stderr is connected to it, else `Human`.
    Auto,
    /// Lines on stderr; in colour at a terminal.
    Human,
    /// One JSON object per line on stderr.
    Json,
    /// journald's own protocol, with fields.
    Journald,
}

/// Lines that this process could not get rid of.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// How many lines of this process's log were lost, because they were not taken in time.
pub fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

fn drop_line() {
    DROPPED.fetch_add(1, Ordering::Relaxed);
}

/// What is logged, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The form.
    pub format: Format,
    /// A level, or directives of tracing's filter.
    pub filter: String,
}

impl Log {
    /// Whether `filter` can be understood.
    ///
    /// # Errors
    /// Why not.
    pub fn check_filter(filter: &str) -> Result<(), String> {
        if filter.trim().is_empty() {
            return Err("it is empty".to_owned());
        }
        // A word alone would be taken for a target: a slip of the pen would silence everything else.
        let is_target =
            |word: &&str| !word.contains(['=', '[']) && word.parse::<LevelFilter>().is_err();
        if let Some(word) = filter.split(',').map(str::trim).find(is_target) {
            return Err(format!("{word:?} is none of error, warn, info, debug, trace and off"));
        }
        EnvFilter::builder().parse(filter).map(|_| ()).map_err(|error| error.to_string())
    }

    /// The same choice, with `Auto` decided: for a worker, which inherits stderr.
    #[must_use]
    pub fn decided(&self) -> Self {
        let format = match self.format {
            Format::Auto if stderr_is_journal() => Format::Journald,
            Format::Auto => Format::Human,
            format => format,
        };
        Self { format, filter: self.filter.clone() }
    }

    /// Sends this process's events there from now on. To be called once, early.
    ///
    /// # Errors
    /// `InvalidArgument` for a filter that cannot be understood; `Internal` when called twice.
    pub fn init(&self) -> Result<()> {
        let filter = EnvFilter::builder().parse(&self.filter).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "the log filter cannot be understood")
                .with_source(error)
        })?;
        let registry = tracing_subscriber::registry().with(filter);
        let stderr = tracing_subscriber::fmt::layer().with_writer(|| stderr::Stderr);
        let done = match self.decided().format {
            Format::Json => registry.with(stderr.json().flatten_event(true)).try_init(),
            Format::Journald => match journal::Journal::new() {
                Ok(journal) => registry.with(journal).try_init(),
                // Started by hand with JOURNAL_STREAM left over, or in a container without journald.
                Err(_) => registry.with(stderr.with_ansi(false)).try_init(),
            },
            Format::Human | Format::Auto => {
                let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
                let colour = terminal && std::env::var_os("NO_COLOR").is_none();
                registry.with(stderr.with_ansi(colour).with_target(false)).try_init()
            }
        };
        done.map_err(|error| {
            Error::new(ErrorKind::Internal, "logging was set up twice").with_source(error)
        })
    }
}

/// As a worker is told.
impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.format {
            Format::Auto => "auto",
            Format::Human => "human",
            Format::Json => "json",
            Format::Journald => "journald",
        };
        write!(f, "{format}:{}", self.filter)
    }
}

impl FromStr for Log {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (format, filter) = text.split_once(':').unwrap_or((text, "info"));
        let format = if format.is_empty() { Format::Auto } else { format.parse()? };
        Ok(Self { format, filter: filter.to_owned() })
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            "journald" => Ok(Self::Journald),
            other => {
                let message = format!("{other:?} is no form of logs");
                Err(Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("use auto, human, json or journald"))
            }
        }
    }
}

/// Whether stderr is what systemd connected to the journal: systemd.exec(5), $JOURNAL_STREAM. The
/// variable alone proves nothing, as shells started by a service inherit it.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stderr.dev(), stderr.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_survives_its_way_to_a_worker() {
        for format in [Format::Auto, Format::Human, Format::Json, Format::Journald] {
            let log = Log { format, filter: "info,cleat_node=debug".into() };
            assert_eq!(log.to_string().parse::<Log>().unwrap(), log);
        }
        assert!("xml:info".parse::<Log>().is_err());
    }

    #[test]
    fn auto_is_decided_before_a_worker_hears_of_it() {
        let log = Log { format: Format::Auto, filter: "info".into() };
        assert_ne!(log.decided().format, Format::Auto);
    }

    #[test]
    fn filters_are_checked() {
        Log::check_filter("info").unwrap();
        Log::check_filter("warn,cleat=trace").unwrap();
        assert!(Log::check_filter("").is_err());
        assert!(Log::check_filter("cleat=loud").is_err());
        assert!(Log::check_filter("loud").is_err());
        assert!(Log::check_filter("info,cleat_node").is_err());
    }
}
