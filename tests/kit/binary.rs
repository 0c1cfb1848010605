//! The binary under test.

use std::path::PathBuf;

/// Set to the path of another build of `cleat` that the tests shall start, for example
/// `target/release/cleat` to take figures.
const OTHER: &str = "CLEAT_TEST_BINARY";

/// Returns the path of the `cleat` binary: the one that cargo built beside the running test, or the
/// one that `CLEAT_TEST_BINARY` names.
pub fn cleat() -> PathBuf {
    if let Some(other) = std::env::var_os(OTHER) {
        return other.into();
    }
    // Cargo puts tests into PROFILE/deps and binaries into PROFILE.
    let test = std::env::current_exe().unwrap();
    let binary = test.parent().and_then(|deps| deps.parent()).unwrap().join("cleat");
    assert!(binary.exists(), "{} is missing: run 'cargo build --features fault'", binary.display());
    binary
}
