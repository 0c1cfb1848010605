//! Log output in journald's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): each event is one
//! datagram of fields.
//!
//! A send never blocks. While journald is stopped or overloaded, events are dropped and counted.

use std::fmt::{self, Write as _};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::sync::{PoisonError, RwLock};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// The socket on which journald listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// The socket of this process that is connected to journald.
static CONNECTION: RwLock<Option<UnixDatagram>> = RwLock::new(None);

/// Sends events to journald.
pub(super) struct Journal;

impl Journal {
    /// Opens the socket, and checks that journald listens.
    ///
    /// # Errors
    /// Returns an error if journald does not listen on its socket.
    pub(super) fn new() -> io::Result<Self> {
        let socket = connected()?;
        *CONNECTION.write().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        Ok(Self)
    }
}

fn connected() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    // Connected, because a confined worker cannot reach the path. systemd keeps the socket open when
    // journald restarts.
    socket.connect(SOCKET)?;
    // journald ignores an empty datagram.
    socket.send(&[])?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Replaces the socket, if there is one, by a socket of the current network namespace. If that fails, nothing is
/// logged from now on.
///
/// # Errors
/// Returns an error if journald does not listen on its socket.
pub(super) fn reconnect() -> io::Result<()> {
    let mut connection = CONNECTION.write().unwrap_or_else(PoisonError::into_inner);
    if connection.take().is_some() {
        *connection = Some(connected()?);
    }
    Ok(())
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let connection = CONNECTION.read().unwrap_or_else(PoisonError::into_inner);
        if !connection.as_ref().is_some_and(|socket| is_sent(socket, &entry(event))) {
            super::drop_line();
        }
    }
}

/// Sends an entry, if necessary through a socket that has replaced the one of this connection. Returns whether it
/// was sent. A confined worker cannot connect.
fn is_sent(socket: &UnixDatagram, entry: &[u8]) -> bool {
    match socket.send(entry) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            socket.connect(SOCKET).and_then(|()| socket.send(entry)).is_ok()
        }
        Err(_) => false,
    }
}

fn entry(event: &Event<'_>) -> Vec<u8> {
    let metadata = event.metadata();
    let mut fields = Fields(Vec::with_capacity(512));
    fields.put("SYSLOG_IDENTIFIER", "cleat");
    fields.put("PRIORITY", priority(*metadata.level()));
    fields.put("TARGET", metadata.target());
    if let (Some(file), Some(line)) = (metadata.file(), metadata.line()) {
        fields.put("CODE_FILE", file);
        fields.put("CODE_LINE", line);
    }
    event.record(&mut fields);
    fields.0
}

/// Returns the priority of syslog(3): 3 is an error, 7 is for debugging.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 5,
        Level::DEBUG => 6,
        Level::TRACE => 7,
    }
}

/// Encoded fields. Each consists of its name, the length of its value, and the value, which may hold any
/// bytes.
struct Fields(Vec<u8>);

impl Fields {
    fn put(&mut self, name: &str, value: impl fmt::Display) {
        let mut text = String::new();
        // A write to a string cannot fail. A `Display` that fails leaves the text incomplete.
        let _ = write!(text, "{value}");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.0.extend_from_slice(&(text.len() as u64).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(b'\n');
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(&journal_name(field.name()), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(&journal_name(field.name()), format_args!("{value:?}"));
    }
}

/// Converts a name to one that journald accepts: upper-case letters, digits and underscores, beginning
/// with a letter. (Names that begin with an underscore are reserved for journald.)
fn journal_name(name: &str) -> String {
    let word =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' });
    let name: String = word.skip_while(|c| !c.is_ascii_alphabetic()).take(64).collect();
    if name.is_empty() { "FIELD".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_names_are_converted_to_journald_names() {
        for (name, expected) in [
            ("message", "MESSAGE"),
            ("mapping_id", "MAPPING_ID"),
            ("log.target", "LOG_TARGET"),
            ("_pid", "PID"),
            ("__", "FIELD"),
            ("3rd", "RD"),
        ] {
            assert_eq!(journal_name(name), expected);
        }
    }

    #[test]
    fn a_value_with_newlines_is_encoded_as_one_field() {
        let mut fields = Fields(Vec::new());
        fields.put("MESSAGE", "a\nPRIORITY=0");
        fields.put("CODE_LINE", 7);
        let mut expected = b"MESSAGE\n\x0c\0\0\0\0\0\0\0a\nPRIORITY=0\n".to_vec();
        expected.extend_from_slice(b"CODE_LINE\n\x01\0\0\0\0\0\0\x007\n");
        assert_eq!(fields.0, expected);
    }
}
