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
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use cleat_core::error::{Error, ErrorKind, Result};

/// The format of log output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `Journald` when stderr is connected to journald, otherwise `Human`.
    Auto,
    /// Plain lines on stderr, in colour at a terminal.
    Human,
    /// One JSON object per line on stderr.
    Json,
    /// journald's native protocol, with fields.
    Journald,
}

/// The number of log lines that this process dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of log lines that this process dropped because the receiver did not take them at once.
pub fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

fn drop_line() {
    DROPPED.fetch_add(1, Ordering::Relaxed);
}

/// Replaces the socket to journald, if this process has one, by a socket of its current network namespace. The
/// abstract sockets that a socket reaches are those of the namespace in which it was made. If that fails, nothing
/// is logged from now on.
///
/// # Errors
/// Returns an error if journald does not listen on its socket.
pub fn reconnect_journal() -> std::io::Result<()> {
    journal::reconnect()
}

/// The choice of what is logged, and in which format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The format.
    pub format: Format,
    /// A level such as `info`, and directives TARGET=LEVEL, separated by commas.
    pub filter: String,
}

impl Log {
    /// Checks that `filter` is valid.
    ///
    /// # Errors
    /// Returns the reason, for an error message, if the filter is not valid.
    pub fn check_filter(filter: &str) -> Result<(), String> {
        if filter.trim().is_empty() {
            return Err("it is empty".to_owned());
        }
        // The parser takes a span in brackets for a part of the target, which nothing would match.
        if filter.contains('[') {
            return Err("it names a span or a field; write TARGET=LEVEL".to_owned());
        }
        // It takes a single word for a target: a typing error would silence everything else.
        let is_target = |word: &&str| !word.contains('=') && word.parse::<LevelFilter>().is_err();
        if let Some(word) = filter.split(',').map(str::trim).find(is_target) {
            return Err(format!("{word:?} is not one of error, warn, info, debug, trace and off"));
        }
        filter.parse::<Targets>().map(|_| ()).map_err(|error| error.to_string())
    }

    /// Returns the same choice with `Auto` replaced by the actual format. The supervisor passes it to
    /// workers, which inherit its stderr.
    #[must_use]
    pub fn decided(&self) -> Self {
        let format = match self.format {
            Format::Auto if stderr_is_journal() => Format::Journald,
            Format::Auto => Format::Human,
            format => format,
        };
        Self { format, filter: self.filter.clone() }
    }

    /// Starts the log output of this process. It must be called once, before the first event.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an invalid filter; `Internal` if it is called a second time.
    pub fn init(&self) -> Result<()> {
        let filter = self.filter.parse::<Targets>().map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "invalid log filter").with_source(error)
        })?;
        let registry = tracing_subscriber::registry().with(filter);
        let stderr = tracing_subscriber::fmt::layer().with_writer(|| stderr::Stderr);
        let done = match self.decided().format {
            Format::Json => registry.with(stderr.json().flatten_event(true)).try_init(),
            Format::Journald => match journal::Journal::new() {
                Ok(journal) => registry.with(journal).try_init(),
                // There is no journald, as in a container, or JOURNAL_STREAM is left over from another
                // process.
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

/// Writes the text form `<format>:<filter>`, which the supervisor passes to a worker.
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
                let message = format!("{other:?} is not a log format");
                Err(Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("use auto, human, json or journald"))
            }
        }
    }
}

/// Returns whether stderr is the stream that systemd connected to the journal (systemd.exec(5),
/// $JOURNAL_STREAM). The variable alone is no proof, because shells that a service starts inherit it.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stderr.dev(), stderr.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_choice_is_the_same_after_printing_and_parsing() {
        for format in [Format::Auto, Format::Human, Format::Json, Format::Journald] {
            let log = Log { format, filter: "info,cleat_node=debug".into() };
            assert_eq!(log.to_string().parse::<Log>().unwrap(), log);
        }
        assert!("xml:info".parse::<Log>().is_err());
    }

    #[test]
    fn decided_replaces_the_format_auto() {
        let log = Log { format: Format::Auto, filter: "info".into() };
        assert_ne!(log.decided().format, Format::Auto);
    }

    #[test]
    fn invalid_filters_are_refused() {
        Log::check_filter("info").unwrap();
        Log::check_filter("warn,cleat=trace").unwrap();
        assert!(Log::check_filter("").is_err());
        assert!(Log::check_filter("cleat=loud").is_err());
        assert!(Log::check_filter("loud").is_err());
        assert!(Log::check_filter("info,cleat_node").is_err());
        assert!(Log::check_filter("info,cleat[call]=debug").is_err());
        assert!(Log::check_filter("[{volume}]=debug").is_err());
    }
}
