//! `cleat volume diff`: the ranges that have changed between two contents of a volume.

use serde_json::Value;
use tempfile::TempDir;
use test_kit::ceph::POOL;

use crate::volumes::fixture::{MIB, User, changed, json, rbd, uri, volume};

/// Returns the changes as `(offset, length, content)`.
fn changes(words: &[&str]) -> Vec<(u64, u64, String)> {
    let found = json(&[&["diff"], words].concat());
    assert_eq!(found["size_bytes"], 16 * MIB, "{found}");
    let list = found["changes"].as_array().expect("a list");
    list.iter()
        .map(|it| (number(&it["offset"]), number(&it["length"]), text(&it["content"])))
        .collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

fn data(parts: &[(u64, u64)]) -> Vec<(u64, u64, String)> {
    parts.iter().map(|(offset, length)| (*offset, *length, "data".to_owned())).collect()
}

/// Writes to a volume with snapshots `one` and `two`: before `one`, between them, and after `two`.
fn write_with_snapshots(uri: &str) {
    assert!(changed(&["create", uri, "16M"]));
    let snapshot = |name: &str| with_snapshot(uri, name);
    assert!(User::of(uri).does("write -P 1 0 2M"));
    assert!(changed(&["snapshot", "create", &snapshot("one")]));
    let user = User::of(uri);
    assert!(user.does_all(&["write -P 2 4M 64k", "write -P 2 4160k 64k", "discard 1M 1M"]));
    drop(user);
    assert!(changed(&["snapshot", "create", &snapshot("two")]));
    assert!(User::of(uri).does("write -P 3 15M 1M"));
}

fn with_snapshot(uri: &str, name: &str) -> String {
    match uri.split_once('?') {
        Some((volume, options)) => format!("{volume}@{name}?{options}"),
        None => format!("{uri}@{name}"),
    }
}

#[test]
fn the_changes_of_an_image_are_those_that_rbd_shows() {
    let uri = uri("differs");
    write_with_snapshots(&uri);
    for (snapshot, since) in
        [(None, None), (None, Some("one")), (Some("two"), Some("one")), (Some("one"), None)]
    {
        let image = snapshot.map_or_else(|| uri.clone(), |name| with_snapshot(&uri, name));
        let mut words = vec![image.as_str()];
        let spec =
            format!("{POOL}/differs{}", snapshot.map_or_else(String::new, |s| format!("@{s}")));
        let mut theirs = vec!["diff", &spec];
        if let Some(since) = since {
            words.extend(["--since", since]);
            theirs.extend(["--from-snap", since]);
        }
        assert_eq!(changes(&words), merged(&rbd(&theirs)), "{snapshot:?} since {since:?}");
    }
    let later = volume(&["diff", &with_snapshot(&uri, "one"), "--since", "two"]);
    assert!(later.error(2).contains("is not older than"), "{later:?}");
    let none = volume(&["diff", &uri, "--since", "three"]);
    assert!(none.error(3).contains("has no snapshot"), "{none:?}");
}

/// Returns what `rbd diff` prints, with one range for adjacent ones.
fn merged(theirs: &Value) -> Vec<(u64, u64, String)> {
    let mut found: Vec<(u64, u64, String)> = Vec::new();
    for it in theirs.as_array().expect("a list") {
        let (offset, length) = (number(&it["offset"]), number(&it["length"]));
        let content = if it["exists"] == "true" { "data" } else { "zeroes" };
        match found.last_mut() {
            Some((at, bytes, same)) if *same == content && *at + *bytes == offset => {
                *bytes += length
            }
            _ => found.push((offset, length, content.to_owned())),
        }
    }
    found
}

#[test]
fn the_changes_of_a_volume_of_objects_are_what_was_written() {
    let directory = TempDir::new().expect("a directory");
    let uri = format!("dir:{}/v", directory.path().display());
    write_with_snapshots(&uri);
    let (one, two) = (with_snapshot(&uri, "one"), with_snapshot(&uri, "two"));
    assert_eq!(changes(&[&one]), data(&[(0, 2 * MIB)]));
    let written = (4 * MIB, 128 << 10);
    let trimmed = (MIB, MIB, "zeroes".to_owned());
    let expected: Vec<_> = [trimmed.clone()].into_iter().chain(data(&[written])).collect();
    assert_eq!(changes(&[&two, "--since", "one"]), expected);
    assert_eq!(changes(&[&uri, "--since", "two"]), data(&[(15 * MIB, MIB)]));
    let expected: Vec<_> = expected.into_iter().chain(data(&[(15 * MIB, MIB)])).collect();
    // Also while a client writes.
    let user = User::of(&uri);
    assert_eq!(changes(&[&uri, "--since", "one"]), expected);
    assert_eq!(changes(&[&uri]), data(&[(0, MIB), written, (15 * MIB, MIB)]));
    drop(user);

    let shown = volume(&["diff", &two, "--since", "one"]);
    let lines: Vec<Vec<&str>> =
        shown.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["OFFSET", "LENGTH", "CONTENT"]);
    assert_eq!(lines[1], ["1048576", "1048576", "zeroes"]);
    assert_eq!(lines.len(), 3, "{shown:?}");
}

#[test]
fn wrong_snapshots_are_refused_by_name() {
    let directory = TempDir::new().expect("a directory");
    let uri = format!("dir:{}/v", directory.path().display());
    write_with_snapshots(&uri);
    for (words, code, cause) in [
        (vec![with_snapshot(&uri, "one"), "--since".into(), "two".into()], 2, "is not older than"),
        (vec![with_snapshot(&uri, "two"), "--since".into(), "two".into()], 2, "is not older than"),
        (vec![uri.clone(), "--since".into(), "none".into()], 3, "has no snapshot"),
        (vec![format!("dir:{}/w", directory.path().display())], 3, "does not exist"),
        (vec![format!("file:{}/w", directory.path().display())], 8, "no record of their changes"),
    ] {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let run = volume(&[&["diff"], &words[..]].concat());
        assert!(run.error(code).contains(cause), "{words:?}: {run:?}");
    }
}
