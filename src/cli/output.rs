//! All output of the command line. No other module prints.
//!
//! Each write locks its stream. If the reader of stdout has closed it (`cleat ls | head -1`), the output ends
//! without an error or a panic.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use super::exit;
use cleat_core::error::{Error, ErrorKind, Result};

/// How results are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table
    Table,
    /// A table with more columns
    Wide,
    /// One JSON document with a stable schema, see cleat(1); errors on stderr are JSON, too
    Json,
}

/// Writes `text` to stdout unchanged.
///
/// # Errors
/// Returns an error if stdout cannot be written. A reader that has closed the pipe is not an error.
pub fn text(text: &str) -> Result<()> {
    bytes(text.as_bytes())
}

/// Writes `content` to stdout unchanged.
///
/// # Errors
/// Returns the errors of [`text`].
pub fn bytes(content: &[u8]) -> Result<()> {
    live(content).map(drop)
}

/// Writes `value` to stdout as one indented JSON document.
///
/// # Errors
/// Returns the errors of [`text`].
pub fn json(value: &impl Serialize) -> Result<()> {
    let document = serde_json::to_string_pretty(value).map_err(not_json)?;
    text(&(without_controls(&document) + "\n"))
}

/// Writes `value` to stdout as JSON on one line, for streams. Returns false if the reader has closed stdout.
///
/// # Errors
/// Returns the errors of [`text`].
pub fn json_line(value: &impl Serialize) -> Result<bool> {
    live((line(value).map_err(not_json)? + "\n").as_bytes())
}

/// Writes `content` to stdout unchanged, for endless output. Returns false if the reader has closed stdout.
///
/// # Errors
/// Returns the errors of [`text`].
pub fn live(content: &[u8]) -> Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(content).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::from_io("cannot write to stdout", error)),
    }
}

/// Returns whether stdout is a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Returns whether stderr is a terminal.
pub fn is_stderr_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Writes `text` to stderr unchanged. For progress: a bar on a terminal, a line for a program.
pub fn progress(text: &str) {
    let mut stderr = io::stderr().lock();
    // An error is ignored: there is no other place to report it.
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Writes a line to stderr that is neither a result nor an error.
pub fn note(message: &str) {
    // An error is ignored: there is no other place to report it.
    let _ = writeln!(io::stderr().lock(), "cleat: {}", printable(message));
}

/// Prints `error` to stderr, as text or as JSON, and returns its exit code.
pub fn error(error: &Error, format: Option<Format>) -> u8 {
    let code = exit::code(error.kind());
    let rendered = if format == Some(Format::Json) {
        error_as_json(error, code)
    } else {
        error_as_text(error)
    };
    let _ = io::stderr().lock().write_all(rendered.as_bytes());
    code
}

fn error_as_text(error: &Error) -> String {
    let mut rendered = format!("cleat: error: {}\n", printable(&error.report()));
    for line in error.repair().into_iter().flat_map(str::lines) {
        let label = if rendered.contains("\n  repair: ") { "          " } else { "  repair: " };
        let _ = writeln!(rendered, "{label}{}", printable(line));
    }
    rendered
}

fn error_as_json(error: &Error, exit_code: u8) -> String {
    #[derive(Serialize)]
    struct Outer<'a> {
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        kind: ErrorKind,
        message: String,
        repair: Option<&'a str>,
        exit_code: u8,
    }
    let inner =
        Inner { kind: error.kind(), message: error.report(), repair: error.repair(), exit_code };
    line(&Outer { error: inner }).map_or_else(|_| error_as_text(error), |line| line + "\n")
}

/// Encodes `value` as JSON on one line that does not control a terminal.
///
/// # Errors
/// Returns an error for a value that JSON cannot represent.
pub(super) fn line(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|line| without_controls(&line))
}

/// Escapes the control characters that JSON allows in strings: DEL, and U+0080 to U+009F, which terminals treat
/// like escape sequences. They occur only in strings, so the document stays the same.
fn without_controls(document: &str) -> String {
    let mut escaped = String::with_capacity(document.len());
    for character in document.chars() {
        if matches!(character, '\u{7f}'..='\u{9f}') {
            // Writing to a String cannot fail.
            let _ = write!(escaped, "\\u{:04x}", u32::from(character));
        } else {
            escaped.push(character);
        }
    }
    escaped
}

fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "cannot encode the result as JSON").with_source(error)
}

/// Returns `text` with its control characters escaped. Names, paths and commands come from other parties and
/// must not control the terminal.
pub fn printable(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            clean.extend(character.escape_default());
        } else {
            clean.push(character);
        }
    }
    clean
}

/// A table of text. Each column is as wide as its widest cell, with two spaces between columns.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<usize>,
}

impl Table {
    /// Creates a table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(ToString::to_string).collect()], right: Vec::new() }
    }

    /// Aligns these columns, counted from 0, to the right. For numbers.
    #[must_use]
    pub fn align_right(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.right = columns.into_iter().collect();
        self
    }

    /// Adds a row. An empty cell is shown as `-`.
    pub fn row(&mut self, cells: Vec<String>) {
        let show = |cell: String| if cell.is_empty() { "-".to_owned() } else { printable(&cell) };
        self.rows.push(cells.into_iter().map(show).collect());
    }

    /// Returns the table as text. Every line ends with a line break.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width_of = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width_of).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths[column];
                // Writing to a String cannot fail.
                let _ = if self.right.contains(&column) {
                    write!(line, "{cell:>width$}  ")
                } else {
                    write!(line, "{cell:<width$}  ")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Returns a volume's URI without its options, for messages to the user who has typed them.
pub(super) fn short(uri: &str) -> &str {
    uri.split_once('?').map_or(uri, |(location, _)| location)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "SIZE"]).align_right([1]);
        table.row(vec!["a-long-name".into(), "1".into()]);
        table.row(vec![String::new(), "10".into()]);
        assert_eq!(table.render(), "NAME         SIZE\na-long-name     1\n-              10\n");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a\x1b[2Jb\n\u{9b}c é"), "a\\u{1b}[2Jb\\n\\u{9b}c é");
        let mut table = Table::new(&["COMMAND"]);
        table.row(vec!["evil\x1b]0;title\x07".into()]);
        assert!(!table.render().contains('\x1b'));
    }

    #[test]
    fn json_contains_no_control_character_and_has_the_same_content() {
        let name = "a\u{7f}b\u{85}c\u{9b}31m\u{9f}\x1bé\u{a0}";
        let encoded = line(&name).expect("it is JSON");
        assert_eq!(encoded, "\"a\\u007fb\\u0085c\\u009b31m\\u009f\\u001bé\u{a0}\"");
        assert!(!encoded.chars().any(char::is_control));
        assert_eq!(serde_json::from_str::<String>(&encoded).expect("it is JSON"), name);
        let error = Error::new(ErrorKind::NotFound, name);
        assert!(!error_as_json(&error, 4).trim_end().chars().any(char::is_control));
    }

    #[test]
    fn an_error_shows_its_repair_on_separate_lines() {
        let error = Error::new(ErrorKind::Unavailable, "no daemon").with_repair("one\ntwo");
        let expected = "cleat: error: no daemon\n  repair: one\n          two\n";
        assert_eq!(error_as_text(&error), expected);
        let json: serde_json::Value =
            serde_json::from_str(&error_as_json(&error, 9)).expect("it is JSON");
        assert_eq!(json["error"]["kind"], "unavailable");
        assert_eq!(json["error"]["exit_code"], 9);
        assert_eq!(json["error"]["repair"], "one\ntwo");
    }
}
