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
    run(Command::new("scripts/go-tool.sh").arg(directory).args(arguments))
}

/// Builds the programs of Kubernetes' control plane and the sidecars of CSI as [`build`] does, and returns the directory
/// that has the executables. The make target `control-plane` builds the same ones.
///
/// # Panics
///
/// As [`build`].
pub fn control_plane() -> PathBuf {
    run(&mut Command::new("scripts/control-plane.sh"))
}

/// Builds kubelet and kubectl as [`build`] does, and returns the directory that has the executables. The make target
/// `control-plane` builds the same ones.
///
/// # Panics
///
/// As [`build`].
pub fn node_programs() -> PathBuf {
    run(Command::new("scripts/control-plane.sh").arg("node"))
}

/// Builds containerd, its shim for runc, and ctr as [`build`] does, and returns the directory that has the executables. The
/// make target `control-plane` builds the same ones.
///
/// # Panics
///
/// As [`build`].
pub fn containerd() -> PathBuf {
    run(Command::new("scripts/control-plane.sh").arg("containerd"))
}

/// Builds helm and kustomize as [`build`] does, and returns the directory that has the executables. The make target
/// `control-plane` builds the same ones.
///
/// # Panics
///
/// As [`build`].
pub fn deploy_tools() -> PathBuf {
    run(&mut Command::new("scripts/deploy-tools.sh"))
}

/// Builds MinIO as [`build`] does, and returns the directory that has the executable. The make target `control-plane` builds
/// the same one.
///
/// # Panics
///
/// As [`build`].
pub fn minio() -> PathBuf {
    build("tests/kit/minio", &["github.com/minio/minio"])
}

/// Returns the directory with the files of `module`, which the module in `directory` requires. `directory` is relative to
/// the project's root.
///
/// # Panics
///
/// Panics if Go is missing or cannot download the module.
pub fn module(directory: &str, module: &str) -> PathBuf {
    let mut command = Command::new("go");
    command.args(["mod", "download", "-json", module]).env("GOWORK", "off");
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = command.current_dir(PathBuf::from(root).join(directory)).output();
    let output = output.expect("go is installed (scripts/install-deps.sh test)");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let dir = text.lines().find_map(|line| line.trim().strip_prefix("\"Dir\": \""));
    let dir = dir.and_then(|dir| dir.split('"').next());
    PathBuf::from(dir.unwrap_or_else(|| panic!("go mod download {module}: {text}")))
}

/// Runs a script that prints the directory of what it has built.
fn run(script: &mut Command) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = script.current_dir(root).output().expect("the script runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script:?} failed: {errors}");
    PathBuf::from(String::from_utf8(output.stdout).expect("UTF-8").trim_end())
}
