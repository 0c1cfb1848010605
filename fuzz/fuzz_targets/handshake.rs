//! libFuzzer runs the target `handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("handshake", data));
