//! The only place of the command line that prints. Everything goes to a locked stdout; a reader
//! that went away (`cleat ls | head -1`) ends the printing quietly, not with a panic.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use super::exit;
use cleat_core::error::{Error, ErrorKind, Result};

/// How results are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Columns for the eye
    Table,
    /// More columns
    Wide,
    /// One JSON document with a stable schema, see cleat(1); errors on stderr as JSON, too
    Json,
}

/// Writes `text` to stdout as it is.
///
/// # Errors
/// When stdout cannot be written, other than for lack of a reader.
pub fn text(text: &str) -> Result<()> {
    bytes(text.as_bytes())
}

/// Writes `content` to stdout as it is.
///
/// # Errors
/// As [`text`].
pub fn bytes(content: &[u8]) -> Result<()> {
    live(content).map(drop)
}

/// Writes `value` as one indented JSON document.
///
/// # Errors
/// As [`text`].
pub fn json(value: &impl Serialize) -> Result<()> {
    let document = serde_json::to_string_pretty(value).map_err(not_json)?;
    text(&(document + "\n"))
}

/// Writes `value` as JSON on one line, for streams. Returns whether anybody still reads.
///
/// # Errors
/// As [`text`].
pub fn json_line(value: &impl Serialize) -> Result<bool> {
    live((serde_json::to_string(value).map_err(not_json)? + "\n").as_bytes())
}

/// As [`bytes`], for endless output: returns whether anybody still reads.
///
/// # Errors
/// As [`text`].
pub fn live(content: &[u8]) -> Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(content).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::from_io("stdout cannot be written", error)),
    }
}

/// Whether stdout is a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Whether stderr is a terminal.
pub fn is_stderr_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Writes `text` to stderr as it is: a bar that moves, a line for a program.
pub fn aside(text: &str) {
    let mut stderr = io::stderr().lock();
    // Nobody is left to tell when stderr is gone.
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Tells the user something on stderr that is no result and no error.
pub fn note(message: &str) {
    // Nobody is left to tell when stderr is gone.
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
    serde_json::to_string(&Outer { error: inner })
        .map_or_else(|_| error_as_text(error), |line| line + "\n")
}

fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "the result cannot be written as JSON").with_source(error)
}

/// `text` without characters that a terminal would act on: names, paths and commands come from
/// others.
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

/// Columns of text, each as wide as its widest cell; two spaces between, none after the last.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<usize>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(ToString::to_string).collect()], right: Vec::new() }
    }

    /// Aligns these columns (from 0) to the right: numbers.
    #[must_use]
    pub fn align_right(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.right = columns.into_iter().collect();
        self
    }

    /// Adds a row. An empty cell shows as `-`.
    pub fn row(&mut self, cells: Vec<String>) {
        let show = |cell: String| if cell.is_empty() { "-".to_owned() } else { printable(&cell) };
        self.rows.push(cells.into_iter().map(show).collect());
    }

    /// The table as text, each line ended.
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

/// Returns a volume's URI without its options, which a person who gave them need not read again.
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
    fn nothing_printed_can_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n\u{9b}c é"), "a\\u{1b}[2Jb\\n\\u{9b}c é");
        let mut table = Table::new(&["COMMAND"]);
        table.row(vec!["evil\x1b]0;title\x07".into()]);
        assert!(!table.render().contains('\x1b'));
    }

    #[test]
    fn an_error_shows_its_repair_on_lines_of_its_own() {
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
