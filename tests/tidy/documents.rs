//! The rules for documents: commands, paths, links and tests that they name exist. And for the systemd
//! unit: systemd accepts it.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use crate::none;
use crate::source::{File, files, root};

#[test]
fn documents_name_commands_that_exist() {
    let targets = make_targets();
    let subcommands = subcommands();
    let mut wrong = Vec::new();
    for file in files().iter().filter(|file| file.path.ends_with(".md")) {
        for (command, argument) in commands(&file.text) {
            let known = match command {
                "make" => targets.iter().any(|target| *target == argument),
                _ => subcommands.iter().any(|known| *known == argument),
            };
            if !known {
                wrong.push(format!("{}: {command} {argument}", file.path));
            }
        }
    }
    none(&wrong);
}

#[test]
fn the_two_commands_are_in_the_readme() {
    let readme = read("README.md");
    let found = commands(&readme);
    for wanted in [("make", "demo"), ("make", "test")] {
        assert!(found.contains(&wanted), "{wanted:?}");
    }
}

#[test]
fn links_between_documents_have_existing_targets() {
    let mut wrong = Vec::new();
    for file in files().iter().filter(|file| file.path.ends_with(".md")) {
        for target in links(file) {
            let base = root().join(&file.path);
            let base = base.parent().expect("a file is in a directory");
            if !target.contains("://") && !target.starts_with('#') && !base.join(target).exists() {
                wrong.push(format!("{}: {target}", file.path));
            }
        }
    }
    none(&wrong);
}

#[test]
fn links_to_sections_have_existing_targets() {
    let mut wrong = Vec::new();
    for file in files().iter().filter(|file| file.path.ends_with(".md")) {
        for (target, section) in section_links(file) {
            let base = root().join(&file.path);
            let path = match target {
                "" => base,
                target => base.parent().expect("a file is in a directory").join(target),
            };
            // The other test reports a missing file.
            let text = fs::read_to_string(path).unwrap_or_default();
            if !text.lines().filter_map(heading).any(|heading| anchor(heading) == section) {
                wrong.push(format!("{}: {target}#{section}", file.path));
            }
        }
    }
    none(&wrong);
}

#[test]
fn documents_name_paths_that_exist() {
    let places = ["src/", "tests/", "benches/", "ffi/", "proto/", "systemd/", "scripts/", "docs/"];
    let mut wrong = Vec::new();
    for file in files().iter().filter(|file| file.path.ends_with(".md")) {
        let named = file.text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
        let paths = named.filter(|code| places.iter().any(|place| code.starts_with(place)));
        let missing = paths.filter(|path| !path.contains(' ') && !root().join(path).exists());
        wrong.extend(missing.map(|path| format!("{}: {path}", file.path)));
    }
    none(&wrong);
}

#[test]
fn the_kernel_facts_name_all_their_tests_and_no_others() {
    let page = read("docs/kernel-facts.md");
    let named: BTreeSet<&str> =
        page.lines().filter(|line| line.starts_with("| ")).flat_map(test_names).collect();
    let sources: Vec<String> = ["commands", "sockets", "timers"]
        .map(|name| read(&format!("tests/device/facts/{name}.rs")))
        .into();
    let listed = sources.iter().flat_map(|text| text.lines().filter_map(listed_test));
    assert_eq!(named, listed.collect::<BTreeSet<_>>());
}

/// The page of the controller has a table of forty behaviours of other systems. Each one has a test, whose name begins
/// with its number, and the page names no others.
#[test]
fn each_of_the_forty_rows_has_a_test_that_the_page_names() {
    let sources = files();
    let sources = sources.iter().filter(|file| file.is_rust());
    let tests: BTreeSet<&str> = sources.flat_map(|file| row_tests(&file.text)).collect();
    let (page, mut listed, mut wrong) = (read("docs/controller.md"), Vec::new(), Vec::new());
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, number, _, named, _] = cells[..] else { continue };
        let Ok(row) = number.parse::<u8>() else { continue };
        listed.push(row);
        let names: Vec<&str> = named.split('`').filter(|name| name.starts_with("row_")).collect();
        let is_test = |name: &&str| {
            tests.iter().any(|test| test.starts_with(*name) && rows(test).contains(&row))
        };
        if names.is_empty() || !names.iter().all(is_test) {
            wrong.push(format!("row {row}: {named}"));
        }
    }
    none(&wrong);
    assert_eq!(listed, (1..=40).collect::<Vec<u8>>());
}

/// The names of functions in a source that begin with the number of a row.
fn row_tests(text: &str) -> impl Iterator<Item = &str> {
    text.split("fn ").filter(|rest| rest.starts_with("row_")).filter_map(|rest| {
        let (name, _) = rest.split_once('(')?;
        Some(name)
    })
}

/// The rows of a test: those of `row_05_and_06_…` are 5 and 6, and those of `row_17_to_20_…` are 17, 18, 19 and 20.
fn rows(test: &str) -> BTreeSet<u8> {
    let words: Vec<&str> = test.split('_').collect();
    let mut rows = BTreeSet::new();
    for pair in words.chunks_exact(2) {
        let Ok(number) = pair[1].parse::<u8>() else { break };
        match (pair[0], rows.last().copied()) {
            ("row" | "and", _) => drop(rows.insert(number)),
            ("to", Some(first)) => rows.extend(first..=number),
            _ => break,
        }
    }
    rows
}

#[test]
fn systemd_accepts_the_unit() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let units = ["cleat.service", "cleat-shutdown.service"].map(|name| {
        let unit = directory.path().join(name);
        // The check needs an existing program, and cleat need not be installed.
        let text = read(&format!("systemd/{name}")).replace("/usr/local/bin/cleat", "/bin/true");
        fs::write(&unit, text).expect("the copy is written");
        unit
    });
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(&units)
        .output()
        .expect("systemd-analyze is installed (apt install systemd)");
    let complaints = String::from_utf8_lossy(&output.stderr);
    // systemd before 255 ignores it.
    let is_newer = |line: &&str| line.contains("Unknown key 'SurviveFinalKillSignal'");
    let ours = complaints.lines().filter(|line| line.contains("cleat") && !is_newer(line));
    let ours: Vec<String> = ours.map(str::to_owned).collect();
    none(&ours);
    assert!(output.status.success(), "{complaints}");
}

#[test]
fn the_unit_keeps_workers_and_the_hosts_mounts() {
    let unit = read("systemd/cleat.service");
    let settings: Vec<&str> =
        unit.lines().filter(|line| !line.starts_with('#') && line.contains('=')).collect();
    for needed in [
        "KillMode=process",
        "OOMPolicy=continue",
        "RuntimeDirectoryPreserve=yes",
        "SurviveFinalKillSignal=yes",
        "MemorySwapMax=0",
        // Encrypted volumes of CSI: cryptsetup uses device-mapper and makes the nodes of its devices.
        "DeviceAllow=block-* rwm",
        "DeviceAllow=/dev/mapper/control rw",
    ] {
        assert!(settings.contains(&needed), "{needed}");
    }
    let own_mounts = ["ProtectSystem", "ProtectHome", "Private", "ProtectProc", "ReadOnlyPaths"];
    let makes_namespace =
        settings.iter().filter(|line| own_mounts.iter().any(|name| line.starts_with(name)));
    none(&makes_namespace.map(ToString::to_string).collect::<Vec<_>>());
}

/// Every `make X` and `cleat X` in code of a Markdown text.
fn commands(text: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
            continue;
        }
        if in_block || line.starts_with("    ") {
            // Commands in a block begin with a prompt; other lines are output.
            let command = line.trim_start().strip_prefix("$ ").unwrap_or_default();
            found.extend(first_words(command));
        } else {
            found.extend(line.split('`').skip(1).step_by(2).flat_map(first_words));
        }
    }
    found
}

fn first_words(command: &str) -> Option<(&str, &str)> {
    let command = command.strip_prefix("sudo ").unwrap_or(command);
    let (program, rest) = command.split_once(' ')?;
    let argument = rest.split_whitespace().next()?;
    let names_one = argument.starts_with(|c: char| c.is_ascii_lowercase());
    (["make", "cleat"].contains(&program) && names_one).then_some((program, argument))
}

fn links(file: &File) -> Vec<&str> {
    let text = &file.text;
    text.match_indices("](")
        .filter_map(|(at, _)| text[at + 2..].split(')').next())
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains(' '))
        .collect()
}

/// Every link with a section, as target (empty for the same file) and section.
fn section_links(file: &File) -> impl Iterator<Item = (&str, &str)> {
    let text = &file.text;
    let targets = text.match_indices("](").filter_map(|(at, _)| text[at + 2..].split(')').next());
    targets.filter(|target| !target.contains("://")).filter_map(|target| target.split_once('#'))
}

fn heading(line: &str) -> Option<&str> {
    line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim())
}

/// The anchor that Markdown viewers give a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The names in the last column of a table's row that have the form of a test's name.
fn test_names(row: &str) -> impl Iterator<Item = &str> {
    let column = row.trim_end_matches(" |").rsplit('|').next().unwrap_or_default();
    column.split('`').skip(1).step_by(2).filter(|name| is_test(name))
}

fn is_test(name: &str) -> bool {
    name.matches('_').count() > 2 && !name.contains(' ')
}

/// The name in a line such as `("a_fact", function),` of a list of facts.
fn listed_test(line: &str) -> Option<&str> {
    let (name, rest) = line.trim_start().strip_prefix("(\"")?.split_once('"')?;
    (rest.starts_with(", ") && is_test(name)).then_some(name)
}

fn make_targets() -> Vec<String> {
    let makefile = read("Makefile");
    let rules = makefile.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    rules.filter_map(|line| line.split_once(':')).map(|(target, _)| target.to_owned()).collect()
}

fn subcommands() -> Vec<String> {
    let help = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["completions", "bash"])
        .output()
        .expect("the binary runs");
    let script = String::from_utf8(help.stdout).expect("UTF-8");
    // `cleat,map)` in the script's table of transitions.
    let transitions = script.lines().filter_map(|line| line.trim().strip_prefix("cleat,"));
    let found: Vec<String> =
        transitions.filter_map(|rest| rest.strip_suffix(')')).map(str::to_owned).collect();
    assert!(
        found.iter().any(|name| name == "map"),
        "the format of the script has changed: {found:?}"
    );
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
