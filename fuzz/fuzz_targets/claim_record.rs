//! libFuzzer runs the target `claim_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("claim_record", data));
