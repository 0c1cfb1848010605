//! Programs of the tests that are written in Go, because they use packages that exist only there.

use std::path::PathBuf;
use std::process::Command;

/// Builds the Go module in `directory`, which is relative to the project's root, and returns the directory
/// that has the executables. `arguments` go to `go build`.
///
/// What is built once is kept outside the source tree: a second call, also of another test, returns at once.
///
/// # Panics
///
/// Panics if Go is missing, with the command that installs it, or if the build fails.
pub fn build(directory: &str, arguments: &[&str]) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = Command::new("scripts/go-tool.sh")
        .current_dir(root)
        .arg(directory)
        .args(arguments)
        .output()
        .expect("scripts/go-tool.sh runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{directory} was not built: {errors}");
    PathBuf::from(String::from_utf8(output.stdout).expect("UTF-8").trim_end())
}
