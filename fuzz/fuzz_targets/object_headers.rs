//! libFuzzer runs the target `object_headers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("object_headers", data));
