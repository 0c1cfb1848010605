//! libFuzzer runs the target `worker_messages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("worker_messages", data));
