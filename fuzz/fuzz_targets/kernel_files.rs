//! libFuzzer runs the target `kernel_files`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("kernel_files", data));
