//! Compatibility with other builds: this build reads the records and messages that they wrote, and they
//! can read what this build writes. The files in this directory were written by builds that support
//! handover. A file with a commit in its name, and most messages, were recorded from a running daemon of
//! that commit; the others are forms that such a run does not produce. Never change these files: add a
//! file or a line for a new form.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cleat_core::policy::Policy;
use cleat_core::request::{IoError, Op};
use cleat_kernel::UnmountScope;
use cleat_node::journal::Journal;
use cleat_node::planner::{Intent, Record};
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, ToWorker};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn written(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compatibility").join(name)
}

/// Creates a state directory with `records`, as a starting daemon finds it.
fn journal(records: &[Value]) -> (tempfile::TempDir, Journal) {
    let directory = tempfile::tempdir().expect("a directory");
    let journal = Journal::open(directory.path()).expect("the journal opens");
    for record in records {
        let id = record["mapping_id"].as_str().expect("an id");
        let path = directory.path().join("mappings").join(format!("{id}.json"));
        fs::write(path, record.to_string()).expect("writing the record");
    }
    (directory, journal)
}

/// Loads all records, in the order of their ids.
fn load(journal: &Journal) -> Vec<Record> {
    let loaded = journal.load().expect("the journal is read");
    assert!(loaded.corrupt.is_empty(), "{:?}", loaded.corrupt);
    let mut records = loaded.records;
    records.sort_by(|a, b| a.mapping_id.cmp(&b.mapping_id));
    records
}

/// Returns the recorded journal records, in the order of their ids.
fn records() -> Vec<Value> {
    let files = fs::read_dir(written("journal")).expect("the records");
    let read = |file: fs::DirEntry| fs::read(file.path()).expect("a record");
    let parsed = files.map(|file| serde_json::from_slice(&read(file.expect("a file"))));
    let mut records: Vec<Value> = parsed.map(|record| record.expect("JSON")).collect();
    records.sort_by_key(|record| record["mapping_id"].to_string());
    records
}

/// Adds an unknown field to each object, as a later build may.
fn with_unknown_fields(value: &Value) -> Value {
    // An intent is a tagged union: an added key would be another variant.
    let later = |key: &str, value: &Value| match key {
        "intent" => value.clone(),
        _ => with_unknown_fields(value),
    };
    match value {
        Value::Object(fields) => {
            let mut fields: serde_json::Map<String, Value> =
                fields.iter().map(|(key, value)| (key.clone(), later(key, value))).collect();
            fields.insert("of_a_later_build".to_owned(), serde_json::json!({"x": [1]}));
            Value::Object(fields)
        }
        other => other.clone(),
    }
}

/// Checks that `now` has all fields of `earlier`, with the same values.
fn assert_contains(earlier: &Value, now: &Value) {
    match (earlier, now) {
        (Value::Object(earlier), Value::Object(now)) => {
            for (key, value) in earlier {
                let now = now.get(key).unwrap_or_else(|| panic!("{key} is missing in {now:?}"));
                assert_contains(value, now);
            }
        }
        (earlier, now) => assert_eq!(earlier, now),
    }
}

#[test]
fn records_of_every_build_are_read_and_are_written_in_a_form_that_it_reads() {
    let records = records();
    let (directory, journal) = journal(&records);
    let loaded = load(&journal);
    assert_eq!(loaded.len(), records.len());
    let one = |id: &str| loaded.iter().find(|record| record.mapping_id.ends_with(id)).expect(id);
    assert_eq!((one("a1").intent, one("a1").fenced), (Intent::Mapped, false));
    assert_eq!(one("a2").options.policy.outage.to_string(), "queue:30s");
    assert_eq!(one("a3").predecessor.expect("a predecessor").pid, 611);
    assert_eq!((one("a4").worker, one("a4").established), (None, false));
    assert_eq!(one("a5").intent, Intent::Unmapped);
    assert!(one("a6").fenced);
    assert_eq!(one("a7").intent, Intent::Forced(UnmountScope::Own));
    assert_eq!(one("a8").intent, Intent::Forced(UnmountScope::All));
    for (record, earlier) in loaded.iter().zip(&records) {
        journal.store(record).expect("storing the record");
        let path = directory.path().join("mappings").join(format!("{}.json", record.mapping_id));
        let now = serde_json::from_slice(&fs::read(path).expect("the record")).expect("JSON");
        let mut earlier = earlier.clone();
        if record.mapping_id.ends_with("a8") {
            // Most builds do not support this form.
            (earlier["intent"], earlier["forced"]) = ("unmapped".into(), "all".into());
        }
        assert_contains(&earlier, &now);
    }
}

#[test]
fn unknown_fields_in_a_record_are_ignored() {
    let (_directory, today) = journal(&records());
    let later: Vec<Value> = records().iter().map(with_unknown_fields).collect();
    let (_later_directory, later) = journal(&later);
    assert_eq!(load(&later), load(&today));
}

/// A record that cannot be read is set aside, and its mapping is not managed any more.
#[test]
fn a_record_with_a_policy_of_a_later_build_is_read() {
    let mut later = records().swap_remove(1);
    later["options"]["policy"] = serde_json::json!({"outage": "ask:operator", "limits": "none"});
    let (_directory, journal) = journal(&[later]);
    assert_eq!(load(&journal)[0].options.policy, Policy::default());
}

fn assert_messages_are_understood<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    name: &str,
) {
    let text = fs::read_to_string(written(name)).expect("the messages");
    for line in text.lines() {
        let earlier: Value = serde_json::from_str(line).expect("JSON");
        let message: T = serde_json::from_value(earlier.clone())
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_contains(&earlier, &serde_json::to_value(&message).expect("JSON"));
        let later: T = serde_json::from_value(with_unknown_fields(&earlier)).expect(line);
        assert_eq!(later, message);
    }
}

#[test]
fn messages_between_supervisor_and_worker_are_understood_both_ways() {
    assert_messages_are_understood::<ToWorker>("to-worker.jsonl");
    assert_messages_are_understood::<FromWorker>("from-worker.jsonl");
}

/// The statistics page is shared by both workers of a handover and by two supervisors, of any builds, so
/// the offset of each word is permanent. The offsets are in words of 8 bytes.
#[test]
fn the_offsets_in_the_statistics_page_do_not_change() {
    const SLOT_3: u64 = 512 + 3 * 512;
    const OF_WRITES: u64 = SLOT_3 + 64 + 64;
    let (page, file) = Page::create().expect("a page");
    let file = fs::File::from(file);
    let word = |index: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, index * 8).expect("the page is long enough");
        u64::from_le_bytes(bytes)
    };
    assert_eq!(word(0).to_le_bytes(), *b"cleatst\0");
    assert_eq!([1, 2, 3, 4, 5].map(word), [1, 6, 9, 32, 64]);

    let recorder = page.recorder(3).expect("a slot");
    recorder.ended(Op::Write, 4096, 3000, Ok(()));
    recorder.ended(Op::Write, 512, 5000, Err(IoError::NoSpace));
    recorder.set_in_flight(11);
    recorder.set_outage(12, 13);
    recorder.stalled(14);
    recorder.limited(15);
    recorder.set_oldest(16);
    page.offer_handover(5);
    page.count_reconnect();
    assert_eq!([6, 7, 8].map(word), [4, 5 << 2 | 1, 1]);
    let of_slot = [0, 1, 2, 3, 4, 5, 6].map(|index| word(SLOT_3 + index));
    assert_eq!(of_slot, [1, 11, 12, 13, 14, 15, 16]);
    assert_eq!(word(SLOT_3 + 16 + IoError::NoSpace as u64), 1);
    assert_eq!([0, 1, 2, 3].map(|index| word(OF_WRITES + index)), [2, 4096, 1, 8000]);
    assert_eq!([2, 3].map(|bucket| word(OF_WRITES + 16 + bucket)), [1, 1]);
    assert!(!page.is_handed_over_to(5));
    file.write_all_at(&(5_u64 << 2 | 2).to_le_bytes(), 7 * 8).expect("the page is long enough");
    assert!(page.is_handed_over_to(5));
}

/// The order determines their offsets in the page, and their names in `stats` and in metrics.
#[test]
fn kinds_of_requests_and_errors_keep_their_order() {
    assert_eq!(Op::ALL.map(Op::name), ["read", "write", "flush", "trim", "write_zeroes", "cache"]);
    assert_eq!(
        IoError::ALL.map(IoError::name),
        [
            "retry",
            "fenced",
            "nospace",
            "invalid",
            "readonly",
            "unsupported",
            "nomemory",
            "shutdown",
            "broken"
        ]
    );
}
