//! libFuzzer runs the target `transmission`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("transmission", data));
