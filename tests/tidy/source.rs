//! The project's files, and Rust source without its comments, strings and tests.

use std::fs;
use std::path::{Path, PathBuf};

/// The project's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// One file of the project.
pub(crate) struct File {
    /// The path relative to the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// The Rust code without comments, strings and the tests at the end.
    pub(crate) fn code(&self) -> String {
        let code = strip(&self.text);
        match code.find("#[cfg(test)]\nmod tests {") {
            Some(tests) => code[..tests].to_owned(),
            None => code,
        }
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// All text files of the project.
pub(crate) fn files() -> Vec<File> {
    let mut files = Vec::new();
    collect(root(), &mut files);
    assert!(
        files.iter().any(|file| file.path == "src/core/lib.rs"),
        "the sources are missing in the list"
    );
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn collect(directory: &Path, files: &mut Vec<File>) {
    for entry in fs::read_dir(directory).expect("the project can be read") {
        let path: PathBuf = entry.expect("the project can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("names are UTF-8");
        if [".git", "target"].contains(&name) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let path = path.strip_prefix(root()).expect("it is below the root");
            files.push(File { path: path.display().to_string(), text });
        }
    }
}

/// Removes comments, strings and character literals from Rust code. Line breaks stay, and with them the
/// line numbers.
pub(crate) fn strip(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &source[at..];
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string(rest, code.chars().last()) {
            let end = format!("\"{}", "#".repeat(hashes));
            let body = hashes + 2;
            body + rest[body..].find(&end).map_or(rest.len() - body, |found| found + end.len())
        } else if rest.starts_with('"') {
            quoted(rest, b'"')
        } else if is_char_literal(rest) {
            quoted(rest, b'\'')
        } else {
            0
        };
        if skipped == 0 {
            let character = rest.chars().next().expect("there is a rest");
            code.push(character);
            at += character.len_utf8();
        } else {
            code.push(' ');
            code.extend(rest[..skipped].matches('\n'));
            at += skipped;
        }
    }
    code
}

/// The number of hashes of the raw string that begins here; `None` if no raw string begins here.
fn raw_string(rest: &str, before: Option<char>) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    let hashes = after.bytes().take_while(|byte| *byte == b'#').count();
    // `br"…"` begins a raw string; an identifier that ends in r does not.
    let apart = before.is_none_or(|c| c == 'b' || !(c.is_alphanumeric() || c == '_'));
    (apart && after[hashes..].starts_with('"')).then_some(hashes)
}

/// The length of the literal that begins here, both quotes included.
fn quoted(rest: &str, quote: u8) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Whether a character literal such as `'a'` or `'\n'` begins here, and not a lifetime such as `'a`.
fn is_char_literal(rest: &str) -> bool {
    let mut characters = rest.chars();
    if characters.next() != Some('\'') {
        return false;
    }
    match characters.next() {
        Some('\\') => true,
        Some(_) => characters.next() == Some('\''),
        None => false,
    }
}

/// The words of `code`: identifiers and keywords.
pub(crate) fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}
