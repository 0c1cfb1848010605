//! libFuzzer runs the target `volume_uri`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cleat_fuzz::run("volume_uri", data));
