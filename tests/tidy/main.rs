//! The project's rules as tests: which crate may depend on which, where `unsafe` is allowed, how long a
//! file may be, and which dependencies are permitted. There is no list of exemptions.

mod dependencies;
mod documents;
mod modules;
mod rooms;
mod source;

use source::{File, files, strip, words};

/// The maximum length of a file, in lines.
const MAX_LINES: usize = 600;

/// The maximum length of the median file, in lines.
const MAX_MEDIAN_LINES: usize = 200;

/// The maximum number of fields of a struct in a crate of the data path.
const MAX_FIELDS: usize = 15;

/// All calls into librbd go through `ffi/librbd`, which only the RBD backend may use.
#[test]
fn only_the_rbd_backend_uses_librbd() {
    let allowed = ["src/rbd/"];
    let mut wrong = Vec::new();
    for file in sources() {
        let code = file.code();
        if names_crate(&code, "librbd_sys") {
            wrong.push(format!("{}: names librbd_sys", file.path));
        }
        if names_crate(&code, "librbd") && !allowed.iter().any(|path| file.path.starts_with(path)) {
            wrong.push(format!("{}: names librbd", file.path));
        }
    }
    none(&wrong);
}

/// A new backend is a crate and a line of the composition: nothing else names one.
#[test]
fn only_the_composition_names_concrete_backends() {
    let concrete =
        ["cleat_backend::mem", "cleat_backend::file", "cleat_backend::fault", "cleat_rbd"];
    let mut wrong = Vec::new();
    let is_test = |file: &&File| file.path.ends_with("/tests.rs");
    let own = |file: &&File| file.path == "src/backends.rs";
    for file in sources().iter().filter(|file| !own(file) && !is_test(file)) {
        let code = file.code();
        for path in concrete {
            let named = code.match_indices(path).any(|(at, _)| {
                !code[at + path.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
            });
            if named {
                wrong.push(format!("{}: names {path}", file.path));
            }
        }
    }
    none(&wrong);
}

#[test]
fn unsafe_is_only_in_sys_and_ffi() {
    let inside = |file: &&File| file.path.starts_with("src/sys/") || file.path.starts_with("ffi/");
    let mut wrong = Vec::new();
    for file in rust().iter().filter(|file| !inside(file)) {
        let code = strip(&file.text);
        if words(&code).any(|word| word == "unsafe") || code.contains("allow(unsafe_code)") {
            wrong.push(format!("{}: unsafe", file.path));
        }
    }
    none(&wrong);
    let blocks = rust().into_iter().filter(|file| inside(&file)).flat_map(|file| {
        // The type of a pointer to an unsafe function needs no comment; its calls do.
        let code = strip(&file.text);
        let types = code.matches("unsafe extern").count();
        let unsafe_words = words(&code).filter(|word| *word == "unsafe").count() - types;
        let reasons = file.text.matches("// SAFETY:").count();
        (unsafe_words > 0 && reasons == 0).then(|| format!("{}: no SAFETY comment", file.path))
    });
    none(&blocks.collect::<Vec<_>>());
}

#[test]
fn files_do_not_exceed_their_length_limits() {
    let mut lengths: Vec<(usize, String)> =
        rust().into_iter().map(|file| (file.text.lines().count(), file.path)).collect();
    lengths.sort();
    let long = lengths.iter().filter(|(lines, _)| *lines > MAX_LINES);
    none(&long.map(|(lines, path)| format!("{path}: {lines} lines")).collect::<Vec<_>>());
    let (median, path) = &lengths[lengths.len() / 2];
    assert!(*median <= MAX_MEDIAN_LINES, "the median file, {path}, has {median} lines");
}

/// A struct with more fields has parts that deserve a name and an invariant of their own.
#[test]
fn structs_of_the_data_path_do_not_exceed_their_number_of_fields() {
    let rooms =
        ["src/nbd/", "src/backend/file/", "src/object/", "src/rbd/", "src/export/", "src/worker/"];
    let mut wrong = Vec::new();
    for file in sources().iter().filter(|file| rooms.iter().any(|room| file.path.starts_with(room)))
    {
        let code = file.code();
        for (at, _) in code.match_indices("struct ") {
            let fields = fields_of(&code[at..]);
            if fields > MAX_FIELDS {
                let name = words(&code[at..]).nth(1).unwrap_or_default();
                wrong.push(format!("{}: {name} has {fields} fields", file.path));
            }
        }
    }
    none(&wrong);
}

/// Counts the named fields of the struct that `code` begins with: the lines of its body that are indented
/// once and name a type.
fn fields_of(code: &str) -> usize {
    let Some(body) = code.find(['{', ';', '(']).filter(|at| code[*at..].starts_with('{')) else {
        return 0;
    };
    let lines = code[body..].lines().skip(1).take_while(|line| *line != "}");
    lines
        .filter(|line| {
            let field =
                line.strip_prefix("    ").filter(|field| !field.starts_with([' ', '}', ')', '>']));
            field.is_some_and(|field| field.contains(": "))
        })
        .count()
}

#[test]
fn every_crate_and_file_begins_with_documentation() {
    let mut wrong = Vec::new();
    for file in sources().iter().filter(|file| file.path.ends_with("/lib.rs")) {
        let lines = file.text.lines().take_while(|line| line.starts_with("//!")).count();
        if !(5..=25).contains(&lines) {
            wrong.push(format!("{}: opens with {lines} lines of documentation", file.path));
        }
    }
    none(&wrong);
    let silent = rust().into_iter().filter(|file| !file.text.starts_with("//!"));
    none(
        &silent
            .map(|file| format!("{}: does not begin with documentation", file.path))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn there_is_no_unfinished_work() {
    let markers = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:")];
    let code = ["todo!", "unimplemented!", "dbg!", "allow(clippy::too_many_lines)"];
    // No test may be skipped in a normal run.
    let skipped = concat!("#[ig", "nore");
    let mut wrong = Vec::new();
    for file in files() {
        let found = markers.iter().filter(|marker| file.text.contains(**marker));
        wrong.extend(found.map(|marker| format!("{}: {marker}", file.path)));
        if file.is_rust() && !file.path.starts_with("tests/tidy/") {
            if file.text.contains(skipped) {
                wrong.push(format!("{}: a test is skipped", file.path));
            }
            let text = strip(&file.text);
            let found = code.iter().filter(|word| text.contains(**word));
            wrong.extend(found.map(|word| format!("{}: {word}", file.path)));
        }
    }
    none(&wrong);
}

#[test]
fn no_file_contains_a_path_of_a_build_machine() {
    let places = [concat!("/wo", "rk/"), concat!("/tmp/", "wt")];
    let mut wrong = Vec::new();
    for file in files() {
        let found = places.iter().filter(|place| file.text.contains(**place));
        wrong.extend(found.map(|place| format!("{}: {place}", file.path)));
    }
    none(&wrong);
}

#[test]
fn only_the_command_line_prints() {
    let mut wrong = Vec::new();
    for file in sources().iter().filter(|file| file.path != "src/cli/output.rs") {
        let code = file.code();
        let found = ["io::stdout", "println!", "eprintln!", "print!("]
            .into_iter()
            .filter(|word| code.contains(word));
        wrong.extend(found.map(|word| format!("{}: {word}", file.path)));
    }
    none(&wrong);
}

/// Tests the helpers of the rules: a rule whose helper finds nothing could never fail.
#[test]
fn fields_are_counted() {
    let code = "struct A<T: B> {\n    pub(crate) a: u8,\n    b: Vec<\n        C,\n    >,\n}\nfn c() {\n    d: u8\n}";
    assert_eq!(fields_of(code), 2);
    assert_eq!(fields_of("struct A(u8);\nstruct B {\n    a: u8,\n}"), 0);
}

#[test]
fn comments_and_strings_are_removed_and_crate_names_found() {
    let source = "a /* unsafe */ // unsafe\n\"unsafe \\\" unsafe\" r#\"unsafe\"# 'x' &'a b '\\'' c";
    assert_eq!(words(&strip(source)).collect::<Vec<_>>(), ["a", "a", "b", "c"]);
    assert_eq!(strip(source).matches('\n').count(), 1);
    assert!(names_crate("use tokio::net;", "tokio"));
    assert!(!names_crate("let tokio = 1; use my_tokio::net;", "tokio"));
}

/// Whether `code` names the crate `name` in a path.
fn names_crate(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::"))
        .any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':'))
}

fn rust() -> Vec<File> {
    files().into_iter().filter(File::is_rust).collect()
}

fn sources() -> Vec<File> {
    // A build script is not part of any program, and prints instructions for cargo.
    let is_source =
        |file: &File| file.path.starts_with("src/") && !file.path.ends_with("/build.rs");
    rust().into_iter().filter(is_source).collect()
}

fn none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}
