//! libFuzzer runs the target `http_response`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("http_response", data));
