//! Compatibility with other builds: this build reads the records and messages that they wrote, and they
//! can read what this build writes. There is one file per format and version, with the version in its
//! name. Released builds use these formats: after a release, never change a file. For a new version add a
//! file, and for a new field a line that contains it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cleat_core::policy::Policy;
use cleat_core::request::{IoError, Op};
use cleat_core::space::SpaceUse;
use cleat_kernel::UnmountScope;
use cleat_node::journal::{Journal, RealDisk};
use cleat_node::planner::{Intent, Record};
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, ToWorker};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compatibility").join(name)
}

/// Creates a state directory with `record`, as a starting daemon finds it. Returns the path of the record's
/// file, too.
fn journal(record: &Value) -> (tempfile::TempDir, Journal, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let disk = Arc::new(RealDisk);
    let journal = Journal::open(directory.path(), &directory.path().join("run"), disk);
    let journal = journal.expect("the journal opens");
    let id = record["mapping_id"].as_str().expect("an id");
    let path = directory.path().join("mappings").join(format!("{id}.json"));
    fs::write(&path, record.to_string()).expect("writing the record");
    (directory, journal, path)
}

/// Reads `record` as the journal does.
fn load(record: &Value) -> Record {
    let (_directory, journal, _) = journal(record);
    let mut loaded = journal.load().expect("the journal is read");
    assert!(loaded.rejected.is_empty(), "{:?}", loaded.rejected);
    loaded.records.pop().expect("the record is read")
}

/// Returns the golden record of version 1, which has a value in every field.
fn record() -> Value {
    let text = fs::read(golden("record-1.json")).expect("the record");
    serde_json::from_slice(&text).expect("JSON")
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
fn a_record_of_version_1_is_read_and_written_in_the_same_form() {
    let golden = record();
    let record = load(&golden);
    assert_eq!(record.options.policy.outage.to_string(), "queue:30s");
    assert_eq!(record.predecessor.expect("a predecessor").pid, 611);
    assert_eq!(record.intent, Intent::Forced(UnmountScope::Own));
    assert!(record.fenced && record.quiesced.is_some());
    let (_directory, journal, path) = journal(&golden);
    journal.store(&record).expect("storing the record");
    let written: Value =
        serde_json::from_slice(&fs::read(path).expect("the record")).expect("JSON");
    assert_contains(&golden, &written);
}

#[test]
fn unknown_fields_in_a_record_are_ignored() {
    assert_eq!(load(&with_unknown_fields(&record())), load(&record()));
}

#[test]
fn a_record_without_the_identity_of_the_volume_is_read() {
    let mut earlier = record();
    earlier["volume"].as_object_mut().expect("an object").remove("identity");
    earlier.as_object_mut().expect("an object").remove("replaced");
    let record = load(&earlier);
    assert_eq!(record.volume.expect("a volume").identity, None);
    assert_eq!(record.replaced, None);
}

/// Otherwise the record would be moved to the quarantine directory, and nothing would manage the mapping.
#[test]
fn an_unknown_policy_in_a_record_is_replaced_by_the_default() {
    let mut later = record();
    later["options"]["policy"] = serde_json::json!({"outage": "ask:operator", "limits": "none"});
    assert_eq!(load(&later).options.policy, Policy::default());
}

#[test]
fn a_record_of_a_newer_version_is_left_in_place_and_reported() {
    let newer = serde_json::json!({"version": 2, "mapping_id": "00000000000000a1", "spec": {}});
    let (_directory, journal, path) = journal(&newer);
    for _ in 0..2 {
        let loaded = journal.load().expect("the journal is read");
        assert!(loaded.records.is_empty());
        let message = loaded.rejected.first().expect("a rejected record").to_string();
        assert!(message.contains("was left in place"), "{message}");
        assert!(message.contains("version 2, and this build reads version 1"), "{message}");
        assert!(message.contains("00000000000000a1.json"), "{message}");
        assert_eq!(fs::read(&path).expect("the record"), newer.to_string().as_bytes());
    }
}

fn assert_messages_are_understood<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    name: &str,
) {
    let text = fs::read_to_string(golden(name)).expect("the messages");
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
    assert_messages_are_understood::<ToWorker>("to-worker-1.jsonl");
    assert_messages_are_understood::<FromWorker>("from-worker-1.jsonl");
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
    page.set_sync_failed();
    page.set_unsaved(17);
    page.set_space(SpaceUse {
        put_bytes: 18,
        written_bytes: 19,
        object_bytes: 20,
        live_bytes: 21,
        copied_bytes: 22,
        copy_rate: 23,
    });
    assert_eq!([6, 7, 8, 9, 10].map(word), [4, 5 << 2 | 1, 1, 1, 17]);
    assert_eq!([11, 12, 13, 14, 15, 16].map(word), [18, 19, 20, 21, 22, 23]);
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
