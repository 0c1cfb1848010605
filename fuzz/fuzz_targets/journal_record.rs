//! libFuzzer runs the target `journal_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("journal_record", data));
