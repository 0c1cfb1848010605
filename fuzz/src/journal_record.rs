//! Records of the journal, as a supervisor reads them after a crash or from another build.

use cleat_node::journal::reprint_record;
use serde_json::Value;

/// The maximum length of the input in bytes: that of a record that the journal reads.
const RECORD_MAX: usize = 64 << 10;

const MAPPING_ID: &str = "00000000000000aa";

/// Checks that a record that is accepted has a name and an id that may become file names, and that it is
/// printed as a record which is accepted and printed in the same way.
pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(&data[..data.len().min(RECORD_MAX)]) else {
        return;
    };
    let Ok(printed) = reprint_record(text, MAPPING_ID) else { return };
    let printed = String::from_utf8(printed).expect("JSON is UTF-8");
    let again = reprint_record(&printed, MAPPING_ID);
    let again = again.unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert_eq!(again, printed.as_bytes(), "the printed form is not final");
    let record: Value = serde_json::from_str(&printed).expect("it was printed as JSON");
    assert_eq!(record["mapping_id"], MAPPING_ID);
    let name = record["name"].as_str().expect("a record has a name");
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    assert!(!name.is_empty() && !name.starts_with('.') && name.bytes().all(plain), "{name:?}");
    assert_ne!(record["options"]["connections"], 0);
}
