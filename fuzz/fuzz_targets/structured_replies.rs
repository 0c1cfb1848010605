//! libFuzzer runs the target `structured_replies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("structured_replies", data));
